"""What engine and draft worker tell each other: records of a header and 32-bit words.

From the engine:
- OPEN: a request; base_length: tokens of its prompt; depth; words: `OPENING`.
- PROMPT: a piece of its prompt; base_length: tokens of it sent before; words: tokens.
- COMMIT: new tokens; base_length: tokens known before; words: the new ones.
- GRAFT: nodes that the engine knows of and verifies; base_length: tokens known; words: `GRAFTED`.
- CLOSE: the request has ended. STOP: the worker is to end.

From the worker:
- HELLO: see `Hello`; value: `PROTOCOL`. BEAT: it lives; value counts up.
- NODES: of a request's tree; base_length: tokens the worker knew; words: `NODE_WORDS` of each node:
  id, parent, token and kind.
- REFUSED: no drafts for a request; value: `Refusal`.

Slot and generation stamp every record about a request: what was meant for a slot's former request
is known by its generation, what was drafted for an older text by its base length. Whether what a
record says makes sense is for its reader to find out.
"""

from __future__ import annotations

import ctypes
import enum
import struct
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hetero_llm.bridge.ipc import ring_library

PROTOCOL = 4
"""Version of the records; `Hello` tells the worker's."""

MAX_WORDS = 6649
"""Most words of one record (csrc/ring.h)."""

PROMPT_CHUNK = 4096
"""Tokens of one PROMPT record."""

GRAFTED = np.dtype([("token", "<i4"), ("parent", "<i4"), ("chance", "<f4")])
"""One node of a GRAFT: parents come first, -1 is the last known token; chance that the text goes
through it."""

HEADER = np.dtype(
    [
        (name, "<u4")
        for name in ("kind", "slot", "generation", "base_length", "words", "depth", "value")
    ]
)
"""The record's header, as csrc/ring.h has it."""

NODE_WORDS = 4
"""Words of a node in a NODES record: its reader makes sure that a record has whole ones."""

HEADER_WORDS = HEADER.itemsize // 4
SLOT, GENERATION, BASE_LENGTH, WORDS = 1, 2, 3, 4
"""Columns of a header as a row of `HEADER_WORDS` words."""

OPENING = np.dtype([("seed", "<u8"), ("sample_index", "<u4"), ("temperature", "<f4")])
"""What an OPEN record tells beside its header."""

_HELLO = np.dtype([("vocab_size", "<u4")])
_pack_run = struct.Struct("<9I").pack  # csrc/outbox.h
_pack_columns = struct.Struct("<4I").pack
_GRAFT_WORDS = GRAFTED.itemsize // 4


class Kind(enum.IntEnum):
    """What a record is."""

    OPEN = 1
    PROMPT = 2
    COMMIT = 3
    CLOSE = 4
    STOP = 5
    GRAFT = 6
    HELLO = 17
    BEAT = 18
    NODES = 19
    REFUSED = 20


_COMMIT, _NODES = Kind.COMMIT, Kind.NODES  # looking a member up takes longer than putting it in


class Refusal(enum.IntEnum):
    """Why a worker drafts nothing for a request."""

    TOO_LONG = 1  # its prompt is longer than the worker's context
    LOST_RECORD = 2  # something that came before is missing: open it again
    NO_ROOM = 3  # no memory for its KV
    BAD_TOKEN = 4  # a token id that the draft model does not have


