"""The compiled CPU library: built at first use, loaded with ctypes.

The file name holds a hash of source, compiler and flags, so a changed source or compiler builds
anew and several processes can share one cache folder. The code itself picks its instruction set at
run time. Without a compiler there is no library and callers stay on torch.

OpenMP: the library names the runtime's functions but is linked against none. `load` first makes
the symbols of the runtime that torch has loaded visible, so that both use one team of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from hetero_llm.core.env import cache_dir, native_enabled

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_COMPILERS = ("g++", "c++")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wno-psabi")
_TIMEOUT_S = 300
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The library, compiled if need be; None (said once in the log) if that is impossible."""
    if not native_enabled():
        return None
    try:
        _share_openmp()
        library = ctypes.CDLL(str(build()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).strip().split("\n")[0]
        logger.warning("the CPU kernels are not available, plain torch serves: %s", reason)
        return None
    library.hetero_attention_chunk.restype = _INT
    library.hetero_store_kv.restype = None
    library.hetero_store_kv.argtypes = [_POINTER] * 4 + [_INT] * 7
    library.hetero_attend_rows.restype = None
    library.hetero_attend_rows.argtypes = (
        [_POINTER] * 6 + [_INT] * 10 + [_FLOAT, _POINTER, _INT, _INT]
    )
    library.hetero_can_attend_chunk.restype = _INT
    library.hetero_attend_chunk.restype = None
    library.hetero_attend_chunk.argtypes = [_POINTER] * 4 + [_INT] * 10 + [_FLOAT, _INT]
    library.hetero_rms_norm_bf16.restype = None
    library.hetero_rms_norm_bf16.argtypes = [_POINTER] * 4 + [_INT] * 3 + [_FLOAT, _INT]
    library.hetero_silu_mul_bf16.restype = None
    library.hetero_silu_mul_bf16.argtypes = [_POINTER] * 2 + [_INT] * 3
    return library


def build() -> Path:
    """Compiles the library unless the cache folder has it.

    Raises:
        RuntimeError: there is no compiler.
        OSError, subprocess.SubprocessError: it failed.
    """
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler found")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout
    sources = sorted(_SOURCES.glob("*.cpp"))
    parts = [path.read_bytes() for path in (*sources, *sorted(_SOURCES.glob("*.h")))]
    parts += [version.encode(), " ".join(_FLAGS).encode()]
    digest = hashlib.sha256(b"\x00".join(parts)).hexdigest()[:16]
    library = cache_dir() / f"kernels-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        built = Path(folder) / "kernels.so"
        # -fopenmp at compile time only: linked with it, a second runtime would be loaded.
        for source, target in zip(sources, objects, strict=True):
            _run([compiler, *_FLAGS, "-fopenmp", "-c", str(source), "-o", target])
        _run([compiler, "-shared", *objects, "-o", str(built)])
        os.replace(built, library)
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"{command[0]} failed: {(lines or ['no message'])[0]}")


def _share_openmp() -> None:
    """Makes the symbols of torch's OpenMP runtime visible to libraries loaded later."""
    import torch  # noqa: F401  (loads the runtime)

    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith(("libgomp", "libiomp5", "libomp")):
            ctypes.CDLL(line[line.index("/") :], mode=ctypes.RTLD_GLOBAL)
            return
    raise RuntimeError("torch has loaded no OpenMP runtime")
