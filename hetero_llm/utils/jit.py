"""numba's `njit` with a cache of ours.

numba's own cache needs a folder beside the sources or in the user's home, does not notice a change
in another file (a NamedTuple with a new field), and raises on a damaged file. This one

- lies in the folders of `cache_folder`;
- names a file by what the compiled code depends on: the function's module and all of our modules
  that it imports, the types of the arguments, the versions of Python, numba, llvmlite and numpy,
  and the CPU's features. What an upgrade changes is compiled anew, the rest is found again;
- throws a damaged file away and compiles again; a full disk costs the next start its time, but no
  start fails.

All functions made here are known: `num_compiled` shows whether anything was compiled or loaded
between two moments.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import compiler, serialize
from numba.core.caching import NullCache

from hetero_llm.utils import cache_folder, compile_progress

logger = logging.getLogger(__name__)

FOLDER = "numba"
"""Name of our folder in the cache folder."""

_PACKAGE = __name__.partition(".")[0]
_IMPORT = re.compile(
    rf"^\s*(?:from\s+({_PACKAGE}[\w.]*)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+({_PACKAGE}[\w.]*))",
    re.MULTILINE,
)
_DIGITS = 20  # of hashes in names
_FORMAT = "1"  # of our files

_functions: list[Any] = []


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.njit` with keywords; `cache` keeps compiled code in our cache."""

    def compile_later(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        if cache:
            dispatcher._cache = _Cache(function)
        _functions.append(dispatcher)
        return dispatcher

    return compile_later


def num_compiled() -> dict[str, int]:
    """Number of argument types for which each function of this process is compiled, by name."""
    return {
        f"{function.__module__}.{function.__qualname__}": len(function.signatures)
        for function in _functions
    }


class _Cache(NullCache):
    """Compiled code of one function, one file for each combination of argument types."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def cache_path(self) -> str:
        return str(cache_folder.write_folder() / FOLDER)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function for a signature; None: it is compiled next."""
        target.refresh()
        name = self._name(signature, target.codegen())
        for folder in cache_folder.folders():
            path = folder / FOLDER / name
            content = cache_folder.read(path)
            if content is None:
                continue
            try:
                return compiler.CompileResult._rebuild(target, *pickle.loads(content))
            except Exception as error:  # a file of ours that this process cannot make use of
                cache_folder.throw_away(path, f"cannot be loaded ({type(error).__name__})")
        compile_progress.begin()
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keeps a compiled function for later processes, if that is possible."""
        compile_progress.advance()
        if result.lifted or result.library.has_dynamic_globals:
            return
        path = cache_folder.write_folder() / FOLDER / self._name(signature, result.codegen)
        try:
            cache_folder.write(path, serialize.dumps(result._reduce()))
        except OSError as error:
            _warn_once(f"compiled code cannot be kept: {error}")

    def _name(self, signature: Any, codegen: Any) -> str:
        """Name of the file with the code for a signature."""
        function = self._function
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        parts = (
            source_digest(function.__module__), str(function.__code__.co_firstlineno),
            versions(), repr(codegen.magic_tuple()), repr(signature),
        )  # fmt: skip
        content = "\0".join(parts).encode() + (serialize.dumps(cells) if cells else b"")
        digest = hashlib.sha256(content).hexdigest()[:_DIGITS]
        return f"{function.__module__}.{function.__qualname__}-{digest}"


@cache
def source_digest(module: str) -> str:
    """Hash of a module's source and of those of ours that it imports, directly or by others."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += imports_of(name)
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + _source(name))
    return digest.hexdigest()[:_DIGITS]


def read_sources_again() -> None:
    """Forgets the sources that were read: they may have changed."""
    for function in (source_digest, imports_of, _source, _file):
        function.cache_clear()


@cache
def imports_of(module: str) -> tuple[str, ...]:
    """Our modules that a module's text imports, wherever in the text that is. Not this one:
    compiled code holds nothing of it."""
    found = []
    for package, names, plain in _IMPORT.findall(_source(module).decode(errors="replace")):
        words = re.findall(r"(\w+)(?:\s+as\s+\w+)?", names)
        found += [package or plain, *(f"{package}.{word}" for word in words if package)]
    found = [name for name in dict.fromkeys(found) if name != __name__]
    return tuple(name for name in found if _file(name) is not None)


@cache
def _source(module: str) -> bytes:
    path = _file(module)
    return b"" if path is None else path.read_bytes()


@cache
def _file(module: str) -> Path | None:
    """A module's source file; None: there is no such module."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        name = getattr(loaded, "__file__", None)
        return Path(name) if name else None
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@cache
def versions() -> str:
    """What compiled code and its files depend on besides our sources and the CPU."""
    numbers = numba.__version__, llvmlite.__version__, np.__version__
    return " ".join((_FORMAT, sys.version, *numbers))


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)
