"""Grammars of messages that call tools, in the model's own format, as llguidance's Lark.

A message has to call a function (tool_choice "required", or a named one), or may (strict tools);
arguments match the schemas of the tools either way. What a grammar accepts, `RegionParser` reads.

Markers that are tokens are written as `<[id]>`, so that no other tokens spell them. A schema stands
beside the grammar, which refers to it as `@name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.reasoning_formats import ReasoningFormat
from hetero_llm.core.structured_outputs import (
    EmbeddedSchema,
    StructuredOutputsParams,
    ToolOutputParams,
)
from hetero_llm.server.regions.argument_types import (
    alone,
    alternatives,
    constants,
    types_of,
)
from hetero_llm.server.regions.formats import (
    Channels,
    HeadedCalls,
    JsonCalls,
    MessageFormat,
    PythonCalls,
    TaggedCalls,
    ToolFormat,
)
from hetero_llm.server.regions.special_tokens import Start

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT_LIMITS = ("pattern", "minLength", "maxLength", "format")
_LITERALS = {"true": "True", "false": "False", "null": "None"}


class SchemaError(ValueError):
    """A schema that the format cannot guarantee.

    Attributes:
        field: the part of the function's parameters.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


@dataclass(frozen=True, slots=True)
class GrammarFunction:
    """A function that the model may call.

    Attributes:
        parameters: the schema of its arguments; None: any object.
        field: of the request, in which the schema stands.
        strict: the arguments have to match the schema whatever it says.
    """

    name: str
    parameters: Mapping[str, Any] | None
    field: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """Attributes:
    lark: of the whole message, or of what follows reasoning.
    schemas: those that it refers to, by name.
    begins_after: tokens behind which the grammar begins, if the message begins with reasoning
        and a token ends that.
    """

    lark: str
    schemas: Mapping[str, EmbeddedSchema]
    begins_after: tuple[int, ...] = ()

    def constraint(self) -> ToolOutputParams:
        """The same for a request."""
        return ToolOutputParams(
            grammar=self.lark, schemas=self.schemas, begins_after=self.begins_after
        )

    def constraint_or(self, answer: StructuredOutputsParams) -> ToolOutputParams:
        """The same of a message that follows either this grammar or the request's own constraint,
        which says where both begin."""
        return ToolOutputParams(
            grammar=self.lark,
            schemas=self.schemas,
            answer=answer,
            begins_after=answer.begins_after,
            may_begin_with=answer.may_begin_with,
        )


def tool_grammar(
    message_format: MessageFormat,
    functions: Sequence[GrammarFunction],
    token_ids: Mapping[str, int],
    start: Start,
    *,
    required: bool,
    parallel: bool,
) -> ToolGrammar:
    """The grammar of a message.

    Args:
        message_format: with a format of tool calls.
        functions: at least one.
        token_ids: the model's tokens that stand for a text of the format; see `written_texts`.
        required: the message consists of calls, but for reasoning before them.
        parallel: the message may hold several calls.

    Raises:
        SchemaError: a strict function has a schema that calls of this format cannot keep to.
    """
    writer = _Writer(token_ids)
    if message_format.channels is not None:
        return writer.channels(message_format.channels, functions, start, required=required)
    assert message_format.tools is not None
    begins_after: tuple[int, ...] = ()
    before = ""
    reasoning = message_format.reasoning
    if reasoning is not None:
        closes = reasoning.closes[0]
        if start == "reasoning" and closes in token_ids:
            begins_after, before = (token_ids[closes],), "SPACE "
        else:
            before = writer.reasoning(reasoning, start)
    body = writer.calls(message_format.tools, functions, required=required, parallel=parallel)
    writer.rules["start"] = before + body
    return ToolGrammar(writer.lark(), writer.schemas, begins_after)


