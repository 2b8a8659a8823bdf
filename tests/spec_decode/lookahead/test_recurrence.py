"""Whether the end of a text has occurred before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.spec_decode.lookahead.recurrence import GRAM, GramFilter, recurs

SALT, OTHER_SALT = (1 << 60) + 7, (1 << 60) + 8


def filters(text: np.ndarray | None = None, *, place: int = 0) -> list[GramFilter]:
    """The three of a cache, of which one knows a text."""
    found = [GramFilter(4096) for _ in range(3)]
    if text is not None:
        found[place].add(text, SALT)
    return found


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@given(
    known=st.lists(st.integers(0, 50_000), min_size=8, max_size=60), end=st.integers(6, 60),
    place=st.integers(0, 2),
)  # fmt: skip
def test_what_a_filter_was_shown_is_known(known: list[int], end: int, place: int) -> None:
    text = np.array(known, np.int32)
    end = min(end, len(text))
    assert recurs(text[:end][-20:], 20, filters(text, place=place), SALT)


def test_new_text_is_not_known_but_for_few() -> None:
    rng = np.random.default_rng(0)
    known = filters(rng.integers(0, 50_000, 4096).astype(np.int32))
    texts = rng.integers(0, 50_000, (1000, 64)).astype(np.int32)
    assert sum(recurs(text, 20, known, SALT) for text in texts) < 20
    assert sum(recurs(text, 1, known, SALT) for text in texts) < 200, "one gram alone"


def test_of_a_new_output_as_many_grams_as_it_has_tokens() -> None:
    known = filters(tokens(1, 2, 3, 4, 5, 6, 7, 8))
    text = tokens(90, 91, 92, 1, 2, 3, 4)
    assert recurs(text, 1, known, SALT)
    assert not recurs(text, 2, known, SALT)
    assert recurs(tokens(*text, 5), 2, known, SALT)
    assert recurs(tokens(*text, 5, 6), 20, known, SALT)


def test_namespaces_do_not_know_each_other() -> None:
    text = np.arange(40, dtype=np.int32)
    assert not recurs(text[:20], 20, filters(text), OTHER_SALT)


def test_a_filter_forgets_all() -> None:
    text = np.arange(40, dtype=np.int32)
    known = filters(text)
    known[0].clear()
    assert not recurs(text[:20], 20, known, SALT)


def test_a_text_that_repeats_itself_recurs() -> None:
    loop = tokens(*range(100, 109))
    assert not recurs(tokens(1, *loop, *loop[:7]), 20, filters(), SALT)
    assert recurs(tokens(1, *loop, *loop[:8]), 20, filters(), SALT)
    assert recurs(np.full(9, 3, np.int32), 20, filters(), SALT)
    assert not recurs(np.full(8, 3, np.int32), 20, filters(), SALT)


def test_short_texts_do_not() -> None:
    for size in range(GRAM):
        assert not recurs(np.arange(size, dtype=np.int32), 1, filters(), SALT)
