"""Reads the header of a GGUF file: metadata and the table of tensors.

The format is ggml's docs/gguf.md, versions 2 and 3, little-endian. Every number of the file is
checked against the size of the file before anything of that size is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.quantization.gguf.types import BLOCK_TYPES, OTHER_TYPES, BlockType
from hetero_llm.utils.files import MIB, check_regular

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_MOST_DIMENSIONS = 4
_MOST_NESTED = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of metadata values that are numbers, as numpy names them."""
_LEAST_PAIR = 8 + 4 + 1  # bytes of a pair of metadata: length of the key, type, a value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
_MOST_FLOATS = 1 << 16
_MOST_HEADER = 128 * MIB  # a vocabulary of 256,000 tokens has 10
_MOST_PAIRS = _MOST_TENSORS = 1 << 16  # a file of 100 layers has 1,000
_MOST_ENTRIES = 8 << 20
"""Of all arrays together, each some 36 bytes in memory; that vocabulary has 1,300,000."""
_NO_TOKEN = 2**32 - 1
_SHOWN_STRINGS = 8


class Strings(Sequence[str]):
    """An array of strings of the metadata, decoded when they are asked for: vocabularies have
    hundreds of thousands."""

    def __init__(self, parts: list[bytes]) -> None:
        self._bytes = b"".join(parts)
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)

    def __repr__(self) -> str:
        more = ", ..." if len(self) > _SHOWN_STRINGS else ""
        return f"[{', '.join(map(repr, self[:_SHOWN_STRINGS]))}{more}]"

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self._bytes[self._ends[index] : self._ends[index + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        ends = self._ends.tolist()
        for first, last in zip(ends, ends[1:], strict=False):
            yield self._bytes[first:last].decode()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the table.

    Attributes:
        shape: rows first, as torch has it; the file has the reverse.
        start: offset of its first byte in the file.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.elements * self.type.nbytes

    @property
    def rows(self) -> int:
        """Runs of the last dimension."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        metadata: numbers, bools, strings, lists of numbers or bools, and `Strings`.
        tensors: by name, in the order of the table.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def bad(self, key: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {key}={shown(self.metadata.get(key))}: {reason}")

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required without a default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelLoadError(f"{self.path}: the key {key!r} is missing")
        if not isinstance(value, str):
            raise self.bad(key, "a string is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "a bool is needed")
        return value

    def integer(self, key: str) -> int | None:
        """An integer of 0 or more; None if there is none."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.bad(key, "an integer of 0 or more is needed")
        return value

    def token_id(self, name: str) -> int | None:
        """`tokenizer.ggml.{name}_token_id`; None if there is none, which some files state as -1."""
        found = self.integer(f"tokenizer.ggml.{name}_token_id")
        return None if found == _NO_TOKEN else found

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor in float32.

        Raises:
            ModelLoadError: it is large, of another type, or cannot be read.
        """
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or tensor.nbytes > 4 * _MOST_FLOATS:
            raise ModelLoadError(
                f"{self.path}: {name} is {tensor.type.name} {list(tensor.shape)}: at most "
                f"{_MOST_FLOATS} numbers in F32 are needed"
            )
        with reading(f"{self.path}: {name}"), self.path.open("rb") as file:
            file.seek(tensor.start)
            data = file.read(tensor.nbytes)
        if len(data) < tensor.nbytes:
            raise ModelLoadError(f"{self.path}: {name}: the file ends inside of it")
        return np.frombuffer(data, "<f4").tolist()


def is_gguf(path: Path) -> bool:
    """Whether a model's path names a GGUF file rather than a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Reports the errors of the system as a `ModelLoadError`: "`what` cannot be read"."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(f"{what} cannot be read: {error.strerror or error}") from error


def read_header(path: Path) -> GgufHeader:
    """Reads metadata and table of a file; the last one read is kept until the file changes.

    Raises:
        ModelLoadError: it cannot be read, or is no GGUF file, damaged, cut off, or has tensors of a
            type that is not read.
    """
    path = Path(path)
    with reading(f"{path}:"):
        check_regular(path)
        found = path.stat()
    return _read_header(path, found.st_size, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=1)
def _read_header(path: Path, size: int, changed: int, inode: int) -> GgufHeader:
    with reading(f"{path}:"), path.open("rb", buffering=1 << 20) as file:
        return _Header(path, file, size).read()


class _Header:
    """Reads a header from its first byte on."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file = path, file
        self._size = self._left = size
        self._entries = 0

    def read(self) -> GgufHeader:
        if self._left < 24 or self._take(4) != _MAGIC:
            raise self._bad("not a GGUF file: it does not begin with GGUF and a header")
        version = self._number("<I")
        if version not in _VERSIONS:
            big_endian = struct.unpack(">I", struct.pack("<I", version))[0] in (1, *_VERSIONS)
            which = "a big-endian file" if big_endian else f"version {version}"
            raise self._bad(f"{which}: versions 2 and 3, little-endian, are read")
        num_tensors, num_pairs = self._number("<Q"), self._number("<Q")
        for count, most, what in (
            (num_tensors, _MOST_TENSORS, "tensors"),
            (num_pairs, _MOST_PAIRS, "pairs of metadata"),
        ):
            if count > most:
                raise self._bad(
                    f"the header says that {count} {what} follow, and at most {most} are read: "
                    "the file is damaged, copy or download it again"
                )
        self._expect(num_tensors * _LEAST_TENSOR + num_pairs * _LEAST_PAIR, "the header")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text("a key of the metadata")
            if key in metadata:
                raise self._bad(f"the key {shown(key)} is there twice")
            metadata[key] = self._value(key, self._number("<I"), _MOST_NESTED)
        tensors = self._tensors(num_tensors, self._alignment(metadata))
        return GgufHeader(self._path, metadata, tensors)

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        entries = []
        for _ in range(count):
            name = self._text("a tensor's name")
            dimensions = self._number("<I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._bad(f"{shown(name)} has {dimensions} dimensions: 1 to 4 are possible")
            shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
            entries.append((name, shape, self._number("<I"), self._number("<Q")))
        begin = self._size - self._left
        begin += -begin % alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, number, offset in entries:
            if name in found:
                raise self._bad(f"the tensor {shown(name)} is there twice")
            tensor = GgufTensor(name, self._type(name, number), shape, begin + offset)
            self._check(tensor, offset, alignment)
            found[name] = tensor
        return found

    def _type(self, name: str, number: int) -> BlockType:
        if number not in BLOCK_TYPES:
            what = OTHER_TYPES.get(number, f"number {number}")
            names = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise self._bad(f"{shown(name)} is of type {what}; {names} are read")
        return BLOCK_TYPES[number]

    def _check(self, tensor: GgufTensor, offset: int, alignment: int) -> None:
        """Sizes are Python's integers: no product of them overflows."""
        name, shape, block = shown(tensor.name), tensor.shape, tensor.type
        if min(shape) < 1:
            raise self._bad(f"{name} has the shape {list(shape)}")
        if shape[-1] % block.elements:
            raise self._bad(
                f"{name}: rows of {shape[-1]} are no multiple of {block.name}'s {block.elements}"
            )
        nbytes = block.nbytes * (shape[-1] // block.elements)
        for size in shape[:-1]:
            nbytes *= size
        if offset % alignment or tensor.start + nbytes > self._size:
            where = f"{nbytes} bytes from byte {tensor.start} on"
            raise self._bad(
                f"{name}: {where} are not in the file of {self._size} bytes, or not aligned to "
                f"{alignment}: it is cut off or damaged, copy or download it again"
            )

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", _ALIGNMENT)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 0 < value <= _MOST_ALIGNMENT or value & (value - 1):
            raise self._bad(f"general.alignment={shown(value)}: a power of 2 is needed")
        return value

    def _value(self, key: str, number: int, nested: int) -> Any:
        if number == _STRING:
            return self._text(key)
        if number == _ARRAY:
            return self._array(key, nested)
        if number not in _NUMBERS:
            raise self._bad(f"{shown(key)} has a value of the unknown type {number}")
        return self._numbers(key, number, 1)[0]

    def _array(self, key: str, nested: int) -> Any:
        number, count = self._number("<I"), self._number("<Q")
        self._entries += 1 + count
        if self._entries > _MOST_ENTRIES and count <= self._left:  # else: the file ends
            raise self._bad(
                f"{shown(key)} with the arrays before has {self._entries} entries, and at most "
                f"{_MOST_ENTRIES} are read"
            )
        if number in _NUMBERS:
            return self._numbers(key, number, count)
        if number == _STRING:
            self._expect(8 * count, shown(key))
            parts = [self._bytes(key) for _ in range(count)]
            try:
                for part in parts:
                    part.decode()
            except UnicodeDecodeError as error:
                raise self._bad(f"{shown(key)} holds a string that is not UTF-8") from error
            return Strings(parts)
        if number != _ARRAY or not nested:
            raise self._bad(f"{shown(key)} is an array of the unknown type {number}")
        self._expect(12 * count, shown(key))
        return [self._array(key, nested - 1) for _ in range(count)]

    def _numbers(self, key: str, number: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[number])
        data = self._take(count * dtype.itemsize, shown(key))
        values = np.frombuffer(data, dtype).tolist()
        if number == _BOOL:
            if not set(values) <= {0, 1}:
                raise self._bad(f"{shown(key)} holds a bool that is neither 0 nor 1")
            return [value == 1 for value in values]
        return values

    def _text(self, what: str) -> str:
        try:
            return self._bytes(what).decode()
        except UnicodeDecodeError as error:
            raise self._bad(f"{shown(what)} is not UTF-8") from error

    def _bytes(self, what: str) -> bytes:
        return self._take(self._number("<Q"), what)

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, nbytes: int, what: str = "the header") -> bytes:
        self._expect(nbytes, what)
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise self._bad("it has become shorter while it was read")
        self._left -= nbytes
        return data

    def _expect(self, nbytes: int, what: str) -> None:
        if nbytes > self._left:
            raise self._bad(
                f"the file ends inside of {what}, which has {nbytes} bytes and more: it is cut off "
                "or damaged, copy or download it again"
            )
        if self._size - self._left + nbytes > _MOST_HEADER:
            raise self._bad(f"{what} with what goes before has more than {_MOST_HEADER // MIB} MiB")

    def _bad(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {reason}")
