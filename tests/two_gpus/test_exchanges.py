"""Collectives of two GPUs, one process each: sums, norms and columns against plain torch, with
ranks that are late at random, in graphs, and after the death of a peer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.two_gpus import exchanges, ranks

LIMIT = 150.0  # seconds; processes take 10 to 20 to start


def show(started: ranks.Started) -> None:
    print(started.text())


@pytest.mark.parametrize("maker", ["symmetric", "handles"])
def test_each_maker_maps_memory(tmp_path: Path, maker: str) -> None:
    started = ranks.start(exchanges.map_and_sum, tmp_path, maker)
    started.finish(60.0)


def test_random_collectives(tmp_path: Path) -> None:
    started = ranks.start(exchanges.fuzz, tmp_path, "3000")
    started.finish(LIMIT)
    show(started)


def test_replays(tmp_path: Path) -> None:
    started = ranks.start(exchanges.replay, tmp_path, "100000")
    started.finish(LIMIT)
    show(started)


def test_the_survivor_gives_up(tmp_path: Path) -> None:
    started = ranks.start(exchanges.lose_a_peer, tmp_path, str(tmp_path))
    survivor, killed = started.processes
    try:
        limit = time.monotonic() + 60.0
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < limit:
            assert survivor.poll() is None and killed.poll() is None, started.text()
            time.sleep(0.05)
        time.sleep(0.5)  # in the middle of replays
        killed.kill()
        began = time.monotonic()
        survivor.wait(10 * exchanges.PATIENCE)
        print(f"the survivor ended {time.monotonic() - began:.2f} s after the death of its peer")
        show(started)
        assert survivor.returncode == 0, started.text()
        assert (tmp_path / "ended0").exists()
    finally:
        started.kill()
