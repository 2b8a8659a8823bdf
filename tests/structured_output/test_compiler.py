"""Grammars over small tokenizers: what they allow, what they refuse, and why."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
import pytest
from llguidance import gbnf_to_lark

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.structured_outputs import (
    EmbeddedSchema,
    StructuredOutputsParams,
    ToolOutputParams,
)
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.structured_output import compiler as compiler_module
from hetero_llm.structured_output.compiler import GrammarCompiler, Matcher
from hetero_llm.structured_output.draft_matcher import DraftMatcher
from tests.helpers.tokenizers import byte_level, get

EOS = 2
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CYCLE: dict[str, Any] = {}
CYCLE["a"] = {"properties": CYCLE}
NOT_NULL = {"not": {"type": "null"}}
TAG: dict[str, Any] = {
    "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.vocabulary(300, (EOS,)))


def allowed(matcher: Matcher, size: int = 300) -> set[int] | None:
    """The tokens that may come next; None: all."""
    mask = np.zeros(-(-size // 32), np.int32)
    if not matcher.fill_mask(mask):
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def optional(count: int, name: str = "p") -> dict[str, Any]:
    """An object's schema."""
    return {"type": "object", "properties": {f"{name}{i}": {"const": 1} for i in range(count)}}


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def takes(compiler: GrammarCompiler, text: str, **constraint: Any) -> bool:
    """Whether a text is a complete output under a constraint, looked at byte by byte."""
    grammar = compiler.grammar(StructuredOutputsParams(**constraint))
    matcher = compiler.open(grammar, [])
    for token in ids(text):
        if token not in (allowed(matcher) or ()):
            return False
        matcher.observe(token)
        assert matcher.error is None
    return EOS in (allowed(matcher) or ())


@pytest.mark.parametrize(
    ("constraint", "text", "expected"),
    [
        ({"json": OBJECT}, '{"a": 1, "b": "x"}', True),
        ({"json": OBJECT}, '{"a":1,"b":"x"}', True),
        ({"json": OBJECT}, '{"a":1,"b":"z"}', False),
        ({"json": OBJECT}, '{"a":1}', False),
        ({"json": OBJECT}, '{"a":1,"b":"x","c":1}', False),
        ({"json": '{"type": "integer"}'}, "-12", True),
        ({"json": True}, "[null]", True),
        ({"json": {"type": "object"}}, '{"a":1}', True),
        ({"json": OBJECT}, "{" + " " * 64 + '"a":1,"b":"x"}', True),
        ({"json": OBJECT}, "{" + " " * 65 + '"a":1,"b":"x"}', False),
        ({"json": OBJECT, "disable_any_whitespace": True}, '{"a":1,"b":"x"}', True),
        ({"json": OBJECT, "disable_any_whitespace": True}, '{"a": 1,"b":"x"}', False),
        ({"json": OBJECT, "whitespace_pattern": "_"}, '{"a":_1,"b":"x"}', True),
        ({"json": OBJECT, "whitespace_pattern": "_"}, '{"a": 1,"b":"x"}', False),
        ({"json": {"properties": {"a": {}}}}, '{"a":1,"c":2}', True),
        (
            {"json": {"properties": {"a": {}}}, "disable_additional_properties": True},
            '{"a":1,"c":2}',
            False,
        ),
        (
            {"json": {"patternProperties": {"a": {}}}, "disable_additional_properties": True},
            '{"c":2}',
            False,
        ),
        (
            {"json": {"type": "object"}, "disable_additional_properties": True},
            '{"a":1,"c":2}',
            True,
        ),
        ({"json_object": True, "disable_additional_properties": True}, '{"a":1}', True),
        ({"json": {"properties": {"a": {"type": "integer"}}}}, '{"\\u0061":"x"}', False),
        ({"json": {"properties": {"\b": {"type": "integer"}}}}, '{"\\u0008":"x"}', False),
        ({"json": {"patternProperties": {"^a": {"type": "integer"}}}}, '{"\\u0061":"x"}', False),
        ({"json": {"type": "string", "pattern": r"^[\[a&-]{2}&&\[$"}}, '"[a&&["', True),
        ({"json": {"type": "integer", "maximum": 2**63 - 1}}, "9223372036854775807", True),
        ({"json": {"type": "number", "minimum": 3, "exclusiveMinimum": True}}, "3", False),
        ({"json": {"allOf": [{"multipleOf": 0.5}, {"multipleOf": 3}]}}, "6", True),
        (
            {"json": {"required": ["a"], "minProperties": 2}},
            '{"a":1,"b":1}',
            True,
        ),
        ({"json": {"type": "string", "pattern": '^[^"]*$'}}, r'"a\"b"', False),
        ({"json": {"type": "string", "pattern": r"^[^\\,]*$"}}, r'"a\\b"', False),
        ({"json": {"type": "string", "pattern": r"^\[?[^,]*$"}}, r'"[a\"\n"', True),
        ({"json": {"patternProperties": {'^[^"]*$': {"type": "integer"}}}}, r'{"a\"":"x"}', True),
        ({"json_object": True}, "{}", True),
        ({"json_object": True}, "[]", False),
        ({"regex": "[ab]{2,3}/"}, "aba/", True),
        ({"regex": "[ab]{2,3}/"}, "a/", False),
        ({"choice": ["yes", 'no, "never"\n', "é"]}, 'no, "never"\n', True),
        ({"choice": ["yes", "no", "é"]}, "é", True),
        ({"choice": ["yes", "no"]}, "ye", False),
        ({"grammar": 'start: "a" b+\nb: "b" | "c"'}, "abcb", True),
        ({"grammar": 'root ::= "a" b+\nb ::= "b" | "c"'}, "abcb", True),
        ({"grammar": 'root ::= "a" b+\nb ::= "b" | "c"'}, "a", False),
        ({"structural_tag": TAG}, "free text", True),
        ({"structural_tag": TAG}, 'a <f=a>{"a":1,"b":"x"}</f> b', True),
        ({"structural_tag": TAG}, "a <f=b>", False),
        ({"structural_tag": TAG}, 'a <f=a>{"a":"x"', False),
    ],
)
def test_outputs(
    compiler: GrammarCompiler, constraint: dict[str, Any], text: str, expected: bool
) -> None:
    assert takes(compiler, text, **constraint) == expected


