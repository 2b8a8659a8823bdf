"""Drafts under a grammar: refused nodes are cut, forced tokens are added."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.structured_output.compiler import GrammarCompiler
from hetero_llm.structured_output.draft_matcher import DraftMatcher
from tests.helpers.tokenizers import byte_level

EOS = 2
COMPILER = GrammarCompiler(byte_level().vocabulary(300, (EOS,)))


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def opened(choice: list[str], output: str = "", after: list[int] | None = None) -> DraftMatcher:
    params = StructuredOutputsParams(choice=choice, begins_after=after or [])
    return COMPILER.open_as(DraftMatcher, COMPILER.grammar(params), ids(output))


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """The path to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert -1 <= parent < len(found), "parents come first"
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return set(found)


def chain(text: str) -> tuple[list[int], list[int]]:
    return ids(text), list(range(-1, len(text) - 1))


def prefixes(*texts: str) -> set[tuple[int, ...]]:
    return {tuple(ids(text)[: end + 1]) for text in texts for end in range(len(text))}


@pytest.mark.parametrize(
    ("choice", "output", "draft", "expected", "forced"),
    [
        (["abc", "abd"], "", "", ["ab"], 2),
        (["abc", "abd"], "", "abc", ["abc"], 2),
        (["abc", "abd"], "", "ax", ["ab"], 2),
        (["abc", "abd"], "ab", "", [], 0),
        (["abc", "abd"], "ab", "d", ["d"], 0),
        (["abc", "abd"], "ab", "x", [], 0),
        (["axyz", "bxyz"], "", "b", ["bxyz"], 3),
        (["axyz", "bxyz"], "", "bxq", ["bx"], 0),
    ],
)
def test_a_chain(
    choice: list[str], output: str, draft: str, expected: list[str], forced: int
) -> None:
    matcher = opened(choice, output)
    for _ in range(2):  # nothing is left behind by the first call
        tokens, parents, found = matcher.constrained(*chain(draft), MAX_NODES)
        assert paths(tokens, parents) == prefixes(*expected)
        assert found == forced


def test_the_best_nodes_stay() -> None:
    tokens, parents, forced = opened(["axyz", "bxyz"]).constrained(ids("ba"), [-1, -1], 4)
    assert paths(tokens, parents) == prefixes("bxyz") and forced == 3


def test_a_grammar_that_begins_within_a_draft() -> None:
    matcher = opened(["yes"], "ab", after=ids("</"))
    tokens, parents, forced = matcher.constrained(*chain("c</yn"), MAX_NODES)
    assert paths(tokens, parents) == prefixes("c</y") and forced == 0
    tokens, parents, forced = matcher.constrained(*chain("c</"), MAX_NODES)
    assert paths(tokens, parents) == prefixes("c</yes") and forced == 3
    assert matcher.constrained(*chain("cd"), MAX_NODES)[0] == ids("cd")


def test_nothing_is_drafted_behind_a_complete_output() -> None:
    assert opened(["yes"], "yes").constrained([], [], MAX_NODES)[0] in ([], [EOS])
    tokens, _, _ = opened(["yes"], "ye").constrained([*ids("s"), EOS, 7], [-1, 0, 1], MAX_NODES)
    assert tokens[:1] == ids("s") and 7 not in tokens


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4, unique=True),
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), max_size=20),
    st.integers(1, MAX_NODES),
)
def test_any_tree(choice: list[str], draft: list[tuple[int, str]], most: int) -> None:
    tokens, parents = [], []
    taken: set[tuple[int, int]] = set()
    for place, letter in draft:
        parent = place % (len(tokens) + 1) - 1
        if (parent, ids(letter)[0]) not in taken:
            taken.add((parent, ids(letter)[0]))
            tokens += ids(letter)
            parents.append(parent)
    found, above, forced = opened(choice).constrained(tokens, parents, most)
    assert len(found) <= most and forced <= len(found)
    allowed = prefixes(*choice)
    texts = {tuple(ids(text)) for text in choice}
    kept = {path for path in paths(found, above) if path[-1] != EOS}
    assert kept <= allowed
    if most == MAX_NODES:  # all that was drafted and may follow is still there
        assert paths(tokens, parents) & allowed <= kept
    alone = os.path.commonprefix(sorted(texts))  # what all choices begin with, up to a complete one
    alone = alone[: min(len(alone), *map(len, texts))]
    assert len(kept) == most or kept >= {alone[: end + 1] for end in range(len(alone))}
