"""JSON schemas in the keywords and with the meaning that llguidance gives them.

Generators of schemas (zod, pydantic, OpenAPI) write keywords and formats that llguidance does not
know, though others say the same; formats and patterns that it knows mean a little more there.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from hetero_llm.structured_output.json_schema import (
    APPLICATORS,
    EXACT,
    INT64,
    MOST_OPTIONAL,
    Schemas,
    is_list,
    is_number,
    patterns_of,
    schemas_in,
    target_of,
)

_UNKNOWN = frozenset({"propertyNames", "uniqueItems", "unevaluatedProperties", "not"})
"""Keywords that llguidance does not know and some of whose values others can say."""
_WATCHED = _UNKNOWN | {"format", "minimum", "maximum", "pattern", "patternProperties"}
_ANNOTATIONS = frozenset({"type", "title", "description", "$comment", "default", "examples"})


def mended(schema: Any, schemas: Schemas) -> Any:
    """A copy that says in llguidance's keywords what the schema says; the schema itself if it does
    already. What cannot be said stays, and llguidance refuses it.

    Args:
        schemas: `schemas_in` of the schema.
    """
    if not any(_needs_mending(one) for _, one in schemas):
        return schema
    schema = copy.deepcopy(schema)
    for _, one in schemas_in(schema):
        _mend_names(one, schema)
        _mend_rest(one)
        _mend_format(one)
        _mend_limits(one)
        if isinstance(one.get("pattern"), str):
            _mend_looking(one)
            one["pattern"] = _without_zero(one["pattern"])
        if isinstance(one.get("patternProperties"), dict):
            one["patternProperties"] = {
                _without_zero(key): value for key, value in one["patternProperties"].items()
            }
    return schema


def _needs_mending(one: dict[str, Any]) -> bool:
    if one.keys().isdisjoint(_WATCHED):
        return False
    if not one.keys().isdisjoint(_UNKNOWN) or _is_too_low(one.get("minimum")):
        return True
    if _is_too_high(one.get("maximum")):
        return True
    if "format" in one and (one["format"] not in _PLAIN or "pattern" in one):
        return True
    return any("[^" in pattern or "(?=" in pattern for _, pattern in patterns_of(one))


# -- objects and arrays -----------------------------------------------------------------------


def _mend_names(one: dict[str, Any], root: Any) -> None:
    """`propertyNames`: a list of names becomes properties, a pattern, a format or a length becomes
    a pattern of properties."""
    if "propertyNames" not in one:
        return
    names, others = one["propertyNames"], one.get("additionalProperties", True)
    if names is True:
        names = {}
    if isinstance(names, dict) and names.keys() - _ANNOTATIONS == {"$ref"}:  # pydantic's enums
        names = target_of(root, names["$ref"])
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    given = names.keys() - _ANNOTATIONS
    listed = [names["const"]] if given == {"const"} else names.get("enum")
    if given in ({"enum"}, {"const"}) and "patternProperties" not in one:
        known = one.get("properties", {})
        if not (is_list(listed) and len(listed) <= MOST_OPTIONAL and isinstance(known, dict)):
            return
        texts = [name for name in listed if isinstance(name, str)]
        one["properties"] = {name: known.get(name, others) for name in texts}
        one["additionalProperties"] = False
    elif given and one.keys().isdisjoint({"properties", "patternProperties"}):
        pattern = _pattern_of_names(names, given)
        if pattern is None:
            return
        one["patternProperties"] = {pattern: others}
        one["additionalProperties"] = False
    elif given:
        return
    del one["propertyNames"]


def _pattern_of_names(names: dict[str, Any], given: set[str]) -> str | None:
    """What names have to match; None if one pattern cannot say it."""
    if given == {"pattern"}:
        return names["pattern"] if isinstance(names["pattern"], str) else None
    if given == {"format"}:
        return _NAMES_OF_FORMAT.get(names["format"])
    limits = [names.get("minLength", 0), names.get("maxLength", 0)]
    if given <= {"minLength", "maxLength"} and all(type(limit) is int for limit in limits):
        return rf"^[\s\S]{{{limits[0]},{limits[1] if 'maxLength' in given else ''}}}$"
    return None


def _mend_rest(one: dict[str, Any]) -> None:
    """`uniqueItems` where it holds for every value, `unevaluatedProperties` where it means
    `additionalProperties`, and `not` where it allows everything or nothing."""
    if one.get("not") in ({}, True) and is_list(one.get("allOf", [])):  # zod's never
        del one["not"]
        one["allOf"] = [*one.get("allOf", ()), False]
    elif one.get("not") is False:
        del one["not"]
    if one.get("uniqueItems") is False or one.get("maxItems") in (0, 1):
        one.pop("uniqueItems", None)
    if "unevaluatedProperties" in one and APPLICATORS.isdisjoint(one):
        others = one.pop("unevaluatedProperties")
        one.setdefault("additionalProperties", others)


# -- formats ----------------------------------------------------------------------------------

_LEAST_INT64 = -(INT64 - 1024)
"""llguidance reads limits as float64 and cannot count down to the least number of 64 bits."""
_INTEGERS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)} | {
    f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)
} | {"int64": (_LEAST_INT64, INT64 - 1), "uint64": (0, INT64 - 1)}  # fmt: skip
"""OpenAPI's formats of integers. llguidance ends at the largest int64 in any case."""

