"""Which format a model writes, from what its chat template writes for earlier messages."""

from __future__ import annotations

from hetero_llm.core.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from hetero_llm.server.regions.formats import HARMONY, TOOL_FORMATS, MessageFormat, ToolFormat

_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_calls>",), "minimax"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call|>",), "granite"),
    (("<|action_start|>",), "internlm"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function_calls>",), "olmo3"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)
"""Texts that stand in a template that writes calls in a format, rarer ones first."""
_REASONING_MARKS: tuple[tuple[str, str], ...] = (
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
    ("<think>", "qwen3"),
    ("Here is my thought process:", "granite"),
)


def detected_format(template: str) -> MessageFormat:
    """The format of a chat template. Parts that it does not show are None."""
    if HARMONY.channel in template and HARMONY.message in template:
        return MessageFormat(channels=HARMONY)
    return MessageFormat(_tools(template), _reasoning(template))


def _tools(template: str) -> ToolFormat | None:
    for marks, name in _TOOL_MARKS:
        if all(mark in template for mark in marks):
            return TOOL_FORMATS[name]
    return None


def _reasoning(template: str) -> ReasoningFormat | None:
    for mark, name in _REASONING_MARKS:
        if mark in template:
            return REASONING_FORMATS[name]
    return None
