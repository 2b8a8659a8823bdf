"""Response templates of transformers: what is translated reads as transformers itself reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from hetero_llm.server.regions.formats import HARMONY
from hetero_llm.server.regions.response_template import translated
from tests.server.regions.reading_aloud import said

THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}
BY_NAME = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": "{content}"}


def template(tool_calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": THINKING,
            "tool_calls": {"repeats": True, **tool_calls},
            "content": CONTENT,
            **fields,
        },
    }


JSON = '{"name": "get_weather", "arguments": {"city": "Köln \\"x\\""}}'
XML = "<function=get_weather>\n<parameter=city>\nKöln <b>\n</parameter>\n</function>"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "JSON between texts": (
        template({"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                  "transform": WHOLE}),
        f"<tool_call>\n{JSON}\n</tool_call>",
    ),
    "JSON, white space in the pattern": (
        template({"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json",
                  "transform": WHOLE}),
        f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>",
    ),
    "JSON with other keys": (
        template({"open": "<call>", "close": "</call>", "content": "json",
                  "transform": {"type": "function", "function": {
                      "name": "{content.tool}", "arguments": "{content.input}"}}}),
        '<call>{"tool": "get_weather", "input": {"city": "a"}}</call>',
    ),
    "a list": (
        template({"open": "[TOOL_CALLS]", "close_pattern": r"</s>", "content": "json",
                  "transform_each": True, "repeats": False,
                  "transform": {"type": "function", "function": {
                      "name": "{name}", "arguments": "{arguments}"}}}),
        f"[TOOL_CALLS][{JSON}, {JSON}]</s>",
    ),
    "the name before JSON": (
        template({"open_pattern": r"<call>to=(?P<name>\w+)\s*", "close": "</call>",
                  "content": "json", "transform": BY_NAME}),
        '<call>to=get_weather {"city": "a"}</call>',
    ),
    "tags": (
        template({"open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                  "close_pattern": r"</function>\s*</tool_call>", "content": "xml-inline",
                  "content_args": {"tag_pattern":
                      r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
                  "transform": BY_NAME}),
        f"<tool_call>\n{XML}\n</tool_call>",
    ),
    "tags, one text closes": (
        template({"open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
                  "close": "</tool_call>", "content": "xml-inline",
                  "content_args": {"tag_pattern":
                      r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
                  "transform": BY_NAME}),
        f"<tool_call>\n{XML}\n</tool_call>",
    ),
    "tags without a marker around": (
        template({"open_pattern": r"<function=(?P<name>[\w.\-]+)>", "close": "</function>",
                  "content": "xml-inline",
                  "content_args": {"tag_pattern":
                      r"<parameter=(?P<key>[\w.\-]+)>\n?(?P<value>.*?)\n?</parameter>"},
                  "transform": BY_NAME}),
        XML,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_transformers(name: str) -> None:
    spec, call = CASES[name]
    found = translated(spec)
    assert not found.problems
    text = f"<think>\nHm.\n</think>\n\nSo:\n{call}"
    expected = parse_response(text, spec, prefix="<|im_start|>assistant\n")
    calls = [one["function"] for one in expected["tool_calls"]]
    assert calls
    for pieces in ([text], list(text)):
        message = said(found.format, pieces)
        assert message.content == "So:"
        assert message.reasoning == expected["reasoning_content"] == "Hm."
        assert [(one, json.loads(two), end) for one, two, end in message.calls] == [
            (one["name"], one["arguments"], True) for one in calls
        ]


def test_harmony() -> None:
    spec = template(
        {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "transform": BY_NAME,
        },
        thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
    )
    assert translated(spec).format.channels is HARMONY


@pytest.mark.parametrize(
    ("tool_calls", "reason"),
    [
        ({"open_pattern": "<a|b>", "close": "c", "content": "json", "transform": WHOLE},
         "tool_calls: the pattern '<a|b>' is too general"),
        ({"open": "<a>", "close": "c", "content": "kv-lines", "transform": WHOLE},
         "tool_calls: content 'kv-lines' is not known"),
        ({"open": "<a>", "close": "c", "content": "json"},
         "tool_calls: its transform makes no function of it"),
        ({"open": "<a>", "close": "c", "content": "json", "transform": WHOLE,
          "content_args": {"unquoted_keys": True}},
         "tool_calls: content_args ['unquoted_keys'] are not known"),
        ({"content": "json", "transform": WHOLE}, "tool_calls: no text opens it"),
        ({"open": "<a>", "content": "json", "transform": {"function": {"name": "f"}}},
         "tool_calls: its transform has 'f'"),
        ({"open": "<a>", "close": "b", "content": "xml-inline", "transform": BY_NAME},
         "tool_calls: its open_pattern has another form"),
        ({"open_pattern": "<f=(?P<name>\\w+)>", "close": "b", "content": "xml-inline",
          "content_args": {"tag_pattern": "(?P<key>\\w+)"}, "transform": BY_NAME},
         "tool_calls: its tag_pattern has another form"),
    ],
)  # fmt: skip
def test_what_is_not_translated(tool_calls: dict[str, Any], reason: str) -> None:
    found = translated(template(tool_calls))
    assert found.problems == (reason,)
    assert found.format.tools is None and found.format.reasoning is not None


def test_other_fields_and_no_template() -> None:
    assert translated({"fields": {"speaker": {}}}).problems == ("speaker: no field of a message",)
    assert translated([]).problems == ("it has no fields",)
    field = {"open": "<think>", "content": "text"}
    reason = "thinking: it needs texts that open and close it"
    assert translated({"fields": {"thinking": field}}).problems == (reason,)
