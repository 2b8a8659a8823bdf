"""Where the answer of a model that may reason begins."""

from __future__ import annotations

import pytest

from hetero_llm.core.reasoning_formats import (
    REASONING_FORMATS,
    AnswerStart,
    reasoning_format,
)

IDS = {"<think>": 7, "</think>": 8}
AT_ONCE, BEHIND, PERHAPS = AnswerStart(), AnswerStart((8,)), AnswerStart((8,), 7)


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("qwen3", "a", PERHAPS),
        ("glm45", "a <think> b", PERHAPS),
        ("qwen3", "a<think>\n", BEHIND),
        ("qwen3", "a<think>\n\n</think>\n\n", AT_ONCE),
        ("deepseek_r1", "a", BEHIND),
        ("olmo3", "a<think>", BEHIND),
        ("deepseek_r1", "a</think> ", AT_ONCE),
        ("deepseek_r1", "a</think> b", BEHIND),
    ],
)
def test_the_end_of_the_prompt_decides(name: str, prompt: str, expected: AnswerStart) -> None:
    assert reasoning_format(name).answer_start(prompt, IDS) == expected


def test_markers_that_are_no_tokens() -> None:
    assert REASONING_FORMATS["granite"].answer_start("a", IDS) == AT_ONCE
    assert REASONING_FORMATS["deepseek_r1"].answer_start("a", {"<think>": 7}) == AT_ONCE
    only_the_end = {"</think>": 8}
    assert REASONING_FORMATS["qwen3"].answer_start("a", only_the_end) == AT_ONCE
    assert REASONING_FORMATS["qwen3"].answer_start("a<think>", only_the_end) == BEHIND