def written_texts(message_format: MessageFormat) -> str:
    """All markup of a format, to find the tokens in it."""
    channels, tools, reasoning = (
        message_format.channels,
        message_format.tools,
        message_format.reasoning,
    )
    texts: list[str] = []
    if channels is not None:
        texts += [channels.part, channels.channel, channels.message, *channels.ends]
        texts += ["<|constrain|>"]
    if reasoning is not None:
        texts += [*reasoning.opens, *reasoning.closes]
    if tools is not None:
        texts += [*tools.opens, tools.closes, *tools.written]
        body = tools.body
        if isinstance(body, HeadedCalls):
            texts += [body.opens, body.written, body.tail, body.closes, *body.inside]
        elif isinstance(body, TaggedCalls):
            texts += [body.opens, body.name_ends, body.parameter, body.key_end_written]
            texts += [body.value_ends, body.closes]
    return "\n".join(texts)


class _Writer:
    """Writes one grammar."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first))) if token_ids else None
        self.rules: dict[str, str] = {"start": ""}
        self.schemas: dict[str, EmbeddedSchema] = {}
        self._untils: dict[str, str] = {}

    def lark(self) -> str:
        lines = [f"{name}: {rule}" for name, rule in self.rules.items()]
        return "\n".join(["%llguidance {}", *lines, "TEXT: /(.|\\n)*/", "SPACE: /[ \\n]{0,4}/", ""])

    def _literal(self, text: str) -> str:
        """The terms of a text, tokens in it as such."""
        terms, at = [], 0
        for found in self._tokens.finditer(text) if self._tokens is not None else ():
            if found.start() > at:
                terms.append(json.dumps(text[at : found.start()]))
            terms.append(f"<[{self._token_ids[found[0]]}]>")
            at = found.end()
        if at < len(text):
            terms.append(json.dumps(text[at:]))
        return " ".join(terms)

    def _until(self, marker: str) -> str:
        """The terms of any text and a marker that ends it."""
        if self._tokens is not None and self._tokens.match(marker):
            return f"TEXT {self._literal(marker)}"
        name = self._untils.get(marker)
        if name is None:
            name = self._untils[marker] = f"until_{len(self._untils)}"
            self.rules[f"{name}[lazy]"] = f"/(.|\\n)*/ {json.dumps(marker)}"
        return name

    def reasoning(self, reasoning: ReasoningFormat, start: Start) -> str:
        """The terms of reasoning before the rest of the message."""
        thoughts = self._until(reasoning.closes[0])
        if start == "reasoning":
            return f"{thoughts} SPACE "
        return f"(SPACE {self._literal(reasoning.opens[0])} {thoughts} SPACE)? "

    # -- calls --------------------------------------------------------------------------------

    def calls(
        self,
        tools: ToolFormat,
        functions: Sequence[GrammarFunction],
        *,
        required: bool,
        parallel: bool,
    ) -> str:
        """The terms of a message behind its reasoning."""
        body, (opens, between, closes) = tools.body, tools.written
        several = tools.several
        in_list = body.as_json if isinstance(body, HeadedCalls) else None
        if in_list is not None and "[ARGS]" not in self._token_ids:  # tokenizers of older models
            body, several = in_list, True
            opens, between, closes = f"{opens} [", ", ", "]"
        calls = []
        for index, function in enumerate(functions):
            name = f"call_{index}"
            self.rules[name] = self._call(body, name, function)
            calls.append(name)
        self.rules["call"] = " | ".join(calls)
        join = self._literal(between)
        inside = f"call ({join} call)*" if several and parallel else "call"
        marked = next((one for one in tools.opens if opens.startswith(one)), "")
        self.rules["rest"] = (
            f"{self._literal(opens[len(marked) :])} {inside} {self._literal(closes)}"
        )
        section = f"{self._literal(marked)} rest"
        if required:
            return section if several or not parallel else f"{section} ({join} {section})*"
        if not marked:
            self.rules["FREE"] = f"/([^{re.escape(tools.bare)} \\n](.|\\n)*)?/"
            return f"({section} | FREE)"
        found = f"{self._until(marked)} rest"
        return f"({found})* TEXT" if parallel else f"({found})? TEXT"

    def _call(self, body: Any, name: str, function: GrammarFunction) -> str:
        if isinstance(body, JsonCalls):
            head = f'{{"{body.name_key}": {json.dumps(function.name)}, "{body.argument_keys[0]}": '
            return f"{json.dumps(head)} {self._json(name, function)} {json.dumps('}')}"
        if isinstance(body, HeadedCalls):
            header, number, rest = body.written.partition("{index}")
            head = self._literal(body.opens + header.replace("{name}", function.name))
            if number:
                head += f" /[0-9]{{1,3}}/ {self._literal(rest)}"
            return f"{head} {self._json(name, function)} {self._literal(body.tail + body.closes)}"
        if isinstance(body, TaggedCalls):
            return self._tagged(body, name, function)
        assert isinstance(body, PythonCalls)
        return self._python(name, function)

    def _json(self, name: str, function: GrammarFunction) -> str:
        """The term of a function's arguments as a JSON object."""
        self.schemas[f"{name}_arguments"] = EmbeddedSchema(_schema(function), function.field)
        return f"@{name}_arguments"

    def _value(self, name: str, function: GrammarFunction, key: str, schema: Any) -> str:
        """The term of one argument as JSON."""
        field = f"{function.field}.properties.{key}"
        whole = alone(schema, _schema(function))
        self.schemas[f"{name}_value"] = EmbeddedSchema(whole, field, shared=function.field)
        return f"@{name}_value"

    def _tagged(self, body: TaggedCalls, name: str, function: GrammarFunction) -> str:
        head = self._literal(f"{body.opens}{function.name}{body.name_ends}\n")
        terms = [head]
        line = "\n" if body.trims else ""
        for index, (key, schema, needed) in enumerate(_parameters(function)):
            rule = f"{name}_{index}"
            opens = self._literal(f"{body.parameter}{key}{body.key_end_written}")
            closes = self._literal(f"{line}{body.value_ends}\n")
            texts, values, is_free = self._choices(rule, function, key, schema)
            if is_free:
                ends = line + body.value_ends
                if body.value_ends in self._token_ids:
                    ends = body.value_ends
                after = self._literal("\n")
                self.rules[rule] = f"{opens} {self._until(ends)} {after}"
            else:
                choice = " | ".join([*map(json.dumps, texts), *values])
                self.rules[rule] = f"{opens} ({choice}) {closes}"
            terms.append(rule if needed else f"{rule}?")
        return " ".join([*terms, self._literal(body.closes)])

    def _choices(
        self, rule: str, function: GrammarFunction, key: str, schema: Any
    ) -> tuple[list[str], list[str], bool]:
        """How an argument may stand in a tag, where strings have no quotes: the texts of constants,
        the terms of other values, and whether it may be any text.

        Raises:
            SchemaError: a strict function limits what may be any text.
        """
        root = _schema(function)
        texts: list[str] = []
        others: list[Mapping[str, Any]] = []
        free: list[Mapping[str, Any]] = []
        for one in alternatives(schema, root):
            one = one if isinstance(one, Mapping) else {}
            values = constants(one)
            if values is not None:
                texts += [each if isinstance(each, str) else json.dumps(each) for each in values]
            elif "string" in types_of(one, root):
                free.append(one)
            else:
                others.append(one)
        if function.strict and free:
            field = f"{function.field}.properties.{key}"
            for one in free:
                _refuse_limits(field, one)
            if any(one.keys() - {"type", "title", "description"} for one in others):
                raise SchemaError(field, "a string or another value is not available in this "
                                         "model's format")  # fmt: skip
        if free:
            return [], [], True
        found = [
            self._value(f"{rule}_{index}", function, key, one) for index, one in enumerate(others)
        ]
        return list(dict.fromkeys(texts)), found, False

    def _python(self, name: str, function: GrammarFunction) -> str:
        parameters = list(_parameters(function))
        for index, (key, schema, _) in enumerate(parameters):
            rule = f"{name}_{index}"
            constants = _constants(schema)
            if constants is None:
                value = self._value(rule, function, key, schema)
            else:
                value = "(" + " | ".join(json.dumps(_LITERALS[one]) for one in constants) + ")"
            self.rules[rule] = f"{json.dumps(key + '=')} {value}"
        # One rule for each parameter that may come first: commas stand between those that come.
        tails = ""
        for index in reversed(range(len(parameters))):
            rule, needed = f"{name}_{index}", parameters[index][2]
            after = f"{name}_after_{index}"
            later = f" {name}_after_{index + 1}" if index + 1 < len(parameters) else ""
            optional = "" if needed else "?"
            self.rules[after] = f'(", " {rule}){optional}{later}'
            first = f"{rule}{later}"
            tails = first if needed or not tails else f"{first} | {tails}"
        needs_none = not any(needed for _, _, needed in parameters)
        inside = f"({tails}){'?' if needs_none else ''}" if tails else ""
        return f"{json.dumps(function.name + '(')} {inside} {json.dumps(')')}"

    # -- harmony ------------------------------------------------------------------------------

    def channels(
        self,
        channels: Channels,
        functions: Sequence[GrammarFunction],
        start: Start,
        *,
        required: bool,
    ) -> ToolGrammar:
        """The grammar of a message in channels. It has one call, which ends the message: what
        ends the call also ends the sequence."""

        def head(text: str) -> str:
            return self._literal(f"{channels.channel}{text}{channels.message}")

        calls = []
        for index, function in enumerate(functions):
            name = f"call_{index}"
            header = head(f"commentary to=functions.{function.name} <|constrain|>json")
            self.rules[name] = f"{header} {self._json(name, function)}"
            calls.append(name)
        self.rules["call"] = " | ".join(calls)
        end = channels.ends[0]
        again = self._literal(f"{channels.part}assistant")
        before = f"({head('analysis')} {self._until(end)} {again})* "
        if start == "reasoning":
            before = f"{self._until(end)} {again} {before}"
        if required:
            self.rules["start"] = f"{before}call"
        else:
            preamble = f"({head('commentary')} {self._until(end)} {again})*"
            self.rules["start"] = f"{before}{preamble} (call | {head('final')} TEXT)"
        return ToolGrammar(self.lark(), self.schemas)


