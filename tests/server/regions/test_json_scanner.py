"""The incremental scanner against the json module and Python's own literals."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.server.regions.json_scanner import JSON, PYTHON, Dialect, JsonScanner

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def scan(pieces: list[str], dialect: Dialect = JSON) -> tuple[JsonScanner, str, str]:
    """The scanner, the JSON it wrote and the text it left, after all pieces."""
    scanner, written, rest = JsonScanner(dialect), "", ""
    for piece in pieces:
        rest += piece
        rest = rest[scanner.feed(rest, 0) :]
        written += scanner.take()
    scanner.finish()
    return scanner, written + scanner.take(), rest


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(VALUES, st.lists(st.integers(0), max_size=6), st.booleans(), st.sampled_from([None, 2]))
def test_json_passes_unchanged(value: Any, places: list[int], ascii: bool, indent: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    text = text.replace("\x7f", "")
    scanner, written, rest = scan([*cut(text, places), ")", "rest"])
    assert scanner.done and not scanner.failed
    assert (written, rest) == (text, ")rest")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(VALUES, st.lists(st.integers(0), max_size=6))
def test_python_is_rewritten(value: Any, places: list[int]) -> None:
    text = repr(value)
    scanner, written, rest = scan([*cut(text, places), ")"], PYTHON)
    assert scanner.done, (text, written)
    assert rest == ")"
    assert json.loads(written) == ast.literal_eval(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text(alphabet='{}[]",:\\ utrfn1e-.x\n', max_size=30), st.lists(st.integers(0), max_size=4)
)
def test_any_text_is_scanned_alike_in_pieces(text: str, places: list[int]) -> None:
    whole, written, rest = scan([text])
    pieces, written_so, rest_so = scan(cut(text, places))
    assert (whole.done, whole.failed) == (pieces.done, pieces.failed)
    assert (written, rest) == (written_so, rest_so)
    if whole.done:
        json.loads(written)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('{"a": "line\nbreak\tand tab"}', {"a": "line\nbreak\tand tab"}),
        (r'{"pattern": "\d+\.x"}', {"pattern": r"\d+\.x"}),
        (r'{"bad": "\u12"}', {"bad": r"\u12"}),
        (r'{"pair": "\ud83d\ude00"}', {"pair": "😀"}),
    ],
)
def test_what_models_write_is_repaired(text: str, meant: Any) -> None:
    for pieces in ([text], list(text)):
        scanner, written, _ = scan(pieces)
        assert scanner.done and json.loads(written) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("('a', 1)", ["a", 1]),
        (r"'it\'s \x41\u00e9\U0001F600 \"q\"'", 'it\'s Aé😀 "q"'),
        ("{'a': [True, None, -1.5e3]}", {"a": [True, None, -1500.0]}),
        ("\"say 'hi'\"", "say 'hi'"),
    ],
)
def test_python_literals(text: str, meant: Any) -> None:
    for pieces in ([text], list(text)):
        scanner, written, _ = scan(pieces, PYTHON)
        assert scanner.done and json.loads(written) == meant


@pytest.mark.parametrize(
    "text",
    ["}", "]", "{]", "[}", "{1: 2}", '{"a" 1}', '{"a": 1 2}', "[1 2]", "tru", "01", "1.", "+1",
     ".5", "NaN", "nul", "[,]", '{"a": }', "1" * 5000, "[" * 600],
)  # fmt: skip
def test_no_value(text: str) -> None:
    for pieces in ([text + " "], list(text) + [" "]):
        scanner, _, _ = scan(pieces)
        assert scanner.failed and not scanner.done


def test_each_character_is_looked_at_once() -> None:
    """Long values in small pieces: the scanner holds back nothing but an open escape."""
    scanner = JsonScanner()
    text = '{"a": "' + "x" * 10_000 + '"}'
    held = 0
    for start in range(0, len(text), 3):
        piece = text[start : start + 3]
        held += len(piece) - scanner.feed(piece, 0)
        assert scanner.take() == piece
    assert held == 0 and scanner.done