class Records:
    """Records, oldest first. Nobody changes them.

    Attributes:
        headers: [n] `HEADER`.
        words: [sum of headers["words"]] int32, the bodies one after the other.
        header_words: [n * HEADER_WORDS] int32, the headers for compiled functions.
        kind: of all of them, if there are any; None: of several, or nobody knows.
    """

    __slots__ = ("header_words", "headers", "kind", "words")

    def __init__(self, headers: np.ndarray, words: np.ndarray, kind: int | None = None) -> None:
        self.headers, self.words, self.kind = headers, words, kind
        self.header_words = headers.view(np.int32)

    def __len__(self) -> int:
        return len(self.headers)

    def runs(self) -> Iterable[tuple[int, Records]]:
        """The longest stretches of one kind, in order: a kind (maybe an unknown one) and them."""
        if self.kind is not None:  # as nearly always, and ten times as fast
            return ((self.kind, self),)
        return self._split()

    def _split(self) -> Iterator[tuple[int, Records]]:
        kinds = self.headers["kind"]
        edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
        ends = np.concatenate([[0], np.cumsum(self.headers["words"], dtype=np.int64)])
        bounds = [0, *edges, len(kinds)] if len(kinds) else []
        for first, last in pairwise(bounds):
            kind, words = int(kinds[first]), self.words[ends[first] : ends[last]]
            yield kind, Records(self.headers[first:last], words, kind)

    def only(self, wanted: np.ndarray) -> Records:
        """Those records where `wanted`, [n] bool, is true."""
        words = self.words[np.repeat(wanted, self.headers["words"])]
        return Records(self.headers[wanted], words)

    def copy(self) -> Records:
        """The same in memory of its own."""
        return Records(self.headers.copy(), self.words.copy(), self.kind)


