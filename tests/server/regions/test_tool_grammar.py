"""Grammars of tool calls: they accept what models write, refuse arguments that break a schema, and
what they let through at random is read back as calls that keep to it."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import numpy as np
import pytest
from tokenizers import AddedToken

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.message_events import CallArguments
from hetero_llm.server.regions.formats import HARMONY, TOOL_FORMATS, named_format
from hetero_llm.server.regions.region_parser import RegionParser
from hetero_llm.server.regions.tool_grammar import (
    GrammarFunction,
    SchemaError,
    tool_grammar,
    written_texts,
)
from hetero_llm.structured_output.grammar_text import constraint_grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = [GrammarFunction("get_weather", SCHEMA, "w"), GrammarFunction("now", {}, "n")]
ARGUMENTS = {"city": 'Köln "am" Rhein\n', "days": 3, "exact": True, "where": {"x": 0.5}}
J = json.dumps(ARGUMENTS, ensure_ascii=False)
BAD = J.replace("3", '"three"')
TAGS = (
    "<{p}city{k}Köln am Rhein{e}\n<{p}days{k}3{e}\n<{p}exact{k}true{e}\n"
    '<{p}where{k}{{"x": 0.5}}{e}\n'
)
Q = TAGS.format(p="parameter=", k=">\n", e="\n</parameter>")
G = TAGS.format(p="arg_key>", k="</arg_key>\n<arg_value>", e="</arg_value>")
M = TAGS.format(p='parameter name="', k='">', e="</parameter>")
P = 'get_weather(city="Köln \\"am\\" Rhein", days=3, exact=True, where={"x": 0.5})'


def json_call(arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "get_weather", "{key}": {arguments}}}'


WRITTEN: dict[str, str] = {
    "hermes": f"<tool_call>\n{json_call(J)}\n</tool_call>",
    "llama3_json": json_call(J, "parameters"),
    "pythonic": f"[{P}]",
    "llama4_pythonic": f"[{P}, now()]",
    "olmo3": f"<function_calls>{P}\nnow()</function_calls>",
    "mistral": f"[TOOL_CALLS] [{json_call(J)}]",
    "internlm": f"<|action_start|><|plugin|>\n{json_call(J, 'parameters')}<|action_end|>",
    "qwen3_coder": f"<tool_call>\n<function=get_weather>\n{Q}</function>\n</tool_call>",
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{J}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{J}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "glm45": f"<tool_call>get_weather\n{G}</tool_call>",
    "granite": f"<|tool_call|>[{json_call(J)}]",
    "granite-20b-fc": f"<function_call> {json_call(J)}",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{J}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "minimax": f"<tool_calls>\n{json_call(J)}\n</tool_calls>",
    "minimax_m2": (
        f'<minimax:tool_call>\n<invoke name="get_weather">\n{M}</invoke>\n</minimax:tool_call>'
    ),
    "openai": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{J}",
}
"""A call as each format writes it. Values in tags are on a line."""


class Model:
    """A tokenizer with or without tokens for the markers of a format."""

    def __init__(self, plain: Tokenizer, name: str, *, marked: bool) -> None:
        self.format = named_format(name, None)
        self.hf = copy.deepcopy(plain.hf)
        self.token_ids: dict[str, int] = {}
        if marked:
            markers = re.findall(r"<[^<>\s=]+>|\[TOOL_CALLS\]", written_texts(self.format))
            self.hf.add_tokens(
                [AddedToken(one, special=False, normalized=False) for one in dict.fromkeys(markers)]
            )
            self.token_ids = {one: self.hf.convert_tokens_to_ids(one) for one in markers}
        self.tokenizer = llguidance.hf.from_tokenizer(self.hf)

    def matcher(self, start: Any = "content", **options: Any) -> llguidance.LLMatcher:
        functions = options.pop("functions", FUNCTIONS)
        options = {"required": True, "parallel": True} | options
        grammar = tool_grammar(self.format, functions, self.token_ids, start, **options)
        compiled = constraint_grammar(grammar.constraint(), {}).text
        matcher = llguidance.LLMatcher(self.tokenizer, compiled)
        assert not matcher.is_error(), (matcher.get_error(), grammar.lark)
        return matcher

    def accepts(self, text: str, start: Any = "content", **options: Any) -> bool:
        matcher = self.matcher(start, **options)
        ids = self.hf.encode(text, add_special_tokens=False)
        if matcher.validate_tokens(ids) < len(ids):
            return False
        for token in ids:
            matcher.consume_token(token)
        return matcher.is_accepting()


def start_of(name: str) -> str:
    return "header" if name == HARMONY.name else "content"


@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", WRITTEN)
def test_required(tokenizer: Tokenizer, name: str, marked: bool) -> None:
    model, start = Model(tokenizer, name, marked=marked), start_of(name)
    good = WRITTEN[name]
    assert model.accepts(good, start), good
    for wrong in (
        good.replace("3", "three"),
        good.replace("get_weather", "get_water"),
        good[:-1],
        "Well, " + good,
        "",
    ):
        assert not model.accepts(wrong, start), wrong
    only_now = [GrammarFunction("now", {}, "n")]
    assert not model.accepts(good, start, functions=only_now)


@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", WRITTEN)
def test_strict(tokenizer: Tokenizer, name: str, marked: bool) -> None:
    """Free text, and calls whose arguments match."""
    model, start = Model(tokenizer, name, marked=marked), start_of(name)
    good = WRITTEN[name]
    free = "The weather? I do not know."
    if name == HARMONY.name:
        free = f"<|channel|>final<|message|>{free}"
    for text in (good, free):
        assert model.accepts(text, start, required=False), text
    assert not model.accepts(good.replace("3", "three"), start, required=False)
    if name != HARMONY.name and TOOL_FORMATS[name].opens and not TOOL_FORMATS[name].bare:
        assert model.accepts(f"Let me see.\n{good}\nSo.", start, required=False)
        bad = f"Let me see.\n{good.replace('3', 'three')}\nSo."
        assert not model.accepts(bad, start, required=False)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_grammar_lets_through_is_read_back(tokenizer: Tokenizer, name: str) -> None:
    """Random walks: closed calls keep to their schemas."""
    model, start = Model(tokenizer, name, marked=False), start_of(name)
    draw = random.Random(7)
    closed = 0
    for _ in range(4):
        matcher = model.matcher(start, parallel=False)
        text = walk(model, matcher, draw)
        parser = RegionParser(model.format, start, schemas={"get_weather": SCHEMA, "now": {}})
        events = parser.feed(text, []) + parser.finish()
        calls: dict[int, list[str]] = {}
        for event in events:
            match type(event).__name__:
                case "CallStart":
                    calls[event.index] = [event.name, ""]
                case "CallArguments":
                    calls[event.index][1] += event.text
                case "CallEnd":
                    closed += 1
                    called, arguments = calls[event.index]
                    schema = SCHEMA if called == "get_weather" else {"type": "object"}
                    jsonschema.validate(json.loads(arguments), schema)
                case kind:
                    in_channels = name == HARMONY.name and kind == "Reasoning"
                    assert in_channels or not matcher.is_accepting(), (event, text)
    assert closed


REFERRED = {
    "$defs": {
        "Color": {"type": "string", "enum": ["red", "2", 3]},
        "Node": {
            "type": "object",
            "properties": {"all": {"$ref": "#"}, "color": {"$ref": "#/$defs/Color"}},
            "additionalProperties": False,
        },
    },
    "type": "object",
    "additionalProperties": False,
    "required": ["x"],
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "pythonic"])
@pytest.mark.parametrize(
    "one",
    [
        {"$ref": "#/$defs/Color", "description": "its color"},
        {"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"},
        {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
        {"anyOf": [{"const": "a"}, {"const": 1.5}]},
        {"enum": ["a", 1, None, True]},
        {"$ref": "#/$defs/Node"},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        {"type": "array", "items": {"$ref": "#/properties/n"}, "maxItems": 2},
    ],
)
def test_arguments_by_reference_or_choice(
    tokenizer: Tokenizer, name: str, one: dict[str, Any]
) -> None:
    properties = {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "x": one}
    schema = {**REFERRED, "properties": properties}
    model = Model(tokenizer, name, marked=False)
    matcher = model.matcher(functions=[GrammarFunction("f", schema, "w", True)], parallel=False)
    read = 0
    for seed in range(4):
        text = walk(model, after := matcher.deep_copy(), random.Random(seed))
        if after.is_accepting():
            parser = RegionParser(model.format, schemas={"f": schema})
            events = parser.feed(text, []) + parser.finish()
            arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
            jsonschema.validate(json.loads(arguments), schema)
            read += 1
    assert read


def test_a_strict_argument_of_text_or_limited_values_is_refused() -> None:
    schema = {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}}}
    function = GrammarFunction("f", schema, "tools[1]", True)
    options: dict[str, Any] = {"required": True, "parallel": True}
    with pytest.raises(SchemaError) as caught:
        tool_grammar(named_format("glm45", None), [function], {}, "content", **options)
    assert caught.value.field == "tools[1].properties.a"


def walk(model: Model, matcher: llguidance.LLMatcher, draw: random.Random) -> str:
    """A random text that the grammar accepts; strings in it end soon."""
    ids: list[int] = []
    ends = set(model.hf.encode('"}\n</', add_special_tokens=False))
    while len(ids) < 250:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        allowed = allowed[allowed > 1]  # end of text
        if not len(allowed) or (matcher.is_accepting() and draw.random() < 0.3):
            break
        soon = [int(one) for one in allowed if int(one) in ends]
        token = draw.choice(soon if soon and draw.random() < 0.5 else [int(i) for i in allowed])
        assert matcher.consume_token(token)
        ids.append(token)
    return str(model.hf.decode(ids))


@pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])
def test_reasoning_stands_before(tokenizer: Tokenizer, marked: bool) -> None:
    model = Model(tokenizer, "hermes", marked=marked)
    model.format = named_format("hermes", "qwen3")
    if marked:
        thinks = ["<think>", "</think>"]
        model.hf.add_tokens([AddedToken(one, special=False, normalized=False) for one in thinks])
        model.token_ids |= {one: model.hf.convert_tokens_to_ids(one) for one in thinks}
        model.tokenizer = llguidance.hf.from_tokenizer(model.hf)
    good = WRITTEN["hermes"]
    assert model.accepts(good)
    assert model.accepts(f"<think>\nHm.\n</think>\n\n{good}")
    assert not model.accepts(f"Hm.\n</think>\n\n{good}")
    grammar = tool_grammar(
        model.format, FUNCTIONS, model.token_ids, "reasoning", required=True, parallel=True
    )
    if marked:  # the engine begins with the grammar where the token ends the reasoning
        assert grammar.begins_after == (model.token_ids["</think>"],)
        assert model.accepts(f"\n\n{good}", "reasoning")
    else:
        assert grammar.begins_after == ()
        assert model.accepts(f"Hm.\n</think>\n\n{good}", "reasoning")


def test_parallel_calls(tokenizer: Tokenizer) -> None:
    now = '{"name": "now", "arguments": {}}'
    for name, two in (
        ("hermes", f"<tool_call>\n{now}\n</tool_call>\n<tool_call>\n{now}\n</tool_call>"),
        ("mistral", f"[TOOL_CALLS] [{now}, {now}]"),
        ("pythonic", "[now(), now()]"),
    ):
        model = Model(tokenizer, name, marked=False)
        assert model.accepts(two)
        assert not model.accepts(two, parallel=False)


def test_newer_mistral(tokenizer: Tokenizer) -> None:
    model = Model(tokenizer, "mistral", marked=True)
    for one in ("[ARGS]",):
        model.hf.add_tokens([AddedToken(one, special=False, normalized=False)])
        model.token_ids[one] = model.hf.convert_tokens_to_ids(one)
    model.tokenizer = llguidance.hf.from_tokenizer(model.hf)
    assert model.accepts(f"[TOOL_CALLS]get_weather[ARGS]{J}[TOOL_CALLS]now[ARGS]{{}}")
    assert not model.accepts(f"[TOOL_CALLS]get_weather[ARGS]{BAD}")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "properties.a.pattern"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "anyOf"),
    ],
)
def test_what_tags_cannot_guarantee(schema: dict[str, Any], path: str) -> None:
    """A strict tool is refused, where a tool that is not is free there."""
    strict, free = (GrammarFunction("f", schema, "tools[1]", strict) for strict in (True, False))
    options: dict[str, Any] = {"required": True, "parallel": True}
    model_format = named_format("qwen3_coder", None)
    with pytest.raises(SchemaError) as caught:
        tool_grammar(model_format, [strict], {}, "content", **options)
    assert caught.value.field == f"tools[1].{path}"
    tool_grammar(model_format, [free], {}, "content", **options)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    "one", [{"type": 5}, {"type": [{}]}, {"anyOf": 5}, {"items": {"not": {"type": "null"}}}]
)
def test_a_schema_that_is_none_is_left_to_who_compiles_it(name: str, one: dict[str, Any]) -> None:
    function = GrammarFunction("f", {"properties": {"a": one}}, "tools[1]")
    options: dict[str, Any] = {"required": True, "parallel": True}
    grammar = tool_grammar(named_format(name, None), [function], {}, "content", **options)
    fields = {schema.field for schema in grammar.schemas.values()}
    assert fields <= {"tools[1]", "tools[1].properties.a"}
