"""Snapshots: what the global cache has learned, in one file.

A safetensors file with the text and the documents of each generation; its metadata names the
format, the tokenizer and a checksum of everything. Indexes are not stored, they are built again: so
a snapshot suits any configuration and outlives changes of the caches' layout.

Namespaces appear as hashes of their salts, but texts can be read by everyone who can read the file:
it is made readable to its owner alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from hetero_llm.core.errors import SnapshotError
from hetero_llm.spec_decode.lookahead.global_cache import (
    BEGIN,
    NEW,
    SPACE,
    TICK,
    CacheContent,
    GenerationContent,
)
from hetero_llm.spec_decode.lookahead.sequence_state import SEPARATOR, with_separators
from hetero_llm.utils.files import check_regular, read_bytes

FORMAT = "hetero_llm lookahead cache"
VERSION = "1"

_FORMAT, _VERSION, _TOKENIZER, _CHECKSUM = "format", "version", "tokenizer", "sha256"
_GENERATIONS = ("static", "old", "young")
_TENSORS = {
    f"{generation}.{name}": (dtype, shape)
    for generation in _GENERATIONS
    for name, dtype, shape in (("text", "I32", ()), ("documents", "I64", (4,)))
}
"""Names, and what they have behind the first dimension: type and shape."""
_DTYPES: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_DOCUMENT_BYTES = 4 * _DTYPES["I64"].itemsize
_LONGEST_HEADER = 1 << 16
_SHOWN = 12  # characters of a fingerprint
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot says about itself, not verified against the rest of it.

    Attributes:
        tokenizer: fingerprint of the tokenizer whose tokens these are.
        static, old, young: tokens of each generation, separators included.
        num_documents: of all of them.
    """

    tokenizer: str
    static: int
    old: int
    young: int
    num_documents: int

    @property
    def num_tokens(self) -> int:
        """Separators included."""
        return self.static + self.old + self.young

    @property
    def num_bytes(self) -> int:
        """Of all tensors in the file."""
        return _DTYPES["I32"].itemsize * self.num_tokens + _DOCUMENT_BYTES * self.num_documents

    @property
    def needed(self) -> int:
        """Least capacity of a global cache that can load it."""
        return max(self.static, 2 * self.old, 2 * self.young)


@dataclass(frozen=True, slots=True)
class SnapshotRequirements:
    """What a snapshot, or another file of token ids, must fit to be learned here.

    Attributes:
        tokenizer: gives the fingerprint of the one in use; called when it is needed.
        voc_size: token ids are below it.
        stop_tokens: separators take their requirements.
        capacity: tokens of the global cache, see `GlobalCache`.
    """

    tokenizer: Callable[[], str]
    voc_size: int
    stop_tokens: tuple[int, ...]
    capacity: int

    def check(self, path: str, header: Header, *, as_static: bool) -> None:
        """Refuses a snapshot that does not belong here.

        Args:
            as_static: all of it is to become one generation.

        Raises:
            SnapshotError: it is of another tokenizer, or too large.
        """
        fingerprint = self.tokenizer()
        if header.tokenizer != fingerprint:
            theirs, ours = header.tokenizer[:_SHOWN], fingerprint[:_SHOWN]
            reason = f"is of another tokenizer ({theirs}) than the one in use ({ours})"
            raise SnapshotError(path, reason)
        needed = header.num_tokens if as_static else header.needed
        if needed > self.capacity:
            have = f"it is {self.capacity}" if self.capacity else "there is no global cache"
            raise SnapshotError(path, f"needs a cache_size of at least {needed}; {have}")


def write_snapshot(path: str, content: CacheContent, tokenizer: str) -> int:
    """Writes a file beside `path` and gives it that name when it is whole; returns its bytes.

    Raises:
        SnapshotError: it cannot be written; an older file of that name is still there.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise SnapshotError(path, "is not a regular file")
    tensors = _tensors_of(content)
    about = {_FORMAT: FORMAT, _VERSION: VERSION, _TOKENIZER: tokenizer}
    data = save(tensors, {**about, _CHECKSUM: _checksum(about, tensors)})
    try:
        _replace(target, data)
    except OSError as error:
        raise SnapshotError(path, f"cannot be written: {error.strerror or error}") from None
    return len(data)


def read_header(path: str) -> Header:
    """Reads a snapshot's header alone.

    Raises:
        SnapshotError: it cannot be read, is no snapshot, or is one of another version.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            start = file.read(8 + _LONGEST_HEADER)
    except OSError as error:
        raise SnapshotError(path, f"cannot be read: {error.strerror or error}") from None
    return _parse_header(path, start)[0]


def read_snapshot(
    path: str, requirements: SnapshotRequirements | None = None, *, as_static: bool = False
) -> tuple[Header, CacheContent]:
    """Reads a snapshot and verifies that it is as it was written and belongs here.

    The file is read, not mapped: a disk error is an exception then, and not a signal.

    Args:
        requirements: None for anywhere.
        as_static: as in `SnapshotRequirements.check`.

    Raises:
        SnapshotError: as `read_header` and `SnapshotRequirements.check`; it is damaged; a token is
            beyond the vocabulary.
    """
    stated = read_header(path)
    if requirements is not None:
        requirements.check(path, stated, as_static=as_static)
    try:
        data = read_bytes(path, most=8 + _LONGEST_HEADER + stated.num_bytes)
    except OSError as error:
        raise SnapshotError(path, f"cannot be read: {error.strerror or error}") from None
    header, about = _parse_header(path, data)
    if header != stated:
        raise SnapshotError(path, "has changed while it was read")
    try:
        tensors = {
            name: np.frombuffer(one["data"], _DTYPES[one["dtype"]]).reshape(one["shape"])
            for name, one in deserialize(data)
        }
    except SafetensorError as error:
        raise SnapshotError(path, f"is damaged: {error}") from None
    if _checksum(about, tensors) != about.get(_CHECKSUM):
        raise SnapshotError(path, "is damaged: its checksum is wrong")
    content = [_part(path, tensors, name, requirements) for name in _GENERATIONS]
    return header, CacheContent(*content)


