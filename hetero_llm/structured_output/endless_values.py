"""Schemas that no value with an end follows, because each of their values contains another one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hetero_llm.core.errors import SamplingError
from hetero_llm.structured_output.json_schema import target_of

_REASON = "allows no output that ends: each value contains another one"
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_SINGLE = ("additionalProperties", "items", "additionalItems")
_PLAIN_PATTERN = re.compile(r"(\^?)([^\\^$.|?*+()\[\]{}]*)(\$?)")
_MOST_WORK = 100_000
"""Schemas and names looked at before a schema passes unchecked, some 50 ms."""


def check_values_end(schema: Any) -> None:
    """Refuses a schema that an output can only follow without an end, or that has a part like
    this: an output which has begun it cannot be completed.

    Raises:
        SamplingError: names the part by its path from the root, such as ".properties.a".
    """
    parts = dict(_reachable(schema))
    if not any("$ref" in one for one, _ in parts.values()) or _renames_references(parts.values()):
        return
    unknown = dict(reversed(parts.items()))
    judge = _Judge(schema, unknown)
    before = len(unknown) + 1
    while len(unknown) < before:
        before = len(unknown)
        for key, (one, _) in list(unknown.items()):
            if judge.has_end(one):
                del unknown[key]
            if judge.work > _MOST_WORK:
                return
    if unknown:
        one, path = list(unknown.values())[-1]  # the outermost
        raise SamplingError(path, one, _REASON)


def _renames_references(parts: Iterable[tuple[dict[str, Any], str]]) -> bool:
    """Whether references may be relative to another schema than the root."""
    return any("$id" in one and path for one, path in parts)


def _reachable(schema: Any) -> Iterator[tuple[int, tuple[dict[str, Any], str]]]:
    """The schemas that parts of a value may have to follow, the outermost first, each with the path
    by which it is reached first; by their identities."""
    seen: set[int] = set()
    level = [(schema, "")]
    while level:
        below: list[tuple[Any, str]] = []
        for one, path in level:
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            yield id(one), (one, path)
            below += _parts(schema, one, path)
        level = below


def _parts(root: Any, one: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    for name in _SINGLE:
        yield one.get(name), f"{path}.{name}"
    for name in (*_LISTS, "items"):
        for index, inner in enumerate(_list(one.get(name))):
            yield inner, f"{path}.{name}[{index}]"
    for name in _NAMED:
        for key, inner in _dict(one.get(name)).items():
            yield inner, f"{path}.{name}.{key}"
    if "$ref" in one:
        yield target_of(root, one["$ref"]), f"{path}.$ref"


class _Judge:
    """Decides which schemas have a value that ends, while some are not known to have one.

    Args:
        root: what references point into.
        unknown: by identity, schemas not known to have one. It may shrink.

    Attributes:
        work: schemas and names looked at so far.
    """

    def __init__(self, root: Any, unknown: Mapping[int, Any]) -> None:
        self._root = root
        self._unknown = unknown
        self.work = 0

    def has_end(self, one: dict[str, Any]) -> bool:
        """False: only if no value of schemas that are known to have one makes up a value."""
        members = self._members(one)
        for member in members:
            for name in ("anyOf", "oneOf"):
                branches = _list(member.get(name))
                if branches and not any(map(self._ends, branches)):
                    return False
        if any("const" in member or "enum" in member for member in members):
            return True
        types = set(_TYPES)
        for member in members:
            types &= _types(member.get("type"))
        if types - {"object", "array"}:
            return True
        # No type at all is another mistake than this.
        return (
            not types
            or ("object" in types and self._object_ends(members))
            or ("array" in types and self._array_ends(members))
        )

    def _ends(self, schema: Any) -> bool:
        return id(schema) not in self._unknown

    def _members(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """The schema and all that its values follow as well."""
        found: dict[int, dict[str, Any]] = {}
        stack: list[Any] = [one]
        while stack:
            member = stack.pop()
            if isinstance(member, dict) and id(member) not in found:
                found[id(member)] = member
                stack += _list(member.get("allOf"))
                if "$ref" in member:
                    stack.append(target_of(self._root, member["$ref"]))
        self.work += len(found)
        return list(found.values())

    def _object_ends(self, members: list[dict[str, Any]]) -> bool:
        needed = {
            name
            for member in members
            for name in _list(member.get("required"))
            if isinstance(name, str)
        }
        self.work += len(needed) * sum(
            1 + len(_dict(member.get("patternProperties"))) for member in members
        )
        if self.work > _MOST_WORK:
            return True
        if not all(
            self._ends(schema)
            for member in members
            for name in needed
            for schema in _of_property(member, name)
        ):
            return False
        least = max((_count(member.get("minProperties")) for member in members), default=0)
        if least <= len(needed):
            return True
        # Another property is needed: one whose schemas all have an end.
        return all(
            any(self._ends(schema) for schema in _of_any_property(member)) for member in members
        )

    def _array_ends(self, members: list[dict[str, Any]]) -> bool:
        least = max((_count(member.get("minItems")) for member in members), default=0)
        return all(self._ends(schema) for member in members for schema in _of_items(member, least))


def _of_property(member: dict[str, Any], name: str) -> Iterator[Any]:
    """The schemas that the value of a property has to follow."""
    properties, matched = _dict(member.get("properties")), []
    if name in properties:
        matched.append(properties[name])
    certain = True
    for pattern, schema in _dict(member.get("patternProperties")).items():
        matches = _matches(pattern, name)
        if matches:
            matched.append(schema)
        certain = certain and matches is not None
    if not matched and certain:
        matched.append(member.get("additionalProperties"))
    yield from matched


def _of_any_property(member: dict[str, Any]) -> Iterator[Any]:
    """The schemas of which the value of some property follows one."""
    for name in _NAMED:
        yield from _dict(member.get(name)).values()
    yield member.get("additionalProperties")


def _of_items(member: dict[str, Any], count: int) -> Iterator[Any]:
    """The schemas that the first `count` items have to follow."""
    items = member.get("items")
    first = _list(items) or _list(member.get("prefixItems"))
    yield from first[:count]
    if count > len(first):
        yield member.get("additionalItems") if isinstance(items, list) else items


def _matches(pattern: str, name: str) -> bool | None:
    """Whether a pattern matches; None for one that is more than a text and anchors: a search could
    take very long."""
    found = _PLAIN_PATTERN.fullmatch(pattern)
    if found is None:
        return None
    begins, text, ends = found.groups()
    if begins and ends:
        return name == text
    return name.startswith(text) if begins else name.endswith(text) if ends else text in name


def _types(value: Any) -> set[str] | frozenset[str]:
    if isinstance(value, str):
        return {value}
    return {one for one in value if isinstance(one, str)} if isinstance(value, list) else _TYPES


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
