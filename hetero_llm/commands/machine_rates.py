"""What this machine moves in a second, measured in about a second, for `hetero-llm doctor MODEL`;
and set-ups of its memory that make experts on the CPU slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_MIB = 1 << 20
_READ_BYTES = 1024 * _MIB  # of all threads, more than the last-level caches
_READ_S = 0.6
_COPY_BYTES = 512 * _MIB
_COPIES = 5
_ASSUMED_DRAM, _ASSUMED_LINK = 40e9, 25e9


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes, and bytes a second, of a machine.

    Attributes:
        gpu: read from the GPU's memory; 0: there is no GPU.
        link: copied from host memory to the GPU.
        dram: read from host memory by all usable cores.
        gpu_bytes: the GPU's memory.
        host_bytes: host memory that can be allocated now.
        sources: where each of the five comes from, for the report.
    """

    gpu: float
    link: float
    dram: float
    gpu_bytes: int
    host_bytes: int
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class GivenRates:
    """What the user says instead of what would be measured; None: measure."""

    gpu: float | None = None
    link: float | None = None
    dram: float | None = None
    gpu_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def names_a_gpu(self) -> bool:
        """Whether a GPU is to be assumed that need not be there."""
        return self.gpu is not None or self.gpu_bytes is not None


def measure_rates(given: GivenRates) -> Rates:
    """Measures what was not given."""
    sources: dict[str, str] = {}
    found: dict[str, Any] = {}
    for name, measure in (("dram", _dram), ("host_bytes", _host_bytes)):
        value, sources[name] = _value(getattr(given, name), measure)
        found[name] = value
    gpu = None if given.names_a_gpu and given.gpu and given.gpu_bytes else _first_gpu()
    memory = (0, "no GPU") if gpu is None else (int(gpu.total_memory), f"measured, {gpu.name}")
    found["gpu_bytes"], sources["gpu_bytes"] = _value(given.gpu_bytes, lambda: memory)
    if not found["gpu_bytes"]:
        none = "no GPU"
        return Rates(**found, gpu=0.0, link=0.0, sources={**sources, "gpu": none, "link": none})
    found["gpu"], sources["gpu"] = _value(given.gpu, lambda: _gpu_rate(gpu is not None))
    found["link"], sources["link"] = _value(given.link, lambda: _link_rate(gpu is not None))
    return Rates(**found, sources=sources)


def read_rate(threads: int, *, seconds: float = _READ_S, num_bytes: int = _READ_BYTES) -> float:
    """Bytes a second that `threads` threads read from `num_bytes` of memory together, each its own
    part: the mean over `seconds`. numpy's sums of integers wait for memory, not for arithmetic."""
    import numpy as np

    size = num_bytes // 8 // threads
    with ThreadPoolExecutor(threads) as pool:
        # Each thread makes a part, so that it lies in the memory of a node that computes.
        parts = list(pool.map(lambda _: np.ones(size, np.int64), range(threads)))
        passes = 0
        begin = time.perf_counter()
        while not passes or time.perf_counter() - begin < seconds:
            total = sum(pool.map(_total_of_part, parts))
            assert total == threads * size
            passes += 1
        return passes * threads * size * 8 / (time.perf_counter() - begin)


def _total_of_part(part: Any) -> int:
    return int(part.sum())


def _value(given: Any, measure: Any) -> tuple[Any, str]:
    return measure() if given is None else (given, "as given")


def _dram() -> tuple[float, str]:
    try:
        from hetero_llm.utils.topology import compute_cpus

        threads = len(compute_cpus(reserve=0))
        return read_rate(threads), f"measured, {threads} threads"
    except (ImportError, MemoryError) as error:
        return _ASSUMED_DRAM, f"assumed: {type(error).__name__}"


def _host_bytes() -> tuple[int, str]:
    from hetero_llm.utils.topology import usable_memory_bytes

    return usable_memory_bytes(), "available now"


def _first_gpu() -> Any:
    """The first GPU's properties; None without one."""
    try:
        import torch

        return torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    except Exception:  # a broken installation fails in many ways; the doctor's report says how
        return None


def _gpu_rate(there: bool) -> tuple[float, str]:
    """Bytes read plus bytes written by large copies on the device."""
    if not there:
        return 2.0e12, "assumed"
    import torch

    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return 2 * _COPY_BYTES / best, "measured, a large copy on the device"


def _link_rate(there: bool) -> tuple[float, str]:
    if not there:
        return _ASSUMED_LINK, "assumed"
    from hetero_llm.bridge.kv_offload.copy_calibration import calibrate_device

    try:
        return calibrate_device().best_rate(), "measured, copies to the device"
    except Exception as error:  # no page-locked memory, no driver library ...
        reason = str(error).partition("\n")[0] or type(error).__name__
        return _ASSUMED_LINK, f"assumed: {reason}"


def memory_warnings(
    cpus: Sequence[int], sockets: dict[int, int], nodes: dict[int, int], gpu_node: int | None
) -> list[str]:
    """What makes reads of host memory slower than the machine's memory is.

    Args:
        cpus: those that compute.
        sockets, nodes: CPU -> its socket, and its NUMA node.
        gpu_node: NUMA node of the GPU; None: unknown.
    """
    warnings = []
    per_socket = {
        socket: {nodes[cpu] for cpu, at in sockets.items() if at == socket and cpu in nodes}
        for socket in set(sockets.values())
    }
    split = max((len(found) for found in per_socket.values()), default=0)
    if split > 1:
        warnings.append(
            f"each socket has {split} NUMA nodes (SNC on Intel, NPS on AMD): a core reads the "
            "other parts of its socket more slowly; switch it off in the firmware, or start under "
            "numactl --interleave=all"
        )
    used = {sockets[cpu] for cpu in cpus if cpu in sockets}
    if len(used) > 1:
        warnings.append(
            f"threads would run on {len(used)} sockets and read much of the weights across the "
            "link between them; start under numactl --cpunodebind=N --membind=N if one "
            "socket's memory holds the experts, else --interleave=all"
        )
    own = {nodes[cpu] for cpu in cpus if cpu in nodes}
    if gpu_node is not None and own and gpu_node not in own:
        warnings.append(
            f"the GPU is at NUMA node {gpu_node} and the usable cores are not: requests and "
            "answers of each layer cross the sockets; use cores of that node"
        )
    return warnings


def warnings_here(*, with_gpu: bool) -> list[str]:
    """`memory_warnings` of this machine; none where /sys and /proc do not say."""
    try:
        from hetero_llm.utils import numa
        from hetero_llm.utils.topology import compute_cpus, read_sockets, read_topology
    except ImportError:
        return []
    host = read_topology()
    nodes = {cpu: node.index for node in host.numa_nodes for cpu in node.cpus}
    gpu_node = numa.numa_node(0) if with_gpu else None
    return memory_warnings(compute_cpus(reserve=0), read_sockets(), nodes, gpu_node)
