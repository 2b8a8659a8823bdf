"""Placement: owners and table agree, promotions are bounded, demand decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.expert_offload.placement import (
    HALF_LIVES,
    ON_HOST,
    ExpertPlacement,
    PromotionBudget,
    UseScores,
)

PLENTY = 1e12


def placement(
    slots: int, layers: int = 2, experts: int = 4, *, rate: float = PLENTY, each: int = 1
) -> ExpertPlacement:
    budget = PromotionBudget(bytes_per_s=rate, expert_bytes=each)
    made = ExpertPlacement(layers, experts, slots, budget=budget)
    made.fill()
    return made


def uses(shape: tuple[int, int], **counts: int) -> np.ndarray:
    """Zeros but for counts such as `l1e3=5`."""
    found = np.zeros(shape, np.int32)
    for name, count in counts.items():
        layer, expert = name.removeprefix("l").split("e")
        found[int(layer), int(expert)] = count
    return found


def run(made: ExpertPlacement, counts: np.ndarray, **options: Any) -> list[tuple[int, int]]:
    """One round: (layer, expert) of the promotions, all finished."""
    made.observe(counts, steps=32, seconds=1.0)
    chosen = made.choose(**options)
    made.check_integrity()
    for one in chosen:
        made.finish(one.slot)
    made.check_integrity()
    return [(one.layer, one.expert) for one in chosen]


class TestBudget:
    def test_is_earned_with_time_and_kept_for_a_second(self) -> None:
        budget = PromotionBudget(bytes_per_s=100, expert_bytes=10)
        assert budget.promotions == 0
        budget.earn(0.25)
        assert budget.promotions == 2
        budget.spend(2)
        budget.earn(0.06)  # and 5 bytes that were left
        assert budget.promotions == 1
        budget.earn(99.0)
        assert budget.promotions == 10

    def test_an_expert_larger_than_a_second_is_saved_up(self) -> None:
        budget = PromotionBudget(bytes_per_s=100, expert_bytes=250)
        seen = []
        for _ in range(4):
            budget.earn(1.0)
            seen.append(budget.promotions)
        assert seen == [0, 0, 1, 1]

    def test_nothing_without_a_rate_but_what_is_granted(self) -> None:
        budget = PromotionBudget(bytes_per_s=0, expert_bytes=10)
        budget.earn(99.0)
        assert budget.promotions == 0
        budget.grant(35)
        assert budget.promotions == 3


class TestScores:
    def test_decay(self) -> None:
        scores = UseScores(4, 2, (10.0,))
        scores.observe(np.float32([8, 0, 4, 0]), 10.0)
        scores.observe(np.float32([1, 1, 0, 0]), 20.0)
        assert scores.scores.tolist() == [3, 1, 1, 0]

    def test_steady_use_chooses_the_longest_half_life(self) -> None:
        rng = np.random.default_rng(0)
        scores = UseScores(512, 128)
        rates = rng.permutation(np.arange(512)) / 64
        for _ in range(60):
            scores.observe(rng.poisson(rates).astype(np.float32), 32.0)
        assert scores.best == len(HALF_LIVES) - 1

    def test_use_that_changes_chooses_a_shorter_one(self) -> None:
        rng = np.random.default_rng(0)
        scores = UseScores(512, 128)
        for _ in range(8):
            rates = rng.permutation(np.arange(512)) / 512
            for _ in range(16):
                scores.observe(rng.poisson(rates).astype(np.float32), 32.0)
        assert scores.best == 1

    def test_start_from_earlier_ones(self) -> None:
        scores = UseScores(3, 1)
        scores.start_from(np.float32([0, 16, 32]))
        assert scores.slowest.tolist() == [0, 16, 32]


class TestFill:
    def test_spreads_over_the_layers(self) -> None:
        made = placement(4)
        assert (made.table != ON_HOST).sum(axis=1).tolist() == [2, 2]

    def test_follows_scores(self) -> None:
        budget = PromotionBudget(bytes_per_s=1, expert_bytes=1)
        made = ExpertPlacement(2, 4, 3, budget=budget)
        made.scores.start_from(np.float32([0, 9, 0, 8, 0, 0, 7, 0]))
        filled = {(one.layer, one.expert): one.slot for one in made.fill()}
        assert filled.keys() == {(0, 1), (0, 3), (1, 2)}
        assert all(made.table[place] == slot for place, slot in filled.items())
        made.check_integrity()

    def test_all_or_none(self) -> None:
        assert (placement(8).table != ON_HOST).all()
        none = placement(0)
        assert run(none, uses((2, 4), l0e1=99)) == []
        assert (none.table == ON_HOST).all()


class TestChoose:
    def test_the_expert_in_demand_takes_the_place_of_the_one_in_least(self) -> None:
        made = placement(2)
        made.observe(uses((2, 4), l0e0=9, l1e0=3, l1e3=20), steps=32, seconds=1.0)
        (one,) = made.choose()
        assert (one.layer, one.expert, one.evicted) == (1, 3, (1, 0))
        # The slot belongs to no one until the copy is complete.
        assert made.owner_of(one.slot) is None and made.table[1, 3] == made.table[1, 0] == ON_HOST
        assert made.choose() == ()  # (0, 0) is in demand, and the other slot is on its way
        made.finish(one.slot)
        assert made.owner_of(one.slot) == (1, 3) and made.table[1, 3] == one.slot

    def test_hysteresis(self) -> None:
        made = placement(2)
        counts = uses((2, 4), l0e0=100, l1e0=100, l0e1=120, l1e1=124)
        assert [run(made, counts) for _ in range(20)] == [[]] * 20
        # Two experts that are in demand by turns do not exchange places for ever.
        made = placement(2)
        turns = [uses((2, 4), l0e0=50, l0e1=40, l1e0=99), uses((2, 4), l0e0=40, l0e1=50, l1e0=99)]
        assert sum(len(run(made, turns[i % 2])) for i in range(200)) <= 1

    def test_steady_demand_comes_to_rest(self) -> None:
        rng = np.random.default_rng(1)
        made = placement(20, 4, 16)
        counts = rng.integers(0, 50, (4, 16)).astype(np.int32)
        for _ in range(30):
            run(made, counts)
        assert run(made, counts) == []
        kept = np.sort(counts[made.table != ON_HOST])
        others = np.sort(counts[made.table == ON_HOST])
        assert kept[0] * 1.25 + 2 >= others[-1]

    def test_the_most_urgent_first_and_no_more_than_the_budget(self) -> None:
        made = placement(4, rate=20, each=10)
        demand = uses((2, 4), l0e2=50, l0e3=80, l1e2=90, l1e3=70)
        assert run(made, demand) == [(1, 2), (0, 3)]
        assert run(made, demand) == [(1, 3), (0, 2)]

    def test_nothing_while_kv_loads_wait(self) -> None:
        made = placement(2)
        demand = uses((2, 4), l0e3=50)
        assert run(made, demand, loads_wait=True) == []
        assert run(made, demand) == [(0, 3)]

    def test_slots_that_may_be_read_stay(self) -> None:
        made = placement(2)
        demand = uses((2, 4), l0e3=50, l1e3=60)
        assert run(made, demand, movable=np.array([False, False])) == []
        assert run(made, demand, movable=np.array([False, True])) == [(1, 3)]
        assert made.owner_of(0) == (0, 0) and made.owner_of(1) == (1, 3)

    def test_abort(self) -> None:
        made = placement(2)
        made.observe(uses((2, 4), l0e3=50, l1e3=60), steps=32, seconds=1.0)
        first, second = made.choose()
        made.abort(first.slot, intact=True)
        made.abort(second.slot, intact=False)
        made.check_integrity()
        assert made.owner_of(first.slot) == first.evicted
        assert made.owner_of(second.slot) is None
        # What was wanted is still wanted; the empty slot goes first.
        again = made.choose()
        assert (again[0].slot, again[0].evicted) == (second.slot, None)
        assert {(one.layer, one.expert) for one in again} == {(0, 3), (1, 3)}

    def test_is_deterministic(self) -> None:
        def history() -> list[list[tuple[int, int]]]:
            rng = np.random.default_rng(3)
            made = placement(16, 4, 16, rate=3, each=1)
            return [run(made, rng.integers(0, 9, (4, 16))) for _ in range(50)]

        assert history() == history()


class TestPrompt:
    def test_places_its_experts_before_decoding(self) -> None:
        made = placement(2)
        for _ in range(30):
            run(made, uses((2, 4), l0e0=64, l1e0=64))
        prompt = uses((2, 4), l0e1=9000, l1e1=9000)
        made.observe_prompt(prompt, tokens=9000, grant_bytes=2)
        run_now = made.choose()
        assert {(one.layer, one.expert) for one in run_now} <= {(0, 1), (1, 1)}

    def test_counts_for_a_bounded_number_of_steps(self) -> None:
        made = placement(2)
        made.observe_prompt(uses((2, 4), l0e1=100_000), tokens=100_000)
        assert made.scores.slowest.max() == pytest.approx(200)
        alone = placement(2)
        alone.observe_prompt(uses((2, 4), l0e1=100), tokens=100)
        shared = placement(2)
        shared.observe_prompt(uses((2, 4), l0e1=100), tokens=100, share=0.25)
        assert shared.scores.slowest.max() == alone.scores.slowest.max() == pytest.approx(100)

    def test_nothing_of_no_tokens(self) -> None:
        made = placement(2)
        made.observe_prompt(uses((2, 4)), tokens=0)
        assert made.scores.slowest.max() == 0


def test_interval_is_short_where_uses_are_over_soon() -> None:
    made = placement(64, 1, 256)
    assert made.interval == 32
    rng = np.random.default_rng(0)
    for _ in range(40):  # 32 experts in demand for two rounds
        now = np.zeros((1, 256), np.int32)
        now[0, rng.choice(256, 32, replace=False)] = 9
        run(made, now)
        run(made, now)
    assert made.interval == 2


@pytest.mark.parametrize(("skew", "least"), [(1.0, 0.55), (0.0, 0.23)])
def test_hits_at_a_bounded_rate(skew: float, least: float) -> None:
    rng = np.random.default_rng(0)
    layers, experts, k = 4, 64, 4
    made = placement(layers * experts // 4, layers, experts, rate=4, each=1)
    popularity = np.stack([rng.permutation(1 / np.arange(1, experts + 1) ** skew)] * layers)
    hits = total = 0
    for number in range(60):
        noise = rng.gumbel(size=(32, layers, experts))
        ids = np.argsort(-(np.log(popularity) + noise), axis=-1)[..., :k]
        there = np.take_along_axis(made.table[None], ids, axis=2) != ON_HOST
        if number >= 30:
            hits, total = hits + int(there.sum()), total + there.size
        counts = np.stack(
            [np.bincount(ids[:, x].ravel(), minlength=experts) for x in range(layers)]
        )
        run(made, counts)
    assert hits / total > least


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_history_keeps_slots_and_table_in_order(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    slots = data.draw(st.integers(0, layers * experts))
    rate = data.draw(st.integers(0, 5))
    made = placement(slots, layers, experts, rate=rate, each=2)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    moving: list[Any] = []
    seconds, spent, granted = 0.0, 0, 0
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["observe", "prompt", "choose", "finish", "abort"]))
        if action == "observe":
            passed = data.draw(st.floats(0, 2))
            seconds += passed
            counts = rng.integers(0, 40, (layers, experts))
            made.observe(counts, steps=data.draw(st.integers(0, 64)), seconds=passed)
        elif action == "prompt":
            grant = data.draw(st.integers(0, 9))
            granted += grant
            counts = rng.integers(0, 90, (layers, experts))
            made.observe_prompt(counts, tokens=99, share=0.5, grant_bytes=grant)
        elif action == "choose":
            movable = rng.random(slots) < 0.7
            busy = {one.slot for one in moving}
            before = [made.owner_of(slot) for slot in range(slots)]
            chosen = made.choose(movable)
            spent += 2 * len(chosen)
            for one in chosen:
                assert movable[one.slot] and one.slot not in busy
                assert before[one.slot] == one.evicted != (one.layer, one.expert)
            moving += chosen
        elif moving:
            one = moving.pop(data.draw(st.integers(0, len(moving) - 1)))
            if action == "finish":
                made.finish(one.slot)
                assert made.table[one.layer, one.expert] == one.slot
            else:
                made.abort(one.slot, intact=data.draw(st.booleans()))
                assert made.table[one.layer, one.expert] == ON_HOST
        made.check_integrity()
        assert made.num_moving == len(moving)
        assert spent <= rate * seconds + granted + 1e-6
