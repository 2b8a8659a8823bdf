"""What a request's output must follow: `response_format`, `structured_outputs`, `guided_*`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from hetero_llm.core.structured_outputs import (
    GuidedDecodingRequest,
    StructuredOutputsParams,
    check_backend,
)
from hetero_llm.server.errors import FieldNames, invalid, required, too_many, wrong, wrong_value
from hetero_llm.server.protocol import Generation, ResponseFormat
from hetero_llm.server.settings import Limits

FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structural_tag", "guided_decoding_backend", "guided_whitespace_pattern",
)  # fmt: skip
"""Fields of requests that this module reads."""
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
_OF_FORMAT = FieldNames(
    {
        "json": "response_format.json_schema.schema",
        "json_object": "response_format",
        "structural_tag": "response_format",
    }
)
_OF_GUIDED = FieldNames(
    {name.removeprefix("guided_"): name for name in (*_GUIDED, "guided_whitespace_pattern")}
)
_OF_PARAMS = FieldNames(
    {one.name: f"structured_outputs.{one.name}" for one in fields(StructuredOutputsParams)}
)
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def constraint_names(request: Generation) -> FieldNames:
    """What a request calls the fields of its constraint."""
    if request.structured_outputs is not None:
        return _OF_PARAMS
    if any(getattr(request, name) is not None for name in _GUIDED):
        return _OF_GUIDED
    return _OF_FORMAT


def output_constraint(request: Generation, limits: Limits) -> StructuredOutputsParams | None:
    """The constraint of a request; None without any.

    Raises:
        ApiError: several fields give one, a field is not in its form, or the constraint is too
            long.
    """
    with constraint_names(request).in_errors():
        return _constraint(request, limits)


def _constraint(request: Generation, limits: Limits) -> StructuredOutputsParams | None:
    found: list[tuple[str, StructuredOutputsParams]] = []
    if request.response_format is not None:
        constraint = _of_format(request.response_format)
        if constraint is not None:
            found.append(("response_format", constraint))
    if request.structured_outputs is not None:
        given = request.structured_outputs
        found.append(
            ("structured_outputs", StructuredOutputsParams.of(given, "structured_outputs"))
        )
    found += _of_guided(request)
    for field, constraint in found:
        size = len(msgspec.json.encode(constraint))
        if size > limits.constraint_chars:
            raise too_many(field, f"{size} characters as JSON", limits.constraint_chars)
    if len(found) > 1:
        names = " and ".join(field for field, _ in found)
        raise invalid(found[1][0], f"{names}: an output can follow one of them only")
    return found[0][1] if found else None


def _of_format(form: ResponseFormat) -> StructuredOutputsParams | None:
    """The constraint of OpenAI's field; schemas are followed whether `strict` or not."""
    match form.type:
        case None:
            name = "response_format.type"
            raise required(name)
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=_schema(form.json_schema))
        case "structural_tag":
            given = msgspec.to_builtins(form)
            return StructuredOutputsParams(
                structural_tag={k: v for k, v in given.items() if v is not None}
            )
    name = "response_format.type"
    raise wrong_value(name, form.type, f"must be one of {', '.join(_FORMATS)}")


def _schema(given: Any) -> Any:
    """The schema of `{"name": ..., "schema": ..., "strict": ...}`."""
    name = "response_format.json_schema"
    if not isinstance(given, dict):
        raise wrong(name, "must be an object with a schema")
    schema = given.get("schema", given.get("json_schema"))
    if not isinstance(schema, (dict, bool)):
        raise wrong_value(f"{name}.schema", schema, "must be a JSON schema")
    return schema


def _of_guided(request: Generation) -> list[tuple[str, StructuredOutputsParams]]:
    """The constraint of the TACO-LLM manual's fields."""
    check_backend("guided_decoding_backend", request.guided_decoding_backend)
    names = [name for name in _GUIDED if getattr(request, name) is not None]
    if not names:
        if request.guided_whitespace_pattern is not None:
            raise wrong("guided_whitespace_pattern", "needs guided_json")
        return []
    given = {name: getattr(request, name) for name in names}
    pattern = request.guided_whitespace_pattern
    guided = GuidedDecodingRequest(**given, guided_whitespace_pattern=pattern)
    return [(names[0], guided.structured_outputs())]
