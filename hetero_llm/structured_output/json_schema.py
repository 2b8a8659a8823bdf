"""JSON schemas as users send them: reading, closing objects, and where a keyword stands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hetero_llm.core.errors import SamplingError

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_QUOTED_VALUE = re.compile(r"(?:Unknown format|Invalid type): (.*)")
_POINTER = re.compile(r"Pointer '(.*)' does not exist")

# Keywords whose value is not a schema, nor holds any.
_DATA = frozenset({"enum", "const", "default", "examples", "required", "type", "description"})
# Keywords whose value maps names to schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def read_schema(schema: str | Mapping[str, Any] | bool, field: str) -> dict[str, Any] | bool:
    """A schema as an object, or true or false.

    Raises:
        SamplingError: the text is no JSON, or no schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise SamplingError(field, schema, f"is not valid JSON: {error}") from None
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise SamplingError(field, schema, "must be a JSON schema: an object, true or false")
    return dict(schema)


def close_objects(schema: Any) -> Any:
    """A copy in which objects that say nothing about additional properties have none."""
    if isinstance(schema, list):
        return [close_objects(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: value if name in _DATA else _close_named(value) if name in _NAMED
        else close_objects(value)
        for name, value in schema.items()
    }  # fmt: skip
    if closed.get("type") == "object" or "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _close_named(schemas: Any) -> Any:
    if not isinstance(schemas, dict):
        return schemas
    return {name: close_objects(one) for name, one in schemas.items()}


def check_schema(schema: Any, field: str) -> None:
    """Refuses what llguidance 1.9 takes and follows wrongly.

    Raises:
        SamplingError: a number lies above an integer and below the next one (or the other way
            round), the integer excluded: llguidance would allow the integer itself.
    """
    for path, one in _schemas(schema):
        if one.get("type") == "integer":
            continue
        for name, others, sign in _EXCLUSIVE:
            bound = one.get(name)
            ends = [one[other] for other in others if isinstance(one.get(other), (int, float))]
            if not isinstance(bound, (int, float)) or bound != int(bound) or not ends:
                continue
            if min(sign * (end - bound) for end in ends) < 1:
                reason = (
                    "an excluded integer with the other limit less than 1 away is not supported"
                )
                raise SamplingError(f"{field}{path}.{name}", bound, reason)


_EXCLUSIVE = (
    ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
)


def place_of(message: str, schema: Any) -> tuple[str, Any] | None:
    """Where in a schema lies what llguidance's message speaks of: a path from the root such as
    ".properties.age.format", and the value there; None if the message does not tell."""
    wanted = _subject(message)
    found = (
        (path, value)
        for path, name, value in _keywords(schema)
        if wanted is not None and wanted(name, value)
    )
    return next(found, None)


def _subject(message: str) -> Callable[[str, Any], bool] | None:
    """A test of keyword and value for what the message is about; None if it names nothing."""
    if found := _UNIMPLEMENTED.search(message):
        keys = set(json.loads(found[1]))
        return lambda name, value: name in keys
    if found := _POINTER.search(message):
        pointer = found[1]
        return lambda name, value: name == "$ref" and str(value).endswith(pointer)
    if found := _QUOTED_VALUE.search(message):
        wanted = found[1].strip()
        keyword = "format" if "format" in message else "type"
        return lambda name, value: name == keyword and wanted in (value, json.dumps(value))
    if "regex parse error" in message or "look-around" in message:
        return lambda name, value: name == "pattern" and str(value) in message
    return None


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Path, keyword and value of every keyword of a schema and of the schemas in it. The patterns
    of patternProperties count as keywords "pattern"."""
    for path, one in _schemas(schema):
        for name, value in one.items():
            yield f"{path}.{name}", name, value
            if name == "patternProperties" and isinstance(value, dict):
                yield from ((f"{path}.{name}.{key}", "pattern", key) for key in value)


def _schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and object of a schema and of the schemas in it."""
    stack = [(schema, "")]
    while stack:
        one, at = stack.pop()
        if isinstance(one, list):
            stack += [(item, f"{at}[{index}]") for index, item in enumerate(one)]
        if not isinstance(one, dict):
            continue
        yield at, one
        for name, value in one.items():
            if name in _NAMED and isinstance(value, dict):
                stack += [(item, f"{at}.{name}.{key}") for key, item in value.items()]
            elif name not in _DATA:
                stack.append((value, f"{at}.{name}"))
