"""Plain values as bytes: numbers, texts, arrays, containers and dataclasses of a fixed table.

Every value begins with a byte that says its type. Reading makes nothing but these types, and runs
no code of theirs: dataclasses get their fields without `__init__`, since the writer has checked
them. Meant for what is sent when a sequence is admitted or a process starts; steps have arrays
(`step_codec`).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

import numpy as np

_INT, _FLOAT, _COUNT = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I")
_MOST_INT = 2**63


class ValueCodec:
    """Writes and reads values.

    Args:
        types: dataclasses and enumerations that may occur; both sides have the same ones in the
            same order. A subclass needs an entry of its own.
    """

    def __init__(self, *types: Any) -> None:
        self._types = types
        self._places = {one: place for place, one in enumerate(types)}
        # Of a dataclass's fields; an enumeration has none.
        self._names = [
            () if issubclass(one, Enum) else tuple(field.name for field in fields(one))
            for one in types
        ]

    def write(self, value: Any) -> bytes:
        """Raises TypeError: the value holds something else."""
        parts: list[bytes] = []
        self._put(value, parts)
        return b"".join(parts)

    def read(self, data: bytes) -> Any:
        """What `write` has written: tuples as tuples, mappings as dicts, `array` as arrays of
        32-bit integers, numpy's as arrays that cannot be written to."""
        value, end = self._get(data, 0)
        assert end == len(data), "bytes are left over"
        return value

    def _put(self, value: Any, parts: list[bytes]) -> None:
        kind = type(value)
        place = self._places.get(kind)
        if value is None:
            parts.append(b"N")
        elif kind is bool:
            parts.append(b"T" if value else b"F")
        elif kind is int:
            if -_MOST_INT <= value < _MOST_INT:
                parts += (b"i", _INT.pack(value))
            else:
                self._put_bytes(b"I", str(value).encode(), parts)
        elif kind is float:
            parts += (b"d", _FLOAT.pack(value))
        elif kind is str:
            self._put_bytes(b"s", value.encode("utf-8", "surrogatepass"), parts)
        elif kind is bytes:
            self._put_bytes(b"b", value, parts)
        elif kind is array and value.typecode == "i":
            self._put_bytes(b"a", value.tobytes(), parts)
        elif kind is np.ndarray:
            self._put_array(value, parts)
        elif place is not None:
            parts += (b"E" if issubclass(kind, Enum) else b"D", _COUNT.pack(place))
            if issubclass(kind, Enum):
                self._put(value.name, parts)
            for name in self._names[place]:
                self._put(getattr(value, name), parts)
        elif kind in (list, tuple):
            parts += (b"l" if kind is list else b"t", _COUNT.pack(len(value)))
            for item in value:
                self._put(item, parts)
        elif isinstance(value, Mapping):
            parts += (b"m", _COUNT.pack(len(value)))
            for key, item in value.items():
                self._put(key, parts)
                self._put(item, parts)
        else:
            raise TypeError(f"{kind.__name__} has no plain form")

    def _put_array(self, value: np.ndarray, parts: list[bytes]) -> None:
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} has no plain form")
        parts.append(b"n")
        self._put(value.dtype.str, parts)
        self._put(value.shape, parts)
        self._put(value.tobytes(), parts)

    @staticmethod
    def _put_bytes(kind: bytes, data: bytes, parts: list[bytes]) -> None:
        parts += (kind, _COUNT.pack(len(data)), data)

    def _get(self, data: bytes, at: int) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        kind, at = data[at : at + 1], at + 1
        if kind in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[kind], at
        if kind == b"i":
            return _INT.unpack_from(data, at)[0], at + 8
        if kind == b"d":
            return _FLOAT.unpack_from(data, at)[0], at + 8
        if kind == b"n":
            dtype, at = self._get(data, at)
            shape, at = self._get(data, at)
            held, at = self._get(data, at)
            return np.frombuffer(held, np.dtype(dtype)).reshape(shape), at
        count, at = _COUNT.unpack_from(data, at)[0], at + 4
        if kind in b"Isba":
            held, end = data[at : at + count], at + count
            assert len(held) == count, "the data are cut off"
            if kind == b"s":
                return held.decode("utf-8", "surrogatepass"), end
            if kind == b"I":
                return int(held), end
            return (held if kind == b"b" else array("i", held)), end
        if kind == b"E":
            name, at = self._get(data, at)
            return self._types[count][name], at
        if kind == b"D":
            return self._get_fields(data, at, count)
        if kind not in b"ltm":
            raise ValueError(f"unknown kind of value {kind!r}")
        items = []
        for _ in range(2 * count if kind == b"m" else count):
            item, at = self._get(data, at)
            items.append(item)
        if kind == b"m":
            return dict(zip(items[::2], items[1::2], strict=True)), at
        return (items if kind == b"l" else tuple(items)), at

    def _get_fields(self, data: bytes, at: int, place: int) -> tuple[Any, int]:
        made: Any = object.__new__(self._types[place])
        for name in self._names[place]:
            value, at = self._get(data, at)
            object.__setattr__(made, name, value)
        return made, at


def types_within(root: type) -> tuple[type, ...]:
    """The dataclasses and enumerations that a dataclass's fields may hold, by their annotations,
    itself included; in an order that depends on these alone."""
    found: dict[type, None] = {}
    waiting: list[Any] = [root]
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        if not isinstance(hint, type) or hint in found:
            continue
        if issubclass(hint, Enum):
            found[hint] = None
        elif is_dataclass(hint):
            found[hint] = None
            waiting += get_type_hints(hint).values()
    return tuple(found)
