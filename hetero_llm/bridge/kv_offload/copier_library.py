"""The compiled copier, built at first use; `csrc/copier.h` documents its functions. Its copy kernel
is compiled at run time by NVRTC, from the CUDA installation that the process has loaded."""

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.utils.native_build import CallableLibrary, open_both_ways, reason, usual_recipe

_SOURCES = Path(__file__).parent / "csrc"
_POINTER, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
_MESSAGE_BYTES = 256
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class CopierError(HeteroLLMError):
    """The copier is unavailable; the engine serves without offload."""


class Method(enum.IntEnum):
    """How a group of layers is loaded; see `csrc/copier.h`."""

    BATCH = 0
    """One call of the driver for many blocks (CUDA 12.8 and later)."""
    RUNS = 1
    """One two-dimensional copy for blocks that are consecutive on both sides."""
    PLAIN = 2
    """One copy for each block."""
    KERNEL = 3
    """A kernel that reads host memory."""


class Setup(ctypes.Structure):
    """Argument of `hetero_copier_open`."""

    _fields_ = [
        (name, _INT)
        for name in (
            "device",
            "host",
            "flags",
            "block_bytes",
            "num_layers",
            "chunk_rows",
            "lookahead",
            "ahead_bytes",
            "max_inflight",
            "part_bytes",
            "lazy",
            "core",
            "board",
            "rank",
        )
    ]


class Load(ctypes.Structure):
    """Argument of `hetero_copier_load`."""

    _fields_ = [
        (name, _INT)
        for name in ("transfer_id", "place", "base", "method", "group", "layers", "after_step")
    ]


COUNTERS = (
    "bytes_in",
    "bytes_out",
    "loads",
    "failed_loads",
    "aborted_loads",
    "stores",
    "failed_stores",
    "busy_in_ns",
    "busy_out_ns",
    "loading_ns",
    "cpu_ns",
    "errors",
    "broken",
)


class Totals(ctypes.Structure):
    """Result of `hetero_copier_totals`."""

    _fields_ = [*((name, _INT) for name in COUNTERS), ("rate", ctypes.c_double)]


# Before glibc 2.34 dlopen is in a library of its own.
recipe = partial(usual_recipe, "kv-copier", _SOURCES, link_flags=("-Wl,--no-as-needed", "-ldl"))

FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("hetero_copier_open", _POINTER, [_TEXT, _POINTER, _TEXT, _INT]),
    ("hetero_copier_methods", _INT, [_POINTER]),
    ("hetero_copier_add_kernel", _INT, [_POINTER, _TEXT, _TEXT, _INT]),
    ("hetero_copier_load", None, [_POINTER] * 4 + [_INT]),
    ("hetero_copier_store", None, [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT]),
    ("hetero_copier_abort", None, [_POINTER, _INT]),
    ("hetero_copier_step_launched", None, [_POINTER, _INT, _POINTER]),
    ("hetero_copier_step_done", _INT, [_POINTER, _INT]),
    ("hetero_copier_ahead", _INT, [_POINTER, _INT]),
    ("hetero_copier_poll", _INT, [_POINTER, _POINTER, _INT]),
    ("hetero_copier_wait", _INT, [_POINTER, _INT]),
    ("hetero_copier_report_step", None, [_POINTER, _INT]),
    ("hetero_copier_set_rate", None, [_POINTER, ctypes.c_double]),
    ("hetero_copier_totals", None, [_POINTER, _POINTER]),
    ("hetero_copier_first_error", _INT, [_POINTER, _TEXT, _INT]),
    ("hetero_copier_close", None, [_POINTER]),
    ("hetero_copier_free", None, [_POINTER]),
    ("hetero_reports_bytes", _INT, [_INT]),
    ("hetero_reports_format", None, [_POINTER, _INT]),
    ("hetero_reports_ranks", _INT, [_POINTER, _INT]),
    ("hetero_reports_take", _INT, [_POINTER, _INT, _POINTER, _INT]),
    ("hetero_reports_wait", _INT, [_POINTER, _INT]),
    ("hetero_reports_ready_rows", _INT, [_POINTER]),
    ("hetero_reports_broken", _INT, [_POINTER]),
    ("hetero_reports_set_ready_rows", None, [_POINTER, _INT, _INT]),
)
"""Name, result and arguments of each function of the library."""


@lru_cache(maxsize=1)
def load() -> CallableLibrary:
    """The library, compiled if need be.

    Raises:
        CopierError: there is no compiler, it fails, or HETERO_LLM_NATIVE is 0.
    """
    return open_both_ways("compiled copier", recipe, FUNCTIONS, CopierError)


def with_message(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Calls a function whose last arguments are a buffer for a message and its size. Returns its
    result, and the message or ""."""
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    result = function(*arguments, message, len(message))
    return result, message.value.decode(errors="replace")


def compile_kernel(libcuda: str) -> bytes:
    """Compiles the copy kernel for the device whose context is current.

    Raises:
        CopierError: there is no compiler library, or it fails.
    """
    source = (_SOURCES / "copy_rows.cu").read_bytes()
    option = f"--gpu-architecture={_architecture(libcuda)}".encode()
    nvrtc = _open_nvrtc()
    program = ctypes.c_void_p()
    options = (ctypes.c_char_p * 1)(option)
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source, b"copy_rows.cu", 0, None, None
    )
    if created != 0:
        raise CopierError(f"the copy kernel cannot be compiled: NVRTC error {created}")
    try:
        result = nvrtc.nvrtcCompileProgram(program, 1, options)
        size = ctypes.c_size_t()
        if result == 0:
            result = nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(max(1, size.value))
        if result == 0:
            result = nvrtc.nvrtcGetCUBIN(program, image)
        if result != 0:
            raise CopierError(f"the copy kernel cannot be compiled: NVRTC error {result}")
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _architecture(libcuda: str) -> str:
    numbers = []
    try:
        driver = ctypes.CDLL(libcuda)
        device, value = ctypes.c_int(), ctypes.c_int()
        result = driver.cuCtxGetDevice(ctypes.byref(device))
        for attribute in (_MAJOR, _MINOR):
            result = result or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            numbers.append(value.value)
    except (OSError, AttributeError) as error:
        raise CopierError(f"the device's architecture is not known: {reason(error)}") from error
    if result != 0:
        raise CopierError(f"the device's architecture is not known: error {result}")
    return "sm_" + "".join(map(str, numbers))


def _open_nvrtc() -> ctypes.CDLL:
    for path in _nvrtc_paths():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CopierError("there is no NVRTC library beside the CUDA that is loaded")


def _nvrtc_paths() -> Iterator[str]:
    """Yields NVRTC if it is loaded, then the one beside the loaded CUDA runtime."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    found = re.findall(r"(/\S*/lib(nvrtc|cudart)\.so\.(\d+)\S*)$", maps, re.MULTILINE)
    yield from sorted({path for path, name, _ in found if name == "nvrtc"})
    for path, major in sorted({(path, major) for path, name, major in found if name == "cudart"}):
        folder, file = Path(path).parent, f"libnvrtc.so.{major}"
        yield from (str(folder / file), str(folder.parents[1] / "cuda_nvrtc/lib" / file), file)