_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_HEX = "[0-9a-fA-F]"
# Formats of OpenAPI and pydantic that JSON Schema does not define.
_ANY_STRING = frozenset({"password", "binary", "path", "file-path", "directory-path"})
_SPELLED = {
    "byte": _BASE64,
    "base64": _BASE64,
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?$",
    "int64": "^-?[0-9]{1,19}$",  # Google's APIs write large numbers as strings
    "uint64": "^[0-9]{1,20}$",
} | {
    f"uuid{kind}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{kind}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
    for kind in range(1, 9)
}
_NAMES_OF_FORMAT: dict[Any, str] = {
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "date": (
        "^(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
        "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
        "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)$"
    ),
}
"""Formats of the names of properties, which pydantic writes for dict[UUID, ...]."""
_PLAIN = frozenset({"email", "duration", "ipv4", "ipv6", "uuid", "uri"})
_DEFINED = _PLAIN | {
    "date-time", "time", "date", "hostname",
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
"""JSON Schema's formats; llguidance has no expression for those in the last two lines, which are
refused. `_PLAIN`: what llguidance makes of them is right."""
_LOCAL = "[A-Za-z0-9_'+-]"
# Patterns with look-around which zod 4 writes beside a format, and others that say the same there.
_WITHOUT_LOOKING = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$":
        rf"^(?:{_LOCAL}+\.)*{_LOCAL}*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{{2,}}$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$":
        "^P",
}  # fmt: skip
_LEAP_DAY = (
    "^(?:.{5}(?:0[13-9]|1)|.{8}(?:[01]|2[0-8])"
    "|(?:..(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_LABEL = "(?:[^.]{1,2}|[^.]{2}[^-.][^.]*|[^.]{2}-[^-.][^.]*)"
# What llguidance's expressions for formats leave out: 29 February exists in leap years only; leap
# seconds depend on the time zone, so there are none; labels with "--" in the third place are an
# encoding (RFC 5890) that no expression can check.
_BEYOND_FORM: dict[Any, tuple[str, ...]] = {
    "date": (_LEAP_DAY,),
    "time": ("^.{6}[0-5]",),
    "date-time": (_LEAP_DAY, "^.{17}[0-5]"),
    "hostname": (rf"^{_LABEL}(?:\.{_LABEL})*$", "^.{1,253}$"),
}


def _mend_format(one: dict[str, Any]) -> None:
    name = one.get("format")
    if not isinstance(name, str):
        return
    kinds = one.get("type")
    if name in _INTEGERS and kinds in ("integer", ["integer", "null"], ["null", "integer"]):
        _bound(one, *_INTEGERS[name])
        return
    more = (_SPELLED[name],) if name in _SPELLED else _BEYOND_FORM.get(name, ())
    parts = one.get("allOf", [])
    if not is_list(parts):
        return
    if name == "ipvanyaddress":  # pydantic's
        one["allOf"] = [*parts, {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}]
        del one["format"]
    elif name in _ANY_STRING or name in _SPELLED or _is_said_by_pattern(one, name):
        del one["format"]
    elif name in ("email", "duration") and isinstance(one.get("pattern"), str):
        one["pattern"] = _WITHOUT_LOOKING.get(one["pattern"], one["pattern"])
    if more:
        one["allOf"] = [*parts, *({"pattern": pattern} for pattern in more)]


def _bound(one: dict[str, Any], least: int, most: int) -> None:
    """Adds the limits, unless the schema has narrower ones, or excludes its own."""
    for limit, exclusive, own, narrower in (
        ("minimum", "exclusiveMinimum", least, max),
        ("maximum", "exclusiveMaximum", most, min),
    ):
        if exclusive not in one:
            given = one.get(limit)
            one[limit] = narrower(own, given) if is_number(given) else own


def _is_too_low(limit: Any) -> bool:
    return is_number(limit) and limit < _LEAST_INT64


def _is_too_high(limit: Any) -> bool:
    return is_number(limit) and limit >= INT64 - 1


def _mend_limits(one: dict[str, Any]) -> None:
    """Limits that llguidance cannot count to, such as the ends of float32 and float64, become the
    widest ones to which it can."""
    kinds = one.get("type")
    is_whole = kinds == "integer" or (
        is_list(kinds) and "integer" in kinds and "number" not in kinds
    )
    if _is_too_low(one.get("minimum")):
        one["minimum"] = _LEAST_INT64 if is_whole else -EXACT
    if _is_too_high(one.get("maximum")):
        one["maximum"] = INT64 - 1 if is_whole else EXACT


def _is_said_by_pattern(one: dict[str, Any], name: str) -> bool:
    """Whether the format is none of JSON Schema's and stands beside a pattern: zod writes its own
    formats (cuid, e164, lowercase, ...) with one."""
    if name in _DEFINED:
        return False
    parts = (one, *one.get("allOf", ()))
    return any(isinstance(part, dict) and "pattern" in part for part in parts)


# -- patterns ---------------------------------------------------------------------------------

_PIECES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _mend_looking(one: dict[str, Any]) -> None:
    """A pattern that begins with look-aheads, such as `^(?=.*[A-Z])(?=.*\\d).{8,}$`, becomes
    several patterns, all of which have to match."""
    *ahead, rest = _split_at_beginning(one["pattern"])
    parts = one.get("allOf", [])
    if ahead and is_list(parts):
        one["pattern"] = rest
        one["allOf"] = [*parts, *({"pattern": _without_zero(part)} for part in ahead)]


def _split_at_beginning(pattern: str) -> list[str]:
    """What has to match at the beginning of a string: the look-aheads, and what follows them. The
    pattern itself if there are none there, or the rest of it has alternatives."""
    pieces = _PIECES.findall(pattern)
    found, at = [], 1
    while pieces[:1] == ["^"] and pieces[at : at + 3] == ["(", "?", "="]:
        end = _end_of_group(pieces, at)
        if end is None or pieces[end : end + 1] in (["*"], ["+"], ["?"], ["{"]):
            return [pattern]
        found.append(f"^(?:{''.join(pieces[at + 3 : end - 1])})")
        at = end
    if not found or _has_alternatives(pieces[at:]):
        return [pattern]
    return [*found, f"^{''.join(pieces[at:])}"]


def _end_of_group(pieces: list[str], start: int) -> int | None:
    """The index behind a group that begins at `start`; None if it has no end."""
    depth = 0
    for index in range(start, len(pieces)):
        depth += {"(": 1, ")": -1}.get(pieces[index], 0)
        if depth == 0:
            return index + 1
    return None


def _has_alternatives(pieces: list[str]) -> bool:
    """Whether there is a `|` outside of all groups."""
    depth = 0
    for piece in pieces:
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and depth == 0:
            return True
    return False


def _without_zero(pattern: str) -> str:
    """The pattern without U+0000 in its negated classes. llguidance 1.9 writes a class that has all
    control characters with all escapes of JSON, a quote or a backslash that it excludes, too; and
    no string has U+0000, see `grammar_text.py`."""
    found, inside = [], False
    for piece in re.findall(r"\\.|\[\^|.", pattern, re.DOTALL):
        if piece == "[^" and not inside:
            piece = r"[^\x00"
        inside = piece[0] == "[" or (inside and piece != "]")
        found.append(piece)
    return "".join(found)
