"""The use of this machine: CPU time and memory of our processes, and how busy the GPUs are."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil

from hetero_llm.utils.topology import read_memory_limit


@dataclass(frozen=True)
class GpuMemoryUse:
    """Of one GPU, with all that uses it."""

    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class MachineUse:
    """One reading.

    Attributes:
        cores: logical cores that this process may use.
        cpu_seconds: CPU time since the first reading, of this process and those below it; the
            difference of two readings divided by their distance in time is the cores in use.
        memory_bytes: their resident memory; shared pages count for each process.
        memory_total_bytes: what they may have: the machine's memory, or the limit of a cgroup.
        gpu: busy part of each GPU, 0 to 1; None if no GPU can be read.
        gpu_memory: of each GPU; None if it cannot be read of every one.
    """

    cores: int
    cpu_seconds: float
    memory_bytes: int
    memory_total_bytes: int
    gpu: list[float] | None
    gpu_memory: list[GpuMemoryUse] | None


class Machine:
    """Reads a machine's use; one per server.

    Args:
        device: of the engine; only "cuda" devices have GPUs to show.
        kept_seconds: shortest time between two readings, however often the page asks.
        children_seconds: time between two searches for child processes, which read the whole
            process table.
    """

    def __init__(
        self, device: str, *, kept_seconds: float = 0.5, children_seconds: float = 5.0
    ) -> None:
        self._kept_seconds, self._children_seconds = kept_seconds, children_seconds
        self._uses_gpu = device.startswith("cuda")
        self._lock = threading.Lock()
        # By process id: the process, and its CPU seconds when last read.
        self._tree: dict[int, tuple[Any, float]] = {}
        self._looked = -children_seconds
        self._cpu_seconds = 0.0
        self._memory_total = 0
        self._gpus: list[_Gpu] | None = None
        self._last: MachineUse | None = None
        self._read_at = 0.0

    def read(self) -> MachineUse:
        """The use now, or up to `kept_seconds` ago. Takes milliseconds: call it in a thread, or in
        several."""
        with self._lock:
            now = time.monotonic()
            if self._last is None or now - self._read_at >= self._kept_seconds:
                if now - self._looked >= self._children_seconds:
                    self._looked = now
                    self._look_for_children()
                    self._memory_total = _memory_total()
                memory = self._read_tree()
                cores = len(os.sched_getaffinity(0))
                busy, gpu_memory = self._read_gpus()
                self._last = MachineUse(
                    cores, self._cpu_seconds, memory, self._memory_total, busy, gpu_memory
                )
                self._read_at = now
            return self._last

    def _look_for_children(self) -> None:
        """Finds new processes; the CPU time before their first reading does not count."""
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            # The id of an ended process may be that of a new one now.
            known = self._tree.get(process.pid)
            if known is None or known[0] != process:
                try:
                    self._tree[process.pid] = process, _cpu_seconds(process)
                except psutil.Error:  # it has just ended
                    self._tree.pop(process.pid, None)

    def _read_tree(self) -> int:
        """Adds the CPU time since the last reading; returns the memory in bytes."""
        memory = 0
        for pid, (process, before) in tuple(self._tree.items()):
            try:
                with process.oneshot():
                    seconds = _cpu_seconds(process)
                    memory += process.memory_info().rss
            except psutil.Error:  # it has ended
                del self._tree[pid]
                continue
            self._cpu_seconds += seconds - before
            self._tree[pid] = process, seconds
        return memory

    def _read_gpus(self) -> tuple[list[float] | None, list[GpuMemoryUse] | None]:
        """What `MachineUse` holds of the GPUs."""
        if not self._uses_gpu:
            return None, None
        if self._gpus is None:
            self._gpus = _open_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        memory = [gpu.memory() for gpu in self._gpus]
        known = [one for one in memory if one is not None]
        busy = [gpu.busy() for gpu in self._gpus]
        return busy or None, known if known and len(known) == len(memory) else None


def _memory_total() -> int:
    """Bytes that this process and those below it may use."""
    limit, total = read_memory_limit(), int(psutil.virtual_memory().total)
    return total if limit is None else min(limit.limit_bytes, total)


def _cpu_seconds(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class _Rates(ctypes.Structure):
    """Percent of the last moments in which a GPU computed, and used its memory."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """Bytes of a GPU's memory."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _open_gpus(visible: str | None) -> list[_Gpu]:
    """A reader for each GPU that CUDA sees. None without NVIDIA's driver, or if one GPU cannot
    be read, such as a part of a card or a name that only CUDA understands."""
    nvml = _driver()
    if nvml is None or nvml.nvmlInit_v2():
        return []
    number = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
    names = visible.split(",") if visible else map(str, range(number.value))
    readers = [_reader(nvml, name.strip()) for name in names]
    known = [reader for reader in readers if reader is not None]
    return known if len(known) == len(readers) else []


def _driver() -> Any:
    """The library of NVIDIA's driver, None without; its functions return 0 on success."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def _reader(nvml: Any, name: str) -> _Gpu | None:
    handle = ctypes.c_void_p()
    if name.isdecimal():
        unknown = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        unknown = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    gpu = _Gpu(nvml, handle)
    return None if unknown or not gpu.can_be_read else gpu


class _Gpu:
    """Reads one GPU. During its reset the driver's calls fail and the last figures stay."""

    def __init__(self, nvml: Any, handle: ctypes.c_void_p) -> None:
        self._nvml, self._handle = nvml, handle
        self._rates, self._memory = _Rates(), _Memory()

    @property
    def can_be_read(self) -> bool:
        rates = ctypes.byref(self._rates)
        return not self._nvml.nvmlDeviceGetUtilizationRates(self._handle, rates)

    def busy(self) -> float:
        """Part of the last moments in which it computed, 0 to 1."""
        self._nvml.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(self._rates))
        return float(self._rates.gpu) / 100

    def memory(self) -> GpuMemoryUse | None:
        """None where it never could be read, as on GPUs without memory of their own."""
        self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(self._memory))
        used, total = int(self._memory.used), int(self._memory.total)
        return GpuMemoryUse(used, total) if total else None
