"""Published schemas: the JSON Schema test suite (draft 2020-12) and a part of JSONSchemaBench.

The files in data/ tell where they come from, and their licences.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.structured_output.compiler import GrammarCompiler
from tests.helpers.grammar_walk import byte_compiler, check, random_keywords, walk
from tests.structured_output.test_compiler import takes

DATA = Path(__file__).parent / "data"
SUITE: list[list[Any]] = json.loads((DATA / "json_schema_test_suite.json").read_text())["groups"]
BENCH: list[list[Any]] = json.loads((DATA / "json_schema_bench.json").read_text())["schemas"]

# Valid instances that no output can be: by file, the begin of their descriptions, and why.
NOT_WRITTEN = [
    ("allOf", "allOf", "properties come in the order of the schema"),
    ("allOf", "valid", "properties come in the order of the schema"),
    ("const", "same object with different property order", "properties come in one order"),
    ("const", "float ", "a number is spelled in one way"),
    ("enum", "float zero", "a number is spelled in one way"),
    ("enum", "float one", "a number is spelled in one way"),
    ("enum", "[0.0]", "a number is spelled in one way"),
    ("enum", "[1.0]", "a number is spelled in one way"),
    ("type", "a float with zero fractional part", "integers have no fraction"),
    ("optional/float-overflow", "valid if optional", "integers have no exponent"),
    ("optional/bignum", "comparison works for", "numbers end where llguidance's limits do"),
    ("format", "invalid ", "formats are followed, here they are annotations"),
    ("optional/ecmascript-regex", "zero-width whitespace matches", "not white space in Unicode"),
    ("optional/ecmascript-regex", "Line tabulation", "a control character"),
    ("optional/ecmascript-regex", "Non-whitespace control", "a control character"),
    ("optional/format/date-time", "a valid date-time with a leap second", "no leap seconds"),
    ("optional/format/time", "a valid time string with leap second", "no leap seconds"),
    ("optional/format/time", "valid leap second", "no leap seconds"),
    ("optional/format/email", "a quoted string", "no quotes in addresses"),
    ("optional/format/email", "an IPv6-address-literal", "no IPv6 in addresses"),
    ("optional/format/ipv6", "mixed format", "no IPv4 in IPv6"),
    ("optional/format/ipv6", "a long valid ipv6", "no IPv4 in IPv6"),
]  # fmt: skip
NO_PUNYCODE = "validation of A-label (punycode) host names"
# Invalid instances that an output can be: U+FEFF is white space in ECMA-262, not in Unicode.
WRITTEN = [("optional/ecmascript-regex", "zero-width whitespace does not match")]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


@pytest.mark.parametrize("file", dict.fromkeys(group[0] for group in SUITE))
def test_the_json_schema_test_suite(compiler: GrammarCompiler, file: str) -> None:
    wrong = []
    for _, group, schema, rows in (one for one in SUITE if one[0] == file):
        text = json.dumps(schema)
        try:
            compiler.grammar(StructuredOutputsParams(json=text))
        except SamplingError as error:
            assert error.field.startswith("json")
            continue
        for description, instance, valid in rows:
            written = takes(compiler, json.dumps(instance, ensure_ascii=False), json=text)
            if written and not valid and (file, description) not in WRITTEN:
                wrong.append(("invalid, written", group, description, instance))
            excused = group == NO_PUNYCODE or any(
                file == one and description.startswith(begin) for one, begin, _ in NOT_WRITTEN
            )
            if valid and not written and not excused:
                wrong.append(("valid, not written", group, description, instance))
    assert not wrong


def test_most_of_the_test_suite_is_not_refused(compiler: GrammarCompiler) -> None:
    taken = 0
    for _, _, schema, _ in SUITE:
        try:
            compiler.grammar(StructuredOutputsParams(json=json.dumps(schema)))
        except SamplingError:
            continue
        taken += 1
    assert taken >= 0.7 * len(SUITE)


@pytest.mark.parametrize("part", range(4))
def test_json_schema_bench(compiler: GrammarCompiler, part: int) -> None:
    finished = refused = 0
    for name, schema in BENCH[part::4]:
        params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        begun = time.thread_time()
        try:
            compiler.grammar(params)
        except SamplingError as error:
            assert error.field.startswith("json") and error.reason, name
            refused += 1
            continue
        finally:
            assert time.thread_time() - begun < 1, name
        text = walk(compiler, params, Random(name), 300)
        if text is not None:
            check(schema, text)
            finished += 1
    assert finished >= 30 and refused <= 6


def test_random_combinations_of_keywords(compiler: GrammarCompiler) -> None:
    finished = 0
    for seed in range(300):
        rng = Random(seed)
        schema = random_keywords(rng)
        params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        try:
            text = walk(compiler, params, rng, 120)
        except SamplingError as error:
            assert error.field.startswith("json")
            continue
        if text is not None:
            check(schema, text)
            finished += 1
    assert finished > 100