def _part(
    path: str,
    tensors: dict[str, NDArray[Any]],
    name: str,
    requirements: SnapshotRequirements | None,
) -> GenerationContent:
    part = GenerationContent(tensors[f"{name}.text"], tensors[f"{name}.documents"])
    problem = _inconsistency(part)
    if problem is not None:
        raise SnapshotError(path, f"is damaged: {problem}")
    if requirements is None or not len(part.text):
        return part
    largest = int(part.text.max())
    if largest >= requirements.voc_size:
        reason = f"holds token id {largest}, beyond the vocabulary ({requirements.voc_size})"
        raise SnapshotError(path, reason)
    return GenerationContent(with_separators(part.text, requirements.stop_tokens), part.documents)


def _tensors_of(content: CacheContent) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {}
    for name in _GENERATIONS:
        part = getattr(content, name)
        tensors[f"{name}.text"] = np.ascontiguousarray(part.text, _DTYPES["I32"])
        tensors[f"{name}.documents"] = np.ascontiguousarray(part.documents, _DTYPES["I64"])
    return tensors


def _checksum(about: dict[str, str], tensors: dict[str, NDArray[Any]]) -> str:
    """SHA-256 over everything but itself, each part under its name and its size."""
    digest = hashlib.sha256()
    for name in (_FORMAT, _VERSION, _TOKENIZER):
        digest.update(json.dumps([name, about.get(name)]).encode())
    for name in sorted(tensors):
        digest.update(json.dumps([name, tensors[name].shape]).encode())
        digest.update(tensors[name].data)
    return digest.hexdigest()


def _replace(target: str, content: bytes) -> None:
    folder, name = os.path.split(target)
    handle, temporary = _open_temporary(folder, name)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _open_temporary(folder: str, name: str) -> tuple[int, str]:
    return tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=folder)


def _parse_header(path: str, start: bytes) -> tuple[Header, dict[str, str]]:
    """The header and the metadata at the start of a file."""
    size = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= size <= min(_LONGEST_HEADER, len(start) - 8):
        raise SnapshotError(path, "is no snapshot of the lookahead cache, or its start is damaged")
    try:
        content = json.loads(start[8 : 8 + size])
        about = content.pop("__metadata__")
        form = about[_FORMAT], about[_VERSION]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        reason = "is no snapshot of the lookahead cache, or its header is damaged"
        raise SnapshotError(path, reason) from None
    if form[0] != FORMAT:
        raise SnapshotError(path, "is no snapshot of the lookahead cache")
    if form[1] != VERSION:
        reason = f"has version {form[1]!r} of the format; this release reads {VERSION!r}"
        raise SnapshotError(path, reason)
    tokenizer = about.get(_TOKENIZER)
    if not isinstance(tokenizer, str) or not _is_known(content):
        raise SnapshotError(path, "is damaged: its header is not that of a snapshot")
    texts = {g: content[f"{g}.text"]["shape"][0] for g in _GENERATIONS}
    documents = sum(content[f"{g}.documents"]["shape"][0] for g in _GENERATIONS)
    return Header(tokenizer, **texts, num_documents=documents), about


def _is_known(content: Any) -> bool:
    """Whether a header lists our tensors, each of its type and shape."""
    if not isinstance(content, dict) or content.keys() != _TENSORS.keys():
        return False
    for name, (dtype, rest) in _TENSORS.items():
        one = content[name]
        shape = one.get("shape") if isinstance(one, dict) else None
        if not isinstance(shape, list) or one.get("dtype") != dtype:
            return False
        if any(type(size) is not int or size < 0 for size in shape):
            return False
        if len(shape) != 1 + len(rest) or tuple(shape[1:]) != rest:
            return False
    return True


def _inconsistency(part: GenerationContent) -> str | None:
    """What compiled code could not cope with: it does not check where it reads."""
    text, documents = part.text, part.documents
    begins, news = documents[:, BEGIN], documents[:, NEW]
    if len(documents) == 0:
        return "a text without documents" if len(text) else None
    if begins[0] != 1 or begins.min() < 1 or begins.max() > len(text):
        return "documents that are not within their text"
    ends = np.append(begins[1:] - 1, len(text))
    if (ends < begins).any() or (news < begins).any() or (news > ends).any():
        return "documents that are not within their text"
    if len(text) > _LARGEST or (text < SEPARATOR).any() or (text[begins - 1] != SEPARATOR).any():
        return "documents that are not parted"
    ticks = documents[:, TICK]
    if (documents[:, SPACE] < 0).any() or ticks[0] < 0 or (np.diff(ticks) < 0).any():
        return "documents out of order"
    return "documents out of order" if ticks[-1] > _LARGEST else None
