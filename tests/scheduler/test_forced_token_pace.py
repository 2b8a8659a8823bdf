"""When forced tokens are looked for: by their share, and by measured times."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from hetero_llm.scheduler.forced_token_pace import (
    LONGEST_PAUSE,
    PAUSED_STEPS,
    RETRIED_STEPS,
    TRIED_STEPS,
    ForcedTokenPace,
    PaceByShare,
    PaceByTimes,
)

Seconds = Callable[[int], float]


class Steps:
    """Runs steps of a batch as the engine does.

    Args:
        looked: seconds of a step in which forced tokens are looked for, by its sequences.
        plain: the same without drafts.
        tokens: of a sequence and a step in which they are looked for.
    """

    def __init__(
        self, pace: ForcedTokenPace, looked: Seconds, plain: Seconds, tokens: float = 2.0
    ) -> None:
        self._pace, self._looked, self._plain, self.tokens = pace, looked, plain, tokens
        self.seconds = self.num_tokens = 0.0
        self.kinds: list[bool] = []

    def run(self, count: int, steps: int) -> list[bool]:
        """Which steps looked."""
        begun = len(self.kinds)
        for _ in range(steps):
            looked = not self._pace.paused
            sampled = round(count * self.tokens) if looked else count
            if looked:
                self._pace.looked(count, sampled - count)
            self._pace.launched(count)
            seconds = (self._looked if looked else self._plain)(count)
            self._pace.observe_step(count, seconds, sampled, looked=looked)
            self.seconds += seconds
            self.num_tokens += sampled
            self.kinds.append(looked)
        return self.kinds[begun:]


def gpu_plain(count: int) -> float:
    """8B on an H200, as measured: 3.8 ms at batch 1, 5.9 at 128."""
    return 3.8e-3 + 16.5e-6 * count


def gpu_looked(count: int) -> float:
    """With 2 tokens a sequence, and a slow host that takes 80 us for each."""
    return 4.1e-3 + 33e-6 * count + 80e-6 * count


@pytest.mark.parametrize(
    ("forced", "number", "pause"), [(1, 1, 0), (0, 1, 256), (1, 9, 0), (1, 10, 256), (9, 17, 0)]
)
def test_rare_forced_tokens_are_not_looked_for(forced: int, number: int, pause: int) -> None:
    pace = PaceByShare()
    for _ in range(TRIED_STEPS):
        assert not pace.paused
        pace.looked(number, forced)
        pace.launched(number)
    steps = 0
    while pace.paused:
        pace.launched(number)
        steps += 1
    assert steps == max(pause - 1, 0)  # the launch of the trial's last step counts


@pytest.mark.parametrize("count", [1, 8, 24])
def test_a_batch_that_gains_looks_on(count: int) -> None:
    steps = Steps(PaceByTimes(), gpu_looked, gpu_plain)
    kinds = steps.run(count, 4000)
    # It is timed without drafts once, and looks in all other steps.
    assert kinds.count(False) <= RETRIED_STEPS
    assert kinds[TRIED_STEPS + RETRIED_STEPS :].count(False) == 0


@pytest.mark.parametrize(("count", "tokens"), [(64, 2.0), (128, 1.5), (8, 1.05), (1, 1.0)])
def test_a_batch_that_loses_seldom_looks(count: int, tokens: float) -> None:
    steps = Steps(PaceByTimes(), gpu_looked, gpu_plain, tokens)
    kinds = steps.run(count, 20_000)
    assert kinds.count(True) <= TRIED_STEPS + 1 + 9 * (RETRIED_STEPS + 1)
    plain = count * len(kinds) / (gpu_plain(count) * len(kinds))
    assert steps.num_tokens / steps.seconds > 0.99 * plain
    longest = max(len(run) for run in "".join("x" if k else "-" for k in kinds).split("x"))
    assert PAUSED_STEPS < longest <= LONGEST_PAUSE


def test_a_smaller_batch_ends_the_pause_of_a_larger_one() -> None:
    steps = Steps(PaceByTimes(), gpu_looked, gpu_plain)
    steps.run(128, 4000)
    assert steps.run(70, 40).count(True) <= RETRIED_STEPS + 1
    kinds = steps.run(4, 200)
    assert kinds.count(True) >= 180
    assert steps.run(128, 1000).count(True) < 2 * TRIED_STEPS + RETRIED_STEPS


def test_forced_tokens_that_come_later_are_found() -> None:
    steps = Steps(PaceByTimes(), gpu_looked, gpu_plain, tokens=1.0)
    steps.run(2, 3000)
    steps.tokens = 2.0
    kinds = steps.run(2, LONGEST_PAUSE + TRIED_STEPS)
    assert all(kinds[-TRIED_STEPS:])


def test_old_times_do_not_begin_a_pause() -> None:
    """Contexts grow, and so do both times; the one without drafts is from long ago."""
    now = [1.0]
    steps = Steps(
        PaceByTimes(), lambda count: 1.5 * gpu_plain(count) * now[0],
        lambda count: gpu_plain(count) * now[0],
    )  # fmt: skip
    steps.run(4, 1500)
    now[0] = 1.4
    assert steps.run(4, 2500).count(False) <= RETRIED_STEPS


@pytest.mark.parametrize("seed", range(4))
def test_noise_costs_little(seed: int) -> None:
    rng = Random(seed)

    def noisy(seconds: Seconds) -> Seconds:
        return lambda count: (
            seconds(count) * rng.uniform(0.9, 1.2) * (6.0 if rng.random() < 0.02 else 1.0)
        )

    for count, gains in ((1, True), (100, False)):
        steps = Steps(PaceByTimes(), noisy(gpu_looked), noisy(gpu_plain))
        kinds = steps.run(count, 6000)
        assert kinds.count(gains) >= 0.95 * len(kinds)
