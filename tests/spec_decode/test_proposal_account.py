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


PROFILE = [(1, 1e-3), (2, 1.2e-3), (8, 2e-3), (64, 9e-3)]


def synchronous() -> ProposalAccount:
    """Of an engine in which plain steps wait 0.1 ms, and a proposal takes 0.2 ms more."""
    account = ProposalAccount()
    account.set_step_times(PROFILE, False)
    for _ in range(60):
        report_plain(account)
        report(account, num_sampled=2)
    return account


def report(account: ProposalAccount, num_tokens: int = 1, num_sampled: int = 1) -> None:
    """A step with a proposal for one sequence."""
    seconds = account.step_times.predict(num_tokens)
    account.observe_step(StepReport(1, num_tokens, seconds, 3e-4, True, num_sampled))
    account.run_deferred()


def report_plain(account: ProposalAccount) -> None:
    account.observe_step(StepReport(1, 1, account.step_times.predict(1), 1e-4, False, 1))
    account.run_deferred()


def test_all_that_a_synchronous_engine_waits_for_a_proposal_counts() -> None:
    account = synchronous()
    assert account.idle_of(1) == pytest.approx((3e-4, 1e-4), rel=0.1)
    for _ in range(100):
        account.observe_step(StepReport(1, 1, 1e-3, 8e-4, True, 2))
        account.run_deferred()
    assert account.idle_of(1) == pytest.approx((8e-4, 1e-4), rel=0.1)


def test_a_rehearsal_is_no_idle_time_of_the_step_behind_it() -> None:
    account = synchronous()
    account.rehearses = True
    account.note_rehearsal(0.0, 1, 5e-4)
    account.observe_step(StepReport(1, 1, 1e-3, 6e-4, False, 1))
    while account.paused:
        account.run_deferred()
    assert account.idle_of(1).plain == pytest.approx(1e-4, rel=0.1)


def test_what_proposals_lose_is_paid_back_by_pauses_whatever_was_estimated() -> None:
    account = synchronous()
    proposals = steps = 0
    for _ in range(2000):
        steps += 1
        if account.paused:
            report_plain(account)
            continue
        account.note_gain(1.5, 1, account.idle_of(1))
        report(account)
        proposals += 1
    lost = proposals * 0.2 / 1.1
    assert 0.005 * steps < lost < 0.02 * steps


def test_drafts_that_pay_are_not_held_back_by_single_misses() -> None:
    account = synchronous()
    for _ in range(200):
        for num_sampled in (1, 4):
            assert not account.paused
            report(account, 2, num_sampled)


def test_a_new_text_is_looked_up_at_once_and_may_not_lose_more() -> None:
    account = synchronous()
    for _ in range(400):
        report_plain(account) if account.paused else report(account)
    while not account.paused:
        report(account)
    account.begin_text(1)
    account.run_deferred()
    assert not account.paused
    proposals = 0
    while not account.paused:
        report(account)
        proposals += 1
    assert 1 <= proposals <= 4, "half a step's worth of time"


def test_many_running_sequences_share_what_a_new_text_brings() -> None:
    account = synchronous()
    while not account.paused:
        report(account)
    account.begin_text(64)
    account.run_deferred()
    assert account.paused


def test_a_rehearsal_decides_whether_a_pause_goes_on() -> None:
    account = synchronous()
    for _ in range(400):
        report_plain(account) if account.paused else report(account)
    account.note_rehearsal(0.0, 1, 2e-5)
    assert account.paused
    while account.paused:
        report_plain(account)
    account.note_rehearsal(1.0, 1, 2e-5)
    assert not account.paused and not account.is_probing


def rehearsing(*, launches_ahead: bool = False) -> ProposalAccount:
    account = synchronous()
    account.set_step_times(PROFILE, launches_ahead)
    account.rehearses = True
    report_plain(account)
    return account


def run_out(account: ProposalAccount) -> None:
    """Proposals that find nothing, until a pause."""
    while not account.paused:
        report(account)


def test_pauses_between_rehearsals_get_longer() -> None:
    account = rehearsing()
    run_out(account)
    pauses = []
    for _ in range(6):
        pauses.append(account.num_to_sleep)
        account.wake(account.num_to_sleep)
        account.run_deferred()
        assert not account.paused
        account.note_rehearsal(0.0, 1, 2e-4)
    assert pauses[0] < 10 < pauses[1] < pauses[2] <= 128
    assert min(pauses[3:]) > 30, "a rehearsal of a fifth of a step, every forty"


def test_where_nothing_recurs_nothing_is_rehearsed() -> None:
    account = rehearsing()
    run_out(account)
    for _ in range(4):
        account.wake(account.num_to_sleep)
        account.run_deferred()
        account.note_nothing_recurs(1e-5)
        assert 7 <= account.num_to_sleep <= 16


def test_the_more_is_owed_the_more_a_rehearsal_has_to_show() -> None:
    account = rehearsing()
    account.note_rehearsal(0.3, 1, 1e-5)
    assert not account.paused
    for _ in range(3):
        account.note_rehearsal(0.9, 1, 1e-5)
        report(account, 8)  # eight tokens, one accepted
        report(account, 8)
        run_out(account)
    account.note_rehearsal(0.3, 1, 1e-5)
    assert account.paused
    account.wake(account.num_to_sleep)
    account.run_deferred()
    account.note_rehearsal(0.9, 1, 1e-5)
    assert not account.paused


def test_a_draft_risks_no_more_than_there_is_to_lose() -> None:
    account = rehearsing()
    account.set_step_times([*PROFILE[:2], (4, 1.4e-3), (8, 2e-3), (16, 3.2e-3), (64, 9e-3)], False)
    report_plain(account)
    run_out(account)
    few = account.most_nodes(1)
    account.wake(account.num_to_sleep)
    account.run_deferred()
    account.note_rehearsal(0.9, 1, 1e-5)
    some = account.most_nodes(1)
    for _ in range(10):
        report(account, 8, 8)
    assert few < some < account.most_nodes(1)


def test_a_text_alone_is_checked_at_its_beginning() -> None:
    account = rehearsing()
    for _ in range(5):
        report(account, 8, 8)
    account.begin_text(1)
    assert account.paused and account.ends_pause and account.begins_text
    account.run_deferred()
    assert not account.paused


def test_an_engine_that_launches_ahead_neither_sleeps_nor_cuts_drafts() -> None:
    account = rehearsing(launches_ahead=True)
    nodes = account.most_nodes(1)
    account.begin_text(1)
    assert not account.paused and not account.begins_text
    account.pause()
    assert account.paused and account.num_to_sleep == 0
    assert account.most_nodes(1) == nodes > 1000


def test_an_engine_that_launches_ahead_pays_no_losses_back() -> None:
    """There estimates alone decide: what a batch loses at its beginning it gains later."""
    account = ProposalAccount()
    account.set_step_times(PROFILE, True)
    for _ in range(100):
        report(account)
    account.begin_text(1)
    account.run_deferred()
    assert not account.paused
