"""Transfers of three ranks, whose streams move at random and by themselves."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload.copier_protocol import Done
from hetero_llm.bridge.kv_offload.rank_copies import NoRankCopies, RankCopies, RanksCopier
from hetero_llm.bridge.kv_offload.transfer_reports import STEP
from hetero_llm.core.errors import EngineDeadError, RankDeadError
from hetero_llm.core.transfer_order import TransferOrder
from tests.bridge.kv_offload.model_copier import ModelCopier

RANKS, LAYERS, BLOCKS, HOST_BLOCKS = 3, 3, 12, 16


class Reporting(ModelCopier):
    """Reports each end when it comes, as a copy thread does."""

    def report_step(self, ok: bool) -> None:
        self.reported.append(Done(STEP, ok, 0.0))

    def take_reports(self) -> list[Done]:
        self.reported += self.poll()
        found, self.reported = self.reported, []
        return found


class World:
    """Rank 0's copier, the others, the orders between them and the board, in one process."""

    def __init__(self, seed: int, *, places: int = 64, patience_s: float = 60.0) -> None:
        rng = np.random.default_rng(seed)
        self.rng = random.Random(seed)
        self.models: list[Any] = []
        for _ in range(RANKS):
            device, host = (
                rng.integers(0, 256, (rows, LAYERS, 8), np.uint8) for rows in (BLOCKS, HOST_BLOCKS)
            )
            model = Reporting(device, host, HOST_BLOCKS, self.rng, places=places)
            self.models.append(model)
            model.reported = []
        self.rows = [0] * RANKS
        self.others = [
            RankCopies(model, lambda rows, rank=rank: self.rows.__setitem__(rank, rows))
            for rank, model in enumerate(self.models[1:], 1)
        ]
        self.failure: Exception | None = None
        self.broken = False
        self.waits = 0
        self.copier = RanksCopier(
            self.models[0], self, self,
            most_loads=places, patience_s=patience_s, bytes_of_all=RANKS,
        )  # fmt: skip

    # the other ranks
    def load_blocks(self, order: TransferOrder) -> None:
        self.check()
        for other in self.others:
            other.load(order)

    def store_blocks(self, order: TransferOrder) -> None:
        self.check()
        for other in self.others:
            other.store(order)

    def abort_load(self, transfer_id: int) -> None:
        for other in self.others:
            other.abort(transfer_id)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    # the board
    ranks = RANKS

    def take(self, rank: int) -> list[Done]:
        return self.models[rank].take_reports()

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.move(self.rng.randrange(RANKS))

    def ready_rows(self) -> int:
        return min(self.rows[1:])

    def is_broken(self) -> bool:
        return self.broken

    # the test
    def step(self, number: int) -> None:
        self.copier.step_launched(number)
        for other in self.others:
            other.step_launched()

    def move(self, rank: int) -> None:
        self.models[rank].advance(self.rng.random() < 0.5)

    def drain(self) -> list[Done]:
        found = []
        for _ in range(2000):
            self.move(self.rng.randrange(RANKS))
            found += self.copier.poll()
        return found


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("seed", range(20))
def test_a_transfer_ends_when_it_has_ended_on_all_ranks(seed: int) -> None:
    world = World(seed)
    rng = world.rng
    free, free_host = list(range(BLOCKS)), list(range(HOST_BLOCKS))
    under_way: dict[int, tuple[list[int], list[int]]] = {}
    fails: set[int] = set()
    ended: dict[int, bool] = {}
    for number in range(1, 25):
        count = rng.randint(1, 3)
        if len(free) >= count and len(free_host) >= count:
            mine, host = ([pool.pop() for _ in range(count)] for pool in (free, free_host))
            under_way[number] = mine, host
            if rng.random() < 0.5:
                world.copier.load(TransferOrder(number, blocks(*host), blocks(*mine), 0))
                if rng.random() < 0.3:
                    world.copier.abort(number)
                    fails.add(number)
            else:
                world.copier.store(TransferOrder(number, blocks(*host), blocks(*mine), 0))
            if rng.random() < 0.2:
                world.models[rng.randrange(RANKS)].fail(number, 0)
                fails.add(number)
        for _ in range(rng.randint(0, 30)):
            world.move(rng.randrange(RANKS))
        for done in [*world.copier.poll(), *(world.drain() if number == 24 else ())]:
            mine, host = under_way.pop(done.transfer_id)
            free, free_host = mine + free, host + free_host
            ended[done.transfer_id] = done.ok
            for model in world.models:
                assert model.layer_ready_flag(done.transfer_id) is None
                assert done.transfer_id not in [
                    *model.open_transfers(True), *model.open_transfers(False)
                ]  # fmt: skip
                if done.ok:
                    for block, row in zip(mine, host, strict=True):
                        np.testing.assert_array_equal(model.device[block], model.host[row])
    assert not under_way and {number for number, ok in ended.items() if not ok} == fails
    assert world.copier.poll() == []


