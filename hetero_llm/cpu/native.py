"""The compiled CPU library: built at first use, loaded with ctypes.

The file name holds a hash of sources, compiler and flags, so a changed source or compiler builds
anew and several processes can share one cache folder. The code itself picks its instruction set at
run time. Without a compiler there is no library and callers stay on torch.

OpenMP: the library names the runtime's functions but is linked against none. `load` first makes
the symbols of the runtime that torch has loaded visible, so that both use one team of threads.
The step executor (csrc/step) has threads of its own and is compiled without OpenMP.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from hetero_llm.core.env import cache_dir, cpu_isa, native_choice
from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu.topology import read_topology

logger = logging.getLogger(__name__)

ISA_NAMES = ("base", "avx2", "avx512", "avx512_bf16", "amx")
"""Names of the levels of csrc/step/isa.h, by number; each includes those before it."""

_SOURCES = Path(__file__).parent / "csrc"
_COMPILERS = ("g++", "c++")
_FLAGS = ("-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", "-Wno-psabi")
_FAST = ("-O3",)
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", *_SANITIZERS)
_TIMEOUT_S = 600
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The library, compiled if need be; None (said once in the log) if that is impossible."""
    choice = native_choice()
    if choice == "0":
        return None
    try:
        return open_library(sanitize=choice == "sanitized")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels are not available, plain torch serves: %s", reason(error))
        return None


def isa_level(library: ctypes.CDLL | None = None) -> int:
    """The instruction set for the step executor: an index of `ISA_NAMES`.

    The machine's best, or the lower one that HETERO_LLM_CPU_ISA names.

    Args:
        library: Whom to ask; `load()`'s if None, which must have one then.

    Raises:
        ConfigError: HETERO_LLM_CPU_ISA is no such name, or more than the machine has.
    """
    library = library or load()
    assert library is not None
    best, forced = int(library.hetero_isa_best()), cpu_isa()
    if forced is None:
        return best
    if forced not in ISA_NAMES:
        raise ConfigError("HETERO_LLM_CPU_ISA", forced, f"must be one of {', '.join(ISA_NAMES)}")
    if ISA_NAMES.index(forced) > best:
        raise ConfigError("HETERO_LLM_CPU_ISA", forced, f"this machine has {ISA_NAMES[best]}")
    return ISA_NAMES.index(forced)


def reason(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n")[0]


def open_library(*, sanitize: bool = False) -> ctypes.CDLL:
    """Builds and loads the library; a damaged or foreign file in the cache is built anew, once.

    Raises:
        RuntimeError, OSError, subprocess.SubprocessError: see `build`, or it cannot be loaded.
    """
    _share_openmp()
    path = build(sanitize=sanitize)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        library = ctypes.CDLL(str(build(sanitize=sanitize, force=True)))
    declare(library)
    return library


def declare(library: ctypes.CDLL) -> None:
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
    library.hetero_isa_best.restype = _INT
    library.hetero_isa_best.argtypes = []


def build(*, sanitize: bool = False, force: bool = False) -> Path:
    """Compiles the library unless the cache folder has it.

    Args:
        sanitize: The one with AddressSanitizer and UBSan; a process can load it only if
            libasan was preloaded.
        force: Compile even so.

    Raises:
        RuntimeError: there is no compiler, or it reports an error.
        OSError, subprocess.SubprocessError: it failed.
    """
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler found")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout
    flags = (*_FLAGS, *(_SANITIZED if sanitize else _FAST))
    sources = sorted(_SOURCES.rglob("*.cpp"))
    everything = [*sources, *sorted(_SOURCES.rglob("*.h"))]
    digest = _digest(everything, version, flags)
    library = cache_dir() / f"kernels-{'sanitized-' if sanitize else ''}{digest}.so"
    if not force and _is_whole(library):
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "kernels.so"
        commands, objects = [], []
        for index, source in enumerate(sources):
            objects.append(f"{folder}/{index}.o")
            # -fopenmp at compile time only: linked with it, a second runtime would be loaded.
            openmp = ("-fopenmp",) if source.parent == _SOURCES else ()
            commands.append([compiler, *flags, *openmp, "-c", str(source), "-o", objects[-1]])
        with ThreadPoolExecutor(read_topology().usable_cores) as pool:
            list(pool.map(_run, commands))
        link = [compiler, "-shared", "-pthread", *(_SANITIZERS if sanitize else ())]
        _run([*link, *objects, "-o", str(built)])
        if _digest(everything, version, flags) != digest:
            raise RuntimeError("the sources changed while they were compiled; try again")
        os.replace(built, library)
    return library


def _digest(files: list[Path], version: str, flags: tuple[str, ...]) -> str:
    parts = [version.encode(), " ".join(flags).encode()]
    for path in files:
        parts += [str(path.relative_to(_SOURCES)).encode(), path.read_bytes()]
    return hashlib.sha256(b"\x00".join(parts)).hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    """Whether the file is there and not cut short: the loader would die of SIGBUS on such a one.

    The linker writes the table of sections last; the file's header says where it ends.
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


def _share_openmp() -> None:
    """Makes the symbols of torch's OpenMP runtime visible to libraries loaded later."""
    import torch  # noqa: F401  (loads the runtime)

    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith(("libgomp", "libiomp5", "libomp")):
            ctypes.CDLL(line[line.index("/") :], mode=ctypes.RTLD_GLOBAL)
            return
    raise RuntimeError("torch has loaded no OpenMP runtime")
