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

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PROTOCOL = 3
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

_HELLO = np.dtype([("vocab_size", "<u4"), ("max_context", "<u4"), ("max_slots", "<u4")])
_HEADER_BYTES = HEADER.itemsize
_pack_header = struct.Struct("<7I").pack_into
_GRAFT_WORDS = GRAFTED.itemsize // 4
_FIRST_RECORDS, _FIRST_WORDS = 256, 1 << 14


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


class Refusal(enum.IntEnum):
    """Why a worker drafts nothing for a request."""

    TOO_LONG = 1  # its prompt is longer than the worker's context
    LOST_RECORD = 2  # something that came before is missing: open it again
    NO_ROOM = 3  # no memory for its KV
    BAD_TOKEN = 4  # a token id that the draft model does not have


@dataclass(slots=True, eq=False)  # a frozen one takes three times as long to make
class Records:
    """Records, oldest first. Nobody changes them.

    Attributes:
        headers: [n] `HEADER`.
        words: [sum of headers["words"]] int32, the bodies one after the other.
    """

    headers: np.ndarray
    words: np.ndarray

    def __len__(self) -> int:
        return len(self.headers)

    def runs(self) -> Iterator[tuple[int, Records]]:
        """The longest stretches of one kind, in order: a kind (maybe an unknown one) and them."""
        kinds = self.headers["kind"]
        listed = kinds.tolist()
        if not listed:
            return
        if listed.count(listed[0]) == len(listed):  # as nearly always, and ten times as fast
            yield listed[0], self
            return
        edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
        ends = np.concatenate([[0], np.cumsum(self.headers["words"], dtype=np.int64)])
        bounds = [0, *edges, len(kinds)]
        for first, last in zip(bounds[:-1], bounds[1:], strict=True):
            words = self.words[ends[first] : ends[last]]
            yield int(kinds[first]), Records(self.headers[first:last], words)

    def only(self, wanted: np.ndarray) -> Records:
        """Those records where `wanted`, [n] bool, is true."""
        words = self.words[np.repeat(wanted, self.headers["words"])]
        return Records(self.headers[wanted], words)

    def copy(self) -> Records:
        """The same in memory of its own."""
        return Records(self.headers.copy(), self.words.copy())


