"""Random outputs of a JSON schema's grammar, without a model: each has to be valid."""

from __future__ import annotations

import json
import warnings
from decimal import Decimal, localcontext
from random import Random
from typing import Any

import jsonschema
import numpy as np

from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.structured_output.compiler import GrammarCompiler
from tests.helpers.tokenizers import BYTES, byte_level

EOS = 2
_FIRST_BYTE = 3  # of the byte-level tokenizer
_SIZE = 300
_CLOSERS = frozenset(_FIRST_BYTE + byte for byte in b'"}]')
# Names of `random_keywords` in all their spellings, and names that come twice.
_LIKELY = frozenset(_FIRST_BYTE + byte for byte in b'"ab\\u0610.-,')
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")


def byte_compiler() -> GrammarCompiler:
    """Grammars over a tokenizer whose tokens are bytes."""
    return GrammarCompiler(byte_level().vocabulary(_SIZE, (EOS,)))


def walk(
    compiler: GrammarCompiler, params: StructuredOutputsParams, rng: Random, most_tokens: int
) -> str | None:
    """A random output of a grammar; None if it is not complete after `most_tokens` tokens.

    Raises:
        SamplingError: the grammar cannot be followed.
        AssertionError: no token is allowed where the output is not complete.
    """
    matcher = compiler.open(compiler.grammar(params), [])
    mask = np.zeros(-(-_SIZE // 32), np.int32)
    output = bytearray()
    haste = rng.choice((0.03, 0.1, 0.3, 0.9))
    for _ in range(most_tokens):
        assert matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, f"no token is allowed behind {bytes(output)!r}: {matcher.error}"
        if EOS in allowed and (len(allowed) == 1 or rng.random() < haste):
            return output.decode()
        allowed = [token for token in allowed if token != EOS]
        # With every byte as likely as another, strings would seldom end or repeat.
        wanted = _CLOSERS if rng.random() < haste else _LIKELY
        token = rng.choice([one for one in allowed if one in wanted] or allowed)
        matcher.observe(token)
        assert matcher.error is None
        output += BYTES["byte_level"][token]
    return None


def check(schema: Any, text: str) -> None:
    """Whether a text is JSON that is valid under a schema and the draft that it names.

    Raises:
        jsonschema.ValidationError: it is not valid.
        ValueError: it is not JSON.
        RecursionError: the schema refers to itself without an end, and the validator follows.
    """
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of Python's own regular expressions
        with localcontext(prec=400):  # 19.99 is a multiple of 0.01
            exact = json.loads(json.dumps(schema), parse_float=Decimal)
            value = json.loads(text, parse_float=_decimal)
            try:
                kind(exact).validate(value)
            except BaseException as error:
                # The validator's own library makes this of a RecursionError.
                if type(error).__name__ == "PanicException":
                    raise RecursionError from None
                raise


def _decimal(text: str) -> Decimal | int:
    """A number; one beyond float64, which the validator cannot divide, is 0."""
    return Decimal(text) if 1e-300 < abs(float(text)) < 1e300 else 0


def random_keywords(rng: Random, depth: int = 0) -> Any:
    """A schema of any keywords that llguidance knows, side by side: many cannot be satisfied, or
    are refused."""
    if depth > 2 or rng.random() < 0.05:
        return rng.choice((True, {}, False, {"type": "integer"}, {"type": "string"}))
    makers = rng.sample(_MAKERS, rng.choice((1, 1, 2, 3)))
    schema: dict[str, Any] = {}
    for make in makers:
        schema.update(make(rng, depth + 1))
    if rng.random() < 0.3:
        wanted = rng.sample(("object", "array", "string", "number", "integer", "null"), 2)
        schema["type"] = rng.choice((wanted[0], wanted))
    keys = rng.sample(sorted(schema), len(schema))  # the order counts for llguidance
    schema = {key: schema[key] for key in keys}
    if depth == 0:
        schema["$defs"] = {name: random_keywords(rng, 1) for name in "de"}
    return schema


def _numbers(rng: Random, depth: int) -> dict[str, Any]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    whole = rng.random() < 0.5
    found: dict[str, Any] = {}
    if rng.random() < 0.1:
        return {
            "minimum": rng.choice((-1e30, -(2**63), -3.5)),
            "maximum": 10.0 ** rng.randint(1, 40),
        }
    for name in rng.sample(names, rng.randint(1, 2)):
        found[name] = rng.randint(-3, 12) if whole else rng.randint(-12, 48) / 4
    if rng.random() < 0.3:
        found["multipleOf"] = rng.choice((1, 2, 3, 0.5, 0.25, 7))
    return found


def _strings(rng: Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    found: dict[str, Any] = rng.choice(
        ({"minLength": least}, {"maxLength": least}, {"minLength": least, "maxLength": least + 2})
    )
    if rng.random() < 0.5:
        patterns = (
            "^[a-c]*$",
            "x",
            "^a",
            "b$",
            r"\d",
            "^(a|b)*$",
            "[^a-z]",
            "^$|^ab",
            r"^\S+$",
            r"^(?=.*[ab])(?=[^\d]*\d)[a-c\d]{2,4}$",
            "^(?=.{0,3}$)(?=a|b)",
            "^(?=a)b|c",
        )
        found["pattern"] = rng.choice(patterns)
    return found


def _objects(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(("a", "ab", "b", "c", "é", 'q"', "\x01", ""), rng.randint(0, 3))
    found: dict[str, Any] = {"properties": {name: random_keywords(rng, depth) for name in names}}
    if rng.random() < 0.5:
        found["required"] = rng.sample(("a", "ab", "b", "é"), rng.randint(0, 2))
    if rng.random() < 0.5:
        found["additionalProperties"] = random_keywords(rng, depth)
    if rng.random() < 0.3:
        patterns = rng.choice((["^a"], ["b$"], ["^a", "^b"], ["é"], ["^.$"]))
        found["patternProperties"] = {one: random_keywords(rng, depth) for one in patterns}
    if rng.random() < 0.1:
        found["propertyNames"] = rng.choice(_NAME_RULES)
    if rng.random() < 0.3:
        found[rng.choice(("minProperties", "maxProperties"))] = rng.choice((0, 1, 1, 2))
    return found


_NAME_RULES = (
    {"enum": ["a", "b", "é"]}, {"$ref": "#/$defs/d"}, {"format": "date"}, {"pattern": "^a"},
    {"minLength": 1, "maxLength": 2}, {"const": "ab", "title": "Name"}, True,
)  # fmt: skip


def _arrays(rng: Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.6:
        found["items"] = random_keywords(rng, depth)
    if rng.random() < 0.5:
        found["prefixItems"] = [random_keywords(rng, depth) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.7:
        found[rng.choice(("minItems", "maxItems"))] = rng.randint(0, 3)
    return found


def _values(rng: Random, depth: int) -> dict[str, Any]:
    values = (0, 1, -2, 2.5, 3, 3.0, 1e-7, 100.25, "a", "ab", "", "é", None, True, False,
              {"a": 1}, {"a": {"b": "x"}}, {"ab": 1, "b": [2]}, [], [1], [1, "a"])  # fmt: skip
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 6))}


def _nothing(rng: Random, depth: int) -> dict[str, Any]:
    return {"not": rng.choice(({}, True, False, {"type": "null"}))}


def _combined(rng: Random, depth: int) -> dict[str, Any]:
    match rng.choice(_COMBINING):
        case "$ref":
            return {"$ref": rng.choice(("#/$defs/d", "#/$defs/e", "#"))}
        case name:
            return {name: [random_keywords(rng, depth) for _ in range(rng.randint(1, 3))]}


_MAKERS = (_numbers, _strings, _objects, _objects, _arrays, _values, _combined, _combined,
           _nothing)  # fmt: skip
