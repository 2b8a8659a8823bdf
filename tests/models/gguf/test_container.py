"""Headers of GGUF files: every type of value, and files that are damaged or hostile."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.gguf.container import Strings, is_gguf, read_header
from tests.helpers.gguf_files import (
    ARRAY,
    BOOL,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    GgufWriter,
    Typed,
)

VALUES = {
    "u8": Typed(UINT8, 255), "i8": Typed(INT8, -128), "u16": Typed(UINT16, 65535),
    "i16": Typed(INT16, -1), "u32": Typed(UINT32, 2**32 - 1), "i32": Typed(INT32, -5),
    "u64": Typed(UINT64, 2**64 - 1), "i64": Typed(INT64, -(2**63)), "f32": Typed(FLOAT32, 0.5),
    "f64": Typed(FLOAT64, 0.1), "yes": Typed(BOOL, True), "no": Typed(BOOL, False),
    "text": Typed(STRING, "naïve 中"), "empty": Typed(STRING, ""),
    "floats": Typed(ARRAY, [1.5, -2.0], FLOAT32), "flags": Typed(ARRAY, [True, False], BOOL),
    "none": Typed(ARRAY, [], INT32),
    "nested": Typed(ARRAY, [Typed(ARRAY, [1, 2], INT32), Typed(ARRAY, [], INT32)], ARRAY),
}  # fmt: skip


def small(**fields: Any) -> GgufWriter:
    writer = GgufWriter({"general.architecture": "llama", "tokens": ["a", "é"]}, **fields)
    writer.add("one", "F32", np.arange(6, dtype=np.float32), (2, 3))
    writer.add("two", "Q8_0", np.zeros(34, np.uint8), (1, 32))
    return writer


def refused(contents: bytes, folder: Path, message: str) -> None:
    path = folder / "wrong.gguf"
    path.write_bytes(contents)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_values(tmp_path: Path) -> None:
    found = read_header(GgufWriter(dict(VALUES)).write(tmp_path / "a.gguf")).metadata
    plain = {key: typed.value for key, typed in VALUES.items() if key != "nested"}
    assert {key: found[key] for key in plain} == plain
    assert found["nested"] == [[1, 2], []]
    assert found["yes"] is True and isinstance(found["u8"], int)


def test_arrays_of_strings(tmp_path: Path) -> None:
    words = ["", "a", "é", "中" * 50, "<s>"]
    found = read_header(GgufWriter({"w": words}).write(tmp_path / "a.gguf")).metadata["w"]
    assert isinstance(found, Strings) and len(found) == 5
    assert list(found) == words and found[1:3] == words[1:3] and found[-1] == "<s>"
    with pytest.raises(IndexError):
        found[5]
    assert repr(found) == repr(words)
    assert repr(Strings([b"a"] * 9)) == "['a', 'a', 'a', 'a', 'a', 'a', 'a', 'a', ...]"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_tensors(tmp_path: Path, version: int, alignment: int) -> None:
    writer = small(version=version, alignment=alignment)
    if alignment != 32:
        writer.metadata["general.alignment"] = alignment
    header = read_header(writer.write(tmp_path / "a.gguf"))
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.type.name, one.shape, one.row_bytes, one.nbytes) == ("F32", (2, 3), 12, 24)
    assert (two.type.name, two.shape, two.row_bytes) == ("Q8_0", (1, 32), 34)
    assert one.start % alignment == two.start % alignment == 0
    assert header.floats("one") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ModelLoadError, match=r"two is Q8_0 \[1, 32\]"):
        header.floats("two")


def test_the_file_is_read_again_after_a_change(tmp_path: Path) -> None:
    path = small().write(tmp_path / "a.gguf")
    assert "one" in read_header(path).tensors
    writer = small()
    writer.metadata["more"] = "longer"
    writer.write(path)
    assert read_header(path).metadata["more"] == "longer"


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "not a GGUF file"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1: versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0), "the file ends inside of the header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1000), "the file ends inside of the header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), f"says that {2**62} tensors follow, and at"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), f"that {2**63} pairs of metadata follow"),
        (small(alignment=8).contents(), "not aligned to 32"),
    ],
)  # fmt: skip
def test_other_files(tmp_path: Path, contents: bytes, message: str) -> None:
    refused(contents, tmp_path, message)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """A file with one pair of metadata."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    return head + struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (pair(b"k", STRING, struct.pack("<Q", 2**60) + b"x"), "the file ends inside of k"),
        (pair(b"k", STRING, struct.pack("<Q", 1) + b"\xff"), "'k' is not UTF-8"),
        (pair(b"\xff", UINT8, b"\0"), "a key of the metadata' is not UTF-8"),
        (pair(b"k", ARRAY, struct.pack("<IQ", FLOAT64, 2**61)), "ends inside of 'k'"),
        (pair(b"k", ARRAY, struct.pack("<IQ", STRING, 2**61)), "ends inside of 'k'"),
        (pair(b"k", ARRAY, struct.pack("<IQ", ARRAY, 2**61)), "ends inside of 'k'"),
        (pair(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 6), "array of the unknown type 9"),
        (pair(b"k", ARRAY, struct.pack("<IQ", 77, 1)), "array of the unknown type 77"),
        (pair(b"k", ARRAY, struct.pack("<IQQ", STRING, 1, 1) + b"\xff"), "a string that is not"),
        (pair(b"k", 13, bytes(8)), "'k' has a value of the unknown type 13"),
        (pair(b"k", BOOL, b"\2"), "'k' holds a bool that is neither 0 nor 1"),
        (pair(b"general.alignment", UINT32, struct.pack("<I", 48)), "=48: a power of 2"),
        (pair(b"general.alignment", UINT32, struct.pack("<I", 0)), "=0: a power of 2"),
        (pair(b"general.alignment", UINT32, struct.pack("<I", 1 << 31)), "a power of 2"),
        (pair(b"general.alignment", STRING, struct.pack("<Q", 0)), "='': a power of 2"),
    ],
)
def test_wrong_values(tmp_path: Path, contents: bytes, message: str) -> None:
    refused(contents, tmp_path, message)


