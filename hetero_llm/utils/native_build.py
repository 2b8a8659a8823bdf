"""Compiles a folder of C++ sources at first use, into a cache that processes share.

The file name holds a hash of sources, compiler and flags, so a changed source, compiler or flag
causes a new build. The packages with sources (cpu, bridge) give the recipe and handle failures.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.utils.env import cache_dir, native_choice

PORTABLE = ("-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", "-Wno-psabi")
FAST = ("-O3",)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS)

_COMPILERS = ("g++", "c++")
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Recipe:
    """One library: every *.cpp in a folder and below it, with its headers.

    Attributes:
        name: name of the file in the cache, before the hash.
        folder: folder of the sources.
        flags: flags of the compiler.
        link_flags: flags of the linker.
        flags_of: returns more compiler flags for a source, given its path.
        workers: number of compilers that run in parallel.
    """

    name: str
    folder: Path
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    flags_of: Callable[[Path], tuple[str, ...]] = lambda _: ()
    workers: int = 1


def reason(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n")[0]


def find_compiler() -> str | None:
    """The path of a C++ compiler, None if there is none."""
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def build_library(recipe: Recipe, *, force: bool = False) -> Path:
    """Compiles the library unless the cache folder has it.

    Args:
        force: compile it in any case.

    Raises:
        RuntimeError: there is no compiler, or it reports an error.
        OSError, subprocess.SubprocessError: the compiler could not be run.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout
    sources = sorted(recipe.folder.rglob("*.cpp"))
    everything = [*sources, *sorted(recipe.folder.rglob("*.h"))]
    digest = _digest(recipe, everything, version)
    library = cache_dir() / f"{recipe.name}-{digest}.so"
    if not force and _is_whole(library):
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "built.so"
        commands, objects = [], []
        for index, source in enumerate(sources):
            objects.append(f"{folder}/{index}.o")
            flags = (*recipe.flags, *recipe.flags_of(source))
            commands.append([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        with ThreadPoolExecutor(recipe.workers) as pool:
            list(pool.map(_run, commands))
        _run([compiler, "-shared", "-pthread", *recipe.link_flags, *objects, "-o", str(built)])
        if _digest(recipe, everything, version) != digest:
            raise RuntimeError("the sources changed while they were compiled; try again")
        os.replace(built, library)
    return library


def open_library(recipe: Recipe) -> ctypes.CDLL:
    """Builds and loads the library. If the file in the cache cannot be loaded, it is rebuilt once.

    Raises:
        RuntimeError, OSError, subprocess.SubprocessError: see `build_library`, or the new library
            cannot be loaded.
    """
    path = build_library(recipe)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return ctypes.CDLL(str(build_library(recipe, force=True)))


class NativeMissingError(Exception):
    """A compiled library is not available; the message says why."""


@dataclass(frozen=True, slots=True)
class CallableLibrary:
    """The same functions, called with or without the GIL.

    Attributes:
        waiting: releases the GIL during a call, for functions that may wait.
        quick: keeps the GIL, for functions of microseconds: a released GIL may come back late.
    """

    waiting: ctypes.CDLL
    quick: ctypes.PyDLL


def open_both_ways(
    what: str, recipe: Callable[..., Recipe], functions: Iterable[tuple[str, Any, list[Any] | None]]
) -> CallableLibrary:
    """Opens the library that `recipe(sanitize=...)` describes, as HETERO_LLM_NATIVE says.

    Args:
        what: name of the library in messages.
        functions: (name, ctypes result type, ctypes argument types) of each function.

    Raises:
        NativeMissingError: there is no compiler, it fails, or HETERO_LLM_NATIVE is 0.
    """
    choice = native_choice()
    if choice == "0":
        raise NativeMissingError(f"HETERO_LLM_NATIVE=0 leaves the {what} out")
    try:
        library = open_library(recipe(sanitize=choice == "sanitized"))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeMissingError(f"the {what} is not available: {reason(error)}") from error
    quick = ctypes.PyDLL(library._name)
    for name, result, arguments in functions:
        for dll in (library, quick):
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
    return CallableLibrary(library, quick)


def _digest(recipe: Recipe, files: list[Path], version: str) -> str:
    parts = [version.encode(), " ".join(recipe.flags).encode()]
    for path in files:
        parts += [str(path.relative_to(recipe.folder)).encode(), path.read_bytes()]
    return hashlib.sha256(b"\x00".join(parts)).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    """Whether the file exists and is not truncated: loading a truncated file would raise SIGBUS.

    The linker writes the table of sections last; the ELF header says where it ends.
    """
    try:
        with library.open("rb") as file:
            header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return False
        (table,) = struct.unpack_from("<Q", header, 40)
        entry_size, entries = struct.unpack_from("<HH", header, 58)
        return library.stat().st_size >= table + entry_size * entries
    except OSError:
        return False


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"{command[0]} failed: {(lines or ['no message'])[0]}")