def test_a_load_waits_for_the_step_of_each_rank() -> None:
    world = World(0)
    world.step(1)
    world.copier.load(TransferOrder(1, blocks(0), blocks(0), 1))
    world.models[0].finish_step()
    world.models[1].finish_step()
    assert world.drain() == []
    assert world.copier.seconds_left([1]) == 0.0, "rank 0 has its part"
    world.models[2].finish_step()
    assert [done.transfer_id for done in world.drain()] == [1]


def test_transfers_wait_for_moves_of_kv_before_them() -> None:
    """Which a rank makes on its stream behind a step, be the transfer ordered after an older
    one."""
    world = World(0)
    for number in (1, 2):
        world.step(number)
    for model in world.models:
        model.finish_step()
    world.others[0].kv_moved()
    world.copier.store(TransferOrder(1, blocks(0), blocks(0), 1))
    for model in (world.models[0], *world.models[2:], world.models[1]):
        assert world.drain() == []
        model.finish_step()
    assert world.drain() == [], "rank 1 has a move behind its second step"
    world.models[1].finish_step()
    assert [done.transfer_id for done in world.drain()] == [1]


def test_flags_of_all_ranks_are_free_for_the_next_load() -> None:
    """Rank 0 has none to give as long as any rank still loads."""
    world = World(1, places=2)
    for number in (1, 2):
        assert world.copier.can_load()
        world.copier.load(TransferOrder(number, blocks(number), blocks(number), 0))
    assert not world.copier.can_load()
    while world.models[0].advance(True):
        pass
    world.copier.poll()
    assert world.models[0].can_load() and not world.copier.can_load()
    assert len(world.drain()) == 2 and world.copier.can_load()
    world.copier.load(TransferOrder(3, blocks(3), blocks(3), 0))


def test_host_memory_grows_as_on_the_slowest_rank() -> None:
    world = World(2)
    assert world.copier.num_host_blocks == HOST_BLOCKS
    world.models[1].num_host_blocks = 5
    assert world.copier.num_host_blocks == HOST_BLOCKS, "not yet seen"
    world.others[0].observe()
    assert world.copier.num_host_blocks == 5
    world.models[0].num_host_blocks = 3
    assert world.copier.num_host_blocks == 3


def test_a_dead_rank_ends_a_wait() -> None:
    world = World(3)
    world.copier.load(TransferOrder(1, blocks(0), blocks(0), 0))
    world.failure = RankDeadError("rank 1 was ended by signal 9")
    for call in (
        lambda: world.copier.wait(1.0),
        lambda: world.copier.store(TransferOrder(2, blocks(1), blocks(1), 0)),
        world.copier.gave_up,
    ):
        with pytest.raises(RankDeadError):
            call()
    assert world.waits == 0


def test_steps_that_another_rank_has_given_up() -> None:
    world = World(4, patience_s=0.0)
    said = ((False, False), (False, True), (True, False), (False, False))
    for step in said:
        for other, timed_out in zip(world.others, step, strict=True):
            other.step_finished(timed_out=timed_out)
    assert [world.copier.gave_up() for _ in said] == [any(step) for step in said]
    world.others[0].step_finished(timed_out=False)
    with pytest.raises(EngineDeadError, match="did not finish a step within 0 s of rank 0"):
        world.copier.gave_up()
    world.others[1].step_finished(timed_out=False)
    assert not world.copier.gave_up()


def test_the_end() -> None:
    """What is under way in other ranks cannot be waited for."""
    world = World(5)
    world.copier.load(TransferOrder(1, blocks(0), blocks(0), 0))
    world.broken = True
    assert world.copier.metrics()["kv_offload_broken"] == 1.0
    world.copier.close()
    world.copier.close()
    assert [(done.transfer_id, done.ok) for done in world.copier.poll()] == [(1, False)]
    assert world.copier.poll() == [] and world.copier.num_host_blocks == 0
    world.copier.wait(3600.0)
    for other, model in zip(world.others, world.models[1:], strict=True):
        other.close()
        assert model.closed


def test_ranks_that_count_steps_differently() -> None:
    world = World(6)
    with pytest.raises(AssertionError, match="count steps differently"):
        world.others[0].load(TransferOrder(1, blocks(0), blocks(0), 2))


def test_a_rank_without_copies() -> None:
    none = NoRankCopies()
    none.observe()
    none.step_launched()
    none.close()
    for call in (
        lambda: none.load(TransferOrder(1, blocks(0), blocks(0), 0)),
        lambda: none.store(TransferOrder(1, blocks(0), blocks(0), 0)),
        lambda: none.abort(1),
        lambda: none.step_finished(timed_out=False),
    ):
        with pytest.raises(AssertionError, match="nothing is offloaded"):
            call()