class Stamps(NamedTuple):
    """Which text of which requests records are about.

    Attributes:
        slots, generations, base_lengths: [n] int32 or int64.
    """

    slots: np.ndarray
    generations: np.ndarray
    base_lengths: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest:
    """A request to draft for.

    Attributes:
        prompt: [at least 1] int32.
        seed, sample_index: of the noise that draws its tokens, unsigned 64 and 32 bits.
        temperature: 0 for the most likely token.
        depth: most nodes on a path.
    """

    slot: int
    generation: int
    prompt: np.ndarray
    seed: int = 0
    sample_index: int = 0
    temperature: float = 0.0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says first."""

    vocab_size: int
    protocol: int = PROTOCOL


class Outbox:
    """Records on their way into a ring, oldest first; what the ring has no room for stays.

    It grows without bound: who fills it looks at `len` and stops.

    Raises:
        RingError: there is no compiled library.
    """

    def __init__(self) -> None:
        self._library = ring_library.load().quick
        self._push = self._library.hetero_outbox_push
        self._handle = ctypes.c_void_p(self._library.hetero_outbox_make())
        weakref.finalize(self, self._library.hetero_outbox_free, self._handle)
        self._count = 0
        # Runs that the compiled outbox does not have yet: it is called once for all of them.
        self._fresh: list[bytes] = []

    def __len__(self) -> int:
        return self._count

    @property
    def num_words(self) -> int:
        """Words of all bodies."""
        self.push_into(None)
        return int(self._library.hetero_outbox_words(self._handle))

    def records(self) -> Records:
        """A copy of what waits."""
        headers, words = np.empty(self._count, HEADER), np.empty(self.num_words, np.int32)
        self._library.hetero_outbox_copy(self._handle, headers.ctypes.data, words.ctypes.data)
        return Records(headers, words)

    def clear(self) -> None:
        self.drop(self._count)

    def drop(self, count: int) -> None:
        """Forgets the oldest `count`."""
        assert 0 <= count <= self._count
        self.push_into(None)
        self._library.hetero_outbox_drop(self._handle, count)
        self._count -= count

    def push_into(self, end: ctypes.c_void_p | None) -> int:
        """Pushes what waits into a ring's end, as far as there is room; None: into none. For
        `Producer.push`. Returns how many wait then."""
        data = b"".join(self._fresh)
        left: int = self._push(self._handle, end, data, len(data))
        assert left >= 0, "bodies are as long as their counts say, at most MAX_WORDS"
        self._fresh.clear()
        self._count = left
        return left

    def append(
        self,
        kind: Kind,
        body: np.ndarray | None = None,
        *,
        slot: int = 0,
        generation: int = 0,
        base_length: int = 0,
        depth: int = 0,
        value: int = 0,
    ) -> None:
        """One record. `body`: any array whose bytes are whole words."""
        data = b"" if body is None else body.tobytes()
        assert len(data) <= 4 * MAX_WORDS, len(data)
        head = _pack_run(kind, depth, value, 1, 1, 4, 4, 4, 4)
        columns = _pack_columns(slot, generation, base_length, len(data) // 4)
        self._fresh += head, columns, data
        self._count += 1

    def extend(
        self, kind: Kind, stamps: Stamps, counts: np.ndarray, body: np.ndarray, width: int = 1
    ) -> None:
        """Several records of one kind.

        Args:
            counts: [n] int32 or int64, items of each body, each at most `MAX_WORDS` words.
            body: items of `width` words, the bodies one after the other.
        """
        slots, generations, lengths = stamps
        head = _pack_run(
            kind, 0, 0, width, len(slots),
            slots.itemsize, generations.itemsize, lengths.itemsize, counts.itemsize,
        )  # fmt: skip
        self._fresh += (
            head, slots.tobytes(), generations.tobytes(), lengths.tobytes(), counts.tobytes(),
            body.tobytes(),
        )  # fmt: skip
        self._count += len(slots)


def put_open(outbox: Outbox, request: OpenRequest) -> None:
    """A request and its prompt, in pieces of `PROMPT_CHUNK` tokens."""
    assert len(request.prompt) > 0
    opening = np.array([(request.seed, request.sample_index, request.temperature)], OPENING)
    whose = {"slot": request.slot, "generation": request.generation}
    outbox.append(Kind.OPEN, opening, base_length=len(request.prompt), depth=request.depth, **whose)
    tokens = np.ascontiguousarray(request.prompt, np.int32)
    for start in range(0, len(tokens), PROMPT_CHUNK):
        piece = tokens[start : start + PROMPT_CHUNK]
        outbox.append(Kind.PROMPT, piece, base_length=start, **whose)


def put_commits(outbox: Outbox, stamps: Stamps, counts: np.ndarray, token_ids: np.ndarray) -> None:
    """New tokens of several requests.

    Args:
        stamps: base lengths without the new tokens.
        counts: [n] new tokens of each, at least 1.
        token_ids: [sum of counts] int32.
    """
    outbox.extend(_COMMIT, stamps, counts, token_ids)


def put_nodes(outbox: Outbox, stamps: Stamps, counts: np.ndarray, nodes: np.ndarray) -> None:
    """Nodes of the trees of several requests.

    Args:
        stamps: base lengths: tokens the worker knows.
        counts: [n] nodes of each, which may be none.
        nodes: [sum of counts, NODE_WORDS] int32, contiguous: id, parent, token and kind.
    """
    outbox.extend(_NODES, stamps, counts, nodes, NODE_WORDS)


def put_grafts(outbox: Outbox, stamps: Stamps, counts: np.ndarray, nodes: np.ndarray) -> None:
    """Nodes for the trees of several requests.

    Args:
        counts: [n] nodes of each. nodes: [sum of counts] `GRAFTED`, contiguous.
    """
    outbox.extend(Kind.GRAFT, stamps, counts, nodes, _GRAFT_WORDS)


def put_close(outbox: Outbox, slot: int, generation: int) -> None:
    """No more drafts for this request."""
    outbox.append(Kind.CLOSE, slot=slot, generation=generation)


def put_stop(outbox: Outbox) -> None:
    """The worker is to end."""
    outbox.append(Kind.STOP)


def put_hello(outbox: Outbox, hello: Hello) -> None:
    """What a worker says first."""
    outbox.append(Kind.HELLO, np.array([(hello.vocab_size,)], _HELLO), value=hello.protocol)


def put_beat(outbox: Outbox, counter: int) -> None:
    """The worker lives; `counter` modulo 2**32."""
    outbox.append(Kind.BEAT, value=counter & 0xFFFFFFFF)


def put_refused(outbox: Outbox, slot: int, generation: int, refusal: Refusal) -> None:
    """The worker drafts nothing for this request."""
    outbox.append(Kind.REFUSED, slot=slot, generation=generation, value=refusal)


def read_hello(records: Records) -> Hello | None:
    """The last of some HELLO records; None if it is not of the form of `PROTOCOL`."""
    header = records.headers[-1]
    if header["words"] * 4 != _HELLO.itemsize or header["value"] != PROTOCOL:
        return None
    told = records.words[-_HELLO.itemsize // 4 :].view(_HELLO)[0]
    return Hello(int(told["vocab_size"]), protocol=int(header["value"]))
