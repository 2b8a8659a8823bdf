"""Host memory that several ranks open together: as many blocks for all, or none for any."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hetero_llm.bridge.ipc.shared_memory import allocate_shared
from hetero_llm.bridge.kv_offload.pinned_pool import PoolError
from hetero_llm.bridge.kv_offload.transfer_reports import board_bytes
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.distributed.rank_share import RankShare
from hetero_llm.engine.builders import build_host_tier
from hetero_llm.engine.builders.build_host_tier import (
    HostPlatform,
    HostShare,
    HostTierMemory,
    host_platform,
    open_host_memory,
)
from hetero_llm.engine.resolve import limit_steps
from hetero_llm.models.collectives import Rank
from hetero_llm.runner.kv_cache import KVCacheShape
from tests.helpers.offload_traffic import share_for
from tests.helpers.polled_gates import PolledGates

SHAPE = KVCacheShape(2, 2, 16, 16, torch.float32)
ANY = 1 << 62


class Agreement:
    """Plays the other ranks: what they say, and what this one says."""

    size = 2

    def __init__(self, of_rank_0: int, others_have_it: bool) -> None:
        self._answers = [of_rank_0 or ANY, int(others_have_it)]
        self.said: list[int] = []

    def least(self, value: int) -> int:
        self.said.append(value)
        return min(value, self._answers[len(self.said) - 1])

    def of_first(self, values: Sequence[int]) -> list[int]:
        raise AssertionError("stages agree, too")


class Pool:
    """Host memory that is there at once."""

    failure = ""

    def __init__(self, row_bytes: int, num_rows: int, **_: Any) -> None:
        self.row_bytes, self.num_rows = row_bytes, num_rows
        self.ready_rows = num_rows
        self.open = True

    def close(self) -> None:
        self.open = False


@pytest.fixture
def board() -> Iterator[int]:
    fd = allocate_shared(board_bytes(2))
    yield fd
    os.close(fd)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    made: list[Pool] = []

    def make(*args: Any, **kwargs: Any) -> Pool:
        made.append(Pool(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(build_host_tier, "PinnedPool", make)
    return made


def config_of(share: float) -> EngineConfig:
    given = {
        "model": "m", "enable_prefix_cache_offload": True, "cpu_prefill_memory_utilization": share,
        "tensor_parallel_size": 2,
    }  # fmt: skip
    return EngineConfig.from_args(resolve_engine_args(given))


def open_one(rank: int, board: int, agreement: Agreement, num_bytes: int) -> HostTierMemory | None:
    class Collectives:
        pass

    collectives: Any = Collectives()
    collectives.rank = Rank(rank, 2)
    config = config_of(share_for(num_bytes))
    platform = HostPlatform("none", lambda: 0, PolledGates)
    return open_host_memory(
        config.offload, platform, SHAPE, limit_steps(config, 64, "cpu", serving=False),
        own=HostShare(RankShare(collectives, agreement), rank, board=board, bytes_of_all=2.0),
    )  # fmt: skip


def test_the_share_of_memory_is_that_of_all_ranks(board: int, pools: list[Pool]) -> None:
    """100 blocks of one process are 100 blocks of two ranks, each of which has half of them: here
    every rank's part is as large as such a block, so 50 fit."""
    agreement = Agreement(0, True)
    first = open_one(0, board, agreement, 100 * SHAPE.block_bytes)
    assert first is not None and agreement.said == [50, 1]
    other = Agreement(50, True)
    second = open_one(1, board, other, 100 * SHAPE.block_bytes)
    assert second is not None and other.said == [ANY, 1]
    for memory, pool in zip((first, second), pools, strict=True):
        assert (pool.num_rows, pool.row_bytes) == (50, SHAPE.block_bytes)
        assert memory.board is not None and memory.board.ranks == 2
        assert "divided between 2 ranks" in memory.words()
        memory.board.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_another_rank_has_not(
    board: int, pools: list[Pool], caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    open_board = open_one(0, board, Agreement(0, True), 100 * SHAPE.block_bytes)
    assert open_board is not None
    with caplog.at_level(logging.WARNING):
        assert open_one(rank, board, Agreement(50, False), 100 * SHAPE.block_bytes) is None
    assert "serving without prefix cache offload: another rank has no memory" in caplog.text
    assert not pools[-1].open


def test_memory_that_this_rank_has_not(
    board: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Pool:
        raise PoolError("no memory for the pool")

    monkeypatch.setattr(build_host_tier, "PinnedPool", refuse)
    agreement = Agreement(0, True)
    assert open_one(0, board, agreement, 100 * SHAPE.block_bytes) is None
    assert agreement.said == [50, 0], "the others hear of it"
    assert "serving without prefix cache offload: no memory for the pool" in caplog.text


def test_too_little_memory_is_the_mistake_of_the_user(board: int, pools: list[Pool]) -> None:
    with pytest.raises(ConfigError, match=r"^cpu_prefill_memory_utilization=.*4 are needed"):
        open_one(0, board, Agreement(0, True), 6 * SHAPE.block_bytes)


def test_one_rank_agrees_with_itself(pools: list[Pool]) -> None:
    config = config_of(share_for(100 * SHAPE.block_bytes))
    platform = HostPlatform("none", lambda: 0, PolledGates)
    limits = limit_steps(config, 64, "cpu", serving=False)
    made = open_host_memory(config.offload, platform, SHAPE, limits)
    assert made is not None and made.board is None and pools[0].num_rows == 100
    assert HostShare().rank == 0
    assert open_host_memory(None, platform, SHAPE, limits) is None
    assert open_host_memory(config.offload, None, SHAPE, limits) is None


def test_a_cpu_has_no_host_tier(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(0.1)
    for rank in (0, 1):
        assert host_platform(config, torch.device("cpu"), rank) is None
    assert caplog.text.count("enable_prefix_cache_offload has no effect on a CPU") == 1
