"""Which maker gives the ranks memory, what all of them hear of a failure, and how it is given back:
ranks are threads, memory is on the host. `tests/two_gpus` maps memory of devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from hetero_llm.gpu.peer_memory import (
    MAKERS,
    PeerMemory,
    PeersUnreachable,
    close_peer_memory,
    make_peer_memory,
)

T = TypeVar("T")
SIZE = 3
CPU = torch.device("cpu")


class Host:
    """What the ranks share."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=60)
        self.values: list[Any] = [None] * SIZE
        self.memories = [torch.zeros(4 << 20, dtype=torch.int16) for _ in range(SIZE)]
        self.events: list[str] = []


class ThreadExchange:
    size = SIZE

    def __init__(self, host: Host, rank: int) -> None:
        self.host, self.rank = host, rank

    def gather(self, value: Any) -> list[Any]:
        self.host.values[self.rank] = value
        self.host.barrier.wait()
        values = list(self.host.values)
        self.host.barrier.wait()
        return values


class HostMemory:
    """`PeerMemory`; `order`: whose memory it takes for that of each rank."""

    def __init__(
        self, num_bytes: int, exchange: ThreadExchange, order: tuple[int, ...] = (0, 1, 2)
    ) -> None:
        self.host, self.rank = exchange.host, exchange.rank
        found = [self.host.memories[rank][: num_bytes // 2] for rank in order]
        self.tensors: tuple[Tensor, ...] = tuple(found)

    def unmap(self) -> None:
        self.tensors = ()
        self.host.events.append("unmap")

    def free(self) -> None:
        self.host.events.append("free")


def shared(num_bytes: int, _: torch.device, exchange: Any) -> PeerMemory:
    return HostMemory(num_bytes, exchange)


def crossed(num_bytes: int, _: torch.device, exchange: Any) -> PeerMemory:
    """Rank 1 maps the wrong peers."""
    return HostMemory(num_bytes, exchange, (2, 1, 0) if exchange.rank == 1 else (0, 1, 2))


def broken(num_bytes: int, _: torch.device, exchange: Any) -> PeerMemory:
    if exchange.rank == 2:
        raise OSError("no room\nat all")
    return HostMemory(num_bytes, exchange)


def run(act: Callable[[ThreadExchange], T]) -> tuple[Host, list[T]]:
    host = Host()
    with ThreadPoolExecutor(SIZE) as pool:
        return host, list(pool.map(act, [ThreadExchange(host, rank) for rank in range(SIZE)]))


def test_memory_is_filled_and_seen_by_all() -> None:
    def act(exchange: ThreadExchange) -> None:
        memory = make_peer_memory(100, CPU, exchange, fill=-1, makers=[("shared", shared)])
        assert len(memory.tensors) == SIZE and memory.tensors[0].dtype == torch.int16
        assert all(bool((tensor == -1).all()) for tensor in memory.tensors)
        assert 2 * len(memory.tensors[0]) >= 100
        exchange.gather(None)
        memory.tensors[(exchange.rank + 1) % SIZE][3] = exchange.rank
        exchange.gather(None)
        assert memory.tensors[exchange.rank][3] == (exchange.rank - 1) % SIZE

    run(act)


@pytest.mark.parametrize(
    ("maker", "reason"),
    [
        (broken, "rank 2: OSError: no room"),
        (crossed, "rank 0: peers wrote [0, 3, 6, 0, 3, 6], here is"),
    ],
)
def test_the_next_maker_is_tried_on_all_ranks(
    maker: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def act(exchange: ThreadExchange) -> PeerMemory:
        return make_peer_memory(
            64, CPU, exchange, fill=7, makers=[("first", maker), ("second", shared)]
        )

    with caplog.at_level(logging.WARNING):
        host, made = run(act)
    assert len(caplog.records) == 1
    assert f"not mapped by first: {reason}" in caplog.text
    assert all(bool((memory.tensors[rank] == 7).all()) for rank, memory in enumerate(made))
    dropped = 2 if maker is broken else 3
    assert host.events == ["unmap"] * dropped + ["free"] * dropped


def test_without_a_maker_all_ranks_hear_why() -> None:
    def act(exchange: ThreadExchange) -> str:
        with pytest.raises(PeersUnreachable) as raised:
            make_peer_memory(64, CPU, exchange, makers=[("a", broken), ("b", broken)])
        return str(raised.value)

    _, texts = run(act)
    reason = "rank 2: OSError: no room"
    assert texts == [f"GPUs cannot reach each other's memory: a: {reason}; b: {reason}"] * SIZE


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/two_gpus tests them")
def test_the_makers_of_devices_say_why_they_do_not_work_here() -> None:
    def act(exchange: ThreadExchange) -> str:
        with pytest.raises(PeersUnreachable) as raised:
            make_peer_memory(64, CPU, exchange)
        return raised.value.reason

    _, reasons = run(act)
    assert len(set(reasons)) == 1
    assert all(f"{name}: rank 0: " in reasons[0] for name, _ in MAKERS)


def test_memory_is_freed_once_no_rank_maps_it() -> None:
    def act(exchange: ThreadExchange) -> None:
        memory = make_peer_memory(64, CPU, exchange, makers=[("shared", shared)])
        close_peer_memory(memory, exchange)

    host, _ = run(act)
    assert host.events == ["unmap"] * SIZE + ["free"] * SIZE


def test_a_dead_rank_is_not_waited_for() -> None:
    host = Host()

    class Left(ThreadExchange):
        def gather(self, value: Any) -> list[Any]:
            raise RuntimeError("Connection closed by peer")

    memory = HostMemory(64, Left(host, 0))
    close_peer_memory(memory, Left(host, 0))
    assert host.events == ["unmap", "free"]
