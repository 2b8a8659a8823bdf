"""Tokens and log-probabilities of a message's parts."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_llm.core.outputs import CompletionOutput, Logprob
from hetero_llm.server.message_events import (
    Content,
    MessageEvent,
    MessageReader,
    PlainParser,
    Reasoning,
)
from hetero_llm.server.regions.formats import named_format
from hetero_llm.server.regions.region_parser import RegionParser
from tests.server.scripted_parser import AGENT, ScriptedParser


def delta(*tokens: int, end: str | None = None) -> CompletionOutput:
    logprobs = [{token: Logprob(-1.0, 1, "t")} for token in tokens]
    return CompletionOutput(0, "x" * len(tokens), list(tokens), None, logprobs, end, None)


def test_reasoning_tokens_and_the_tokens_of_contents() -> None:
    reader = MessageReader(ScriptedParser(AGENT))
    pieces = [piece for token in range(7) for piece in reader.read(delta(token))]
    pieces += reader.read(delta(7, end="stop"))
    contents = [piece for piece in pieces if isinstance(piece.event, Content)]
    # The token without text belongs to the content that comes next.
    assert [piece.token_ids for piece in contents] == [[2, 3], [4]]
    assert [list(map(min, piece.logprobs)) for piece in contents] == [[2, 3], [4]]
    assert (reader.num_tokens, reader.reasoning_tokens, reader.has_calls) == (8, 2, True)


def test_a_delta_of_reasoning_and_content_is_divided_by_length() -> None:
    reader = MessageReader(ScriptedParser([[Reasoning("aaaaaa"), Content("bb")]]))
    reasoning, content = reader.read(delta(1, 2, 3, 4, end="stop"))
    assert reader.reasoning_tokens == 3
    assert reasoning.token_ids == [] and content.token_ids == [1, 2, 3, 4]


def test_a_plain_message() -> None:
    reader = MessageReader(PlainParser())
    pieces = reader.read(delta(1)) + reader.read(delta(2, 3, end="length"))
    assert [piece.event for piece in pieces] == [Content("x"), Content("xx")]
    assert (reader.num_tokens, reader.reasoning_tokens, reader.has_calls) == (3, 0, False)


def test_what_the_parser_held_back_comes_with_the_end() -> None:
    class Late(PlainParser):
        def feed(self, text: str, token_ids: object) -> list[Content]:  # type: ignore[override]
            return []

        def finish(self) -> list[Content]:  # type: ignore[override]
            return [Content("all")]

    reader = MessageReader(Late())
    assert reader.read(delta(1)) == []
    (piece,) = reader.read(delta(2, end="stop"))
    assert piece.event == Content("all") and piece.token_ids == [1, 2]


def test_a_parser_that_counts_is_believed() -> None:
    class Counting(ScriptedParser):
        reasoning_tokens: int | None = 0

        def feed(self, text: str, token_ids: Sequence[int]) -> list[MessageEvent]:
            self.reasoning_tokens += 1  # as if one token of each delta were reasoning
            return super().feed(text, token_ids)

    reader = MessageReader(Counting([[Reasoning("aa")], [], [Content("b")]]))
    for tokens in ((1, 2, 3), (4, 5), (6,)):
        reader.read(delta(*tokens))
    assert (reader.num_tokens, reader.reasoning_tokens) == (6, 3)


def test_a_model_whose_markers_are_no_tokens_has_reasoning_divided_by_length() -> None:
    """Its parser cannot count, and null is no number of tokens for the clients of two APIs."""
    parser = RegionParser(named_format(None, "qwen3"))
    assert parser.reasoning_tokens is None
    reader = MessageReader(parser)
    text = CompletionOutput(0, "<think>aaaaaa</think>bb", [1, 2, 3, 4], None, None, "stop", None)
    assert [piece.event for piece in reader.read(text)] == [Reasoning("aaaaaa"), Content("bb")]
    assert reader.reasoning_tokens == 3


def test_a_token_costs_one_question_to_its_parser() -> None:
    """What kind of parser it is does not change, and asking for that is slow."""

    class Asked(PlainParser):
        asked = 0

        @property
        def reasoning_tokens(self) -> int:
            self.asked += 1
            return 0

    parser = Asked()
    reader = MessageReader(parser)
    before = parser.asked
    for token in range(20):
        reader.read(delta(token))
    assert parser.asked == before + 20