class Stamps(NamedTuple):
    """Which text of which requests records are about.

    Attributes:
        slots, generations, base_lengths: [n] integers.
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
    """What a worker says first.

    Attributes:
        max_context: most tokens of a request.
        max_slots: requests at a time.
    """

    vocab_size: int
    max_context: int
    max_slots: int
    protocol: int = PROTOCOL


class Outbox:
    """Records on their way into a ring, oldest first; what the ring has no room for stays.

    It grows without bound: who fills it looks at `len` and stops.
    """

    def __init__(self) -> None:
        self._headers = np.zeros(_FIRST_RECORDS, HEADER)
        self._words = np.zeros(_FIRST_WORDS, np.int32)
        # What waits lies between these: records sent leave room at the front.
        self._first = self._end = 0
        self._first_word = self._end_word = 0
        self._locate()

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def num_words(self) -> int:
        """Words of all bodies."""
        return self._end_word - self._first_word

    def waiting(self) -> tuple[int, int, int, int]:
        """What waits, as `hetero_ring_push` wants it, until something is put in: addresses of the
        oldest header and body, how many records, and the words of all their bodies."""
        return (
            self._headers_at + self._first * _HEADER_BYTES,
            self._words_at + self._first_word * 4,
            self._end - self._first,
            self._end_word - self._first_word,
        )

    def records(self) -> Records:
        """A copy of what waits."""
        return Records(
            self._headers[self._first : self._end].copy(),
            self._words[self._first_word : self._end_word].copy(),
        )

    def clear(self) -> None:
        self._first = self._end = self._first_word = self._end_word = 0

    def drop(self, count: int) -> None:
        """Forgets the oldest `count`."""
        gone = self._headers["words"][self._first : self._first + count]
        self._first += count
        self._first_word += int(gone.sum(dtype=np.int64))

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
        words = 0 if body is None else body.nbytes // 4
        assert words <= MAX_WORDS, words
        at, used = self._take(1, words)
        _pack_header(
            self._memory, at * _HEADER_BYTES,
            kind, slot, generation, base_length, words, depth, value,
        )  # fmt: skip
        if body is not None:
            self._words[used : used + words] = np.ascontiguousarray(body).reshape(-1).view(np.int32)

    def extend(
        self, kind: Kind, stamps: Stamps, counts: np.ndarray, body: np.ndarray, width: int = 1
    ) -> None:
        """Several records of one kind.

        Args:
            counts: [n] items of each body; together at most `MAX_WORDS` words.
            body: [sum of counts * width] int32, the bodies one after the other.
            width: words of an item.
        """
        slots, generations, base_lengths = stamps
        count, total = len(slots), len(body)
        at, used = self._take(count, total)
        if count == 1:  # much faster than column by column
            _pack_header(
                self._memory, at * _HEADER_BYTES, kind, slots.item(0), generations.item(0),
                base_lengths.item(0), total, 0, 0,
            )  # fmt: skip
        else:
            rows = self._rows[at : at + count]
            rows[:] = _BLANK[kind]
            rows[:, SLOT] = slots
            rows[:, GENERATION] = generations
            rows[:, BASE_LENGTH] = base_lengths
            rows[:, WORDS] = counts
            if width > 1:
                rows[:, WORDS] *= width
        self._words[used : used + total] = body

    def _take(self, records: int, words: int) -> tuple[int, int]:
        """Makes room, counts it as used; where it begins."""
        if self._end + records > len(self._headers) or self._end_word + words > len(self._words):
            waiting, waiting_words = len(self), self.num_words
            self._headers = _moved(self._headers[self._first : self._end], records)
            self._words = _moved(self._words[self._first_word : self._end_word], words)
            self._first = self._first_word = 0
            self._end, self._end_word = waiting, waiting_words
            self._locate()
        start, used = self._end, self._end_word
        self._end, self._end_word = start + records, used + words
        return start, used

    def _locate(self) -> None:
        self._headers_at = self._headers.ctypes.data
        self._words_at = self._words.ctypes.data
        self._rows = self._headers.view(np.uint32).reshape(-1, HEADER_WORDS)
        self._memory = self._rows.data


_BLANK = {kind: np.array([kind, *[0] * (HEADER_WORDS - 1)], np.uint32) for kind in Kind}
"""Headers about nothing."""


def _moved(waiting: np.ndarray, more: int) -> np.ndarray:
    """A copy with room for as many and `more` behind, twice over: moving stays rare."""
    room = max(2 * (len(waiting) + more), _FIRST_RECORDS)
    larger = np.zeros(room, waiting.dtype)
    larger[: len(waiting)] = waiting
    return larger


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
    outbox.extend(Kind.COMMIT, stamps, counts, token_ids)


def put_nodes(outbox: Outbox, stamps: Stamps, counts: np.ndarray, nodes: np.ndarray) -> None:
    """Nodes of the trees of several requests.

    Args:
        stamps: base lengths: tokens the worker knows.
        counts: [n] nodes of each, which may be none.
        nodes: [sum of counts, NODE_WORDS] int32, contiguous: id, parent, token and kind.
    """
    outbox.extend(Kind.NODES, stamps, counts, nodes.reshape(-1), NODE_WORDS)


def put_grafts(outbox: Outbox, stamps: Stamps, counts: np.ndarray, nodes: np.ndarray) -> None:
    """Nodes for the trees of several requests.

    Args:
        counts: [n] nodes of each. nodes: [sum of counts] `GRAFTED`, contiguous.
    """
    outbox.extend(Kind.GRAFT, stamps, counts, nodes.view(np.int32), _GRAFT_WORDS)


def put_close(outbox: Outbox, slot: int, generation: int) -> None:
    """No more drafts for this request."""
    outbox.append(Kind.CLOSE, slot=slot, generation=generation)


def put_stop(outbox: Outbox) -> None:
    """The worker is to end."""
    outbox.append(Kind.STOP)


def put_hello(outbox: Outbox, hello: Hello) -> None:
    """What a worker says first."""
    sizes = (hello.vocab_size, hello.max_context, hello.max_slots)
    outbox.append(Kind.HELLO, np.array([sizes], _HELLO), value=hello.protocol)


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
    vocab_size, max_context, max_slots = told.tolist()
    return Hello(vocab_size, max_context, max_slots, protocol=int(header["value"]))