def test_a_large_header(tmp_path: Path) -> None:
    """The file has holes: nothing of it is read."""
    path = tmp_path / "large.gguf"
    path.write_bytes(pair(b"k", STRING, struct.pack("<Q", 2**30)))
    os.truncate(path, 2**31)
    with pytest.raises(ModelLoadError, match="k with what goes before has more than 128 MiB"):
        read_header(path)


@pytest.mark.parametrize("kind", [UINT8, STRING, ARRAY])
def test_arrays_of_millions(tmp_path: Path, kind: int) -> None:
    """Each entry takes many times its bytes in memory."""
    path = tmp_path / "many.gguf"
    path.write_bytes(pair(b"k", ARRAY, struct.pack("<IQ", kind, 9 << 20)))
    os.truncate(path, 2**31)
    message = f"'k' with the arrays before has {(9 << 20) + 1} entries, and at most 8388608"
    with pytest.raises(ModelLoadError, match=message):
        read_header(path)
    small = [Typed(ARRAY, [1] * 5, UINT8)] * 3
    many = GgufWriter({"k": Typed(ARRAY, small, ARRAY)}).write(tmp_path / "few.gguf")
    assert read_header(many).metadata["k"] == [[1] * 5] * 3


def with_tensor(kind: int, shape: tuple[int, ...], raw: bytes, name: str = "t") -> bytes:
    return GgufWriter({}, {name: (kind, shape, raw)}).contents()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (with_tensor(0, (2**62, 4), b"x" * 32), "'t': .* are not in the file of 128 bytes"),
        (with_tensor(0, (2**32, 2**32), b"x" * 32), "are not in the file of 128 bytes"),
        (with_tensor(0, (0, 4), b""), r"'t' has the shape \[0, 4\]"),
        (with_tensor(8, (2, 33), b"x" * 64), "rows of 33 are no multiple of Q8_0's 32"),
        (with_tensor(16, (1, 256), b"x" * 96), "'t' is of type IQ2_XXS; F32, .* are read"),
        (with_tensor(4711, (1,), b"x" * 32), "'t' is of type number 4711"),
        (with_tensor(0, (), b""), "'t' has 0 dimensions"),
        (with_tensor(0, (1, 1, 1, 1, 1), b"x" * 32), "'t' has 5 dimensions"),
    ],
)
def test_wrong_tensors(tmp_path: Path, contents: bytes, message: str) -> None:
    refused(contents, tmp_path, message)


def test_names_that_are_there_twice(tmp_path: Path) -> None:
    contents = small().contents()
    refused(contents.replace(b"two", b"one"), tmp_path, "the tensor 'one' is there twice")
    writer = GgufWriter({"ab": 1, "cd": 2})
    refused(writer.contents().replace(b"cd", b"ab"), tmp_path, "the key 'ab' is there twice")


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    contents = small().contents()
    last = read_header(small().write(tmp_path / "whole.gguf")).tensors["two"]
    path = tmp_path / "cut.gguf"
    for length in range(last.start + last.nbytes):  # padding behind the last one may be missing
        path.write_bytes(contents[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf: "):
            read_header(path)
    path.write_bytes(contents[: last.start + last.nbytes])
    assert set(read_header(path).tensors) == {"one", "two"}


def test_random_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    contents = GgufWriter({**VALUES, **small().metadata}, small().tensors).contents()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    errors = 0
    for _ in range(400):
        damaged = bytearray(contents)
        for at in rng.integers(0, len(contents) - 90, rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        os.utime(path, ns=(0, int(rng.integers(1, 2**60))))
        try:
            read_header(path)
        except ModelLoadError as error:
            assert str(path) in str(error)
            errors += 1
    assert errors > 50


def test_what_is_no_file(tmp_path: Path) -> None:
    assert is_gguf(tmp_path / "A.GGUF") and not is_gguf(tmp_path / "a.gguf.bin")
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert not is_gguf(folder)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path, reason in ((pipe, "is a pipe"), (tmp_path / "none.gguf", "No such file")):
        with pytest.raises(ModelLoadError, match=re.escape(f"{path}: cannot be read: {reason}")):
            read_header(path)
