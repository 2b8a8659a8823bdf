"""Which occurrences of a marker's text are the marker."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.server.regions.text_source import TextSource

MARKER, OTHER, DROPPED = "<think>", "</think>", "<|im_end|>"
IDS = {MARKER: 1, OTHER: 2}
DROP = {3: DROPPED}


def decode(token_ids: list[int]) -> str:
    texts = {one: text for text, one in IDS.items()} | DROP
    return "".join(texts.get(one) or chr(one) for one in token_ids)


def source() -> TextSource:
    return TextSource(IDS, DROP, decode)


def real(found: TextSource) -> list[bool]:
    """Of each marker in the text whether it is real."""
    places = [
        (at, marker)
        for marker in IDS
        for at in range(len(found.text))
        if found.text.startswith(marker, at)
    ]
    return [found.is_real(marker, at) for at, marker in sorted(places)]


def spelled(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_a_marker_is_its_token() -> None:
    found = source()
    found.feed(f"a{MARKER}b", [ord("a"), 1, ord("b")])
    assert real(found) == [True]


def test_a_marker_spelled_with_other_tokens_is_text() -> None:
    found = source()
    found.feed(f"a{MARKER}b", spelled(f"a{MARKER}b"))
    assert real(found) == [False]


def test_both_in_one_piece() -> None:
    """The order of the tokens tells which is which."""
    found = source()
    text = f"{MARKER}x{MARKER}y{MARKER}{OTHER}"
    found.feed(text, [*spelled(f"{MARKER}x"), 1, *spelled(f"y{MARKER}"), 2])
    assert real(found) == [False, True, False, True]


def test_what_is_no_token_of_the_model_is_always_a_marker() -> None:
    found = TextSource({}, {}, decode)
    found.feed(MARKER, spelled(MARKER))
    assert found.is_real(MARKER, 0) and not found.has_token(MARKER)


def test_special_tokens_are_dropped() -> None:
    found = source()
    found.feed(f"a{DROPPED}b{DROPPED}", [ord("a"), 3, ord("b"), 3])
    found.feed(f"c{DROPPED}", spelled(f"c{DROPPED}"))
    assert found.text == f"abc{DROPPED}"


def test_a_token_whose_text_never_comes() -> None:
    """As that of the end of a sequence, or of what stands behind a stop string."""
    found = source()
    found.feed("a", [ord("a"), 3, 1])
    found.ended = True
    assert found.text == "a"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 2, 3, "s1", "s2", "x"]), max_size=8),
    st.lists(st.integers(0, 9), max_size=60),
    st.integers(0, 3),
)
def test_pieces_do_not_matter(words: list[object], cuts: list[int], lag: int) -> None:
    """Any cutting of tokens and any lag of the text gives the same markers."""
    tokens: list[int] = []
    expected: list[bool] = []
    for word in words:
        if isinstance(word, int):
            tokens.append(word)
            expected += [True] if word != 3 else []
        else:
            tokens += spelled({"s1": MARKER, "s2": OTHER, "x": "x"}[str(word)])
            expected += [False] if word != "x" else []
    texts = [decode([one]) for one in tokens]
    found, seen = source(), 0
    held: list[str] = []
    sizes = itertools.chain(cuts, itertools.repeat(3))
    while seen < len(tokens):
        size = next(sizes)
        new = tokens[seen : seen + size]
        held += texts[seen : seen + size]
        seen += size
        keep = min(lag, len(held)) if seen < len(tokens) else 0
        found.feed("".join(held[: len(held) - keep]), new)
        held = held[len(held) - keep :]
    assert real(found) == expected
    assert DROPPED not in found.text
