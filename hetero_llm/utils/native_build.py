"""Compiles a folder of C++ sources at first use, into a cache that processes share.

The file name holds a hash of sources and flags, so a changed source or flag causes a new build, and
a library that exists is found without a compiler: in the cache, or in a wheel that brings it along.
The packages with sources (cpu, bridge) give the recipe and handle failures.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.utils import cache_folder, compile_progress
from hetero_llm.utils.env import native_choice

logger = logging.getLogger(__name__)

PORTABLE = ("-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", "-Wno-psabi")
FAST = ("-O3",)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS)
HEADERS = Path(__file__).parents[1] / "csrc"
"""Headers that all libraries may include."""

_COMPILERS = ("g++", "c++")
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Recipe:
    """One library: every *.cpp in a folder and below it, with its headers and `HEADERS`.

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


def usual_recipe(
    name: str, folder: Path, *, sanitize: bool = False, link_flags: tuple[str, ...] = ()
) -> Recipe:
    """Recipe without special flags; `sanitize`: with AddressSanitizer and UBSan."""
    return Recipe(
        f"{name}-sanitized" if sanitize else name,
        folder,
        (*PORTABLE, *(SANITIZED if sanitize else FAST)),
        link_flags=(*link_flags, *(SANITIZERS if sanitize else ())),
    )


def reason(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n")[0]


def find_compiler() -> str | None:
    """The path of a C++ compiler, None if there is none."""
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def build_library(recipe: Recipe, *, force: bool = False) -> Path:
    """Finds the library in the folders of `cache_folder`, or compiles it.

    Processes that need the same library wait for the one that compiles it.

    Args:
        force: compile it in any case.

    Raises:
        RuntimeError: it has to be compiled, and there is no compiler, or it reports an error.
        OSError, subprocess.SubprocessError: the compiler could not be run.
    """
    name = library_name(recipe)
    found = None if force else cache_folder.find(name)
    if found is not None:
        return found
    library = cache_folder.write_folder() / name
    with _alone(library.parent):
        if force or cache_folder.read(library) is None:  # else another process has made it
            compile_library(recipe, library)
    return library


def library_name(recipe: Recipe) -> str:
    """Name of the library's file: a hash of all sources, flags, and the machine's architecture."""
    parts = [platform.machine().encode()]
    parts += [" ".join(flags).encode() for flags in (recipe.flags, recipe.link_flags)]
    for path in sorted(HEADERS.glob("*.h")):
        parts += [path.name.encode(), path.read_bytes()]
    for path in sorted(recipe.folder.rglob("*.h")) + _sources(recipe):
        parts += [str(path.relative_to(recipe.folder)).encode(), path.read_bytes()]
        parts.append(" ".join(recipe.flags_of(path)).encode())
    return f"{recipe.name}-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:16]}.so"


def compile_library(recipe: Recipe, library: Path) -> None:
    """Compiles the library into a file.

    Raises:
        RuntimeError: there is no compiler, it reports an error, or a source changed meanwhile.
        OSError, subprocess.SubprocessError: the compiler could not be run.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found")
    name = library_name(recipe)
    compile_progress.begin()
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "built.so"
        commands, objects = [], []
        for index, source in enumerate(_sources(recipe)):
            objects.append(f"{folder}/{index}.o")
            flags = (*recipe.flags, *recipe.flags_of(source), f"-I{HEADERS}")
            commands.append([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        with ThreadPoolExecutor(recipe.workers) as pool:
            for _ in pool.map(_run, commands):
                compile_progress.advance()
        _run([compiler, "-shared", "-pthread", *recipe.link_flags, *objects, "-o", str(built)])
        if library_name(recipe) != name:
            raise RuntimeError("the sources changed while they were compiled; try again")
        cache_folder.write(library, built.read_bytes())


def open_library(recipe: Recipe) -> ctypes.CDLL:
    """Finds or builds the library and loads it. One that cannot be loaded is rebuilt once.

    Raises:
        RuntimeError, OSError, subprocess.SubprocessError: see `build_library`, or the new library
            cannot be loaded.
    """
    path = build_library(recipe)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if find_compiler() is None:
            raise
        logger.warning("%s cannot be loaded (%s): it is compiled again", path, reason(error))
        return ctypes.CDLL(str(build_library(recipe, force=True)))


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
    what: str,
    recipe: Callable[..., Recipe],
    functions: Iterable[tuple[str, Any, list[Any] | None]],
    missing: type[HeteroLLMError],
) -> CallableLibrary:
    """Opens the library that `recipe(sanitize=...)` describes, as HETERO_LLM_NATIVE says.

    Args:
        what: name of the library in messages.
        functions: (name, ctypes result type, ctypes argument types) of each function.
        missing: class of the error.

    Raises:
        missing: there is no compiler, it fails, or HETERO_LLM_NATIVE is 0.
    """
    choice = native_choice()
    if choice == "0":
        raise missing(f"HETERO_LLM_NATIVE=0 leaves the {what} out")
    try:
        library = open_library(recipe(sanitize=choice == "sanitized"))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise missing(f"the {what} is not available: {reason(error)}") from error
    quick = ctypes.PyDLL(library._name)
    for name, result, arguments in functions:
        for dll in (library, quick):
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
    return CallableLibrary(library, quick)


def _sources(recipe: Recipe) -> list[Path]:
    return sorted(recipe.folder.rglob("*.cpp"))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, where the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError(f"{command[0]} failed: {(lines or ['no message'])[0]}")
