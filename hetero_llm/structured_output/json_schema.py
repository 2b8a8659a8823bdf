"""JSON schemas as users send them: reading, closing objects, and where a keyword stands."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeGuard
from urllib.parse import unquote

from hetero_llm.core.errors import SamplingError

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_QUOTED_VALUE = re.compile(r"(?:Unknown format|Invalid type): (.*)")
_REFERENCE = re.compile(r"(?:Pointer|Resource|Anchor) '(.*?)' (?:does not exist|is not present)")

Schemas = Sequence[tuple[str, dict[str, Any]]]
"""Schemas within one, each with its path from the root, such as ".properties.age"."""

# Keywords whose value is not a schema, nor holds any.
_DATA = frozenset({"enum", "const", "default", "examples", "required", "type", "description"})
# Keywords whose value maps names to schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def read_schema(schema: str | Mapping[str, Any] | bool, field: str) -> dict[str, Any] | bool:
    """A schema as an object, or true or false.

    Raises:
        SamplingError: the text is no JSON, or no schema; the object contains itself, or what JSON
            has no form for.
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
    try:
        return json.loads(json.dumps(schema, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise SamplingError(field, schema, f"cannot be written as JSON: {error}") from None


def close_objects(schema: Any) -> Any:
    """A copy in which objects that name properties and say nothing about additional ones have
    none. An object that names no property stays free: otherwise it could only be empty."""
    if isinstance(schema, list):
        return [close_objects(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: value if name in _DATA else _close_named(value) if name in _NAMED
        else close_objects(value)
        for name, value in schema.items()
    }  # fmt: skip
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _close_named(schemas: Any) -> Any:
    if not isinstance(schemas, dict):
        return schemas
    return {name: close_objects(one) for name, one in schemas.items()}


def check_schema(schemas: Schemas) -> None:
    """Refuses what llguidance 1.9 takes and follows wrongly.

    Args:
        schemas: `schemas_in` of the whole schema.

    Raises:
        SamplingError: an output that llguidance allows could break the schema; names the keyword by
            its path from the root, such as ".properties.a.minimum".
    """
    for path, one in schemas:
        if one.keys().isdisjoint(_WATCHED):
            continue
        for keyword, reason in _misread(one):
            raise SamplingError(f"{path}.{keyword}", one[keyword], reason)
        for place, pattern in patterns_of(one):
            if _is_ambiguous(pattern):
                reason = "a [ or a doubled &, - or ~ in a class of characters has to be escaped"
                raise SamplingError(f"{path}.{place}", pattern, reason)
    joined = [(path, one) for path, one in schemas if not one.keys().isdisjoint(_JOINED)]
    for group in [joined] if _any_joined(joined) else [[one] for one in joined]:
        if not all(one.keys().isdisjoint(_BOUNDS) for _, one in group):
            _check_excluded(group)
            _check_multiples(group)


# llguidance reads numbers as float64.
EXACT = 2**53
INT64 = 2**63
# llguidance's parser has 4 states for each property that may come next, and 2,000 at most. It would
# say so at the first token, when the request is running.
MOST_OPTIONAL = 498
# JSON has no short escape for these, and the long ones are not allowed: see `grammar_text.py`.
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_EXCLUSIVE = (
    ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
)
# Keywords of excluded numbers and of multiples, without which nothing about them is wrong.
_BOUNDS = frozenset({"exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
# Keywords that bound numbers, or hold schemas that may.
_JOINED = frozenset({
    *APPLICATORS, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "properties", "patternProperties", "additionalProperties", "items", "prefixItems",
})  # fmt: skip
_WATCHED = frozenset({
    "properties",
    "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minProperties", "additionalItems", "pattern", "patternProperties",
})  # fmt: skip


def _misread(one: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keywords of a schema that llguidance follows wrongly, and what of them is not supported."""
    for name in ("const", "enum"):
        for value in _leaves(one[name]) if name in one else ():
            if is_number(value) and abs(value) > EXACT:
                yield name, f"numbers beyond 2**53, such as {value}, are not supported"
            if isinstance(value, str) and _CONTROL.search(value):
                yield name, f"control characters, as in {value!r}, are not supported"
    beside = ", ".join(sorted(APPLICATORS & one.keys()))
    for exclusive, inclusive, _, sign in _EXCLUSIVE:
        if exclusive not in one and inclusive not in one:
            continue
        bound, limit = one.get(exclusive), one.get(inclusive)
        if bound is True and is_number(limit):
            bound = limit
            if beside:
                yield exclusive, f"true beside {beside} is not supported"
        if is_number(bound) and abs(bound) >= EXACT:
            yield exclusive, "an excluded number of 2**53 or beyond is not supported"
        # Those at the ends of int64 and uint64 limit nothing that llguidance allows.
        if is_number(limit) and abs(limit) > EXACT and -sign * limit < INT64 - 1:
            yield inclusive, "a limit beyond 2**53 is not supported"
    if "additionalItems" in one and is_list(one.get("items")) and beside:
        yield "additionalItems", f"is not supported beside {beside}"
    least, required = one.get("minProperties"), one.get("required")
    if least is None and "properties" not in one:
        return
    names = {name for name in required if isinstance(name, str)} if is_list(required) else set()
    choices = _most_optional(one.get("properties"), names)
    if choices > MOST_OPTIONAL:
        reason = (
            f"{choices} optional properties follow each other, any of which may come next; at most "
            f"{MOST_OPTIONAL} are supported, and required ones divide them"
        )
        yield "properties", reason
    if is_number(least) and least - len(names) > 1:
        reason = (
            "more than one property beyond those in 'required' is not supported: one name could "
            "come twice"
        )
        yield "minProperties", reason


def _most_optional(properties: Any, required: set[str]) -> int:
    """The most properties in a row that are not required. They come in the order of the schema, so
    after a name any of those up to the next required one may follow."""
    if not isinstance(properties, dict):
        return 0
    most = run = 0
    for name in properties:
        run = 0 if name in required else run + 1
        most = max(most, run)
    return most


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _leaves(value: Any) -> Iterator[Any]:
    """The values within a JSON value that are no list and no object."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, (list, dict)):
            stack += one.values() if isinstance(one, dict) else one
        else:
            yield one


def _is_ambiguous(pattern: str) -> bool:
    """Whether a class of characters means another one in Rust's syntax than in ECMA-262's: a class
    within a class, or an operation of two."""
    pieces = iter(re.findall(r"\\.|&&|--|~~|.", pattern, re.DOTALL))
    for piece in pieces:
        if piece != "[":
            continue
        inside = next(pieces, "]")
        if inside == "^":
            inside = next(pieces, "]")
        if inside == "]":  # empty, or with this bracket in it
            return True
        while inside != "]":
            if inside in ("[", "&&", "--", "~~"):
                return True
            inside = next(pieces, "]")
    return False


def _any_joined(schemas: Schemas) -> bool:
    """Whether keywords of several of these schemas may apply to one value."""
    return any(
        "allOf" in one
        or (APPLICATORS & one.keys() and len(_JOINED & one.keys()) > 1)
        or ("patternProperties" in one and "properties" in one)
        for _, one in schemas
    )


def _check_excluded(group: Schemas) -> None:
    """Raises SamplingError if an excluded integer lies less than 1 from the other limit:
    llguidance would allow the integer itself."""
    numbers = [(path, one) for path, one in group if one.get("type") != "integer"]
    for exclusive, inclusive, others, sign in _EXCLUSIVE:
        ends = [one[other] for _, one in numbers for other in others if is_number(one.get(other))]
        for path, one in numbers:
            bound = one.get(exclusive)
            bound = one.get(inclusive) if bound is True else bound
            if not is_number(bound) or bound != int(bound):
                continue
            if any(0 <= sign * (end - bound) < 1 for end in ends):
                reason = (
                    "an excluded integer with the other limit less than 1 away is not supported"
                )
                raise SamplingError(f"{path}.{exclusive}", bound, reason)


def _check_multiples(group: Schemas) -> None:
    """Raises SamplingError if the least common multiple of all `multipleOf` may not fit 32 bits,
    in units of their last decimal place: llguidance would compute another one."""
    found = {
        Fraction(str(one["multipleOf"])): f"{path}.multipleOf"
        for path, one in group
        if is_number(one.get("multipleOf"))
    }
    if len(found) > 1:
        unit = math.lcm(*(value.denominator for value in found))
        if math.prod(int(value * unit) for value in found) >= 2**32:
            value, place = list(found.items())[-1]
            reason = "the least common multiple with the other multipleOf is too large"
            raise SamplingError(place, float(value), reason)


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
    if found := _REFERENCE.search(message):
        target = found[1]
        return lambda name, value: name == "$ref" and target in str(value)
    if found := _QUOTED_VALUE.search(message):
        wanted = found[1].strip()
        keyword = "format" if "format" in message else "type"
        return lambda name, value: name == keyword and wanted in (value, json.dumps(value))
    if "regex parse error" in message or "look-around" in message:
        return lambda name, value: name == "pattern" and str(value) in message
    return None


_CULPRITS = (
    ("oneOf constraints", "oneOf"),
    ("regex parse error", "pattern"),
    ("for float range", "minimum"),
    ("for integer range", "minimum"),
)


def keyword_in(message: str, schema: Any) -> str | None:
    """The keyword that llguidance's message is about, of a schema whose own mistake it is."""
    if isinstance(schema, dict):
        for words, keyword in _CULPRITS:
            if words in message and keyword in schema:
                return keyword
    return None


def target_of(root: Any, reference: Any) -> Any:
    """What a reference within the schema `root` points to; None if it is another kind, or
    broken."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in unquote(reference[2:]).split("/") if reference != "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Path, keyword and value of every keyword of a schema and of the schemas in it. The patterns
    of patternProperties count as keywords "pattern"."""
    for path, one in schemas_in(schema):
        for name, value in one.items():
            yield f"{path}.{name}", name, value
        for place, pattern in patterns_of(one):
            yield f"{path}.{place}", "pattern", pattern


def patterns_of(one: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The regular expressions of a schema, each with its place."""
    if isinstance(one.get("pattern"), str):
        yield "pattern", one["pattern"]
    if isinstance(one.get("patternProperties"), dict):
        yield from ((f"patternProperties.{key}", key) for key in one["patternProperties"])


def schemas_in(schema: Any) -> Schemas:
    """Path and object of a schema and of the schemas in it."""
    found: list[tuple[str, dict[str, Any]]] = []
    stack = [("", schema)]
    while stack:
        at, one = stack.pop()
        if isinstance(one, dict):
            found.append((at, one))
        stack += [(at + place, part) for place, part in _parts(one)]
    return found


def schemas_below(schema: dict[str, Any]) -> Schemas:
    """The schemas that stand directly in a schema, definitions first."""
    found: list[tuple[str, dict[str, Any]]] = []
    stack = list(_parts(schema))
    while stack:
        at, one = stack.pop()
        if isinstance(one, dict):
            found.append((at, one))
        else:
            stack += [(at + place, part) for place, part in _parts(one)]
    return sorted(found, key=lambda pair: not pair[0].startswith((".$defs.", ".definitions.")))


def _parts(one: Any) -> Iterator[tuple[str, Any]]:
    """The schemas, and lists of schemas, in a schema or a list of them, each with what it adds to
    the path."""
    if isinstance(one, list):
        for index, item in enumerate(one):
            if isinstance(item, (dict, list)):
                yield f"[{index}]", item
    if not isinstance(one, dict):
        return
    for name, value in one.items():
        if not isinstance(value, (dict, list)):
            continue
        if name in _NAMED and isinstance(value, dict):
            for key, item in value.items():
                yield f".{name}.{key}", item
        elif name not in _DATA:
            yield f".{name}", value
