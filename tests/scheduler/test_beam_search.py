"""One step of beam search on plain numbers."""

from __future__ import annotations

import math

import pytest

from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.scheduler.beam_search import BeamGroup, Hypothesis, advance, best_sequences
from tests.helpers.harness import make_request, make_sequence


def test_candidates_of_equal_probability_share_a_rank() -> None:
    group = BeamGroup(
        width=4, num_prompt_tokens=1, max_total_tokens=9, length_penalty=1.0, early_stopping=False
    )
    candidates = ((5, -1.0), (7, -1.0), (8, -2.0), (9, -2.0))
    kept = advance(
        group, [([1], 0.0)], [candidates], frozenset(), lambda item: False, lambda item: None
    )
    assert [(item.token, item.rank) for item in kept] == [(5, 1), (7, 1), (8, 3), (9, 3)]


@pytest.mark.parametrize(
    ("penalty", "normalized"),
    [(1e308, 0.0), (10**6, 0.0), (-1e308, -math.inf), (-1074.0, -math.inf)],
)
def test_powers_that_are_no_floats_end_no_engine(penalty: float, normalized: float) -> None:
    group = BeamGroup(
        width=1,
        num_prompt_tokens=1,
        max_total_tokens=9,
        length_penalty=penalty,
        early_stopping=False,
    )
    before = ([1, 4, 4], -2.0)
    advance(group, [before], [((7, -1.0),)], frozenset((7,)), lambda item: False, lambda item: None)
    assert [h.normalized_score for h in group.hypotheses] == [normalized]
    advance(group, [before], [((5, -1.0),)], frozenset((7,)), lambda item: False, lambda item: None)
    assert not group.improvable


@pytest.mark.parametrize(("min_tokens", "reason"), [(2, "length"), (1, "stop")])
def test_a_stop_token_that_min_tokens_forbids_ends_no_beam(min_tokens: int, reason: str) -> None:
    """A grammar may allow nothing else; the beam then ends by its length."""
    params = SamplingParams(
        temperature=0.0,
        best_of=2,
        use_beam_search=True,
        max_tokens=2,
        min_tokens=min_tokens,
        stop_token_ids=[7],
    )
    request = make_request("0", [5, 6], params)
    group = BeamGroup.of(request)
    group.hypotheses.append(Hypothesis([5, 6, 9, 7], -1.0, -0.5, None))
    (best,) = best_sequences(request, group, [make_sequence(request)])
    assert best.finish_reason is not None and best.finish_reason.value == reason
    assert best.stop_reason == (7 if reason == "stop" else None)
