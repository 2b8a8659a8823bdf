"""How long a step takes, predicted by its number of tokens: measured at start, corrected by steps.

The scheduler asks whether a load from host memory is worth its time, the draft budget how many
nodes to verify, the draft worker how many to run. All three use this one predictor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SIZES = tuple(1 << k for k in range(18))
"""Default of `StepTimes`' `sizes`: powers of two."""

_OUTLIER = 4.0
"""Times the prediction. One step as slow is ignored, a second one in a row is not."""
_MAX_ERROR = 1.0  # relative; a slower step counts as this slow
_COMMON_GAIN = 0.025  # share of an error that the common part takes on
_OWN_GAIN = 0.01  # share of the rest that the size's own factor takes on, where a profile is known
_UNMEASURED_GAIN = 0.22  # the same where all that is known was observed
_FIRST_GAIN = 0.5  # of the common part at the first step, half of it at the second, and so on
_GROWTH, _PATIENCE, _MAX_GAIN = 1.3, 3, 0.5
"""Gains are small, so that noise averages out. After `_PATIENCE` errors of one sign in a row each
further one multiplies the gain by `_GROWTH`, up to `_MAX_GAIN`: the machine has changed."""
_BOOSTS = tuple(_GROWTH ** max(0, run - _PATIENCE) for run in range(24))
_KEPT = 0.995  # of all own corrections at every step: sizes that do not run return to the profile
_LEAST = 0.1  # of each factor


