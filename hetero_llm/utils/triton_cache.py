"""Triton's cache of compiled kernels, below our cache folder unless TRITON_CACHE_DIR names one.

Triton takes what lies in its cache as it is: a file that a full disk or a power cut left damaged
would end each start. A kernel is a folder of files, so what is damaged is thrown away by folders.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from pathlib import Path

from hetero_llm.utils import cache_folder

logger = logging.getLogger(__name__)

FOLDER = "triton"
"""Name of our folder in the cache folder."""

_VARIABLE = "TRITON_CACHE_DIR"


def prepare() -> None:
    """Points Triton to our folder, without damaged kernels. To be called before a kernel runs."""
    if os.environ.get(_VARIABLE):
        return
    folder = cache_folder.write_folder() / FOLDER
    if not folder.is_dir():
        _copy_read_only(folder)
    discard_damaged(folder)
    os.environ[_VARIABLE] = str(folder)


def discard_damaged(folder: Path) -> int:
    """Deletes the folders of kernels with a damaged file; returns their number."""
    damaged = {path.parent for path in folder.glob("*/*") if not _is_whole(path)}
    for kernel in damaged:
        logger.warning("compiled kernel %s is damaged: it is compiled again", kernel)
        shutil.rmtree(kernel, ignore_errors=True)
    return len(damaged)


def _copy_read_only(folder: Path) -> None:
    """Copies the kernels of a cache that can only be read, since Triton writes where it reads."""
    for other in cache_folder.folders():
        if (other / FOLDER).is_dir():
            shutil.copytree(other / FOLDER, folder)
            return


def _is_whole(path: Path) -> bool:
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except (OSError, ValueError):
            return False
        return True
    if path.suffix in (".cubin", ".so"):
        return _is_whole_elf(path)
    return path.is_dir() or path.stat().st_size > 0


def _is_whole_elf(path: Path) -> bool:
    """Whether the file reaches to the end of its table of sections, which linkers write last."""
    try:
        with path.open("rb") as file:
            header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return False
        (table,) = struct.unpack_from("<Q", header, 40)
        entry_size, entries = struct.unpack_from("<HH", header, 58)
        return path.stat().st_size >= table + entry_size * entries
    except OSError:
        return False
