"""The format of a model by its chat template."""

from __future__ import annotations

import pytest

from hetero_llm.config.args_server import TOOL_PARSERS
from hetero_llm.server.regions.detection import detected_format
from hetero_llm.server.regions.formats import HARMONY, TOOL_FORMATS, TOOL_PARSER_NAMES

LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name'
FORMATS: list[tuple[str, str | None, str | None]] = [
    ("{{ '<tool_call>\\n{\"name\": \"' }}{{ c.name }}{{ '</tool_call>' }}", "hermes", None),
    ("<tool_call>{{ c }}</tool_call>{% if '</think>' in m.content %}", "hermes", "qwen3"),
    ("{{- '<tool_call>\\n<function=' + c.name + '>\\n' }}<parameter=", "qwen3_coder", None),
    ("'<tool_call>' + c.name + '<arg_key>' + k + '</arg_key>' <think>", "glm45", "qwen3"),
    ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>```json </think>", "deepseek_v3", "qwen3"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v31", None),
    ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
    ("<|tool_call|> Here is my thought process:", "granite", "granite"),
    ("<|action_start|><|plugin|>", "internlm", None),
    ("<|tool_calls_section_begin|>", "kimi_k2", None),
    ("<minimax:tool_call> <think>", "minimax_m2", "qwen3"),
    ("<tool_calls>", "minimax", None),
    ("<function_calls>", "olmo3", None),
    ("<|python_start|>", "llama4_pythonic", None),
    ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    ("<|python_tag|>", "llama3_json", None),
    (LLAMA, "llama3_json", None),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), FORMATS)
def test_formats(template: str, tools: str | None, reasoning: str | None) -> None:
    found = detected_format(template)
    assert found.channels is None
    assert (found.tools and found.tools.name, found.reasoning and found.reasoning.name) == (
        tools,
        reasoning,
    )


def test_harmony() -> None:
    found = detected_format("<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}")
    assert found.channels is HARMONY and found.calls_tools and found.reasons


def test_every_format_is_detected_or_only_named() -> None:
    detected = {tools for _, tools, _ in FORMATS}
    assert TOOL_FORMATS.keys() - detected == {"granite-20b-fc"}


def test_names_of_the_flags() -> None:
    """The table of arguments cannot import the server."""
    assert TOOL_PARSERS == TOOL_PARSER_NAMES
