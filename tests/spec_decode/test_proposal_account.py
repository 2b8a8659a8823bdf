"""Idle times, gains and pauses."""

from __future__ import annotations

import pytest

from hetero_llm.core.drafter import StepReport
from hetero_llm.spec_decode.proposal_account import IdleTimes, ProposalAccount, ProposalIdle

IDLE = ProposalIdle(3e-4, 0.0)


def test_idle_times_are_kept_by_the_number_of_sequences() -> None:
    idle = IdleTimes()
    assert idle.of(8) == 0.0
    for _ in range(50):
        idle.observe(1, 1e-4)
        idle.observe(32, 6e-4)
    assert [idle.of(count) for count in (1, 2, 32, 63, 500)] == pytest.approx(
        [1e-4, 1e-4, 6e-4, 6e-4, 6e-4]
    )
    idle.observe(32, 30.0)
    assert idle.of(32) < 8e-4, "there was nothing to do for half a minute"


def gains(account: ProposalAccount, gain: float, steps: int) -> int:
    """Steps with a proposal of this gain each, of which paused ones get none; how many got one."""
    proposals = 0
    for _ in range(steps):
        account.run_deferred()
        if not account.paused:
            proposals += 1
            account.note_gain(gain, 8, IDLE)
    return proposals


def test_who_loses_pauses_for_longer_and_longer_and_tries_again() -> None:
    account = ProposalAccount()
    account.set_step_times([(1, 3e-3), (8, 4e-3), (64, 5e-3)])
    assert gains(account, 1.2, 50) == 50
    assert gains(account, 0.9, 50) < 20
    assert account.is_probing
    assert 4 <= gains(account, 0.9, 100) <= 8, "0.5% of the time: every fifteenth step"
    assert gains(account, 1.2, 100) >= 80
    assert not account.is_probing


def test_a_loss_beside_larger_gains_is_no_reason_to_pause() -> None:
    account = ProposalAccount()
    for _ in range(100):
        for gain in (0.93, 1.4):
            assert gains(account, gain, 1) == 1


def test_steps_are_reported_to_what_they_were() -> None:
    account = ProposalAccount()
    account.observe_step(StepReport(4, 9, 5e-3, 2e-4, True))
    account.observe_step(StepReport(4, 4, 4e-3, 0.0, False))
    assert account.idle_of(4) == (0.0, 0.0)
    account.run_deferred()
    assert account.idle_of(4) == pytest.approx((2e-4, 0.0))
    assert account.step_times.predict(4) == 4e-3
    assert account.step_times.predict(9) == 5e-3
