"""What the engine's configuration adds to the constraints of requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tokenizers import AddedToken

from hetero_llm.config.engine_config import ConstraintsConfig
from hetero_llm.core.structured_outputs import StructuredOutputsParams, ToolOutputParams
from hetero_llm.engine.inputs.constraint_defaults import ConstraintDefaults
from hetero_llm.engine.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import byte_level


@pytest.fixture(scope="module")
def thinking() -> Tokenizer:
    hf = byte_level().hf
    hf.add_tokens([AddedToken(one, normalized=False) for one in ("<think>", "</think>")])
    return Tokenizer(hf)


def applied(
    tokenizer: Tokenizer, config: dict[str, Any], prompt: str = "a", **constraint: Any
) -> StructuredOutputsParams:
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    given = StructuredOutputsParams(**{"json_object": True, **constraint})
    return ConstraintDefaults(tokenizer, ConstraintsConfig(**config)).applied(given, ids)


def test_whitespace_and_properties(thinking: Tokenizer) -> None:
    plain = applied(thinking, {})
    assert not plain.disable_any_whitespace and not plain.disable_additional_properties
    assert applied(thinking, {}, disable_any_whitespace=True).disable_any_whitespace
    closed = applied(thinking, {"disable_additional_properties": True})
    assert closed.disable_additional_properties and not closed.disable_any_whitespace
    config = {"disable_any_whitespace": True}
    assert applied(thinking, config).disable_any_whitespace
    own = applied(thinking, config, whitespace_pattern=" ")
    assert own.whitespace_pattern == " " and not own.disable_any_whitespace


@pytest.mark.parametrize(
    ("config", "prompt", "begins_after", "may_begin_with"),
    [
        ({}, "a<think>", "", None),
        ({"reasoning_parser": "none"}, "a<think>", "", None),
        ({"reasoning_parser": "qwen3"}, "a", "</think>", "<think>"),
        ({"reasoning_parser": "qwen3"}, "a<think>\n", "</think>", None),
        ({"reasoning_parser": "qwen3"}, "a<think>\n\n</think>\n\n", "", None),
        ({"reasoning_parser": "deepseek_r1"}, "a", "</think>", None),
        ({"reasoning_parser": "deepseek_r1"}, "a" * 500 + "<think>\n", "</think>", None),
        ({"reasoning_parser": "deepseek_r1", "enable_in_reasoning": True}, "a", "", None),
        ({"reasoning_parser": "openai_gptoss"}, "a", "<|channel|>final<|message|>", None),
    ],
)
def test_a_constraint_begins_behind_reasoning(
    thinking: Tokenizer,
    config: dict[str, Any],
    prompt: str,
    begins_after: str,
    may_begin_with: str | None,
) -> None:
    found = applied(thinking, config, prompt)
    expected = thinking.encode(begins_after, add_special_tokens=False)
    assert list(found.begins_after or ()) == expected
    ids = {text: index for index, text in thinking.added_tokens.items()}
    assert found.may_begin_with == (None if may_begin_with is None else ids[may_begin_with])


def test_what_a_request_says_stays(thinking: Tokenizer) -> None:
    config = {"reasoning_parser": "deepseek_r1"}
    assert applied(thinking, config, begins_after=()).begins_after == ()
    own = applied(thinking, config, begins_after=[5], may_begin_with=6)
    assert (own.begins_after, own.may_begin_with) == ([5], 6)


def test_options_hold_for_an_answer_beside_tools(thinking: Tokenizer) -> None:
    """Its own pattern of whitespace stays, and contradicts nothing."""
    config = ConstraintsConfig(disable_any_whitespace=True, disable_additional_properties=True)
    defaults = ConstraintDefaults(thinking, config)
    for pattern in None, " ?":
        answer = StructuredOutputsParams(json_object=True, whitespace_pattern=pattern)
        found = defaults.applied(ToolOutputParams(grammar="start: x", answer=answer), [5])
        assert isinstance(found, ToolOutputParams) and found.answer is not None
        assert found.disable_additional_properties and found.answer.disable_additional_properties
        assert found.answer.disable_any_whitespace == (pattern is None)


def test_reasoning_that_no_token_ends_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level()
    defaults = ConstraintDefaults(tokenizer, ConstraintsConfig(reasoning_parser="deepseek_r1"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            constraint = StructuredOutputsParams(json_object=True)
            assert defaults.applied(constraint, [5]).begins_after == ()
    assert caplog.text.count("has no token '</think>'") == 1
