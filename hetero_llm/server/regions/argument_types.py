"""The JSON types of a function's arguments, for formats that write each in a tag of its own: text
in a tag is a string or another value by its type alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
"""The type of a parameter that has none."""
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_ROOT = "-arguments-of-the-function-"
_OWN = ("#/$defs/", "#/definitions/")


def types_in(parameters: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The types that each parameter may have."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: types_of(one, parameters) for name, one in properties.items()}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a schema within `root` allows, as far as it says so."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > 8:
        return STRING
    found = schema.get("type")
    if isinstance(found, str):
        return frozenset({found})
    if isinstance(found, list):
        return frozenset(map(str, found))
    values = constants(schema)
    if values is not None:
        return frozenset(map(type_of, values))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            each = (types_of(one, root, depth + 1) for one in schema[word])
            return frozenset[str]().union(*each)
    return STRING if not schema.keys() & {"properties", "items", "$ref"} else frozenset({"object"})


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """The schemas of which a value follows one, each as `resolved`; the schema itself if it is no
    plain choice."""
    schema = resolved(schema, root)
    if isinstance(schema, Mapping):
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and not schema.keys() - _ANNOTATIONS - {word}:
                return [resolved(one, root) for one in schema[word]]
    return [schema]


def constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that allows only these, without those of another type than its
    own."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set(given if isinstance(given, list) else ())
    if "number" in kinds:
        kinds.add("integer")
    return [one for one in values if not kinds or type_of(one) in kinds] or None


def type_of(value: Any) -> str:
    """The type of a JSON value."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
             list: "array"}  # fmt: skip
    return names.get(type(value), "object")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema stands for that only refers to another one within `root`."""
    for _ in range(8):
        if not isinstance(schema, Mapping):
            break
        keywords = schema.keys() - _ANNOTATIONS
        both = schema.get("allOf")
        if keywords == {"allOf"} and isinstance(both, list) and len(both) == 1:
            schema = both[0]
        elif keywords == {"$ref"} and isinstance(schema["$ref"], str) and schema["$ref"][:1] == "#":
            found: Any = root
            for name in schema["$ref"].split("/")[1:]:
                plain = name.replace("~1", "/").replace("~0", "~")
                found = found.get(plain) if isinstance(found, Mapping) else None
            if found is None:
                break
            schema = found
        else:
            break
    return schema


def alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema within `root` with all that it refers to, as a root of its own."""
    shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
    found = {**schema, **shared}
    if not _refers_to_root(found):
        return found
    found = _moved(found)
    definitions = found.get("$defs")
    own = {word: value for word, value in root.items() if word not in shared}
    found["$defs"] = {
        **(definitions if isinstance(definitions, Mapping) else {}),
        _ROOT: _moved(own),
    }
    return found


def _refers_to_root(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_of_root(value.get("$ref")) or any(map(_refers_to_root, value.values()))
    return isinstance(value, list) and any(map(_refers_to_root, value))


def _is_of_root(pointer: Any) -> bool:
    return isinstance(pointer, str) and pointer[:1] == "#" and not pointer.startswith(_OWN)


def _moved(value: Any) -> Any:
    """A copy whose references to the root, or to what stands there, follow it into `$defs`."""
    if isinstance(value, list):
        return [_moved(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    found = {name: _moved(one) for name, one in value.items()}
    if _is_of_root(found.get("$ref")):
        found["$ref"] = f"#/$defs/{_ROOT}{found['$ref'][1:]}"
    return found
