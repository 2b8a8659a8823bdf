"""Facts about the host: instruction sets, cores, NUMA nodes, memory, and limits of cgroups.

All of them are read from the kernel's text files. A file that is missing or unreadable (another
system, a locked-down container) means "unknown" or "no limit".
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
"""Instruction sets for which there are kernels, weakest first, as /proc/cpuinfo spells them."""

_ROOT = Path("/")
_V1_NO_LIMIT = 1 << 62
"""cgroup v1 writes "no limit" as the largest page-aligned 64-bit number."""


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Contents of /proc/cpuinfo. `core_of` maps a logical CPU to its (socket, core)."""

    model_name: str
    isa: tuple[str, ...]
    core_of: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node; `cpus` is empty for a node of memory only."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest memory cgroup around this process.

    Attributes:
        limit_bytes: The lowest limit of all enclosing groups.
        headroom_bytes: Bytes that can still be allocated under every limit; file cache that the
            kernel would drop first counts as free.
    """

    limit_bytes: int
    headroom_bytes: int


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The host as this process may use it. Sizes in bytes.

    Attributes:
        isa: The members of `ISA_FLAGS` that the CPU has.
        logical_cpus: Hardware threads of the host.
        physical_cores: Cores of the host.
        allowed_cpus: Hardware threads in the affinity mask.
        allowed_cores: Different cores among `allowed_cpus`.
        cpu_quota: CPU time that cgroups grant, in CPUs; None without a limit.
        memory_limit: None without a limit.
    """

    model_name: str
    isa: tuple[str, ...]
    logical_cpus: int
    physical_cores: int
    allowed_cpus: tuple[int, ...]
    allowed_cores: int
    cpu_quota: float | None
    numa_nodes: tuple[NumaNode, ...]
    total_memory: int
    available_memory: int
    memory_limit: MemoryLimit | None

    @property
    def hyperthreads(self) -> int:
        """Hardware threads of one core."""
        return max(1, self.logical_cpus // self.physical_cores)

    @property
    def usable_cores(self) -> int:
        """Cores to plan compute threads for: the affinity mask's, within the cgroup's quota."""
        if self.cpu_quota is None:
            return self.allowed_cores
        return max(1, min(self.allowed_cores, int(self.cpu_quota)))


def read_topology(root: Path = _ROOT) -> CpuTopology:
    """Read the host's topology from `root`/proc and `root`/sys."""
    info = read_cpuinfo(root)
    allowed = _allowed_cpus()
    logical = len(info.core_of) or os.cpu_count() or 1
    physical = len(set(info.core_of.values())) or psutil.cpu_count(logical=False) or logical
    memory = psutil.virtual_memory()
    return CpuTopology(
        model_name=info.model_name or platform.processor() or platform.machine(),
        isa=info.isa,
        logical_cpus=logical,
        physical_cores=physical,
        allowed_cpus=allowed,
        allowed_cores=len({info.core_of.get(cpu, (-1, cpu)) for cpu in allowed}),
        cpu_quota=read_cpu_quota(root),
        numa_nodes=read_numa_nodes(root),
        total_memory=memory.total,
        available_memory=memory.available,
        memory_limit=read_memory_limit(root),
    )


def compute_cpus(reserve: int, root: Path = _ROOT) -> tuple[int, ...]:
    """The logical CPUs to pin compute threads to: one for each physical core granted.

    Cores of the NUMA node with most of them come first, so that few threads share a node.

    Args:
        reserve: Number of cores left to control threads.
        root: Folder that holds proc and sys.

    Returns:
        Logical CPUs in the affinity mask, as many as affinity and the cgroup's quota allow, less
        `reserve`, but at least one.
    """
    assert reserve >= 0
    host = read_topology(root)
    core_of = read_cpuinfo(root).core_of
    first_cpu: dict[tuple[int, int], int] = {}
    for cpu in host.allowed_cpus:
        first_cpu.setdefault(core_of.get(cpu, (-1, cpu)), cpu)
    chosen = sorted(first_cpu.values())
    node_of = {cpu: node.index for node in host.numa_nodes for cpu in node.cpus}
    sizes = Counter(node_of.get(cpu, -1) for cpu in chosen)
    chosen.sort(key=lambda cpu: (-sizes[node_of.get(cpu, -1)], node_of.get(cpu, -1), cpu))
    return tuple(chosen[: max(1, host.usable_cores - reserve)])


def numa_pools(cpus: tuple[int, ...] | None, root: Path = _ROOT) -> tuple[int, ...] | None:
    """Which of these logical CPUs are on one NUMA node.

    Args:
        cpus: as of `compute_cpus`: those of a node follow each other. None: any.

    Returns:
        For each of them the number of its node among theirs, ascending from 0; None if they are on
        one node, or in an order that goes back to an earlier one.
    """
    node_of = {cpu: node.index for node in read_numa_nodes(root) for cpu in node.cpus}
    nodes = [node_of.get(cpu, -1) for cpu in cpus or ()]
    order = list(dict.fromkeys(nodes))
    pools = tuple(order.index(node) for node in nodes)
    return pools if len(order) > 1 and list(pools) == sorted(pools) else None


def split_cpus(parts: int, root: Path = _ROOT) -> tuple[tuple[int, ...], ...]:
    """Divides the logical CPUs of this process into parts of whole cores, near each other: cores
    are dealt in runs, in the order of their NUMA nodes. Beyond the cgroup's quota no core is dealt.
    With fewer cores than parts, every part has all of them.

    Returns:
        `parts` tuples of logical CPUs, ascending.
    """
    assert parts >= 1
    host = read_topology(root)
    core_of = read_cpuinfo(root).core_of
    node_of = {cpu: node.index for node in host.numa_nodes for cpu in node.cpus}
    threads_of: dict[tuple[int, int], list[int]] = {}
    for cpu in host.allowed_cpus:
        threads_of.setdefault(core_of.get(cpu, (-1, cpu)), []).append(cpu)
    cores = sorted(threads_of.values(), key=lambda cpus: (node_of.get(cpus[0], -1), cpus[0]))
    cores = cores[: host.usable_cores]
    if len(cores) < parts:
        return (tuple(sorted(cpu for cpus in cores for cpu in cpus)),) * parts
    bounds = [len(cores) * part // parts for part in range(parts + 1)]
    return tuple(
        tuple(sorted(cpu for cpus in cores[first:last] for cpu in cpus))
        for first, last in zip(bounds, bounds[1:], strict=False)
    )


def usable_memory_bytes(root: Path = _ROOT) -> int:
    """Host memory that can be allocated now without swapping and within the cgroups' limits."""
    available = int(psutil.virtual_memory().available)
    limit = read_memory_limit(root)
    return available if limit is None else min(available, limit.headroom_bytes)


def read_cpuinfo(root: Path = _ROOT) -> CpuInfo:
    """What `root`/proc/cpuinfo says; nothing where there is none."""
    return parse_cpuinfo(_read(root / "proc/cpuinfo") or "")


def parse_cpuinfo(text: str) -> CpuInfo:
    """Parse the text of /proc/cpuinfo.

    If it names no cores (virtual machines, other architectures), each logical CPU counts as one.
    """
    model_name = ""
    flags: set[str] = set()
    core_of: dict[int, tuple[int, int]] = {}
    for block in text.split("\n\n"):
        fields = dict(_key_value(line) for line in block.splitlines() if ":" in line)
        if "processor" not in fields or not fields["processor"].isdigit():
            continue
        cpu = int(fields["processor"])
        core = int(fields.get("core id", cpu))
        core_of[cpu] = (int(fields.get("physical id", 0)), core)
        model_name = model_name or fields.get("model name", "")
        flags = flags or set(fields.get("flags", "").split())
    return CpuInfo(model_name, tuple(flag for flag in ISA_FLAGS if flag in flags), core_of)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-2,8` -> (0, 1, 2, 8): the kernel's notation for sets of CPUs."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def read_sockets(root: Path = _ROOT) -> dict[int, int]:
    """Logical CPU -> its socket, under `root`/proc; none if the kernel does not say."""
    return {cpu: socket for cpu, (socket, _) in read_cpuinfo(root).core_of.items()}


def read_numa_nodes(root: Path = _ROOT) -> tuple[NumaNode, ...]:
    """The NUMA nodes under `root`/sys, by index; none if the kernel has no NUMA."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpu_list(_read(folder / "cpulist") or "")
        memory = _node_memory(_read(folder / "meminfo") or "")
        nodes.append(NumaNode(int(folder.name.removeprefix("node")), cpus, memory))
    return tuple(sorted(nodes, key=lambda node: node.index))


def read_cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU time granted by the tightest enclosing cgroup, in CPUs; None without a limit."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()  # version 2: "quota period"
        if len(words) != 2:
            quota, period = (
                _read_int(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
            )
        else:
            quota, period = _to_int(words[0]), _to_int(words[1])
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def read_memory_limit(root: Path = _ROOT) -> MemoryLimit | None:
    """The memory limit of the enclosing cgroups, None without one."""
    limits, headrooms = [], []
    for folder in _cgroup_folders(root, "memory"):
        limit, usage = _read_int(folder / "memory.max"), _read_int(folder / "memory.current")
        cache_key = "inactive_file"
        if limit is None:
            limit = _read_int(folder / "memory.limit_in_bytes")
            usage = _read_int(folder / "memory.usage_in_bytes")
            cache_key = "total_inactive_file"
        if limit is None or limit >= _V1_NO_LIMIT:
            continue
        cache = _stat(_read(folder / "memory.stat") or "", cache_key)
        limits.append(limit)
        headrooms.append(max(0, limit - max(0, (usage or 0) - cache)))
    return MemoryLimit(min(limits), min(headrooms)) if limits else None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and its ancestors, for a controller of version 1 or 2.

    A container often mounts its own group as the root. Then folders of the path in
    /proc/self/cgroup may be missing, and the path may start with "..".
    """
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = mount / controller
        elif not controllers:
            base = mount
        else:
            continue
        parts = [] if ".." in path.split("/") else path.strip("/").split("/")
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _allowed_cpus() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _node_memory(meminfo: str) -> int:
    for line in meminfo.splitlines():  # "Node 0 MemTotal:  263868992 kB"
        if "MemTotal:" in line:
            return int(line.split()[-2]) * 1024
    return 0


def _stat(text: str, key: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _key_value(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    return _to_int((_read(path) or "").strip())


def _to_int(text: str) -> int | None:
    """The number, or None for an empty file and for version 2's "max"."""
    try:
        return int(text)
    except ValueError:
        return None
