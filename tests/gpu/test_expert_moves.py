"""Promotions: no slot is written while a step that was launched may read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import ExpertMoves, NoPlacement, Promotion
from hetero_llm.gpu.kernels.expert_requests import ON_HOST
from tests.helpers.hybrid import EveryStep, round_robin

LAYERS, EXPERTS, SLOTS = 3, 4, 5


@dataclass
class FakeHost:
    num_layers: int = LAYERS
    num_experts: int = EXPERTS
    expert_bytes: int = 100


@dataclass
class FakeBank:
    """Remembers which expert each slot has."""

    table: torch.Tensor
    host: FakeHost = field(default_factory=FakeHost)
    held: dict[int, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def fill(self, slot: int, layer: int, expert: int) -> None:
        self.held[slot] = layer * EXPERTS + expert


class HeldCopies:
    """Copies that end when the test says so; a slot holds nothing meanwhile."""

    def __init__(self, bank: FakeBank) -> None:
        self.bank = bank
        self.begun: list[tuple[int, Callable[[], None], list[bool]]] = []

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        self.bank.held.pop(slot, None)
        done = [False]
        self.begun.append((slot, copy, done))
        return lambda: done[0]

    def end_one(self) -> None:
        for _, copy, done in self.begun:
            if not done[0]:
                copy()
                done[0] = True
                return


@dataclass
class Rig:
    bank: FakeBank
    copies: HeldCopies
    moves: ExpertMoves
    seconds: list[float]

    @classmethod
    def of(cls, device: torch.device, placement: object, rate: float = 1e9) -> Rig:
        table = torch.full((LAYERS, EXPERTS), ON_HOST, dtype=torch.int32)
        owners = round_robin(SLOTS, LAYERS, EXPERTS)
        for slot, owner in enumerate(owners.tolist()):
            table.view(-1)[owner] = slot
        bank = FakeBank(table.to(device), held=dict(enumerate(owners.tolist())))
        copies, seconds = HeldCopies(bank), [0.0]
        moves = ExpertMoves(
            cast(ExpertBank, bank), owners, placement, copies,  # type: ignore[arg-type]
            bytes_per_second=rate, clock=lambda: seconds[0],
        )  # fmt: skip
        return cls(bank, copies, moves, seconds)

    def check(self, table: np.ndarray) -> None:
        """What a step with this table reads is what it ought to be."""
        for place in np.flatnonzero(table.ravel() >= 0).tolist():
            assert self.bank.held.get(int(table.ravel()[place])) == place


@pytest.mark.parametrize("seed", range(6))
def test_steps_never_read_a_slot_that_is_written(seed: int, device: torch.device) -> None:
    """Up to three steps under way, each with the table of its launch; copies end at any time."""
    rng = np.random.default_rng(seed)
    placement = EveryStep(round_robin(SLOTS, LAYERS, EXPERTS), (LAYERS, EXPERTS), seed)
    rig = Rig.of(device, placement)
    under_way: list[np.ndarray] = []
    for _ in range(120):
        what = rng.integers(0, 3)
        if what == 0 and len(under_way) < 3:
            rig.seconds[0] += 1.0
            rig.moves.before_launch(link_is_busy=bool(rng.integers(0, 4) == 0))
            table = rig.bank.table.cpu().numpy().copy()
            assert (table == rig.moves.table).all()
            under_way.append(table)
            rig.moves.check_integrity()
        elif what == 1 and under_way:
            under_way.pop(0)
            rig.moves.finished()
        else:
            rig.copies.end_one()
        for table in under_way:
            rig.check(table)
    assert rig.moves.num_promoted >= 3


class Once:
    """Wants one promotion, as soon as it may."""

    def __init__(self, *wanted: Promotion) -> None:
        self.wanted = list(wanted)
        self.budgets: list[int] = []

    def observe(self, counts: np.ndarray) -> None:
        raise AssertionError

    def promotions(self, budget: int) -> list[Promotion]:
        self.budgets.append(budget)
        found, self.wanted = self.wanted[:budget], self.wanted[budget:]
        return found


def test_the_four_moments_of_a_promotion(device: torch.device) -> None:
    rig = Rig.of(device, Once((2, 3, 0)))
    assert rig.bank.table[0, 0] == 0
    rig.moves.before_launch(link_is_busy=False)  # step 0 has this table
    assert rig.bank.table[0, 0] == 0 and rig.moves.num_moving == 0  # no time has passed
    rig.seconds[0] = 1.0
    rig.moves.before_launch(link_is_busy=False)  # step 1 does not read the slot any more
    assert rig.bank.table[0, 0] == ON_HOST and rig.bank.table[2, 3] == ON_HOST
    rig.moves.before_launch(link_is_busy=False)
    assert not rig.copies.begun  # step 0 may still read it
    rig.moves.finished()
    assert not rig.copies.begun  # copies begin at launches
    rig.moves.before_launch(link_is_busy=True)
    assert not rig.copies.begun  # loads go first
    rig.moves.before_launch(link_is_busy=False)
    assert [slot for slot, _, _ in rig.copies.begun] == [0]
    rig.moves.before_launch(link_is_busy=False)
    assert rig.bank.table[2, 3] == ON_HOST and rig.moves.num_promoted == 0
    rig.copies.end_one()
    assert rig.bank.table[2, 3] == ON_HOST
    rig.moves.before_launch(link_is_busy=False)
    assert rig.bank.table[2, 3] == 0 and rig.moves.num_promoted == 1 and not rig.moves.num_moving


def test_promotions_keep_to_their_rate(device: torch.device) -> None:
    """An expert has 100 bytes: a thousand bytes a second are ten of them, and a quarter of a second
    of them at most at once."""
    placement = Once()
    rig = Rig.of(device, placement, rate=1000.0)
    for second in (0.0, 0.05, 0.1, 0.15, 0.19, 0.2, 50.0):
        rig.seconds[0] = second
        rig.moves.before_launch(link_is_busy=False)
    assert placement.budgets == [1, 1, 1, 2, 2]


def test_without_a_placement_nothing_moves(device: torch.device) -> None:
    rig = Rig.of(device, NoPlacement())
    before = rig.bank.table.clone()
    for second in range(4):
        rig.seconds[0] = float(second)
        rig.moves.observe(np.ones((LAYERS, EXPERTS)))
        rig.moves.before_launch(link_is_busy=False)
    assert torch.equal(rig.bank.table, before) and not rig.moves.num_moving
