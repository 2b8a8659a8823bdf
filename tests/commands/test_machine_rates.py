"""Rates of the machine, and set-ups of memory that are warned of."""

from __future__ import annotations

import pytest

from hetero_llm.commands.machine_rates import GivenRates, measure_rates, memory_warnings, read_rate


def test_threads_read_memory() -> None:
    assert read_rate(2, seconds=0.0, num_bytes=1 << 20) > 0


def test_what_is_given_is_not_measured() -> None:
    rates = measure_rates(
        GivenRates(gpu=3e12, link=50e9, dram=100e9, gpu_bytes=80 << 30, host_bytes=7)
    )
    assert (rates.gpu, rates.link, rates.dram) == (3e12, 50e9, 100e9)
    assert (rates.gpu_bytes, rates.host_bytes) == (80 << 30, 7)
    assert set(rates.sources.values()) == {"as given"} and len(rates.sources) == 5


def test_no_gpu_is_given() -> None:
    rates = measure_rates(GivenRates(dram=1e9, gpu_bytes=0))
    assert (rates.gpu, rates.link, rates.gpu_bytes) == (0.0, 0.0, 0)
    assert rates.host_bytes > 0 and rates.sources["host_bytes"] == "available now"


ONE = dict.fromkeys(range(4), 0)


@pytest.mark.parametrize(
    ("cpus", "sockets", "nodes", "gpu_node", "words"),
    [
        ((0, 1), ONE, ONE, 0, []),
        ((0, 1), ONE, {}, None, []),
        ((0, 1), ONE, {0: 0, 1: 0, 2: 1, 3: 1}, 0, ["2 NUMA nodes (SNC"]),
        ((0, 1, 2, 3), {0: 0, 1: 0, 2: 1, 3: 1}, {0: 0, 1: 0, 2: 1, 3: 1}, 0, ["on 2 sockets"]),
        ((0, 1), {0: 0, 1: 0, 2: 1, 3: 1}, {0: 0, 1: 0, 2: 1, 3: 1}, 1, ["GPU is at NUMA node 1"]),
        ((0, 2), {0: 0, 1: 0, 2: 1, 3: 1}, {0: 0, 1: 1, 2: 2, 3: 3}, 1,
         ["2 NUMA nodes (SNC", "on 2 sockets", "GPU is at NUMA node 1"]),
    ],
)  # fmt: skip
def test_warnings(
    cpus: tuple[int, ...],
    sockets: dict[int, int],
    nodes: dict[int, int],
    gpu_node: int | None,
    words: list[str],
) -> None:
    found = memory_warnings(cpus, sockets, nodes, gpu_node)
    assert len(found) == len(words)
    assert all(word in warning for word, warning in zip(words, found, strict=True))
