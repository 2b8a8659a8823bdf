"""In which steps the tokens that grammars force are looked for.

To look has a price: the host has to know all tokens before the step is launched, so none is
launched ahead, and then looks at the grammar of each sequence in turn; each drafted token has a
mask of its own. The forced tokens have to pay for that. They do for one sequence; where few
sequences of a large batch have any, they may not.
"""

from __future__ import annotations

from statistics import median
from typing import Protocol

from hetero_llm.core.step_times import StepTimes

TRIED_STEPS = 32
"""Steps of a trial, behind which it is decided whether to look on."""
PAUSED_STEPS = 256
"""Steps of a pause that begins behind a trial which did not pay."""
RETRIED_STEPS = 8
"""Steps of the trials behind a pause, and of the pauses in which steps without drafts are timed."""
LONGEST_PAUSE = 4096
"""Steps; each trial that does not pay doubles the next pause up to it."""

_LEAST_SHARE = 0.1
"""Forced tokens among those generated, below which none are drafted for a while. A step that is
not launched ahead costs up to a tenth of its time."""
_NEAR = 4
"""A batch is timed by those larger or smaller by up to its 4th part."""
_KEPT_STEPS = 1024
"""Steps after which a batch that has not run without drafts is timed again before a pause."""


class ForcedTokenPace(Protocol):
    """Decides whether forced tokens are looked for in the next step."""

    @property
    def paused(self) -> bool: ...

    def looked(self, num_sequences: int, num_forced: int) -> None:
        """Reports what was found for a step of `num_sequences` sequences, all of which waited."""

    def launched(self, num_running: int) -> None:
        """Counts a step that is launched while a guided sequence runs, in a pause or not.

        Args:
            num_running: sequences that run.
        """

    def observe_step(
        self, num_sequences: int, seconds: float, num_sampled: int, *, looked: bool
    ) -> None:
        """Reports a finished step without prompt chunks.

        Args:
            seconds: since the step before was finished.
            num_sampled: tokens that it yielded.
            looked: forced tokens were looked for.
        """


class PaceByShare:
    """Looks on as long as a tenth of all tokens is forced: for steps that wait for the host's
    tokens anyway, on CPUs and beside a drafter."""

    def __init__(self) -> None:
        self._num_steps = self._num_forced = self._num_tokens = 0
        self._paused = 0

    @property
    def paused(self) -> bool:
        return self._paused > 0

    def looked(self, num_sequences: int, num_forced: int) -> None:
        """See `ForcedTokenPace`."""
        self._num_steps += 1
        self._num_forced += num_forced
        self._num_tokens += num_sequences
        if self._num_steps < TRIED_STEPS:
            return
        share = self._num_forced / (self._num_tokens + self._num_forced)
        if share < _LEAST_SHARE:
            self._paused = PAUSED_STEPS
        self._num_steps = self._num_forced = self._num_tokens = 0

    def launched(self, num_running: int) -> None:
        """See `ForcedTokenPace`."""
        if self._paused:
            self._paused -= 1

    def observe_step(
        self, num_sequences: int, seconds: float, num_sampled: int, *, looked: bool
    ) -> None:
        """See `ForcedTokenPace`: times count for nothing."""


class PaceByTimes:
    """Looks on as long as steps with forced tokens yield more tokens a second than those without
    drafts take for as many: both are measured, from one finished step to the next.

    Steps without drafts are timed in pauses and while no guided sequence runs. A batch of which no
    such time is known, or none from the last `_KEPT_STEPS` steps where it would begin a pause, is
    timed in a pause of `RETRIED_STEPS` first.
    """

    def __init__(self) -> None:
        self._plain = StepTimes()  # by number of sequences
        self._timed: dict[int, int] = {}  # number of sequences to the step that timed it last
        self._num_steps = 0
        self._paused, self._next_pause = 0, PAUSED_STEPS
        self._lost_at = 0  # sequences of the trial that began the pause; 0: it times steps
        self._trial = TRIED_STEPS
        self._seconds: list[float] = []  # of the trial's steps so far
        self._num_sequences = self._num_sampled = 0

    @property
    def paused(self) -> bool:
        return self._paused > 0

    def looked(self, num_sequences: int, num_forced: int) -> None:
        """See `ForcedTokenPace`: the step's tokens count when it has run."""

    def launched(self, num_running: int) -> None:
        """See `ForcedTokenPace`. A batch half as large as the one that began a pause ends it."""
        if self._paused:
            self._paused -= 1
            if 2 * num_running <= self._lost_at:
                self._paused, self._next_pause = 0, PAUSED_STEPS

    def observe_step(
        self, num_sequences: int, seconds: float, num_sampled: int, *, looked: bool
    ) -> None:
        """See `ForcedTokenPace`."""
        self._num_steps += 1
        if not looked:
            self._plain.observe(num_sequences, seconds)
            self._timed[num_sequences] = self._num_steps
            return
        if self._paused:
            return  # launched before the pause
        self._seconds.append(seconds)
        self._num_sequences += num_sequences
        self._num_sampled += num_sampled
        if len(self._seconds) >= self._trial:
            self._decide()

    def _decide(self) -> None:
        """Ends a trial, unless steps without drafts have to be timed first."""
        count = len(self._seconds)
        rows = self._num_sequences / count
        near = [size for size in self._timed if _NEAR * abs(size - rows) <= rows]
        pays = False
        if near:
            plain = self._plain.predict(round(rows))
            pays = self._num_sampled * plain > self._num_sequences * median(self._seconds)
        last = max((self._timed[size] for size in near), default=-_KEPT_STEPS)
        if not pays and self._num_steps - last > _KEPT_STEPS:
            self._paused, self._lost_at = RETRIED_STEPS, 0
            return
        if pays:
            self._trial, self._next_pause = TRIED_STEPS, PAUSED_STEPS
        else:
            self._trial, self._lost_at = RETRIED_STEPS, round(rows)
            self._paused = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        self._seconds.clear()
        self._num_sequences = self._num_sampled = 0
