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
        ({"type": "array", "uniqueItems": False, "items": NULL}, ["[null,null]"], ["[1]"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
         ['{"a":1}'], ['{"b":1}']),
        ({"type": "integer", "format": "int32"}, ["-2147483648", "2147483647"], ["2147483648"]),
        ({"type": ["integer", "null"], "format": "uint8"}, ["255", "null"], ["256", "-1"]),
        ({"type": "integer", "format": "int32", "minimum": 5}, ["5"], ["4"]),
        ({"type": "integer", "format": "int64"}, [str(2**63 - 1)], [str(2**63), "1" * 30]),
        ({"type": "integer", "minimum": -(2**63)}, ["-9223372036854774784"], [str(-(2**63) - 1)]),
        (string("uint64"), ['"18446744073709551615"'], ['"-1"']),
        (string("password"), ['"a b"'], ["1"]),
        (string("base64"), ['""', '"YQ=="'], ['"YQ="', '"a"']),
        (string("uuid4"), ['"00000000-0000-4000-8000-000000000000"'],
         ['"00000000-0000-1000-8000-000000000000"']),
        (string("e164", pattern=r"^\+[1-9]\d{6,14}$"), ['"+12345678"'], ['"12345678"']),
        (string("includes", allOf=[{"pattern": "x"}]), ['"axa"'], ['"a"']),
        (string("email", pattern=ZOD_EMAIL), ['"a.b+c@d-e.org"'],
         ['"a..b@d.org"', '".a@d.org"', '"a.@d.org"', '"a@d"']),
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
        string("emoji", pattern="^(?=a)"),
    ],
)
def test_what_others_cannot_say_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    with pytest.raises(SamplingError):
        compiler.grammar(StructuredOutputsParams(json=schema))


def test_only_schemas_that_need_it_are_copied() -> None:
    plain = {"properties": {"a": string("email"), "b": {"minimum": -5, "pattern": "^a"}}}
    assert mended(plain, schemas_in(plain)) is plain
    given: dict[str, Any] = {"properties": {"a": names({"enum": ["a"]})}}
    before = json.dumps(given)
    assert mended(given, schemas_in(given)) != given and json.dumps(given) == before
