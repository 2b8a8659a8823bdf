"""Keywords and formats of zod, pydantic and OpenAPI: outputs are valid, and mean what was asked."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.structured_output.compiler import GrammarCompiler
from hetero_llm.structured_output.json_schema import schemas_in
from hetero_llm.structured_output.mended_schema import mended
from tests.helpers.grammar_walk import byte_compiler, check, walk
from tests.structured_output.test_compiler import takes

NULL = {"type": "null"}
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
ZOD_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)

ZOD_EMOJI = (
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$"
)
PASSWORD = r"^(?=.*[A-Z)])(?=.*\d)[^\s]{4,}$"
COLOR = {"$defs": {"Color": {"enum": ["red", 1], "type": "string", "title": "Color"}}}
FLOAT32 = 3.4028234663852886e38


def names(rule: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "object", "propertyNames": rule, "additionalProperties": NULL,
        **more,
    }  # fmt: skip


def string(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "format": name, **more}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (names({"type": "string"}), ['{"a":null}', "{}"], ['{"a":1}']),
        (names(True, properties={"b": {"const": 1}}), ['{"b":1,"a":null}'], ['{"b":null}']),
        (names({"enum": ["a", "b", 3]}), ['{"a":null,"b":null}', "{}"], ['{"c":null}', '{"a":1}']),
        (names({"enum": ["a"]}, properties={"a": {"const": 1}, "z": {}}), ['{"a":1}'], ['{"z":1}']),
        (names({"const": "a"}, required=["a"]), ['{"a":null}'], ["{}"]),
        (names({"pattern": "^x-"}), ['{"x-a":null}', "{}"], ['{"a":null}', '{"x-a":1}']),
        (names({"minLength": 1, "maxLength": 2}), ['{"ab":null}'], ['{"":null}', '{"abc":null}']),
        (names({"$ref": "#/$defs/Color"}, **COLOR), ['{"red":null}', "{}"], ['{"blue":null}']),
        (names({"format": "uuid"}), ['{"00000000-0000-0000-0000-00000000000A":null}'],
         ['{"a":null}']),
        (names({"format": "date"}), ['{"2024-02-29":null,"2023-12-31":null}'],
         ['{"2023-02-29":null}', '{"1900-02-29":null}', '{"2023-04-31":null}']),
        ({"type": "object", "properties": {"a": {"not": {}}}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"anyOf": [{"not": True}, {"type": "null", "not": False}]}, ["null"], ["1"]),
        ({"type": "array", "uniqueItems": False, "items": NULL}, ["[null,null]"], ["[1]"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
         ['{"a":1}'], ['{"b":1}']),
        ({"type": "integer", "format": "int32"}, ["-2147483648", "2147483647"], ["2147483648"]),
        ({"type": ["integer", "null"], "format": "uint8"}, ["255", "null"], ["256", "-1"]),
        ({"type": "integer", "format": "int32", "minimum": 5}, ["5"], ["4"]),
        ({"type": "integer", "format": "int64"}, [str(2**63 - 1)], [str(2**63), "1" * 30]),
        ({"type": "integer", "minimum": -(2**63)}, ["-9223372036854774784"], [str(-(2**63) - 1)]),
        ({"type": "integer", "minimum": -(2**70), "maximum": 2**70}, [str(2**63 - 1)], ["1" * 30]),
        ({"type": "number", "minimum": -FLOAT32, "maximum": FLOAT32}, ["-1.5", str(2**53)],
         [str(2**53 + 1), "1e39"]),
        ({"maximum": 1e300}, ["1.5", '"a"'], [str(2**53 + 1)]),
        (string("uint64"), ['"18446744073709551615"'], ['"-1"']),
        (string("password"), ['"a b"'], ["1"]),
        (string("base64"), ['""', '"YQ=="'], ['"YQ="', '"a"']),
        (string("uuid4"), ['"00000000-0000-4000-8000-000000000000"'],
         ['"00000000-0000-1000-8000-000000000000"']),
        (string("e164", pattern=r"^\+[1-9]\d{6,14}$"), ['"+12345678"'], ['"12345678"']),
        (string("includes", allOf=[{"pattern": "x"}]), ['"axa"'], ['"a"']),
        (string("email", pattern=ZOD_EMAIL), ['"a.b+c@d-e.org"'],
         ['"a..b@d.org"', '".a@d.org"', '"a.@d.org"', '"a@d"']),
        (string("ipvanyaddress"), ['"1.2.3.4"', '"::1"'], ['"1.2.3"', '"a"']),
        ({"type": "string", "pattern": PASSWORD}, ['"ab1A"', '"a)1b"'],
         ['"abcA"', '"abc1"', '"A1"', '"A1 bc"']),
        ({"pattern": "^(?=[^a]b)", "allOf": [{"maxLength": 3}]}, ['"cbd"'], ['"ab"', '"cbde"']),
        (string("duration", pattern=ZOD_DURATION), ['"P1Y2M3D"', '"PT1H"', '"P2W"'], ['"P"']),
    ],
)  # fmt: skip
def test_outputs_of_mended_schemas(
    compiler: GrammarCompiler, schema: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    assert [text for text in taken if not takes(compiler, text, json=schema)] == []
    assert [text for text in refused if takes(compiler, text, json=schema)] == []
    for text in taken:
        check(schema, text)
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    for seed in range(4):
        text = walk(compiler, params, Random(seed), 200)
        if text is not None:
            check(schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        names({"enum": ["a"]}, patternProperties={"^b": {}}),
        names({"pattern": "^a"}, properties={"b": {}}),
        names({"pattern": "^a", "maxLength": 3}),
        names({"type": "integer"}),
        names({"enum": [str(number) for number in range(499)]}),
        {"unevaluatedProperties": False, "allOf": [{}]},
        {"uniqueItems": True, "maxItems": 2},
        string("poem"),
        string("iri", pattern="^h"),
        string("emoji", pattern="^(?!a)"),
        string("jwt"),
        {"pattern": "^(?=a)b|c"},
        {"pattern": "^(?=a)*b"},
        {"pattern": "(?=a)b"},
        names({"$ref": "#/$defs/Size"}),
    ],
)
def test_what_others_cannot_say_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    with pytest.raises(SamplingError):
        compiler.grammar(StructuredOutputsParams(json=schema))


def test_emoji(compiler: GrammarCompiler) -> None:
    """Python's own expressions, and so the validator, have no classes of this kind."""
    for schema in (string("emoji", pattern=ZOD_EMOJI), {"type": "string", "pattern": ZOD_EMOJI}):
        for text in ("😀", "👍🏽😀", "🇩🇪", "1\ufe0f\u20e3"):
            assert takes(compiler, json.dumps(text, ensure_ascii=False), json=schema)
        for text in ("", "1", "a", "😀a"):
            assert not takes(compiler, json.dumps(text, ensure_ascii=False), json=schema)


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"pattern": r"^a\d(?<!b)"}, "pattern"),
        ({"$ref": "https://example.com/a.json"}, "$ref"),
        ({"$ref": "#/$defs/no"}, "$ref"),
        (string("jwt"), "format"),
    ],
)
@pytest.mark.parametrize("place", ["", ".properties.b.anyOf[1]"])
def test_the_keyword_is_named(
    compiler: GrammarCompiler, schema: dict[str, Any], field: str, place: str
) -> None:
    whole = schema
    if place:
        plain = {"oneOf": [{"type": "string"}, {"type": "null"}]}
        b = {"anyOf": [plain, schema]}
        whole = {"type": "object", "properties": {"a": plain, "b": b}}
    with pytest.raises(SamplingError) as raised:
        compiler.grammar(StructuredOutputsParams(json=whole))
    assert raised.value.field == f"json{place}.{field}"
    assert raised.value.value == schema[field]


def test_only_schemas_that_need_it_are_copied() -> None:
    plain = {"properties": {"a": string("email"), "b": {"minimum": -5, "pattern": "^a"}}}
    assert mended(plain, schemas_in(plain)) is plain
    given: dict[str, Any] = {"properties": {"a": names({"enum": ["a"]})}}
    before = json.dumps(given)
    assert mended(given, schemas_in(given)) != given and json.dumps(given) == before
