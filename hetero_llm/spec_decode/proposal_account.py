"""What proposals cost and gain, and when a drafter pauses because they lose.

A step with drafts can only be made when the tokens of the one before are known, and the device
idles meanwhile; steps without are launched ahead, where the engine does that. So a drafter whose
proposals yield fewer tokens a second than steps without them, idle time included, pauses for some
steps and then tries again.

Two rules begin a pause. By the first one proposals have lost on average, as estimated when they
were made. By the second one, where no step is launched ahead (on a CPU), they have lost more than
they may: whatever was estimated, the account knows how many steps' worth of time the tokens that
came have saved or cost (`_settle`). A loss beyond what was saved is paid back by a pause in which
nothing is proposed, one hundredth of a step for each step. A new text brings a little to lose, so
that it is looked up at once.

A drafter that can tell afterwards what drafts would have saved (`rehearses`) goes by the second
rule alone. Its pauses get longer, up to one behind which the rehearsal at its end takes half a
hundredth of the time. Proposals begin again if the rehearsal shows that they save; the more they
owe for earlier losses, the more it has to show.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from hetero_llm.core.drafter import StepReport
from hetero_llm.core.step_times import StepTimes
from hetero_llm.spec_decode.budget import MOST_ROWS, verify_times

_MAX_BUCKETS = 16
_IDLE_WEIGHT = 0.1  # of a new time in the average
_FIRST_IDLE = 2e-3  # most seconds that the first time counts for
_FIRST_WAIT = 2e-4  # the same where an engine waits for a drafter that is called for the first time
_GAIN_WEIGHT = 0.15  # of a proposal in the moving average of gains
_FIRST_GAIN = 1.05  # so that a drafter begins with proposals
_MIN_PAUSE, _MAX_PAUSE = 2, 32  # steps; twice as many after each pause that ends in a loss
_PAUSE_UNKNOWN = 16  # the longest pause as long as step times are not known
_PROBE_SHARE = 0.005  # of the time, at most, that proposals between pauses cost
_LOSS_SHARE = 0.01  # of the time that proposals may lose in the long run
_TO_LOSE = 0.5  # steps' worth of time that a text alone may lose before that
_MOST_SAVED = 2.0  # steps' worth of time that may be lost again, of what drafts have saved
_LONGEST_DEBT = 16  # steps of a pause that pays back
_LEAST_SAVED = 0.2  # share of the time that drafts must have saved for a pause to end
_REHEARSAL_WEIGHT = 2.0  # steps: what a rehearsal has saved in so many may be lost again
_SHORTEST_REHEARSED, _LONGEST_REHEARSED = 8, 128  # steps of a pause behind which a rehearsal is due
_LONGEST_UNCHECKED = 16  # steps of a pause behind which a text is checked for what recurs
_SHORTEST_FAILED = 24  # the same where a rehearsal has shown nothing
_FIRST_REHEARSAL = 0.2  # steps' worth of time that it takes, as long as that is not known
_TIME_OF_REHEARSALS = 0.005  # share of the time
_MOST_OWED = 2.0  # steps' worth of time
_MOST_RISKED = 4.0  # the same that drafts of a drafter which rehearses may lose again
_TO_RISK = 0.5  # steps' worth of time that one draft may lose whatever there is to lose
_TO_LOSE_KNOWN = 1.0  # steps' worth of time that a text which begins like another one may lose
_DRAFT_SIZES = (63, 31, 15, 7, 5)  # nodes that a draft may be cut to; with 3 it is tried anyway
_SAVED_PER_OWED = (
    0.1  # more of the time to be saved by rehearsed drafts, for each step's worth owed
)
_FADING = 0.1  # of what a proposal takes longer than none, at each rehearsal
_MOST_KEPT = 16  # reports of a pause that wait to be taken in
_FEW_KEPT = 4  # the same where an engine waits until they are
_TAKEN_TOGETHER = 8  # reports, where an engine waits: code and data are cold behind a step


class ProposalIdle(NamedTuple):
    """Seconds that the device idles before a step for which drafts are proposed, and before one for
    which none are."""

    proposed: float
    plain: float


class ProposalTerms(NamedTuple):
    """What the choice of a proposal's nodes goes by.

    Attributes:
        num_rows: tokens of the step without drafts.
        idle: of the device.
        plain_seconds: of the step without drafts, its idle time left out; 0.0 if not known.
        most_nodes: of all drafts together, see `ProposalAccount.most_nodes`.
        may_wait: whether to wait for a draft model where that pays.
    """

    num_rows: int
    idle: ProposalIdle
    plain_seconds: float
    most_nodes: int
    may_wait: bool


class IdleTimes:
    """How long the device idles before a step: moving averages in seconds, by the number of
    sequences (one bucket for each power of two).

    Args:
        first: most seconds that the first time counts for.
    """

    def __init__(self, first: float = _FIRST_IDLE) -> None:
        self._first = first
        self._seconds = [0.0] * _MAX_BUCKETS
        self._counts = [0] * _MAX_BUCKETS

    def observe(self, num_sequences: int, seconds: float) -> None:
        """Report a step: its number of sequences, and for how long the device had idled before. A
        single long time counts little: there may have been nothing to do."""
        at = min(num_sequences.bit_length(), _MAX_BUCKETS - 1)
        known = self._counts[at]
        weight = max(_IDLE_WEIGHT, 1.0 / (known + 1))
        most = 2 * self._seconds[at] + 1e-4 if known else self._first
        self._seconds[at] += weight * (min(seconds, most) - self._seconds[at])
        self._counts[at] = known + 1

    def fade(self, num_sequences: int, rest: float) -> None:
        """Brings the time nearer to `rest`: it is long ago that it was observed."""
        at = min(num_sequences.bit_length(), _MAX_BUCKETS - 1)
        self._seconds[at] += _FADING * min(rest - self._seconds[at], 0.0)

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
        launches_ahead: whether the engine launches steps without drafts ahead.
        rehearses: whether the drafter calls `note_rehearsal` at the end of each pause; without
            effect where steps are launched ahead.
        begins_text: whether the pause that ends was begun by a new text, alone: then proposals may
            begin without a rehearsal.
        step_times: of steps without a prompt's chunk, by their tokens.
    """

    def __init__(self) -> None:
        self.launches_ahead, self.rehearses = True, False
        self.step_times: StepTimes = verify_times()
        self._proposal_idle, self._plain_idle = IdleTimes(), IdleTimes()
        self._cost = 0.0  # seconds of a rehearsal before the next step
        # Reports that times do not know yet, each with seconds of a rehearsal before it.
        self._observed: list[tuple[StepReport, float]] = []
        self._num_settled = 0  # of these, whose gains and losses are accounted for
        # Moving average: tokens a second with proposals over those without, as estimated.
        self._gain = _FIRST_GAIN
        self._saved = _TO_LOSE  # steps' worth of time that proposals may lose
        self._paused_for = 0  # steps
        self._next_pause = _MIN_PAUSE
        # What proposals and rehearsals have saved less what they have lost, in steps' worth of
        # time, where the drafter rehearses; and what a rehearsal takes.
        self._balance, self._rehearsal = 0.0, _FIRST_REHEARSAL
        self.begins_text = False

    @property
    def paused(self) -> bool:
        return self._paused_for > 0

    @property
    def ends_pause(self) -> bool:
        """Whether the next step gets a proposal."""
        return self._paused_for <= 1

    @property
    def num_to_sleep(self) -> int:
        """Steps of the pause at which `run_deferred` only counts; 0 where steps are launched
        ahead."""
        return 0 if self.launches_ahead else max(self._paused_for - 1, 0)

    def wake(self, num_steps: int) -> None:
        """Counts steps of the pause at which `run_deferred` was not called."""
        self._paused_for -= num_steps
        self._balance = min(self._balance + num_steps * _LOSS_SHARE, _MOST_SAVED)

    @property
    def is_probing(self) -> bool:
        """Whether the last pause ended in a loss, or no proposal has followed it."""
        return self._next_pause > _MIN_PAUSE

    def set_step_times(self, profile: list[tuple[int, float]], launches_ahead: bool = True) -> None:
        """Sets measured step times; see `core.drafter.CostAware`. Forgets what was observed."""
        self.step_times = verify_times(profile, multiplies=not launches_ahead)
        self.launches_ahead = launches_ahead
        if not launches_ahead:
            self._proposal_idle = IdleTimes(_FIRST_WAIT)

    def idle_of(self, num_sequences: int) -> ProposalIdle:
        """Idle seconds before steps with `num_sequences` sequences."""
        plain = self._plain_idle.of(num_sequences)
        return ProposalIdle(self._proposal_idle.of(num_sequences), plain)

    def terms(self, num_sequences: int, num_rows: int) -> ProposalTerms:
        """Of a proposal for `num_sequences` sequences, for a step of `num_rows` tokens without
        drafts. They change in `run_deferred`, `note_gain` and the calls about texts and
        rehearsals."""
        return ProposalTerms(
            num_rows,
            self.idle_of(num_sequences),
            self.step_times.predict(num_rows),
            self.most_nodes(num_rows),
            not self.is_probing,
        )

    def observe_step(self, report: StepReport) -> None:
        """Notes a report for `run_deferred`: the device may wait now. In a pause only the first
        ones are kept: it is to cost nothing."""
        most = _MOST_KEPT if self.launches_ahead else _FEW_KEPT
        if not self._paused_for or len(self._observed) < most:
            self._observed.append((report, self._cost))
        self._cost = 0.0

    def run_deferred(self) -> None:
        """Takes in what was observed; called once a step while the device works. Where an engine
        waits for that, times take in several steps together, and in a pause all at its end."""
        self._balance = min(self._balance + _LOSS_SHARE, _MOST_SAVED)
        if self._paused_for > 1:
            self._paused_for -= 1
            return
        ended, self._paused_for = self._paused_for, 0
        reports = self._observed
        saved = 0.0
        if not self.launches_ahead:
            saved = sum(self._saved_by(report) for report, _ in reports[self._num_settled :])
        self._num_settled = len(reports)
        if self.launches_ahead or ended or len(reports) >= _TAKEN_TOGETHER:
            for report, before in reports:
                self.step_times.observe(report.num_tokens, report.seconds)
                idle = self._proposal_idle if report.proposed else self._plain_idle
                idle.observe(report.num_sequences, max(report.idle_seconds - before, 0.0))
            self._num_settled = 0
            reports.clear()
        if saved and not self.launches_ahead:
            self._settle(saved)

    def _saved_by(self, report: StepReport) -> float:
        """How many steps without drafts the tokens of a step would have taken beyond the time that
        it took, its idle time included, by average times; 0.0 without a proposal."""
        count = report.num_sequences
        if not report.proposed or not report.num_sampled:
            return 0.0
        idle = self.idle_of(count)
        plain = self.step_times.predict(count) + idle.plain
        if not plain:
            return 0.0
        took = self.step_times.predict(report.num_tokens) + idle.proposed
        return report.num_sampled / count - took / plain

    def _settle(self, saved: float) -> None:
        """Adds to what may be lost, and begins a pause that pays back what was lost beyond it."""
        self._balance = min(max(self._balance + saved, -_MOST_OWED), _MOST_SAVED)
        self._saved = min(self._saved + saved, _MOST_RISKED if self.rehearses else _MOST_SAVED)
        if self._saved < 0.0:
            if self.rehearses:
                self._pause_for_rehearsal()
            else:
                self._paused_for = min(ceil(-self._saved / _LOSS_SHARE), _LONGEST_DEBT)
            self._saved = 0.0

    def note_rehearsal(self, saved: float, num_sequences: int, seconds: float) -> None:
        """Notes what drafts would have saved in the pause that ends: proposals begin again, or the
        pause continues.

        Args:
            saved: steps without drafts, for each step of the pause that was looked at.
            seconds: that it took.
        """
        plain = self.step_times.predict(num_sequences) + self._plain_idle.of(num_sequences)
        took = min(seconds / plain, 1.0) if plain else _FIRST_REHEARSAL
        self._proposal_idle.fade(num_sequences, self._plain_idle.of(num_sequences))
        self._cost = seconds
        self._rehearsal += _IDLE_WEIGHT * (took - self._rehearsal)
        self._balance = max(self._balance - took, -_MOST_OWED)
        if saved > _LEAST_SAVED + _SAVED_PER_OWED * max(-self._balance, 0.0):
            self._saved = max(self._saved, min(_REHEARSAL_WEIGHT * saved, _MOST_SAVED))
            self._next_pause, self._gain = _MIN_PAUSE, max(self._gain, _FIRST_GAIN)
        else:
            self._next_pause = max(self._next_pause, _SHORTEST_FAILED)
            self._pause_for_rehearsal()

    def note_text_recurs(self) -> None:
        """Notes that a text which begins is known: proposals begin without a rehearsal."""
        self._saved = max(self._saved, _TO_LOSE_KNOWN)

    def note_nothing_recurs(self, seconds: float) -> None:
        """Notes that no text has come to what it or another one held before: the pause continues.

        Args:
            seconds: that it took to find out.
        """
        self._cost = seconds
        self._paused_for = max(min(self._next_pause, _LONGEST_UNCHECKED), _SHORTEST_REHEARSED)
        self._next_pause = 2 * self._paused_for

    def _pause_for_rehearsal(self) -> None:
        """Begins a pause, twice as long as the last one, up to one behind which a rehearsal takes
        its share of the time."""
        most = min(self._rehearsal / _TIME_OF_REHEARSALS, _LONGEST_REHEARSED)
        self._paused_for = int(max(min(self._next_pause, most), _SHORTEST_REHEARSED))
        self._next_pause = 2 * self._paused_for

    def begin_text(self, num_running: int) -> None:
        """A prompt has begun: proposals may lose a little for it, divided among all that run. Where
        that pays for a proposal a pause ends. Without effect where steps are launched ahead."""
        if self.launches_ahead:
            return
        self._saved = min(self._saved + _TO_LOSE / num_running, _TO_LOSE)
        idle = self.idle_of(num_running)
        plain = self.step_times.predict(num_running) + idle.plain
        pays = bool(plain) and self._saved >= (idle.proposed - idle.plain) / plain
        if self.rehearses and (pays or num_running == 1):
            self._paused_for, self._next_pause, self.begins_text = 1, _MIN_PAUSE, True
        elif self._paused_for > 1 and pays:
            self._paused_for = 1  # the next call of `run_deferred` takes in what was observed
            self._next_pause = _MIN_PAUSE

    def most_nodes(self, num_rows: int) -> int:
        """Draft nodes of all sequences that may run in a step of `num_rows` tokens without drafts:
        if none is accepted, the step must not lose more than there is to lose. Any number where the
        drafter does not rehearse."""
        if self.launches_ahead or not self.rehearses:
            return MOST_ROWS
        rows = self.step_times.predict(num_rows)
        risk = max(self._saved, _TO_RISK) * (rows + self._plain_idle.of(num_rows))
        for nodes in _DRAFT_SIZES:
            nodes *= num_rows
            if self.step_times.predict(num_rows + nodes) - rows <= risk:
                return nodes
        return 3 * num_rows

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
        if self.rehearses and not self.launches_ahead:
            return
        self._gain += _GAIN_WEIGHT * (gain - self._gain)
        if self._gain < 1.0:  # the next proposal decides whether to go on
            self._gain = 1.0
            self._paused_for = max(self._next_pause, self._paused_for)
            self._next_pause = min(2 * self._next_pause, self._longest_pause(num_rows, idle))
        elif gain > 1.0 and self.is_probing:  # as at the beginning
            self._next_pause, self._gain = _MIN_PAUSE, max(self._gain, _FIRST_GAIN)

    def _longest_pause(self, num_rows: int, idle: ProposalIdle) -> int:
        """Steps of a pause behind which the idle time of one proposal does not count."""
        return self._longest(num_rows, idle.proposed - idle.plain)

    def _longest(self, num_rows: int, cost: float) -> int:
        """Steps of a pause behind which `cost` seconds do not count."""
        seconds = self.step_times.predict(num_rows)
        if not seconds:
            return _PAUSE_UNKNOWN
        share = cost / (seconds + self._plain_idle.of(num_rows))
        return int(min(max(share / _PROBE_SHARE, _MIN_PAUSE), _MAX_PAUSE))