CALL = {"type": "tag", "begin": "<c>", "content": {"type": "json_schema", "json_schema": OBJECT},
        "end": "</c>"}  # fmt: skip
GOOD = '<c>{"a":1,"b":"x"}</c>'
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ({"type": "const_string", "value": "ab"}, "ab", True),
        ({"type": "regex", "pattern": "a/b"}, "a/b", True),
        ({"type": "grammar", "grammar": 'start: "x"'}, "x", True),
        (CALL, GOOD, True),
        (CALL, GOOD[:-1], False),
        (THOUGHT, "<t>so <c> what</t>", True),
        (THOUGHT, "<t>so what", False),
        ({"type": "sequence", "elements": [THOUGHT, CALL]}, "<t></t>" + GOOD, True),
        ({"type": "sequence", "elements": [THOUGHT, CALL]}, GOOD, False),
        ({"type": "or", "elements": [THOUGHT, CALL]}, GOOD, True),
        ({"type": "triggered_tags", "triggers": ["<c"], "tags": [CALL]}, "a" + GOOD + "b", True),
        ({"type": "triggered_tags", "triggers": ["<c"], "tags": [CALL]}, "none", True),
        (
            {"type": "triggered_tags", "triggers": ["<c"], "tags": [CALL], "at_least_one": True},
            "none",
            False,
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<c"],
                "tags": [CALL],
                "stop_after_first": True,
            },
            GOOD + "b",
            False,
        ),
        ({"type": "tags_with_separator", "tags": [CALL], "separator": ","}, f"{GOOD},{GOOD}", True),
        ({"type": "tags_with_separator", "tags": [CALL], "separator": ","}, GOOD + GOOD, False),
    ],
)
def test_formats_of_structural_tags(
    compiler: GrammarCompiler, form: dict[str, Any], text: str, expected: bool
) -> None:
    tag = {"type": "structural_tag", "format": form}
    assert takes(compiler, text, structural_tag=tag) == expected


def test_special_tokens_in_tags_are_tokens(compiler: GrammarCompiler) -> None:
    tag = {"format": {"type": "tag", "begin": "<s>a", "content": CALL["content"], "end": "</s>"}}
    matcher = compiler.open(compiler.grammar(StructuredOutputsParams(structural_tag=tag)), [])
    assert allowed(matcher) == {1}  # not the byte "<"
    for token in (1, *ids('a{"a":1,"b":"x"}')):
        matcher.observe(token)
    assert matcher.error is None and allowed(matcher) == {2}


