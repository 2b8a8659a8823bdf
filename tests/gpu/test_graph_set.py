"""Which steps have a graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.gpu.graph_set import MAX_GRAPH_TOKENS, step_buckets, token_buckets


@given(st.integers(1, 4096), st.booleans())
def test_every_step_that_may_be_captured_has_a_bucket(max_tokens: int, prompts: bool) -> None:
    buckets = step_buckets(16, max_tokens, most_drafted_tokens=max_tokens, prompts=prompts)
    captured = (*buckets.tokens, *buckets.prompts)
    assert list(captured) == sorted(set(captured))
    most = 2048 if prompts else MAX_GRAPH_TOKENS
    assert buckets.most_tokens == captured[-1] >= min(max_tokens, most)
    assert len(captured) == 1 or captured[-2] < max_tokens, "no graph that no step needs"
    assert set(buckets.waiting) <= set(buckets.tokens)
    assert buckets.decode == token_buckets(16)
    assert buckets.verify == buckets.tokens


@pytest.mark.parametrize(("max_tokens", "larger"), [(512, ()), (513, (640,)), (700, (640, 768))])
def test_larger_steps_are_captured_where_asked(max_tokens: int, larger: tuple[int, ...]) -> None:
    assert step_buckets(8, max_tokens, prompts=True).prompts == larger
    assert step_buckets(8, max_tokens).prompts == ()


@given(st.integers(1, 4096), st.integers(1, 128))
def test_few_sizes_serve_steps_of_forced_tokens(max_tokens: int, most_drafted: int) -> None:
    most = min(most_drafted, max_tokens)
    buckets = step_buckets(16, max_tokens, most_drafted_tokens=most)
    assert set(buckets.verify) <= set(buckets.tokens)
    if most == 128:
        assert buckets.verify[-1] == 128
    if max_tokens > 128:
        assert len(buckets.verify) <= 6


def test_without_drafts_no_step_verifies_any() -> None:
    assert step_buckets(16, 4096).verify == ()
