"""One step of beam search on plain numbers."""

from __future__ import annotations

from hetero_llm.scheduler.beam_search import BeamGroup, advance


def test_candidates_of_equal_probability_share_a_rank() -> None:
    group = BeamGroup(
        width=4, num_prompt_tokens=1, max_total_tokens=9, length_penalty=1.0, early_stopping=False
    )
    candidates = ((5, -1.0), (7, -1.0), (8, -2.0), (9, -2.0))
    kept = advance(
        group, [([1], 0.0)], [candidates], frozenset(), lambda item: False, lambda item: None
    )
    assert [(item.token, item.rank) for item in kept] == [(5, 1), (7, 1), (8, 3), (9, 3)]
