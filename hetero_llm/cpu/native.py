"""The compiled CPU library: built at first use, loaded with ctypes.

`utils/native_build.py` compiles it and caches the file. The library chooses its instruction set at
run time. Without a compiler there is no library, and callers stay on torch.

OpenMP: the library uses the runtime's functions but is linked against none. `load` first makes the
symbols of the runtime that torch has loaded visible, so that both use one team of threads. The step
executor (csrc/step) has threads of its own and is compiled without OpenMP.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.utils import native_build
from hetero_llm.utils.env import cpu_isa, native_choice
from hetero_llm.utils.native_build import Recipe, reason, usual_recipe
from hetero_llm.utils.topology import read_topology

logger = logging.getLogger(__name__)

ISA_NAMES = ("base", "avx2", "avx512", "avx512_bf16", "amx")
"""Names of the levels of csrc/step/isa.h, by number; each includes those before it."""

_SOURCES = Path(__file__).parent / "csrc"
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The library, compiled if the cache has none. None if HETERO_LLM_NATIVE is 0 or, with a
    warning in the log, if it cannot be compiled or loaded."""
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
        library: of `open_library`; None for that of `load`, which must not be None.

    Raises:
        ConfigError: HETERO_LLM_CPU_ISA is not one of `ISA_NAMES`, or above the machine's level.
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


def open_library(*, sanitize: bool = False) -> ctypes.CDLL:
    """Builds and loads the library; a cached file that cannot be loaded is built again, once.

    Raises:
        RuntimeError, OSError, subprocess.SubprocessError: see `build`, or it cannot be loaded.
    """
    _share_openmp()
    library = native_build.open_library(recipe(sanitize=sanitize))
    declare(library)
    return library


def declare(library: ctypes.CDLL) -> None:
    """Sets argument and result types: of the torch path's functions and of `hetero_isa_best`."""
    declare_functions(
        library,
        "hetero_",
        {
            "attention_cut": (_INT, []),
            "attention_partial": (_INT, [_INT]),
            "can_attend_chunk": (_INT, [_INT]),
            "store_kv": (None, [_POINTER] * 4 + [_INT] * 7),
            "attend_rows": (
                None,
                [_POINTER] * 6 + [_INT] * 9 + [_FLOAT] * 2 + [_POINTER] * 2 + [_INT] * 2,
            ),
            "attend_chunk": (None, [_POINTER] * 4 + [_INT] * 9 + [_FLOAT, _INT]),
            "rms_norm_bf16": (None, [_POINTER] * 4 + [_INT] * 3 + [_FLOAT, _INT]),
            "silu_mul_bf16": (None, [_POINTER] * 2 + [_INT] * 3),
            "isa_best": (_INT, []),
        },
    )


def declare_functions(
    library: ctypes.CDLL, prefix: str, functions: Mapping[str, tuple[Any, list[Any]]]
) -> None:
    """Sets the result and argument types of functions, by their names behind `prefix`."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, prefix + name)
        function.restype, function.argtypes = result, arguments


def build(*, sanitize: bool = False, force: bool = False) -> Path:
    """Compiles the library unless the cache folder has it.

    Args:
        sanitize: with AddressSanitizer and UBSan; a process can load that library only if libasan
            was preloaded.
        force: compile although the cache has it.

    Raises:
        RuntimeError: there is no compiler, or it reports an error.
        OSError, subprocess.SubprocessError: it failed.
    """
    return native_build.build_library(recipe(sanitize=sanitize), force=force)


def recipe(*, sanitize: bool = False) -> Recipe:
    """How the library is built; `sanitize`: see `build`."""
    return replace(
        usual_recipe("kernels", _SOURCES, sanitize=sanitize),
        # Only for the compiler: linked with it, the library would load a second runtime.
        flags_of=lambda source: ("-fopenmp",) if source.parent == _SOURCES else (),
        workers=read_topology().usable_cores,
    )


def _share_openmp() -> None:
    """Makes the symbols of torch's OpenMP runtime visible to libraries loaded later."""
    import torch  # noqa: F401  (loads the runtime)

    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith(("libgomp", "libiomp5", "libomp")):
            ctypes.CDLL(line[line.index("/") :], mode=ctypes.RTLD_GLOBAL)
            return
    raise RuntimeError("torch has loaded no OpenMP runtime")
