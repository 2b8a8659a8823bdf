from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.spec_decode.ngram.prompt_lookup import propose_ngrams


def propose(text, rows, limits, smallest, largest, num_tokens) -> list[list[int]]:
    """Drafted tokens of the sequences at rows: (first, end)."""
    count = len(rows)
    firsts, ends = np.array(rows, np.int64).reshape(count, 2).T.copy()
    tokens, parents, kind = np.full((3, count, 63), -7, np.int32)
    survival = np.full((count, 63), -7, np.float32)
    counts = np.full(count, -7, np.int32)
    propose_ngrams(
        np.array(text, np.int32),
        firsts,
        ends,
        np.array(limits, np.int32),
        smallest,
        largest,
        num_tokens,
        tokens,
        parents,
        survival,
        kind,
        counts,
    )
    for i, n in enumerate(counts.tolist()):
        assert parents[i, :n].tolist() == list(range(-1, n - 1))
        assert (kind[i, :n] == -1).all() and (tokens[i, n:] == -7).all()
        assert (survival[i, :n] > 0).all() and (np.diff(survival[i, :n]) <= 0).all()
        assert n == 0 or survival[i, 0] < 1
    return [tokens[i, :n].tolist() for i, n in enumerate(counts.tolist())]


def twin(text: list[int], smallest: int, largest: int, limit: int) -> list[int]:
    for size in range(largest, smallest - 1, -1):
        gram = text[len(text) - size :]
        if len(gram) < size or -1 in gram:
            continue
        for after in range(len(text) - 1, size - 1, -1):
            if text[after - size : after] == gram:
                tokens = text[after : after + max(limit, 0)]
                return tokens[: tokens.index(-1)] if -1 in tokens else tokens
    return []


def some_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).choice([0, 0, 0, 0, 1, 1, 1, 2, -1], count).tolist()


TOKENS = st.one_of(
    st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, -1]), max_size=60),
    st.builds(some_tokens, st.integers(0, 10**6), st.integers(0, 100)),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(TOKENS, st.integers(-1, 70)), max_size=4),
    st.integers(1, 4),
    st.integers(0, 8),
    st.integers(0, 70),
)
def test_drafts_are_the_twins(sequences, smallest, more, num_tokens):
    text: list[int] = []
    rows, limits, expected = [], [], []
    largest = smallest + more
    for tokens, limit in sequences:
        rows.append((len(text), len(text) + len(tokens)))
        limits.append(limit)
        text += tokens
        expected.append(twin(tokens, smallest, largest, min(limit, num_tokens, 63)))
    assert propose(text, rows, limits, smallest, largest, num_tokens) == expected


def test_the_longest_match_wins_over_a_newer_one():
    text = [1, 2, 3, 10, 11, 9, 3, 20, 21, 1, 2, 3]
    assert propose(text, [(0, 12)], [63], 1, 3, 2) == [[10, 11]]
    assert propose(text, [(0, 12)], [63], 1, 1, 2) == [[20, 21]]


def test_the_newest_occurrence_wins_and_may_overlap_the_end():
    assert propose([1, 2, 5, 6, 1, 2, 7, 8, 1, 2], [(0, 10)], [63], 2, 4, 3) == [[7, 8, 1]]
    assert propose([4, 4, 4, 4, 4, 4], [(0, 6)], [63], 2, 3, 7) == [[4]]


def test_a_match_may_begin_inside_one_that_fails():
    tail = [2, 0, 0, 0, 1, 0, 0]
    text = [*tail, 0, 1, 0, 0, 5, *tail]
    assert propose(text, [(0, len(text))], [3], 1, 7, 7) == [[0, 1, 0]]
    assert propose(text, [(0, len(text))], [3], 1, 6, 7) == [[5, 2, 0]]


def test_nothing_is_drafted_across_a_separator():
    assert propose([1, 2, -1, 3, 1, 2], [(0, 6)], [63], 1, 2, 5) == [[]]
    assert propose([1, 2, 3, -1, 1, 2], [(0, 6)], [63], 1, 2, 5) == [[3]]
    assert propose([2, 3, 1, -1], [(0, 4)], [63], 1, 2, 5) == [[]]
