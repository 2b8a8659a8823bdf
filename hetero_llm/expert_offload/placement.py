"""Which experts ought to be in the GPU's bank: scores from counted uses, and bounded promotions.

Use of experts is skewed in some models, and in others only local: an expert that was used lately is
likely to be used again, though over a long text all are used alike. Which of the two it is, and for
how long "lately" is, differs between models and texts. So there are scores of several half-lives,
and those decide that would have held most of the uses seen since.

Unlike an LRU cache, which copies at every miss, promotions have a budget of bytes a second: an
expert that is computed once on the CPU costs one read of its weights, and so does a promotion.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.promotion import Promotion

ON_HOST = -1
"""In the table: the bank does not have this expert. Among owners: the slot has none."""

HALF_LIVES = (8.0, 128.0, 1600.0)
"""In steps, of the scores that compete."""

_RATIO, _GAIN = 1.25, 2.0
"""Hysteresis: an expert takes another one's place if its score is `_RATIO` times as high and, in
uses, `_GAIN` higher; or one use in `_USE_STEPS` steps, where the half-life is so short that scores
are lower than that."""
_USE_STEPS = 32.0
_LONG_INTERVAL, _SHORT_INTERVAL = 32, 2
"""Steps; short where a half-life below the long interval decides."""
_ADVANTAGE = 0.01
"""Share of uses that a shorter half-life must hold more than a longer one to be preferred: longer
ones have less noise, so fewer promotions that win nothing."""
_MEMORY_STEPS = 400.0  # half-life of what each half-life would have held
_SAMPLE = 1 << 10  # experts by which half-lives are compared
_BURST_S = 1.0  # of the rate: unused budget that is kept
_PROMPT_STEPS = 200.0  # a prompt counts for as many steps at most

Scores = NDArray[np.float32]


class PromotionBudget:
    """Bytes that may be copied, earned with time, so that copies take a bounded share of the link.

    Args:
        bytes_per_s: earned; unused ones are kept for a second. 2 GB/s are 4% of a link of 50 GB/s.
        expert_bytes: of one promotion. So much can always be saved up.
    """

    def __init__(self, *, bytes_per_s: float, expert_bytes: int) -> None:
        assert bytes_per_s >= 0 and expert_bytes > 0
        self._rate, self._each = bytes_per_s, expert_bytes
        self._most = max(bytes_per_s * _BURST_S, float(expert_bytes)) if bytes_per_s else 0.0
        self._bytes = 0.0

    def earn(self, seconds: float) -> None:
        """Adds what `seconds` that have passed earn."""
        self._bytes = min(self._most, self._bytes + self._rate * max(seconds, 0.0))

    def grant(self, num_bytes: float) -> None:
        """Once more than the rate: before the first token of a long prompt, when the step waits for
        nothing else."""
        self._bytes = max(self._bytes, num_bytes)

    @property
    def promotions(self) -> int:
        """How many can be paid now."""
        return int(self._bytes // self._each)

    def spend(self, promotions: int) -> None:
        """Pays for as many promotions; at most `self.promotions`."""
        assert 0 <= promotions <= self.promotions
        self._bytes -= promotions * self._each


class UseScores:
    """Decayed counts of the uses of each expert, in several half-lives.

    Args:
        count: experts of all layers.
        slots: of the bank: what a half-life would have held is the uses of its `slots` best.
        half_lives: ascending, in steps.
    """

    def __init__(self, count: int, slots: int, half_lives: tuple[float, ...] = HALF_LIVES) -> None:
        assert count > 0 and half_lives == tuple(sorted(half_lives))
        self._half_lives = np.array(half_lives)
        self._scores = np.zeros((len(half_lives), count), np.float32)
        self._stride = -(-count // _SAMPLE)
        self._offset = 0
        self._share = min(slots / count, 1.0)
        self._held = np.zeros(len(half_lives))  # decayed uses
        self._uses = 0.0

    @property
    def best(self) -> int:
        """Index of the half-life that decides: the longest one that held nearly as much as any."""
        enough = self._held.max() - _ADVANTAGE * self._uses
        return int(np.flatnonzero(self._held >= enough)[-1])

    @property
    def half_life(self) -> float:
        """In steps, of the scores that decide."""
        return float(self._half_lives[self.best])

    @property
    def gain(self) -> float:
        """Uses by which a score must be higher for a promotion to pay."""
        return min(_GAIN, self.half_life / _USE_STEPS)

    @property
    def scores(self) -> Scores:
        """[count] uses, of the half-life that decides; to be read only."""
        return self._scores[self.best]

    @property
    def slowest(self) -> Scores:
        """[count] uses, of the longest half-life; to be read only. Worth saving: it does not depend
        on the last text."""
        return self._scores[-1]

    def start_from(self, scores: Scores) -> None:
        """Begins with the `slowest` scores of an earlier run."""
        assert scores.shape == self._scores.shape[1:]
        # The mean number of steps that a half-life remembers is in proportion to it.
        shares = self._half_lives / self._half_lives[-1]
        self._scores[:] = shares[:, None] * scores

    def observe(self, counts: NDArray[np.float32], steps: float) -> None:
        """Takes in the uses of the last `steps` steps.

        Args:
            counts: [count] float32.
        """
        self._compare(counts, steps)
        for row, factor in zip(self._scores, 0.5 ** (steps / self._half_lives), strict=True):
            row *= np.float32(factor)
            row += counts

    def _compare(self, counts: NDArray[np.float32], steps: float) -> None:
        """Adds up what the best experts of each half-life hold of the new uses, over a sample."""
        part = counts[self._offset :: self._stride]
        kept = round(self._share * len(part))
        old = self._scores[:, self._offset :: self._stride]
        self._offset = (self._offset + 1) % self._stride
        if not 0 < kept < len(part) or not old[0].any():
            return
        fade = 0.5 ** (steps / _MEMORY_STEPS)
        chosen = np.argpartition(old, len(part) - kept, axis=1)[:, -kept:]
        self._held = self._held * fade + part[chosen].sum(axis=1)
        self._uses = self._uses * fade + float(part.sum())


class ExpertPlacement:
    """Owners of the bank's slots, and which experts ought to become owners.

    A promotion has three moments: `choose` takes the slot from its owner, so the table no longer
    leads there; the caller copies once no running step can read the slot; `finish` makes the new
    owner known. In between, the slot has no owner and is not chosen. With `owners_stay` there is
    one more: the owner keeps its slot, which is not chosen again, until the caller has copied it to
    the host and calls `vacate`.

    Args:
        num_layers, num_experts: of the layers that have experts.
        num_slots: of the bank; at most all experts.
        budget: of promotions.
        owners_stay: see above; where host memory does not hold all experts.

    Attributes:
        table: [num_layers, num_experts] int32, slot of each expert or `ON_HOST`; to be read only.
            Changed by `fill`, `choose`, `vacate`, `finish` and `abort`.
        scores: see `UseScores`.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        *,
        budget: PromotionBudget,
        owners_stay: bool = False,
    ) -> None:
        count = num_layers * num_experts
        assert 0 <= num_slots <= count
        self.table: NDArray[np.int32] = np.full((num_layers, num_experts), ON_HOST, np.int32)
        self.scores = UseScores(count, num_slots)
        self.budget = budget
        self._owners_stay = owners_stay
        self._flat = self.table.reshape(-1)
        self._owners = np.full(num_slots, ON_HOST, np.int64)  # flat index of each slot's expert
        self._moving: dict[int, tuple[int, int]] = {}  # slot -> new owner, old owner
        self._settled = np.ones(num_slots, bool)  # slots that are not moving
        self._outside = np.ones(count, bool)  # experts that neither own a slot nor move to one

    @property
    def interval(self) -> int:
        """Steps until `observe` and `choose` should be called again. Few where experts are used
        again soon or not at all: such uses are over when a longer interval ends."""
        short = self.scores.half_life < _LONG_INTERVAL
        return _SHORT_INTERVAL if short else _LONG_INTERVAL

    @property
    def num_moving(self) -> int:
        """Promotions that were chosen and neither finished nor aborted."""
        return len(self._moving)

    def owner_of(self, slot: int) -> tuple[int, int] | None:
        """(layer, expert) in a slot; None: it is empty, or a promotion is on its way there."""
        return self._place(int(self._owners[slot]))

    def fill(self) -> tuple[Promotion, ...]:
        """The first content of the bank, before any step: the experts of the highest scores, and
        among equals those that spread evenly over the layers. They count as finished."""
        assert not self._moving and (self._owners == ON_HOST).all()
        layers, experts = self.table.shape
        spread = np.arange(layers * experts) % experts  # expert 0 of each layer, then 1 ...
        order = np.lexsort((spread, -self.scores.slowest))[: len(self._owners)]
        order = np.sort(order)
        self._owners[:] = order
        self._flat[order] = np.arange(len(order))
        self._outside[order] = False
        places = (divmod(int(index), experts) for index in order)
        return tuple(
            Promotion(layer, expert, slot, None) for slot, (layer, expert) in enumerate(places)
        )

    def observe(self, counts: NDArray[np.integer], *, steps: int, seconds: float) -> None:
        """Takes in what the device has counted since the last call.

        Args:
            counts: [num_layers, num_experts] tokens that used each expert.
            steps: in which they were counted.
            seconds: that have passed, for the budget.
        """
        assert counts.shape == self.table.shape and steps >= 0
        self.budget.earn(seconds)
        if steps:
            self.scores.observe(counts.reshape(-1).astype(np.float32), float(steps))

    def observe_prompt(
        self,
        counts: NDArray[np.integer],
        *,
        tokens: int,
        share: float = 1.0,
        grant_bytes: float = 0,
    ) -> None:
        """Takes in the uses of a prompt, whose text is continued by decoding: `choose` can
        then exchange experts before the first one.

        Args:
            counts: [num_layers, num_experts] tokens of the prompt that used each expert.
            tokens: of the prompt that were computed. However many, they count for a bounded number
                of steps.
            share: of the running sequences that this one is, 1 / B: so much of the others' past
                it displaces.
            grant_bytes: what may be copied at once for it.
        """
        assert counts.shape == self.table.shape and 0 < share <= 1
        self.budget.grant(grant_bytes)
        if tokens <= 0:
            return
        steps = min(float(tokens), _PROMPT_STEPS)
        weighted = counts.reshape(-1).astype(np.float32) * np.float32(steps / tokens)
        self.scores.observe(weighted, steps * share)

    def choose(
        self,
        movable: NDArray[np.bool_] | None = None,
        *,
        loads_wait: bool = False,
        most: int | None = None,
    ) -> tuple[Promotion, ...]:
        """Takes slots from the experts in least demand, for those in most demand on the host.

        Args:
            movable: [num_slots] bool, slots that may be taken; None: all.
            loads_wait: KV loads wait for the link: nothing is chosen, the budget is kept.
            most: promotions; None: what the budget pays.

        Returns:
            As many as the budget pays, the most urgent first.
        """
        paid = self.budget.promotions
        most = paid if most is None else min(paid, most)
        if loads_wait or not most or not len(self._owners):
            return ()
        scores = self.scores.scores
        free = self._settled if movable is None else self._settled & movable
        slots = np.flatnonzero(free)
        if not len(slots):
            return ()
        owners = self._owners[slots]
        old = np.where(owners == ON_HOST, np.float32(-np.inf), scores[owners])
        slots, old = _lowest(slots, old, most)
        gain = self.scores.gain
        least = np.maximum(old[:1], np.float32(0.0))
        wanted = np.flatnonzero(self._outside & (scores >= _needed(least, gain)))
        wanted, new = _lowest(wanted, -scores[wanted], len(slots))
        count = min(len(slots), len(wanted))
        # Both are sorted, so those that win are the first ones.
        wins = -new[:count] >= _needed(np.maximum(old[:count], np.float32(0.0)), gain)
        count = int(wins.argmin()) if not wins.all() else count
        self.budget.spend(count)
        return tuple(
            self._begin(int(slot), int(index))
            for slot, index in zip(slots[:count], wanted[:count], strict=True)
        )

    def vacate(self, slot: int) -> None:
        """The owner of a chosen slot is on the host, too: the table no longer leads there from the
        next step on. Only with `owners_stay`."""
        assert self._owners_stay and slot in self._moving
        self._clear(slot)

    def _clear(self, slot: int) -> None:
        old = int(self._owners[slot])
        if old != ON_HOST:
            self._flat[old] = ON_HOST
            self._outside[old] = True
        self._owners[slot] = ON_HOST

    def finish(self, slot: int) -> None:
        """The copy into a slot is complete: the table leads there from the next step on."""
        assert self._owners[slot] == ON_HOST
        index, _ = self._moving.pop(slot)
        self._own(slot, index)

    def abort(self, slot: int, *, intact: bool) -> None:
        """The copy into a slot does not take place; its expert stays on the host.

        Args:
            intact: the slot still holds what `evicted` says, which becomes its owner again. Else it
                is empty, which exclusive mode must not let happen.
        """
        index, old = self._moving.pop(slot)
        self._outside[index] = True
        if intact and old != ON_HOST:
            self._own(slot, old)
        else:
            self._settled[slot] = True

    def check_integrity(self) -> None:
        """Asserts that slots and table agree, and that no expert is in two places."""
        owned = np.flatnonzero(self._owners != ON_HOST)
        assert (self._flat[self._owners[owned]] == owned).all()
        assert np.count_nonzero(self._flat != ON_HOST) == len(owned)
        moving = set(self._moving)
        assert moving == set(np.flatnonzero(~self._settled).tolist())
        assert self._owners_stay or not moving & set(owned.tolist())
        inside = {*self._owners[owned].tolist(), *(new for new, _ in self._moving.values())}
        assert len(inside) == len(owned) + len(moving)
        assert inside == set(np.flatnonzero(~self._outside).tolist())

    def _begin(self, slot: int, index: int) -> Promotion:
        old = int(self._owners[slot])
        if not self._owners_stay:
            self._clear(slot)
        self._outside[index] = False
        self._settled[slot] = False
        self._moving[slot] = (index, old)
        layer, expert = divmod(index, self.table.shape[1])
        return Promotion(layer, expert, slot, self._place(old))

    def _own(self, slot: int, index: int) -> None:
        self._owners[slot] = index
        self._flat[index] = slot
        self._outside[index] = False
        self._settled[slot] = True

    def _place(self, index: int) -> tuple[int, int] | None:
        return None if index == ON_HOST else divmod(index, self.table.shape[1])


def _needed(scores: Scores, gain: float) -> Scores:
    """What experts must score to take the places of those of `scores`."""
    return np.maximum(scores * np.float32(_RATIO), scores + np.float32(gain))


def _lowest(
    items: NDArray[np.int64], values: NDArray[np.float32], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The `most` items of the lowest values with these, ascending; equals in the items' order."""
    if len(items) > most > 0:
        kept = np.flatnonzero(values <= np.partition(values, most - 1)[most - 1])
        items, values = items[kept], values[kept]
    order = np.argsort(values, kind="stable")[:most]
    return items[order], values[order]
