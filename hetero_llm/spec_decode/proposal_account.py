"""What proposals cost and gain, and when a drafter pauses because they lose.

A step with drafts can only be made when the tokens of the one before are known, and the device
idles meanwhile; steps without are launched ahead. So a drafter whose proposals yield fewer tokens a
second than steps without them, idle time included, pauses for some steps and then tries again.
"""

from __future__ import annotations

from typing import NamedTuple

from hetero_llm.core.drafter import StepReport
from hetero_llm.core.step_times import StepTimes
from hetero_llm.spec_decode.budget import verify_times

_MAX_BUCKETS = 16
_IDLE_WEIGHT = 0.1  # of a new time in the average
_FIRST_IDLE = 2e-3  # most seconds that the first time counts for
_GAIN_WEIGHT = 0.15  # of a proposal in the moving average of gains
_FIRST_GAIN = 1.05  # so that a drafter begins with proposals
_MIN_PAUSE, _MAX_PAUSE = 2, 32  # steps; twice as many after each pause that ends in a loss
_PAUSE_UNKNOWN = 16  # the longest pause as long as step times are not known
_PROBE_SHARE = 0.005  # of the time, at most, that proposals between pauses cost


class ProposalIdle(NamedTuple):
    """Seconds that the device idles before a step for which drafts are proposed, and before one for
    which none are."""

    proposed: float
    plain: float


class IdleTimes:
    """How long the device idles before a step: moving averages in seconds, by the number of
    sequences (one bucket for each power of two)."""

    def __init__(self) -> None:
        self._seconds = [0.0] * _MAX_BUCKETS
        self._counts = [0] * _MAX_BUCKETS

    def observe(self, num_sequences: int, seconds: float) -> None:
        """Report a step: its number of sequences, and for how long the device had idled before. A
        single long time counts little: there may have been nothing to do."""
        at = min(num_sequences.bit_length(), _MAX_BUCKETS - 1)
        known = self._counts[at]
        weight = max(_IDLE_WEIGHT, 1.0 / (known + 1))
        most = 2 * self._seconds[at] + 1e-4 if known else _FIRST_IDLE
        self._seconds[at] += weight * (min(seconds, most) - self._seconds[at])
        self._counts[at] = known + 1

    def of(self, num_sequences: int) -> float:
        """Seconds; of a number that was not seen those of the next smaller one that was, or of the
        next larger one; 0.0 before any was seen."""
        at = min(num_sequences.bit_length(), _MAX_BUCKETS - 1)
        if self._counts[at]:
            return self._seconds[at]
        for bucket in (*range(at - 1, -1, -1), *range(at + 1, _MAX_BUCKETS)):
            if self._counts[bucket]:
                return self._seconds[bucket]
        return 0.0


class ProposalAccount:
    """Step times, idle times and gains of one drafter. One thread at a time.

    Attributes:
        step_times: of steps without a prompt's chunk, by their tokens.
    """

    def __init__(self) -> None:
        self.step_times: StepTimes = verify_times()
        self._proposal_idle, self._plain_idle = IdleTimes(), IdleTimes()
        self._observed: list[StepReport] = []  # that times do not know yet
        # Moving average: tokens a second with proposals over those without, as estimated.
        self._gain = _FIRST_GAIN
        self._paused_for = 0  # steps
        self._next_pause = _MIN_PAUSE

    @property
    def paused(self) -> bool:
        return self._paused_for > 0

    @property
    def ends_pause(self) -> bool:
        """Whether the next step gets a proposal."""
        return self._paused_for <= 1

    @property
    def is_probing(self) -> bool:
        """Whether the last pause ended in a loss, or no proposal has followed it."""
        return self._next_pause > _MIN_PAUSE

    def set_step_times(self, profile: list[tuple[int, float]]) -> None:
        """Sets measured step times; see `core.drafter.CostAware`. Forgets what was observed."""
        self.step_times = verify_times(profile)

    def idle_of(self, num_sequences: int) -> ProposalIdle:
        """Idle seconds before steps with `num_sequences` sequences."""
        return ProposalIdle(
            self._proposal_idle.of(num_sequences), self._plain_idle.of(num_sequences)
        )

    def observe_step(self, report: StepReport) -> None:
        """Notes a report for `run_deferred`: the device may wait now."""
        self._observed.append(report)

    def run_deferred(self) -> None:
        """Takes in what was observed; called once a step while the device works."""
        self._paused_for = max(self._paused_for - 1, 0)
        for report in self._observed:
            self.step_times.observe(report.num_tokens, report.seconds)
            idle = self._proposal_idle if report.proposed else self._plain_idle
            idle.observe(report.num_sequences, report.idle_seconds)
        self._observed.clear()

    def pause(self) -> None:
        """Begins the longest pause: there are too many sequences to draft for."""
        self._paused_for = _MAX_PAUSE

    def note_gain(self, gain: float, num_rows: int, idle: ProposalIdle) -> None:
        """Notes a proposal, and begins a pause where proposals have lost lately.

        Args:
            gain: tokens a second of the step over those of one for which nothing is proposed.
            num_rows: tokens of the step without drafts.
            idle: of such a step.
        """
        self._gain += _GAIN_WEIGHT * (gain - self._gain)
        if self._gain < 1.0:  # the next proposal decides whether to go on
            self._gain = 1.0
            self._paused_for = self._next_pause
            self._next_pause = min(2 * self._next_pause, self._longest_pause(num_rows, idle))
        elif gain > 1.0 and self.is_probing:  # as at the beginning
            self._next_pause, self._gain = _MIN_PAUSE, max(self._gain, _FIRST_GAIN)

    def _longest_pause(self, num_rows: int, idle: ProposalIdle) -> int:
        """Steps of a pause behind which the idle time of one proposal does not count."""
        seconds = self.step_times.predict(num_rows)
        if not seconds:
            return _PAUSE_UNKNOWN
        share = (idle.proposed - idle.plain) / (seconds + idle.plain)
        return int(min(max(share / _PROBE_SHARE, _MIN_PAUSE), _MAX_PAUSE))