# -- schemas --------------------------------------------------------------------------------------


def _schema(function: GrammarFunction) -> dict[str, Any]:
    """The schema of the arguments, which are an object."""
    if function.parameters is None:
        return {"type": "object"}
    return {**(function.parameters or _NO_PARAMETERS), "type": "object"}


def _parameters(function: GrammarFunction) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and necessity of each argument, for formats that write them one by one."""
    schema = _schema(function)
    properties = schema.get("properties", {})
    if function.strict:
        for word in ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "if", "not"):
            if word in schema:
                raise SchemaError(
                    f"{function.field}.{word}",
                    f"{word} is not available here in this model's format",
                )
    needed = set(schema.get("required", ()))
    return [
        (key, {} if isinstance(one, bool) else one, key in needed)
        for key, one in properties.items()
    ]


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """The types that a schema allows, as the user wrote them; empty: it does not say."""
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _refuse_limits(field: str, schema: Mapping[str, Any]) -> None:
    for word in _TEXT_LIMITS:
        if word in schema:
            raise SchemaError(
                f"{field}.{word}", f"{word} of a string is not available in this model's format"
            )


def _constants(schema: Mapping[str, Any]) -> list[str] | None:
    """JSON's names of the constants that a schema allows, if it allows nothing else."""
    kinds = _kinds(schema)
    plain = all(kind in ("boolean", "null") for kind in kinds)
    if not kinds or not plain or schema.keys() & {"enum", "const"}:
        return None
    return [one for kind in kinds for one in (["true", "false"] if kind == "boolean" else ["null"])]