@pytest.mark.parametrize(
    ("constraint", "field", "reason"),
    [
        ({"json": "{"}, "json", "is not valid JSON"),
        ({"json": "[]"}, "json", "must be a JSON schema"),
        ({"json": {"type": "foo"}}, "json.type", "Invalid type"),
        ({"json": {"properties": CYCLE}}, "json", "Circular reference"),
        ({"json": {"const": {1}}}, "json", "cannot be written as JSON"),
        ({"json": {"$ref": "#"}}, "json", "allows no output"),
        ({"json": False}, "json", "schema is false"),
        (
            {"json": {"properties": {"b": {"items": {"uniqueItems": True}}}}},
            "json.properties.b.items.uniqueItems",
            "Unimplemented keys",
        ),
        ({"json": {"anyOf": [{}, NOT_NULL]}}, "json.anyOf[1].not", "Unimplemented"),
        ({"json": {"$defs": {"d": {"format": "poem"}}, "$ref": "#/$defs/d"}},
         "json", "Unknown format"),
        ({"json": {"type": "string", "format": "poem"}}, "json.format", "Unknown format"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "json.pattern", "look-around"),
        ({"json": {"patternProperties": {"(": {}}}}, "json.patternProperties.(", "unclosed group"),
        ({"json": {"$ref": "#/nowhere"}}, "json.$ref", "does not exist"),
        ({"json": {"properties": {"a": {"anyOf": [{"type": "null"}, {"maxLength": -1}]}}}},
         "json.properties.a.anyOf[1]", "positive integer"),
        ({"json": {"properties": {"a": {"$ref": "#/$defs/d"}},
            "$defs": {"d": {"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}}},
         "json.$defs.d.items", "oneOf constraints are not supported"),
        ({"json": {"properties": {"a": {"type": "object", "propertyNames": {"format": "time"}}}}},
         "json.properties.a.propertyNames", "Unimplemented keys"),
        ({"json": {"items": {"exclusiveMinimum": 3.0, "maximum": 3.5}}},
         "json.items.exclusiveMinimum", "an excluded integer"),
        ({"json": {"type": "number", "minimum": -3.5, "exclusiveMaximum": -3}},
         "json.exclusiveMaximum", "an excluded integer"),
        ({"json": {"allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}]}},
         "json.allOf[0].exclusiveMinimum", "an excluded integer"),
        ({"json": {"minimum": 3, "exclusiveMinimum": True, "maximum": 3.5}},
         "json.exclusiveMinimum", "an excluded integer"),
        ({"json": {"minimum": 3, "anyOf": [{}], "exclusiveMinimum": True}},
         "json.exclusiveMinimum", "beside anyOf"),
        ({"json": {"type": "integer", "exclusiveMinimum": 2**53}},
         "json.exclusiveMinimum", "2**53"),
        ({"json": {"items": {"type": "integer", "minimum": 2**53 + 1}}},
         "json.items.minimum", "2**53"),
        ({"json": {"type": "integer", "maximum": 2**53 + 3}}, "json.maximum", "2**53"),
        ({"json": {"const": {"a": [2**53 + 1]}}}, "json.const", "9007199254740993"),
        ({"json": {"enum": [1, "a\x01"]}}, "json.enum", "control characters"),
        ({"json": {"type": "object", "required": ["a"], "minProperties": 3}},
         "json.minProperties", "one name could come twice"),
        ({"json": {"items": [{}], "anyOf": [{}], "additionalItems": False}},
         "json.additionalItems", "beside anyOf"),
        ({"json": {"items": optional(499)}},
         "json.items.properties", "499 optional properties follow"),
        ({"json": {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}},
         "json.allOf[", "least common multiple"),
        ({"json": {"pattern": "^[^a&&b]$"}}, "json.pattern", "has to be escaped"),
        ({"json": {"patternProperties": {r"\\[[^[]": {}}}},
         r"json.patternProperties.\\[[^[]", "has to be escaped"),
        ({"json": {"pattern": "^[]a]$"}}, "json.pattern", "has to be escaped"),
        ({"json": {"properties": {"n": {"type": "array", "minItems": 1, "items":
            {"$ref": "#/properties/n"}}}}}, "json.properties.n", "allows no output that ends"),
        ({"regex": "((a{99}){100}){100}"}, "regex", "too many expressions"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"grammar": "root ::= a"}, "grammar", "is no GBNF: Rule 'a' not found"),
        ({"grammar": "start: a"}, "grammar", "unknown name"),
        ({"structural_tag": "{"}, "structural_tag", "is not valid JSON"),
        ({"structural_tag": {"format": {"type": "or", "elements": [
            {"type": "const_string", "value": "a"},
            {"type": "json_schema", "json_schema": {"properties": {"b": NOT_NULL}}}]}}},
         "structural_tag.format.elements[1].json_schema.properties.b.not", "Unimplemented"),
        ({"structural_tag": json.dumps(
            {**TAG, "structures": [{"begin": "<f=a>", "schema": NOT_NULL, "end": "</f>"}]})},
         "structural_tag.structures[0].schema.not", "Unimplemented"),
        ({"structural_tag": {"format": {"type": "poem"}}}, "structural_tag.format.type", "one of"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag.structures", ""),
        (
            {"structural_tag": {**TAG, "triggers": ["<g"]}},
            "structural_tag.structures[0].begin",
            "must begin with",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(
    compiler: GrammarCompiler, constraint: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(SamplingError) as caught:
        compiler.grammar(StructuredOutputsParams(**constraint))
    assert caught.value.field.startswith(field) and reason in caught.value.reason
    with pytest.raises(SamplingError) as later:
        params = StructuredOutputsParams(**constraint)
        compiler.check(compiler.unchecked_grammar(params), params)
    assert str(later.value) == str(caught.value)


def test_rules_of_gbnf_are_looked_at_twice_each(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 300
    rules = ["root ::= r0", *(f"r{i} ::= 'x' r{i + 1} | [a-c]" for i in range(count))]
    rules.append(f'r{count} ::= "y"')
    looks = []
    original = gbnf_to_lark.RuleRefNode.is_terminal

    def counted(node: Any) -> bool:
        looks.append(node)
        return bool(original(node))

    monkeypatch.setattr(gbnf_to_lark.RuleRefNode, "is_terminal", counted)
    grammar = compiler.grammar(StructuredOutputsParams(grammar="\n".join(rules).replace("'", '"')))
    assert len(looks) <= 2 * count
    assert allowed(compiler.open(grammar, [])) == set(ids("xabc"))


def test_gbnf_rules_may_name_each_other(compiler: GrammarCompiler) -> None:
    text = 'root ::= value\nvalue ::= list | [0-9]\nlist ::= "[" value ("," value)* "]"'
    grammar = compiler.grammar(StructuredOutputsParams(grammar=text))
    assert allowed(compiler.open(grammar, ids("["))) == set(ids("[0123456789"))
    assert allowed(compiler.open(grammar, ids("[[1],2]"))) == {EOS}


@pytest.mark.parametrize("mark", ["?", "!", ""])
def test_lark_with_marks_of_its_tree(compiler: GrammarCompiler, mark: str) -> None:
    text = f'\n    {mark}start: item\n    {mark}item: digit | "x"\n    ?digit: /[0-9]/\n'
    grammar = compiler.grammar(StructuredOutputsParams(grammar=text))
    assert allowed(compiler.open(grammar, [])) == set(ids("x0123456789"))


def test_short_schemas_and_known_constraints_are_written_quickly(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.vocabulary(300, (EOS,)))
    long = StructuredOutputsParams(json={**OBJECT, "description": "x" * 20_000})
    linked = StructuredOutputsParams(json={"$defs": {"d": OBJECT}, "$ref": "#/$defs/d"})
    regex = StructuredOutputsParams(regex="a|b")
    assert compiler.writes_quickly(StructuredOutputsParams(json=OBJECT))
    assert compiler.writes_quickly(StructuredOutputsParams(json=json.dumps(OBJECT)))
    for params in (long, linked, regex):
        assert not compiler.writes_quickly(params)
        compiler.unchecked_grammar(params)
        assert compiler.writes_quickly(params)
    no_json = StructuredOutputsParams(json={"const": lambda: None})
    assert not compiler.writes_quickly(no_json)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "((a{99}){100}){100}"},
        {"regex": "(a"},
        {"grammar": "start: a"},
        {"json": {"properties": {"a": NOT_NULL}}},
    ],
)
def test_an_unchecked_grammar_that_cannot_be_followed_allows_nothing(
    compiler: GrammarCompiler, constraint: dict[str, Any]
) -> None:
    grammar = compiler.unchecked_grammar(StructuredOutputsParams(**constraint))
    compiler.prepare(grammar)
    matcher = compiler.open(grammar, [])
    assert allowed(matcher) == set()
    assert matcher.error is not None and "the grammar" in matcher.error
    matcher.observe(5)
    assert not matcher.try_observe(5) and matcher.copy().error == matcher.error
    draft = compiler.open_as(DraftMatcher, grammar, [])
    assert draft.constrained([5, 6], [-1, 0], 8) == ([], [], 0)


PERSON = {"properties": {"b": {"uniqueItems": True}}}


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        ({"structures": [TAG["structures"][0], {"begin": "<f=b>", "schema": PERSON, "end": "</f>"}],
          "triggers": ["<f="]}, "structural_tag.structures[1].schema"),
        ({"format": {"type": "sequence", "elements": [CALL, {**CALL, "content":
          {"type": "json_schema", "json_schema": PERSON}}]}},
         "structural_tag.format.elements[1].content.json_schema"),
    ],
)  # fmt: skip
def test_the_schema_of_a_tag_is_named(
    compiler: GrammarCompiler, tag: dict[str, Any], field: str
) -> None:
    with pytest.raises(SamplingError) as caught:
        compiler.grammar(StructuredOutputsParams(structural_tag=tag))
    assert caught.value.field == f"{field}.properties.b.uniqueItems"
    assert caught.value.reason == 'Unimplemented keys: ["uniqueItems"]'


def tool_params(lark: str, **schemas: EmbeddedSchema) -> ToolOutputParams:
    return ToolOutputParams(grammar=f"%llguidance {{}}\n{lark}", schemas=schemas)


def test_schemas_beside_a_grammar_are_written_as_templates_write_json(
    compiler: GrammarCompiler,
) -> None:
    both = {"a": EmbeddedSchema(OBJECT, "x"), "b": EmbeddedSchema({"type": "integer"}, "y")}
    params = tool_params('start: "<" @a ">" @b', **both)
    grammar = compiler.grammar(params)
    for text, good in (
        ('<{"a": 1, "b": "x"}>7', True),
        ('<{"a":1,"b":"x"}>7', False),
        ('<{"a": 1, "b": "z"}>7', False),
        ('<{"a": 1, "b": "x"}>x', False),
    ):
        matcher = compiler.open(grammar, ids(text))
        assert (matcher.error is None and EOS in (allowed(matcher) or ())) == good, text


def test_no_escape_hides_a_property_of_a_tool(compiler: GrammarCompiler) -> None:
    """As everywhere: "\\u0061" is "a", and would not have to follow its schema."""
    schema = {"properties": {"a": {"type": "integer"}}}
    grammar = compiler.grammar(tool_params("start: @a", a=EmbeddedSchema(schema, "x")))
    assert compiler.open(grammar, ids('{"\\u0061": "x"}')).error is not None


@pytest.mark.parametrize(
    ("schema", "field", "reason"),
    [
        ({"$defs": {"d": {"format": "poem"}}, "$ref": "#/$defs/d"}, "x.$defs.d.format", "Unknown"),
        ({"$defs": {"d": {"const": 2**60}}, "items": {}}, "x.$defs.d.const", "2**53"),
        ({"items": {"const": 2**60}}, "x.properties.a.items.const", "2**53"),
        ({"items": NOT_NULL}, "x.properties.a.items.not", "Unimplemented"),
    ],
)
def test_the_place_in_a_schema_with_definitions_of_another(
    compiler: GrammarCompiler, schema: dict[str, Any], field: str, reason: str
) -> None:
    source = EmbeddedSchema(schema, "x.properties.a", shared="x")
    with pytest.raises(SamplingError) as caught:
        compiler.grammar(tool_params("start: @n @a", n=EmbeddedSchema(OBJECT, "y"), a=source))
    assert caught.value.field == field and reason in caught.value.reason


def test_a_mistake_in_no_schema_is_the_tools(compiler: GrammarCompiler) -> None:
    with pytest.raises(SamplingError) as caught:
        compiler.grammar(tool_params("start: @a other", a=EmbeddedSchema(OBJECT, "y")))
    assert (caught.value.field, caught.value.value) == ("tools", ["y"])


SCHEMAS = {"a": EmbeddedSchema({"type": "integer"}, "x")}
CALLS = '%llguidance {}\nstart: "<" @a ">"'


def calls_or(schemas: dict[str, EmbeddedSchema], **answer: Any) -> ToolOutputParams:
    own = StructuredOutputsParams(**answer)
    return ToolOutputParams(grammar=CALLS, schemas=schemas, answer=own, begins_after=[9])


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ({"json": OBJECT}, '{"a":1,"b":"x"}', '{"a":"1"}'),
        ({"json": OBJECT, "disable_any_whitespace": True}, '{"a":1,"b":"x"}', '{"a": 1,"b":"x"}'),
        ({"regex": "[ab]+"}, "ab", "<a>"),
        ({"choice": ["<x>"]}, "<x>", "<y>"),
        ({"grammar": 'start: x\nx: "y" x?'}, "yyy", "y<1>"),
    ],
)
def test_calls_or_an_answer(
    compiler: GrammarCompiler, answer: dict[str, Any], right: str, wrong: str
) -> None:
    """Each with its own way to write JSON; both begin where the whole says."""
    grammar = compiler.grammar(calls_or(SCHEMAS, **answer))
    for text, good in ((right, True), (wrong, False), ("<12>", True), ("<x1>", False)):
        matcher = compiler.open(grammar, [9, *ids(text)])
        assert (matcher.error is None and EOS in (allowed(matcher) or ())) == good, text


@pytest.mark.parametrize(
    ("answer", "field", "reason"),
    [
        ({"json": PERSON}, "json.properties.b.uniqueItems", "Unimplemented"),
        ({"json": '{"type": '}, "json", "is not valid JSON"),
        ({"json": False}, "json", ""),
        ({"regex": "("}, "regex", "regex parse error"),
        # The names that our own grammars have are none of the user's.
        ({"grammar": "start: @calls"}, "grammar", "unknown"),
        ({"grammar": "start: @a"}, "grammar", "unknown"),
        ({"grammar": "start: @answer"}, "grammar", "unknown"),
    ],
)
def test_the_answer_beside_calls_is_named(
    compiler: GrammarCompiler, answer: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(SamplingError) as caught:
        compiler.grammar(calls_or(SCHEMAS, **answer))
    assert caught.value.field == field and reason in caught.value.reason


def test_the_tool_beside_an_answer_is_named(compiler: GrammarCompiler) -> None:
    with pytest.raises(SamplingError) as caught:
        compiler.grammar(calls_or({"a": EmbeddedSchema(PERSON, "x")}, choice=["yes"]))
    assert caught.value.field == "x.properties.b.uniqueItems"


def test_an_object_of_many_optional_properties(compiler: GrammarCompiler) -> None:
    assert takes(compiler, '{"p7": 1, "p497": 1}', json=optional(498))
    many = optional(1200)
    many["required"] = ["p400", "p800"]
    assert takes(compiler, '{"p7": 1, "p400": 1, "p800": 1}', json=many)


def test_the_error_of_a_crowded_place(compiler: GrammarCompiler) -> None:
    """Two objects of many properties, either of which may come."""
    schema = {"anyOf": [optional(300, "a"), optional(300, "b")]}
    matcher = compiler.open(compiler.grammar(StructuredOutputsParams(json=schema)), [])
    matcher.observe(ids("{")[0])
    allowed(matcher)
    error = matcher.error or ""
    assert "too much may come next: 24" in error and error.endswith("2000 are possible")


def test_a_compiled_grammar_has_its_first_mask(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step computes it: with an object of many properties it takes long."""
    made: list[Recorder] = []
    real = llguidance.LLMatcher

    class Recorder:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.matcher, self.masks = real(*args, **options), 0
            made.append(self)

        def compute_bitmask(self) -> bytes:
            self.masks += 1
            return self.matcher.compute_bitmask()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

    monkeypatch.setattr(llguidance, "LLMatcher", Recorder)
    grammar = compiler.grammar(StructuredOutputsParams(json=optional(11)))
    assert [one.masks for one in made] == [1]
    assert allowed(compiler.open(grammar, [])) == set(ids("{"))


def test_threads_that_ask_for_one_grammar_wait_for_one_compilation(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer.vocabulary(300, (EOS,)))
    grammar = compiler.unchecked_grammar(StructuredOutputsParams(choice=["ab"]))
    begun, go_on, made = threading.Event(), threading.Event(), []
    real = llguidance.LLMatcher

    def slow(*args: Any, **options: Any) -> llguidance.LLMatcher:
        made.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(compiler.prepare, grammar)
        assert begun.wait(60) and not compiler.knows(grammar)
        second = threads.submit(compiler.open, grammar, [])
        go_on.set()
        first.result()
        assert allowed(second.result()) == set(ids("a"))
    assert len(made) == 1 and compiler.knows(grammar)


def test_a_schema_that_was_written_is_not_written_anew(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"type": "object", "properties": {"once": {"type": "null"}}}
    first = compiler.unchecked_grammar(StructuredOutputsParams(json=given))
    monkeypatch.setattr(compiler_module, "constraint_grammar", lambda *_: pytest.fail("written"))
    again = StructuredOutputsParams(json=json.loads(json.dumps(given)))
    assert compiler.unchecked_grammar(again) == first
    with pytest.raises(pytest.fail.Exception):  # another one is
        compiler.unchecked_grammar(StructuredOutputsParams(json={**given, "title": "x"}))


def test_a_schema_with_a_value_that_is_no_json_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(SamplingError, match="cannot be written as JSON"):
        compiler.grammar(StructuredOutputsParams(json={"a": lambda: 0}))


def test_a_grammar_begins_behind_its_tokens(compiler: GrammarCompiler) -> None:
    params = StructuredOutputsParams(choice=["a"], begins_after=[5, 6])
    matcher = compiler.open(compiler.grammar(params), [9])
    for token in (5, 5):
        assert allowed(matcher) is None
        matcher.observe(token)
    matcher.observe(6)
    assert allowed(matcher) == set(ids("a"))


def test_a_complete_output_allows_all_end_tokens_alone(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.vocabulary(300, (2, 0)))
    matcher = compiler.open(compiler.grammar(StructuredOutputsParams(choice=["a"])), ids("a"))
    for _ in range(3):  # with ignore_eos they may come again and again
        assert allowed(matcher) == {0, 2}
        matcher.observe(0)
    matcher.observe(7)
    assert matcher.error is not None and "token 7" in matcher.error
    assert allowed(matcher) == set()


def test_states_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    grammar = compiler.grammar(StructuredOutputsParams(choice=["ab", "ac"]))
    first, second = compiler.open(grammar, []), compiler.open(grammar, ids("a"))
    assert allowed(first) == set(ids("a")) and allowed(second) == set(ids("bc"))
    assert compiler.knows(grammar) and not compiler.knows(Grammar("else"))


@pytest.mark.parametrize("stream", ["fast", "slow"])
@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_other_kinds_of_tokenizers(kind: str, stream: str) -> None:
    tokenizer = get(kind, stream)
    size = len(tokenizer.hf.get_vocab())
    vocabulary = tokenizer.vocabulary(size + 40, (EOS,))
    compiler = GrammarCompiler(vocabulary)
    grammar = compiler.grammar(StructuredOutputsParams(choice=[" a a", " w"]))
    matcher = compiler.open(grammar, [])
    text = b""
    while (may := allowed(matcher, size + 40)) != {EOS}:
        assert may and max(may) < size
        matcher.observe(min(may))
        text += vocabulary.token_bytes(min(may)) or b""
    assert text in (b" a a", b" w")


def test_without_an_end_token_there_is_no_structured_output(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.vocabulary(300, ()))
    with pytest.raises(SamplingError, match="no end-of-sequence token"):
        compiler.grammar(StructuredOutputsParams(choice=["a"]))
    compiler.warm_up()  # says nothing


def test_a_grammar_that_a_free_text_may_precede(compiler: GrammarCompiler) -> None:
    params = StructuredOutputsParams(choice=["a"], begins_after=[6], may_begin_with=5)
    grammar = compiler.grammar(params)
    assert allowed(compiler.open(grammar, [])) == {5, *ids("a")}
    assert allowed(compiler.open(grammar, ids("a"))) == {EOS}
    for output in ([5], [5, 5]):
        assert allowed(compiler.open(grammar, output)) is None
    assert allowed(compiler.open(grammar, [5, 7, 6])) == set(ids("a"))
    assert allowed(compiler.open(grammar, []).copy()) == {5, *ids("a")}
