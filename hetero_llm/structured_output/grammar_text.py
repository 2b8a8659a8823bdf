"""From a user's constraint to llguidance's grammar text.

The forms of the text are those of llguidance's documentation (docs/syntax.md, docs/json_schema.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.structured_outputs import (
    EmbeddedSchema,
    StructuredOutputsParams,
    ToolOutputParams,
)
from hetero_llm.structured_output.endless_values import check_values_end
from hetero_llm.structured_output.json_schema import (
    check_schema,
    close_objects,
    read_schema,
    schemas_in,
)
from hetero_llm.structured_output.mended_schema import mended
from hetero_llm.structured_output.structural_tag import structural_tag_grammar

_INLINE_START = re.compile(r"(?m)^\s*[?!]start\s*:(?!:=)")
"""Lark's first rule with a mark of its tree, which llguidance's test for Lark does not know."""
WHITESPACE = r"[ \t\n\r]{1,64}"
"""Between parts of JSON. It is bounded, since a model may fall into a loop of line ends."""

# Without u: the name of a property could be spelled with \\u, past the schema of that property.
_ESCAPES = 'nrbtf\\"'
# Calls of tools are written as chat templates write them: one space behind commas and colons.
_TOOL_OPTIONS = {
    "json_allowed_escapes": _ESCAPES,
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """The grammar of one of a constraint's schemas alone.

    Attributes:
        source: the schema as the user gave it, and where.
    """

    source: EmbeddedSchema
    text: str


@dataclass(frozen=True, slots=True)
class ConstraintGrammar:
    """The grammar of a constraint. Whether llguidance takes it is not known yet.

    Attributes:
        text: in llguidance's form.
        field: that gives the constraint.
        value: of the field, for errors.
        schemas: the user's schemas in it.
        answer: the grammar of the request's own constraint in it; see `ToolOutputParams`.
    """

    text: str
    field: str
    value: Any
    schemas: Sequence[SchemaGrammar] = ()
    answer: ConstraintGrammar | None = None


def constraint_grammar(
    params: StructuredOutputsParams, special: Mapping[str, int]
) -> ConstraintGrammar:
    """The grammar of a constraint.

    Args:
        special: the tokenizer's special tokens and their ids.

    Raises:
        SamplingError: the constraint is not in the form of its kind, or a schema in it has a
            keyword that llguidance follows wrongly; names the place.
    """
    from llguidance import LLMatcher

    if params.json is not None or params.json_object:
        field = "json_object" if params.json is None else "json"
        given = {"type": "object"} if params.json is None else params.json
        schema = read_schema(given, field)
        text = _alone(_embedded(schema, field, params))
        alone = SchemaGrammar(EmbeddedSchema(schema, field), text)
        return ConstraintGrammar(text, field, given, (alone,))
    if params.regex is not None:
        text = LLMatcher.grammar_from_regex(params.regex)
        return ConstraintGrammar(text, "regex", params.regex)
    if params.choice is not None:
        return ConstraintGrammar(_choice(params.choice), "choice", params.choice)
    if isinstance(params, ToolOutputParams):
        return _tools(params, special)
    if params.grammar is not None:
        return ConstraintGrammar(_user_grammar(params.grammar), "grammar", params.grammar)
    assert params.structural_tag is not None
    found: list[SchemaGrammar] = []

    def embed(schema: Mapping[str, Any] | bool, field: str) -> dict[str, Any] | bool:
        made = _embedded(schema, field, params)
        found.append(SchemaGrammar(EmbeddedSchema(schema, field), _alone(made)))
        return made

    text = structural_tag_grammar(params.structural_tag, embed, special)
    return ConstraintGrammar(text, "structural_tag", params.structural_tag, found)


def _tools(params: ToolOutputParams, special: Mapping[str, int]) -> ConstraintGrammar:
    """A message that calls tools: the grammars of the tools' schemas beside its own. One that may
    be an answer instead: both grammars beside the choice between them."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": params.grammar}]
    found = []
    for name, source in params.schemas.items():
        made = _with_options(source.schema, source.at, params, _TOOL_OPTIONS)
        grammars.append({"name": name, "json_schema": made})
        found.append(SchemaGrammar(source, _alone(made)))
    answer = None
    if params.answer is not None:
        answer = constraint_grammar(params.answer, special)
        calls, *schemas = grammars
        whole, *parts = json.loads(answer.text)["grammars"]
        grammars = [
            {"lark_grammar": "%llguidance {}\nstart: @calls | @answer"},
            {**calls, "name": "calls"},
            *schemas,
            {**whole, "name": "answer"},
            *parts,
        ]
    return ConstraintGrammar(json.dumps({"grammars": grammars}), *params.given, found, answer)


def schema_text(schema: dict[str, Any]) -> str:
    """The grammar of a schema in its plainest form, to see whether it can be followed."""
    return _alone(mended(schema, schemas_in(schema)))


def _alone(schema: dict[str, Any] | bool) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _embedded(
    schema: Mapping[str, Any] | bool, field: str, params: StructuredOutputsParams
) -> dict[str, Any] | bool:
    """A schema that stands in `field`, for a grammar of its own or a part of one."""
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    return _with_options(schema, lambda path: field + path, params, options)


def _with_options(
    schema: Mapping[str, Any] | bool,
    at: Callable[[str], str],
    params: StructuredOutputsParams,
    options: Mapping[str, Any],
) -> dict[str, Any] | bool:
    """A schema with llguidance's options in it.

    Args:
        at: the field of a path in the schema.

    Raises:
        SamplingError: see `check_schema` and `check_values_end`.
    """
    if params.disable_additional_properties:
        schema = close_objects(schema)
    try:
        schemas = schemas_in(schema)
        check_schema(schemas)
        if any("$ref" in one for _, one in schemas):
            check_values_end(schema)
    except SamplingError as error:
        raise SamplingError(at(error.field), error.value, error.reason) from None
    schema = mended(schema, schemas)
    if schema is False:  # allows nothing, which llguidance says
        return False
    return {**({} if schema is True else schema), "x-guidance": dict(options)}


def _choice(choice: Sequence[str]) -> str:
    return _lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice))


def _user_grammar(text: str) -> str:
    """A grammar in Lark's or GBNF's form.

    Raises:
        SamplingError: it looks like GBNF, and cannot be translated to Lark.
    """
    from llguidance.gbnf_to_lark import is_lark_syntax

    if is_lark_syntax(text) or _INLINE_START.search(text):
        return _lark(text)
    try:
        return _lark(_lark_of_gbnf(text))
    except Exception as error:  # the translator's own assertions, too
        raise SamplingError("grammar", text, f"is no GBNF: {error}") from None


def _lark_of_gbnf(text: str) -> str:
    """llguidance's translation. It looks for terminal rules until it finds no more of them, in the
    order of the rules: here each one follows those that it names, so that it looks twice instead of
    once for each rule (56 KB took 13 s)."""
    from llguidance.gbnf_to_lark import GrammarParser, RuleRefNode, resolve

    rules = GrammarParser().parse(text)
    ordered: dict[str, Any] = {}
    seen = set()
    for first in rules:
        stack = [(first, False)]
        while stack:
            name, follows = stack.pop()
            if follows:
                ordered[name] = rules[name]
            elif name in rules and name not in seen:
                seen.add(name)
                stack.append((name, True))
                nodes = [rules[name].alternatives]
                while nodes:
                    node = nodes.pop()
                    nodes += node.children()
                    if isinstance(node, RuleRefNode):
                        stack.append((node.name, False))
    resolve(ordered)
    return "\n".join(["%llguidance {}", *map(str, ordered.values())])


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
