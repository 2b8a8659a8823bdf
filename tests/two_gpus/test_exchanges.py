"""Collectives of two GPUs, one process each: sums, norms and columns against plain torch, with
ranks that are late at random, in graphs, and after the death of a peer. Two processes run them all;
the last test kills one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.two_gpus import exchanges, ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ranks.Pair]:
    pair = ranks.Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.started.kill()


@pytest.mark.parametrize("maker", ["symmetric", "handles"])
def test_each_maker_maps_memory(pair: ranks.Pair, maker: str) -> None:
    pair.run(exchanges.map_and_sum, maker)


def test_random_collectives(pair: ranks.Pair) -> None:
    pair.run(exchanges.fuzz, "3000")


def test_rows_of_all_sizes(pair: ranks.Pair) -> None:
    pair.run(exchanges.gather_many_rows, "200")


def test_replays(pair: ranks.Pair) -> None:
    pair.run(exchanges.replay, "100000")


@pytest.mark.skipif(torch.cuda.device_count() < ranks.SIZE, reason="NCCL: one rank a GPU")
def test_exchanges_through_nccl(pair: ranks.Pair) -> None:
    pair.run(exchanges.through_nccl)


def test_the_survivor_gives_up(pair: ranks.Pair, tmp_path: Path) -> None:
    pair.send(exchanges.lose_a_peer, str(tmp_path))
    started = pair.started
    survivor, killed = started.processes
    limit = time.monotonic() + 60.0
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < limit:
        assert started.live, started.text()
        time.sleep(0.05)
    time.sleep(0.5)  # in the middle of replays
    killed.kill()
    began = time.monotonic()
    survivor.wait(10 * exchanges.PATIENCE)
    print(f"the survivor ended {time.monotonic() - began:.2f} s after the death of its peer")
    print(started.text())
    assert survivor.returncode == 0, started.text()
    assert (tmp_path / "ended0").exists()