# large: one predictor of three callers: their settings, and tables that change together.
class StepTimes:
    """Predicts seconds of steps from four parts:

        (profile x factor + extra) x own factor x (1 + per_context x context)

    - **profile**: the time of each size as measured at start. Without one the first step of a size
      is its profile, and sizes that have not run lie between those that have;
    - **factor and extra seconds**, common to all sizes: what steps lately took beyond the profile,
      because contexts have grown or other programs run;
    - **own factor** of the size: what its own steps took beyond that. It fades where a profile was
      measured, so that a size which was slow for a while is tried again;
    - **context**, where the caller knows it.

    Every observed step corrects the common part and the own factor of its size, which is the
    nearest one, or the next larger one if steps are padded.

    Args:
        sizes: numbers of tokens, ascending. Larger steps are not observed, and are predicted to
            take as long as the largest size.
        profile: seconds of each size; None: nothing was measured.
        padded: steps are padded to the sizes, so a step between two of them takes as long as the
            larger one. Else times between sizes are interpolated.
        per_context: relative cost of one token of context.
        added: 0 to 1: share of a common error that is added to all sizes alike, as the time of
            contexts is that the caller does not know; the rest multiplies them, as a slower machine
            does.
        growth: without a profile: share of its time that each token beyond the largest size
            observed adds, and smaller sizes take as long as the smallest one observed. None: larger
            sizes take longer in proportion to their tokens; smaller ones lie on the line through
            the two smallest ones observed, in proportion at least.
        memory: without a profile: number of steps after which a size that did not run again is
            forgotten; None: never. For callers who choose their sizes by the predictions: a size
            that was slow once would never run again.

    Attributes:
        sizes: [K] int64, to be read only.
    """

    def __init__(
        self,
        sizes: Sequence[int] = SIZES,
        profile: Sequence[float] | None = None,
        *,
        padded: bool = False,
        per_context: float = 0.0,
        added: float = 0.0,
        growth: float | None = None,
        memory: int | None = None,
    ) -> None:
        assert len(sizes) and (profile is None or len(profile) == len(sizes))
        self.sizes = np.array(sizes, np.int64)
        self._bounds: list[int] = self.sizes.tolist()
        self._padded, self._per_context = padded, per_context
        self._added, self._growth, self._memory = added, growth, memory
        self._measured = profile is not None
        self._profile = np.zeros(len(sizes)) if profile is None else np.array(profile, np.float64)
        self._known = [] if profile is None else list(range(len(sizes)))  # indices, ascending
        self._tokens = self._bounds.copy()  # without a profile: of the first step of each size
        self._known_sizes = self._tokens.copy() if self._measured else []
        self._factor, self._extra = 1.0, 0.0
        self._own = np.zeros(len(sizes))  # own factors less 1
        self._num_steps = 0
        self._run = 0  # errors of one sign in a row, negative if steps were faster than predicted
        self._own_runs = [0] * len(sizes)
        self._last_steps = [0] * len(sizes)
        self._check_at = math.inf if memory is None else memory  # number of a step
        self._after_outlier = False
        self._table: NDArray[np.float64] | None = None  # made when it is asked for

    def table(self) -> NDArray[np.float64]:
        """[K] float64 seconds of steps of each of `sizes` without context, to be read only. All 0
        as long as nothing is known. The array stays as it is; later steps make another one."""
        if self._table is None:
            table = self._profile * self._factor
            table += self._extra
            table *= self._own + 1.0
            if not self._measured:
                known = [table.item(at) for at in self._known]
                sizes, seconds = [0, *self._known_sizes, self._bounds[-1]], [0.0, *known, 0.0]
                if known:
                    seconds[0], seconds[-1] = self._beyond(0), self.predict(self._bounds[-1])
                table = np.interp(self.sizes, sizes, seconds)
            self._table = table
        return self._table

    def predict(self, num_tokens: int, context: float = 0.0) -> float:
        """Seconds of a step of `num_tokens` tokens behind `context` others each. 0.0 as long as
        nothing is known, and for no tokens."""
        if num_tokens <= 0 or not self._known:
            return 0.0
        bounds, sizes = self._bounds, self._known_sizes
        if self._padded or num_tokens > bounds[-1]:
            num_tokens = bounds[min(bisect_left(bounds, num_tokens), len(bounds) - 1)]
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes) or (at == 0 and sizes[0] != num_tokens):
            seconds = self._beyond(num_tokens)
        else:
            seconds = self._seconds(self._known[at])
            if (size := sizes[at]) != num_tokens:
                share = (size - num_tokens) / (size - sizes[at - 1])
                seconds += share * (self._seconds(self._known[at - 1]) - seconds)
        return seconds * (1.0 + self._per_context * context)

    def predict_range(self, num_tokens: int, most: int) -> NDArray[np.float64]:
        """[most + 1] float64 seconds of steps of `num_tokens` tokens and 0 .. `most` more, without
        context. Steps of no tokens count as those of the smallest size."""
        assert not self._padded
        tokens = np.arange(num_tokens, num_tokens + most + 1)
        return np.interp(tokens, self.sizes, self.table())

    def observe(self, num_tokens: int, seconds: float, context: float = 0.0) -> None:
        """Report a finished step: its number of tokens, its duration in seconds, and the tokens of
        context behind which each of its tokens stood, on average."""
        if not 0 < num_tokens <= self._bounds[-1]:
            return
        self._num_steps += 1
        if self._num_steps >= self._check_at:
            self._forget()
        seconds /= 1.0 + self._per_context * context
        at = self._size_of(num_tokens)
        self._last_steps[at] = self._num_steps
        if not self._measured and at not in self._known:
            self._begin(at, num_tokens, seconds)
            return
        error = seconds / self.predict(num_tokens) - 1.0
        if error > _OUTLIER - 1.0 and not self._after_outlier:
            self._after_outlier = True
            return
        self._after_outlier = False
        self._table = None
        if error < -0.5 and not self._own_runs[at] and not self._measured:
            # The only step of this size so far was an outlier: steps have many reasons to be slow.
            self._own[at] = (1.0 + self._own.item(at)) * (1.0 + error) - 1.0
        else:
            self._correct(at, min(error, _MAX_ERROR))

    def _correct(self, at: int, error: float) -> None:
        """Lets the common part and the size's own factor take on parts of an error."""
        self._run = _extended(self._run, error)
        gain = _COMMON_GAIN * _boost(self._run)
        if self._measured:
            self._own *= _KEPT
            gain = max(gain, _FIRST_GAIN / self._num_steps)
        change = min(gain, _MAX_GAIN) * error
        error -= change
        profile = self._profile.item(at)
        change *= profile * self._factor + self._extra  # seconds
        self._extra = max(self._extra + self._added * change, 0.0)
        self._factor = max(self._factor + (1.0 - self._added) * change / profile, _LEAST)
        self._own_runs[at] = run = _extended(self._own_runs[at], error)
        gain = min((_OWN_GAIN if self._measured else _UNMEASURED_GAIN) * _boost(run), _MAX_GAIN)
        self._own[at] = max((1.0 + self._own.item(at)) * (1.0 + gain * error), _LEAST) - 1.0

    def _begin(self, at: int, num_tokens: int, seconds: float) -> None:
        """Takes the first step of a size as its profile."""
        if not self._padded:
            self._tokens[at] = num_tokens
        self._profile[at] = max(seconds - self._extra, _LEAST * seconds) / self._factor
        self._own[at], self._own_runs[at] = 0.0, 0
        self._know(sorted([*self._known, at]))

    def _forget(self) -> None:
        """Forgets sizes that have not run for long, and notes when to look again."""
        assert self._memory is not None
        oldest = self._num_steps - self._memory
        self._know([at for at in self._known if self._last_steps[at] > oldest])
        last = min((self._last_steps[at] for at in self._known), default=self._num_steps)
        self._check_at = last + self._memory

    def _know(self, known: list[int]) -> None:
        self._known, self._table = known, None
        self._known_sizes = [self._tokens[at] for at in known]

    def _size_of(self, num_tokens: int) -> int:
        """Index of the size that a step corrects."""
        bounds = self._bounds
        at = bisect_left(bounds, num_tokens)
        if at and not self._padded and 2 * num_tokens <= bounds[at] + bounds[at - 1]:
            return at - 1
        return at

    def _seconds(self, at: int) -> float:
        """Of a size that is known."""
        common = self._profile.item(at) * self._factor + self._extra
        return common * (1.0 + self._own.item(at))

    def _beyond(self, num_tokens: int) -> float:
        """Seconds of a step larger or smaller than all sizes that are known."""
        known, sizes = self._known, self._known_sizes
        is_larger = num_tokens > sizes[-1]
        at = -1 if is_larger else 0
        nearest, seconds = sizes[at], self._seconds(known[at])
        if self._measured:
            return seconds
        if self._growth is not None:
            return seconds * (1.0 + self._growth * max(num_tokens - nearest, 0))
        slope = seconds / nearest
        if not is_larger and len(known) > 1:
            rise = self._seconds(known[1]) - seconds
            slope = min(max(rise / (sizes[1] - nearest), 0.0), slope)
        return seconds + slope * (num_tokens - nearest)


def extend_profile(
    sizes: Sequence[int], seconds: Sequence[float], beyond: Sequence[int], growth: float = 0.0
) -> tuple[list[int], list[float]]:
    """A profile up to larger sizes: a token more costs as much as between the two largest measured
    ones, or `growth` times the largest one's seconds if that is more.

    Args:
        sizes, seconds: measured, ascending.
        beyond: sizes to add, ascending; those that are not larger are left out.
    """
    largest, last = sizes[-1], seconds[-1]
    slope = growth * last
    if len(sizes) > 1:
        slope = max(slope, (last - seconds[-2]) / (largest - sizes[-2]))
    more = [size for size in beyond if size > largest]
    return [*sizes, *more], [*seconds, *(last + slope * (size - largest) for size in more)]


def _extended(run: int, error: float) -> int:
    """Number of errors of one sign in a row, negative ones as a negative number."""
    return max(run, 0) + 1 if error > 0.0 else min(run, 0) - 1


def _boost(run: int) -> float:
    """By what errors of one sign in a row multiply a gain."""
    return _BOOSTS[min(abs(run), len(_BOOSTS) - 1)]
