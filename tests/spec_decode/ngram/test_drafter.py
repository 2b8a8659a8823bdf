"""Prompt lookup drafts where that pays, and pauses where it does not."""

from __future__ import annotations

import pytest

from hetero_llm import SamplingParams
from hetero_llm.core.drafter import StepReport
from hetero_llm.spec_decode.ngram.drafter import PromptLookupDrafter
from tests.helpers.harness import make_request, make_sequence

PROFILE = [(1, 4.0e-3), (8, 4.2e-3), (64, 5.0e-3)]


def run(texts: list[int], *, idle: float) -> tuple[int, int]:
    """Steps of a sequence that emits these tokens, as its drafts are right.
    Returns the number of steps with a proposal, and that of all."""
    drafter = PromptLookupDrafter(width=4096, smallest=2, largest=4, num_tokens=3)
    drafter.set_step_times(PROFILE)
    sequence = make_sequence(make_request("a", texts[:4], SamplingParams()))
    at, proposals, steps = 4, 0, 0
    while at < len(texts) - 8:
        steps += 1
        accepted = num_nodes = 0
        asks = not drafter.idle
        if asks:
            proposals += 1
            draft = drafter.propose([sequence], [8], 1)
            num_nodes = int(draft.counts[0])
            while accepted < num_nodes and draft.token_ids[accepted] == texts[at + accepted]:
                accepted += 1
        drafter.observe_step(
            StepReport(1, 1 + num_nodes, 4.2e-3 if num_nodes else 4e-3, idle if asks else 0.0, asks)
        )
        drafter.run_deferred()
        sequence.token_ids.extend(texts[at : at + accepted + 1])
        at += accepted + 1
    return proposals, steps


def test_it_never_pauses_where_its_drafts_are_right() -> None:
    proposals, steps = run([5, 6, 7, 8, 9] * 200, idle=2e-4)
    assert proposals == steps < 300


@pytest.mark.parametrize("idle", [2e-4, 1e-3])
def test_it_pauses_where_nothing_is_found(idle: float) -> None:
    proposals, steps = run(list(range(1000)), idle=idle)
    assert steps > 900 and proposals < steps / (0.5 * idle / 4e-3 / 0.005)


def test_it_pauses_where_its_drafts_are_wrong() -> None:
    # The pair (1, 2) comes again and again, each time with other tokens behind it.
    proposals, steps = run([t for n in range(400) for t in (1, 2, 10 + n)], idle=4e-4)
    assert proposals < steps / 3


def test_it_begins_again_when_text_repeats() -> None:
    plain = list(range(600))
    proposals, steps = run([*plain, *[5, 6, 7, 8, 9] * 200], idle=4e-4)
    late, all_late = run([5, 6, 7, 8, 9] * 200, idle=4e-4)
    assert steps - 600 < all_late + 40, "a pause at most longer"
    assert proposals > late / 2
