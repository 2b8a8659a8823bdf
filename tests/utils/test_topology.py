"""Topology parsers on written-out fixtures, and a look at the real host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hetero_llm.utils.topology import (
    NumaNode,
    compute_cpus,
    numa_pools,
    parse_cpu_list,
    parse_cpuinfo,
    read_cpu_quota,
    read_memory_limit,
    read_numa_nodes,
    read_sockets,
    read_topology,
    split_cpus,
    usable_memory_bytes,
)

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


def cpu_block(cpu: int, *, socket: int, core: int, flags: str) -> str:
    return (
        f"processor\t: {cpu}\nvendor_id\t: GenuineIntel\nmodel name\t: A CPU: 2 GHz\n"
        f"physical id\t: {socket}\ncore id\t\t: {core}\nflags\t\t: fpu {flags} ht\n"
    )


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpuinfo_with_hyperthreads() -> None:
    flags = "avx2 avx512f avx512_bf16 amx_tile amx_bf16"
    places = [(0, 0), (0, 4), (1, 0), (1, 4)] * 2  # 2 sockets of 2 cores, 2 threads each
    text = "\n".join(
        cpu_block(cpu, socket=socket, core=core, flags=flags)
        for cpu, (socket, core) in enumerate(places)
    )
    info = parse_cpuinfo(text)
    assert info.model_name == "A CPU: 2 GHz"
    assert info.isa == ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    assert len(info.core_of) == 8
    assert len(set(info.core_of.values())) == 4


def test_cpuinfo_without_cores_or_flags() -> None:
    text = "processor\t: 0\nBogoMIPS\t: 50\n\nprocessor\t: 1\nBogoMIPS\t: 50\n\nHardware: board\n"
    info = parse_cpuinfo(text)
    assert info.isa == ()
    assert info.core_of == {0: (0, 0), 1: (0, 1)}
    assert parse_cpuinfo("").core_of == {}


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0\n", (0,)), ("0-3\n", (0, 1, 2, 3)), ("0-1,8,10-11", (0, 1, 8, 10, 11)), ("\n", ())],
)
def test_cpu_list(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


def test_numa_nodes(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    files = {f"{nodes}/node{i}/meminfo": f"Node {i} MemTotal:  1048576 kB\n" for i in (0, 2, 10)}
    files |= {f"{nodes}/node0/cpulist": "0-1\n", f"{nodes}/node2/cpulist": "2-3\n"}
    assert read_numa_nodes(write(tmp_path, files)) == (
        NumaNode(0, (0, 1), GIB),
        NumaNode(2, (2, 3), GIB),
        NumaNode(10, (), GIB),
    )
    assert read_numa_nodes(tmp_path / "nowhere") == ()


class TestCgroups:
    def test_none(self, tmp_path: Path) -> None:
        assert read_cpu_quota(tmp_path) is None
        assert read_memory_limit(tmp_path) is None

    def test_version_2_takes_the_tightest_ancestor(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup"
        root = write(
            tmp_path,
            {
                "proc/self/cgroup": "0::/pod/box\n",
                f"{group}/pod/cpu.max": "150000 100000\n",
                f"{group}/pod/box/cpu.max": "max 100000\n",
                f"{group}/pod/memory.max": f"{4 * GIB}\n",
                f"{group}/pod/memory.current": f"{3 * GIB}\n",
                f"{group}/pod/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
                f"{group}/pod/box/memory.max": "max\n",
                f"{group}/pod/box/memory.current": f"{GIB}\n",
            },
        )
        assert read_cpu_quota(root) == 1.5
        limit = read_memory_limit(root)
        assert limit is not None
        assert (limit.limit_bytes, limit.headroom_bytes) == (4 * GIB, 2 * GIB)

    def test_version_1(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup"
        root = write(
            tmp_path,
            {
                "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/\n",
                f"{group}/cpu/box/cpu.cfs_quota_us": "200000\n",
                f"{group}/cpu/box/cpu.cfs_period_us": "100000\n",
                f"{group}/cpu/cpu.cfs_quota_us": "-1\n",
                f"{group}/cpu/cpu.cfs_period_us": "100000\n",
                f"{group}/memory/memory.limit_in_bytes": f"{NO_LIMIT_V1}\n",
                f"{group}/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
                f"{group}/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
                f"{group}/memory/box/memory.usage_in_bytes": f"{3 * GIB}\n",
            },
        )
        assert read_cpu_quota(root) == 2.0
        limit = read_memory_limit(root)
        assert limit is not None
        assert (limit.limit_bytes, limit.headroom_bytes) == (2 * GIB, 0)

    def test_container_that_mounts_its_own_group_as_root(self, tmp_path: Path) -> None:
        root = write(
            tmp_path,
            {
                "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
                "sys/fs/cgroup/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": "0\n",
            },
        )
        assert read_cpu_quota(root) == 0.5
        limit = read_memory_limit(root)
        assert limit is not None and limit.headroom_bytes == GIB

    def test_usable_memory_is_within_the_limit(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4096\n"}
        assert usable_memory_bytes(write(tmp_path, files)) == 4096
        assert 0 < usable_memory_bytes(tmp_path / "nowhere") <= psutil.virtual_memory().total


def test_cores_respect_affinity_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(0, 0), (0, 1), (0, 2), (0, 3)] * 2
    text = "\n".join(
        cpu_block(cpu, socket=socket, core=core, flags="avx2")
        for cpu, (socket, core) in enumerate(places)
    )
    root = write(tmp_path, {"proc/cpuinfo": text})
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 4, 5})
    found = read_topology(root)
    assert (found.logical_cpus, found.physical_cores, found.hyperthreads) == (8, 4, 2)
    assert (found.allowed_cores, found.usable_cores) == (3, 3)

    for quota, cores in [("250000", 2), ("50000", 1), ("900000", 3)]:
        files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
        assert read_topology(write(root, files)).usable_cores == cores


def two_sockets(root: Path) -> Path:
    """Sockets of 2 and 4 cores, a NUMA node each; CPUs 6 to 11 are the second hyperthreads."""
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)] * 2
    text = "\n".join(
        cpu_block(cpu, socket=socket, core=core, flags="avx2")
        for cpu, (socket, core) in enumerate(places)
    )
    nodes = "sys/devices/system/node"
    files = {
        "proc/cpuinfo": text,
        f"{nodes}/node0/cpulist": "0-1,6-7\n",
        f"{nodes}/node1/cpulist": "2-5,8-11\n",
    }
    return write(root, files)


@pytest.mark.parametrize(
    ("allowed", "quota", "reserve", "cpus"),
    [
        (range(12), "max", 0, (2, 3, 4, 5, 0, 1)),
        (range(12), "max", 1, (2, 3, 4, 5, 0)),
        (range(12), "300000", 1, (2, 3)),
        (range(12), "50000", 0, (2,)),
        ((0, 1, 2, 6, 8), "max", 0, (0, 1, 2)),
        ((7, 8, 11), "max", 1, (8, 11)),
        ((4, 10), "max", 0, (4,)),
        ((4, 10), "max", 5, (4,)),
    ],
)
def test_compute_threads_get_a_core_each(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: tuple[int, ...],
    quota: str,
    reserve: int,
    cpus: tuple[int, ...],
) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(allowed))
    assert compute_cpus(reserve, write(two_sockets(tmp_path), files)) == cpus


@pytest.mark.parametrize(
    ("cpus", "pools"),
    [
        ((0, 1, 2, 3), (0, 0, 1, 1)),
        ((2, 3, 0), (0, 0, 1)),
        ((0, 1), None),
        ((2,), None),
        ((0, 2, 1), None),
        (None, None),
        ((), None),
    ],
)
def test_cpus_of_a_node_are_a_pool(
    tmp_path: Path, cpus: tuple[int, ...] | None, pools: tuple[int, ...] | None
) -> None:
    root = write(
        tmp_path,
        {f"sys/devices/system/node/node{n}/cpulist": text for n, text in enumerate(("0-1", "2-3"))},
    )
    assert numa_pools(cpus, root) == pools
    assert numa_pools(cpus, tmp_path / "nothing") is None


def test_compute_cpus_where_the_kernel_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5, 7})
    assert compute_cpus(0, tmp_path) == (3, 5, 7)
    assert compute_cpus(1, tmp_path) == (3, 5)


def test_the_real_host() -> None:
    found = read_topology()
    assert found.model_name
    assert 1 <= found.physical_cores <= found.logical_cpus
    assert 1 <= found.usable_cores <= len(found.allowed_cpus)
    assert 0 < found.available_memory <= found.total_memory


def test_needs_no_torch() -> None:
    code = "import sys, hetero_llm.utils.topology; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cores_are_split_whole_and_near_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_sockets(tmp_path)
    allowed = set(range(8))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: allowed, raising=False)
    parts = split_cpus(3, root)
    assert sorted(cpu for part in parts for cpu in part) == sorted(allowed)
    core_of = parse_cpuinfo((root / "proc/cpuinfo").read_text()).core_of
    cores = [{core_of[cpu] for cpu in part} for part in parts]
    assert not cores[0] & cores[1], "no core belongs to two parts"
    nodes = {cpu: node.index for node in read_numa_nodes(root) for cpu in node.cpus}
    assert [len({nodes[cpu] for cpu in part}) for part in parts] == [1, 1, 1]
    assert split_cpus(1, root) == (tuple(sorted(allowed)),)
    many = split_cpus(64, root)
    assert len(many) == 64 and set(many) == {tuple(sorted(allowed))}


def test_sockets(tmp_path: Path) -> None:
    blocks = [
        f"processor : {cpu}\nphysical id : {cpu // 2}\ncore id : {cpu % 2}" for cpu in range(4)
    ]
    assert read_sockets(write(tmp_path, {"proc/cpuinfo": "\n\n".join(blocks)})) == {
        0: 0, 1: 0, 2: 1, 3: 1,
    }  # fmt: skip
    assert read_sockets(tmp_path / "nowhere") == {}
