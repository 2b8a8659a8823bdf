"""From a user's constraint to llguidance's grammar text.

The forms of the text are those of llguidance's documentation (docs/syntax.md, docs/json_schema.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.structured_output.json_schema import (
    check_schema,
    close_objects,
    mended,
    read_schema,
)
from hetero_llm.structured_output.structural_tag import structural_tag_grammar

WHITESPACE = r"[ \t\n\r]{1,64}"
"""Between parts of JSON. It is bounded, since a model may fall into a loop of line ends."""

# Without u: the name of a property could be spelled with \\u, past the schema of that property.
_ESCAPES = 'nrbtf\\"'


def grammar_text(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """The grammar of a constraint. Whether llguidance takes it is not checked here.

    Args:
        special: the tokenizer's special tokens and their ids.

    Raises:
        SamplingError: the constraint is not in the form of its kind.
    """
    from llguidance import LLMatcher

    if params.json is not None:
        return _json(read_schema(params.json, "json"), params)
    if params.json_object:
        return _json({"type": "object"}, params)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return _choice(params.choice)
    if params.grammar is not None:
        return _user_grammar(params.grammar)
    assert params.structural_tag is not None
    return structural_tag_grammar(
        params.structural_tag, lambda schema: embedded_schema(schema, params), special
    )


def _json(schema: dict[str, Any] | bool, params: StructuredOutputsParams) -> str:
    return json.dumps({"grammars": [{"json_schema": embedded_schema(schema, params)}]})


def embedded_schema(
    schema: Mapping[str, Any] | bool, params: StructuredOutputsParams
) -> dict[str, Any] | bool:
    """A schema with llguidance's options in it, for a grammar of its own or a part of one."""
    if params.disable_additional_properties:
        schema = close_objects(schema)
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    check_schema(schema, "json")
    schema = mended(schema)
    if schema is False:  # allows nothing, which llguidance says
        return False
    return {**({} if schema is True else schema), "x-guidance": options}


def _choice(choice: Sequence[str]) -> str:
    return _lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice))


def _user_grammar(text: str) -> str:
    """A grammar in Lark's or GBNF's form.

    Raises:
        SamplingError: it looks like GBNF, and cannot be translated to Lark.
    """
    from llguidance import gbnf_to_lark

    try:
        return _lark(gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # the translator's own assertions, too
        raise SamplingError("grammar", text, f"is no GBNF: {error}") from None


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
