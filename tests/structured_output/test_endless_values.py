"""Schemas whose values contain another one without an end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hetero_llm.core.errors import SamplingError
from hetero_llm.structured_output.endless_values import check_values_end

NODE = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/n"}}}
LIST = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": LIST}}, ""),
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, ""),
        ({"type": "array", "minItems": 2, "items": {"$ref": "#"}}, ""),
        ({"type": "array", "minItems": 2, "prefixItems": [{}], "items": {"$ref": "#"}}, ""),
        ({"type": "array", "minItems": 2, "items": [{}], "additionalItems": {"$ref": "#"}}, ""),
        ({"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}}, ""),
        ({"type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}, "$defs": {"n": NODE}},
         ".properties.b"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "$defs": {"n": LIST}}, ".anyOf[1]"),
        ({"type": "object", "required": ["a"],
          "properties": {"a": {"anyOf": [{"$ref": "#"}, NODE]}}, "$defs": {"n": LIST}}, ""),
        ({"type": "object", "allOf": [{"patternProperties": {"é": {"$ref": "#"}}, "required": ["é"],
          "type": ["object", "array"]}]}, ""),
        ({"type": "object", "required": ["ab"], "patternProperties": {"^a": {"$ref": "#"}}}, ""),
        ({"type": "object", "required": ["ab"], "patternProperties": {"b$": {"$ref": "#"}}}, ""),
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b~1c%25"}},
          "$defs": {"b/c%": NODE, "n": LIST}}, ".properties.a"),
    ],
)  # fmt: skip
def test_what_no_value_with_an_end_follows(schema: Any, path: str) -> None:
    with pytest.raises(SamplingError, match="allows no output that ends") as caught:
        check_values_end(schema)
    assert caught.value.field == path


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"$ref": "#"},  # says nothing about a value
        {"$defs": {"n": NODE}},  # nothing refers to it
        {**NODE, "$defs": {"n": {"anyOf": [NODE, {"type": "null"}]}}},
        {**NODE, "$defs": {"n": {"type": ["object", "string"], "required": ["b"]}}},
        {**NODE, "required": [], "$defs": {"n": {"type": "array", "items": {"$ref": "#"}}}},
        {"type": "array", "minItems": 1, "prefixItems": [{"const": 1}], "items": {"$ref": "#"}},
        {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {"$ref": "#"}}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#anchor"}}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "required": ["b"], "patternProperties": {"^a": {"$ref": "#"}}},
        # More than a text and anchors: not searched for, an expression may take very long.
        {"type": "object", "required": ["a" * 40], "patternProperties": {"(a*)*b": {"$ref": "#"}}},
        {"type": "object", "required": ["ac"], "patternProperties": {"[a-c]": {}},
         "additionalProperties": {"$ref": "#"}},
        {"const": 1, "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/n"}},
         "$defs": {"n": {"$id": "http://a/b", "allOf": [{"$ref": "#"}]}}},
    ],
)  # fmt: skip
def test_values_that_end(schema: Any) -> None:
    check_values_end(schema)


def test_a_long_chain_of_references() -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(300)}
    check_values_end({"$ref": "#/$defs/d0", "$defs": {**chain, "d300": {}}})
    with pytest.raises(SamplingError):
        check_values_end({"$ref": "#/$defs/d0", "$defs": {**chain, "d300": {**NODE}, "n": LIST}})


def test_much_work_is_left_undone() -> None:
    """Thousands of schemas that follow thousands of others are not looked at one by one."""
    all_of: dict[str, Any] = {"allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(2000)]}
    others = {f"d{i}": {"$ref": "#/$defs/all"} for i in range(2000)}
    begun = time.process_time()
    check_values_end({"$ref": "#/$defs/all", "$defs": {"all": all_of, **others}})
    assert time.process_time() - begun < 5.0  # minutes without a limit
