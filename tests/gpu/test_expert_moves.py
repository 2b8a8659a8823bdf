"""Promotions: no slot is written while a step that was launched may read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

from hetero_llm.bridge.host_places import HostPlaces
from hetero_llm.core.promotion import Promotion
from hetero_llm.expert_offload.placement import ExpertPlacement, PromotionBudget
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import (
    ExpertMoves,
    FixedPlacement,
    OrderedPlacement,
    Placement,
)
from hetero_llm.gpu.kernels.expert_requests import ON_HOST
from tests.helpers.hybrid import EveryStep, round_robin

LAYERS, EXPERTS, SLOTS = 3, 4, 5


@dataclass
class FakeHost:
    num_layers: int = LAYERS
    num_experts: int = EXPERTS
    expert_bytes: int = 100
    places: HostPlaces | None = None


@dataclass
class FakeBank:
    """Remembers which expert each slot has, and each place of host memory."""

    table: torch.Tensor
    host: FakeHost = field(default_factory=FakeHost)
    held: dict[int, int] = field(default_factory=dict)
    on_host: dict[int, int] = field(default_factory=dict)
    places: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        return SLOTS

    @property
    def device(self) -> torch.device:
        return self.table.device

    def fill(self, slot: int, layer: int, expert: int) -> None:
        if self.host.places is None:
            self.held[slot] = layer * EXPERTS + expert
        else:
            self.held[slot] = self.on_host[int(self.host.places.table[layer, expert])]

    def save(self, slot: int, place: int) -> None:
        self.on_host[place] = self.held[slot]


class HeldCopies:
    """Copies that end when the test says so; a slot, or a place, holds nothing meanwhile."""

    def __init__(self, bank: FakeBank) -> None:
        self.bank = bank
        self.begun: list[tuple[int, Callable[[], None], list[bool]]] = []

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        self.bank.held.pop(slot, None)
        done = [False]
        self.begun.append((slot, copy, done))
        return lambda: done[0]

    def save(self, place: int, copy: Callable[[], None]) -> Callable[[], bool]:
        self.bank.on_host.pop(place, None)
        done = [False]
        self.begun.append((place, copy, done))
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

    @classmethod
    def of(cls, device: torch.device, placement: Placement, *, spares: int | None = None) -> Rig:
        """`spares`: free places of host memory that holds the others; None: it holds all."""
        table = torch.from_numpy(placement.table.copy())
        held = {
            int(table[layer, expert]): layer * EXPERTS + expert
            for layer, expert in np.argwhere(placement.table >= 0).tolist()
        }
        bank = FakeBank(table.to(device), held=held)
        if spares is not None:
            count = LAYERS * EXPERTS - len(held) + spares
            bank.host.places = places = HostPlaces(LAYERS, EXPERTS, count)
            places.fill(placement.table)
            bank.places = torch.from_numpy(places.table.copy()).to(device)
            bank.on_host = {int(p): i for i, p in enumerate(places.table.ravel()) if p >= 0}
        copies = HeldCopies(bank)
        moves = ExpertMoves(cast(ExpertBank, bank), placement, copies, most_changes=2)
        return cls(bank, copies, moves)

    def launch(self, *, busy: bool = False) -> np.ndarray:
        """The table that the step finds."""
        self.moves.before_launch(link_is_busy=busy, chooses=True)
        return self.bank.table.cpu().numpy().copy()

    def shown_places(self) -> np.ndarray | None:
        """Those that a step which is launched now finds on the device."""
        return None if self.bank.places is None else self.bank.places.cpu().numpy().copy()

    def check(self, table: np.ndarray, shown: np.ndarray | None) -> None:
        """What a step with this table, and these places, reads is what it ought to be."""
        for place in np.flatnonzero(table.ravel() >= 0).tolist():
            assert self.bank.held.get(int(table.ravel()[place])) == place
        places = self.bank.host.places
        if places is None:
            return
        places.check_integrity()
        for expert in np.flatnonzero(table.ravel() < 0).tolist():
            assert self.bank.on_host.get(int(places.table.ravel()[expert])) == expert
            assert shown is not None and self.bank.on_host.get(int(shown.ravel()[expert])) == expert


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spares", [None, 1, 3])
def test_steps_never_read_what_is_written(
    seed: int, spares: int | None, device: torch.device
) -> None:
    """Up to three steps under way, each with the table of its launch; copies end at any time. With
    `spares`, each expert is whole in one of two places in every moment."""
    rng = np.random.default_rng(seed)
    stay = spares is not None
    placement = EveryStep(round_robin(SLOTS, LAYERS, EXPERTS), seed, owners_stay=stay)
    rig = Rig.of(device, placement, spares=spares)
    under_way: list[tuple[np.ndarray, np.ndarray | None]] = []
    for _ in range(120):
        what = rng.integers(0, 3)
        if what == 0 and len(under_way) < 3:
            table = rig.launch(busy=bool(rng.integers(0, 4) == 0))
            assert (table == rig.moves.placement.table).all()
            under_way.append((table, rig.shown_places()))
        elif what == 1 and under_way:
            under_way.pop(0)
            rig.moves.finished()
        else:
            rig.copies.end_one()
        for table, shown in under_way:
            rig.check(table, shown)
    assert rig.moves.num_promoted >= 3


def test_the_four_moments_of_a_promotion(device: torch.device) -> None:
    rig = Rig.of(device, EveryStep(round_robin(SLOTS, LAYERS, EXPERTS), most=1))
    rig.moves.before_launch(link_is_busy=False, chooses=False)  # step 0 has the first table
    before = rig.bank.table.cpu().numpy().copy()
    after = rig.launch()  # step 1 does not read the slot any more
    (gone,) = np.argwhere(before != after).tolist()
    assert after[tuple(gone)] == ON_HOST and rig.moves.num_moving == 1
    slot = int(before[tuple(gone)])

    def launch(*, busy: bool = False) -> np.ndarray:
        rig.moves.before_launch(link_is_busy=busy, chooses=False)
        return rig.bank.table.cpu().numpy().copy()

    launch()
    assert not rig.copies.begun  # step 0 may still read it
    rig.moves.finished()
    assert not rig.copies.begun  # copies begin at launches
    launch(busy=True)
    assert not rig.copies.begun  # loads go first
    launch()
    assert [begun for begun, _, _ in rig.copies.begun] == [slot]
    assert (launch() == after).all() and rig.moves.num_promoted == 0
    rig.copies.end_one()
    assert (rig.bank.table.cpu().numpy() == after).all()
    table = launch()
    (new,) = np.argwhere(table != after).tolist()
    assert table[tuple(new)] == slot and new != gone
    assert rig.moves.num_promoted == 1 and not rig.moves.num_moving


def test_the_engines_placement_moves_what_is_visited(device: torch.device) -> None:
    """All visits go to one expert of each layer, the last one, which is on the host at first."""
    budget = PromotionBudget(bytes_per_s=1e6, expert_bytes=100)
    placement = ExpertPlacement(LAYERS, EXPERTS, SLOTS, budget=budget)
    placement.fill()
    rig = Rig.of(device, placement)
    counts = np.zeros((LAYERS, EXPERTS), np.int32)
    counts[:, -1] = 50
    for _ in range(8):
        placement.observe(counts, steps=32, seconds=1.0)
        rig.check(rig.launch(), rig.shown_places())
        rig.moves.finished()
        rig.copies.end_one()
        rig.copies.end_one()
        placement.check_integrity()
    assert (rig.launch()[:, -1] >= 0).all() and rig.moves.num_promoted == LAYERS


def test_more_changes_than_one_kernel_takes(device: torch.device) -> None:
    rig = Rig.of(device, EveryStep(round_robin(SLOTS, LAYERS, EXPERTS), most=5))
    assert (rig.launch() == rig.moves.placement.table).all()
    assert (rig.moves.placement.table < 0).sum() == LAYERS * EXPERTS


def test_a_fixed_placement_moves_nothing(device: torch.device) -> None:
    table = round_robin(SLOTS, LAYERS, EXPERTS)
    rig = Rig.of(device, FixedPlacement(table.copy()))
    for _ in range(4):
        rig.moves.placement.observe(np.ones((LAYERS, EXPERTS)), steps=1, seconds=1.0)
        assert (rig.launch() == table).all() and not rig.moves.num_moving


@pytest.mark.parametrize("seed", range(4))
def test_another_rank_promotes_what_one_announces(seed: int, device: torch.device) -> None:
    """Steps, copies and announcements of the two come at any times: what a step reads is there on
    both, the one that follows goes through the same changes in the same order, and both end with
    the same content."""
    rng = np.random.default_rng(seed)
    table = round_robin(SLOTS, LAYERS, EXPERTS)
    first = Rig.of(device, EveryStep(table.copy(), seed))
    second = Rig.of(device, OrderedPlacement(table.copy()))
    announced: list[Promotion] = []
    first.moves.announce = announced.extend
    under_way: list[list[np.ndarray]] = [[], []]
    for turn in range(160):
        for rig, steps in zip((first, second), under_way, strict=True):
            what = rng.integers(0, 3)
            if what == 0 and len(steps) < 3 and (rig is second or turn < 120):
                steps.append(rig.launch(busy=bool(rng.integers(0, 4) == 0)))
            elif what == 1 and steps:
                steps.pop(0)
                rig.moves.finished()
            else:
                rig.copies.end_one()
            for read in steps:
                rig.check(read, None)
        if rng.integers(0, 3) == 0:
            second.moves.order(announced[:1])
            del announced[:1]
    second.moves.order(announced)
    for _ in range(400):  # all moves end
        for rig, steps in zip((first, second), under_way, strict=True):
            rig.copies.end_one()
            if steps:
                steps.pop(0)
                rig.moves.finished()
            rig.moves.before_launch(link_is_busy=False, chooses=False)
            rig.moves.finished()
    assert not first.moves.num_moving and not second.moves.num_moving
    assert second.moves.num_promoted == first.moves.num_promoted >= 10
    assert (second.bank.table == first.bank.table).all()
    assert second.bank.held == first.bank.held


def test_the_moments_of_an_exchange(device: torch.device) -> None:
    """The owner of the slot is on both sides before it leaves the bank, and the new one before its
    place is free."""
    placement = EveryStep(round_robin(SLOTS, LAYERS, EXPERTS), most=1, owners_stay=True)
    rig = Rig.of(device, placement, spares=1)
    places = rig.bank.host.places
    assert places is not None

    def launch(*, chooses: bool = False) -> np.ndarray:
        rig.moves.before_launch(link_is_busy=False, chooses=chooses)
        return rig.bank.table.cpu().numpy().copy()

    first = launch(chooses=True)  # step 0
    assert (launch() == first).all() and len(rig.copies.begun) == 1  # step 1: the owner is saved
    assert places.num_free == 0
    rig.copies.end_one()
    after = launch()  # step 2 asks the host
    (gone,) = np.argwhere(after != first).tolist()
    slot = int(first[tuple(gone)])
    assert after[tuple(gone)] == ON_HOST and places.table[tuple(gone)] >= 0
    rig.moves.finished()
    launch()  # step 3: step 1 may still read the slot
    assert len(rig.copies.begun) == 1
    rig.moves.finished()
    launch()  # step 4
    assert len(rig.copies.begun) == 2
    rig.copies.end_one()
    table = launch()  # step 5 finds the new expert in the bank
    (new,) = np.argwhere(table == slot).tolist()
    assert rig.moves.num_promoted == 1 and rig.moves.num_moving == 1
    for _ in range(2):  # steps 2 and 3: the host may be asked for it
        rig.moves.finished()
        launch(chooses=True)
        assert places.num_free == 0 and places.table[tuple(new)] >= 0
    rig.moves.finished()
    launch()
    assert places.num_free == 1 and places.table[tuple(new)] < 0 and not rig.moves.num_moving


@pytest.mark.parametrize("spares", [1, 4])
def test_the_engines_placement_exchanges_what_is_visited(device: torch.device, spares: int) -> None:
    budget = PromotionBudget(bytes_per_s=1e6, expert_bytes=100)
    placement = ExpertPlacement(LAYERS, EXPERTS, SLOTS, budget=budget, owners_stay=True)
    placement.fill()
    rig = Rig.of(device, placement, spares=spares)
    counts = np.zeros((LAYERS, EXPERTS), np.int32)
    counts[:, -1] = 50
    for _ in range(30):
        placement.observe(counts, steps=32, seconds=1.0)
        rig.check(rig.launch(), rig.shown_places())
        rig.moves.finished()
        for _ in range(3):
            rig.copies.end_one()
        placement.check_integrity()
    assert (rig.launch()[:, -1] >= 0).all() and rig.moves.num_promoted == LAYERS
