"""Messages between engine and draft worker: a header and a body of 32-bit words.

From the engine:
- OPEN: a new request; base_length: length of its prompt; depth; words: one `OPENING`.
- PROMPT: a piece of its prompt; base_length: prompt tokens sent before; words: token ids.
- COMMIT: new tokens; base_length: length of the sequence before them; words: their ids.
- EXTERNAL_NODES: nodes that the engine verifies and the worker did not propose; base_length: length
  of the sequence; words: one `EXTERNAL_NODE` for each.
- CLOSE: the request has ended. STOP: the worker must exit.

From the worker:
- HELLO: first message, see `Hello`; value: `PROTOCOL`. HEARTBEAT: sign of life; value counts up.
- NODES: new nodes of a request's tree; base_length: length of the sequence in the worker; words:
  `NODE_WORDS` for each node: id, parent, token, acceptance bucket.
- REFUSED: the worker does not draft for a request; value: `Refusal`.

Every message about a request carries its request slot (here: `slot`) and its generation, a number
that no earlier request of the slot had. So a reader recognises messages about an earlier request by
the generation, and nodes drafted for a shorter sequence by the base length. Readers validate the
content of messages themselves.
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
"""Version of the message format; `Hello` carries the worker's."""

MAX_WORDS = 6649
"""Maximum number of words in the body of a message (`kMaxWords` in csrc/ring.h)."""

PROMPT_CHUNK = 4096
"""Tokens in one PROMPT message."""

EXTERNAL_NODE = np.dtype([("token", "<i4"), ("parent", "<i4"), ("path_prob", "<f4")])
"""One node of an EXTERNAL_NODES message. parent: index of an earlier node of the message, -1 for
the last token of the sequence; path_prob: probability that the sequence goes through the node."""

HEADER = np.dtype(
    [
        (name, "<u4")
        for name in ("kind", "slot", "generation", "base_length", "words", "depth", "value")
    ]
)
"""Header of a message: `MessageHeader` of csrc/ring.h."""

NODE_WORDS = 4
"""Words of a node in a NODES message. Readers check that a body has a multiple of it."""

HEADER_WORDS = HEADER.itemsize // 4
SLOT, GENERATION, BASE_LENGTH, WORDS = 1, 2, 3, 4
"""Columns of a header seen as `HEADER_WORDS` words."""

OPENING = np.dtype([("seed", "<u8"), ("sample_index", "<u4"), ("temperature", "<f4")])
"""Body of an OPEN message."""

_HELLO = np.dtype([("vocab_size", "<u4")])
_pack_run = struct.Struct("<9I").pack  # csrc/outbox.h
_pack_columns = struct.Struct("<4I").pack
_EXTERNAL_NODE_WORDS = EXTERNAL_NODE.itemsize // 4


class MessageKind(enum.IntEnum):
    """What a message is about; below 16 from the engine, above from the worker."""

    OPEN = 1
    PROMPT = 2
    COMMIT = 3
    CLOSE = 4
    STOP = 5
    EXTERNAL_NODES = 6
    HELLO = 17
    HEARTBEAT = 18
    NODES = 19
    REFUSED = 20


# Attribute access on an enum class takes longer than appending a message.
_COMMIT, _NODES = MessageKind.COMMIT, MessageKind.NODES


class Refusal(enum.IntEnum):
    """Why the worker does not draft for a request."""

    TOO_LONG = 1  # the sequence does not fit the draft model's context
    LOST_MESSAGE = 2  # an earlier message is missing: the engine opens the request again
    NO_ROOM = 3  # no memory for its KV
    BAD_TOKEN = 4  # a token id that the draft model does not have


class Messages:
    """Messages, oldest first. Read only.

    Attributes:
        headers: [n] `HEADER`.
        words: [sum of headers["words"]] int32, the concatenated bodies.
        header_words: [n * HEADER_WORDS] int32 view of the headers, for compiled functions.
        kind: kind of all messages; None: they differ, or it is unknown.
    """

    __slots__ = ("header_words", "headers", "kind", "words")

    def __init__(self, headers: np.ndarray, words: np.ndarray, kind: int | None = None) -> None:
        self.headers, self.words, self.kind = headers, words, kind
        self.header_words = headers.view(np.int32)

    def __len__(self) -> int:
        return len(self.headers)

    def runs(self) -> Iterable[tuple[int, Messages]]:
        """Split into maximal runs of one kind, in order: pairs of a kind, which may be no
        `MessageKind`, and its messages."""
        if self.kind is not None:  # the usual case, ten times as fast
            return ((self.kind, self),)
        return self._split()

    def _split(self) -> Iterator[tuple[int, Messages]]:
        kinds = self.headers["kind"]
        edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
        ends = np.concatenate([[0], np.cumsum(self.headers["words"], dtype=np.int64)])
        bounds = [0, *edges, len(kinds)] if len(kinds) else []
        for first, last in pairwise(bounds):
            kind, words = int(kinds[first]), self.words[ends[first] : ends[last]]
            yield kind, Messages(self.headers[first:last], words, kind)

    def only(self, wanted: np.ndarray) -> Messages:
        """The messages where the mask `wanted`, [n] bool, is true."""
        words = self.words[np.repeat(wanted, self.headers["words"])]
        return Messages(self.headers[wanted], words)

    def copy(self) -> Messages:
        """A copy that owns its memory."""
        return Messages(self.headers.copy(), self.words.copy(), self.kind)


class Stamps(NamedTuple):
    """Request slots, generations and base lengths of n messages: [n] int32 or int64 each."""

    slots: np.ndarray
    generations: np.ndarray
    base_lengths: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest:
    """A request to draft for.

    Attributes:
        prompt: [>= 1] int32 token ids.
        seed, sample_index: key of the noise that samples its tokens, unsigned 64 and 32 bits.
        temperature: 0 for greedy sampling.
        depth: maximum depth of its tree; 0: the worker's own.
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
    """First message of a worker."""

    vocab_size: int
    protocol: int = PROTOCOL


class Outbox:
    """Messages waiting to enter a ring, oldest first; those that do not fit stay.

    It grows without bound: callers limit it by looking at `len`.

    Raises:
        RingError: there is no compiled library.
    """

    def __init__(self) -> None:
        self._library = ring_library.load().quick
        self._push = self._library.hetero_outbox_push
        self._handle = ctypes.c_void_p(self._library.hetero_outbox_make())
        weakref.finalize(self, self._library.hetero_outbox_free, self._handle)
        self._count = 0
        # Runs not yet handed to the compiled outbox: one call takes them all.
        self._fresh: list[bytes] = []

    def __len__(self) -> int:
        return self._count

    @property
    def num_words(self) -> int:
        """Total words of all bodies."""
        self.push_into(None)
        return int(self._library.hetero_outbox_words(self._handle))

    def messages(self) -> Messages:
        """A copy of the waiting messages."""
        headers, words = np.empty(self._count, HEADER), np.empty(self.num_words, np.int32)
        self._library.hetero_outbox_copy(self._handle, headers.ctypes.data, words.ctypes.data)
        return Messages(headers, words)

    def clear(self) -> None:
        self.drop(self._count)

    def drop(self, count: int) -> None:
        """Drop the oldest `count` messages."""
        assert 0 <= count <= self._count
        self.push_into(None)
        self._library.hetero_outbox_drop(self._handle, count)
        self._count -= count

    def push_into(self, end: ctypes.c_void_p | None) -> int:
        """Push waiting messages into a ring, as many as fit; for `Producer.push`. Returns how many
        still wait. `end`: handle of the producer's end; None: only hand them to the compiled
        outbox."""
        data = b"".join(self._fresh)
        self._fresh.clear()
        left: int = self._push(self._handle, end, data, len(data))
        assert left >= 0, "bodies are as long as their counts say, at most MAX_WORDS"
        self._count = left
        return left

    def append(
        self,
        kind: MessageKind,
        body: np.ndarray | None = None,
        *,
        slot: int = 0,
        generation: int = 0,
        base_length: int = 0,
        depth: int = 0,
        value: int = 0,
    ) -> None:
        """Append one message. `body`: any array whose size is a multiple of 4 bytes."""
        data = b"" if body is None else body.tobytes()
        assert len(data) <= 4 * MAX_WORDS, len(data)
        head = _pack_run(kind, depth, value, 1, 1, 4, 4, 4, 4)
        columns = _pack_columns(slot, generation, base_length, len(data) // 4)
        self._fresh += head, columns, data
        self._count += 1

    def extend(
        self,
        kind: MessageKind,
        stamps: Stamps,
        counts: np.ndarray,
        body: np.ndarray,
        width: int = 1,
    ) -> None:
        """Append n messages of one kind.

        Args:
            counts: [n] int32 or int64: items in each body, at most `MAX_WORDS` words together.
            body: the concatenated bodies, `width` words an item.
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
    """Announce a request and send its prompt in pieces of `PROMPT_CHUNK` tokens."""
    assert len(request.prompt) > 0
    opening = np.array([(request.seed, request.sample_index, request.temperature)], OPENING)
    whose = {"slot": request.slot, "generation": request.generation}
    outbox.append(
        MessageKind.OPEN, opening, base_length=len(request.prompt), depth=request.depth, **whose
    )
    tokens = np.ascontiguousarray(request.prompt, np.int32)
    for start in range(0, len(tokens), PROMPT_CHUNK):
        piece = tokens[start : start + PROMPT_CHUNK]
        outbox.append(MessageKind.PROMPT, piece, base_length=start, **whose)


def put_commits(outbox: Outbox, stamps: Stamps, counts: np.ndarray, token_ids: np.ndarray) -> None:
    """Send new tokens of n requests.

    Args:
        stamps: base lengths exclude the new tokens.
        counts: [n] new tokens of each request, at least 1.
        token_ids: [sum of counts] int32.
    """
    outbox.extend(_COMMIT, stamps, counts, token_ids)


def put_nodes(outbox: Outbox, stamps: Stamps, counts: np.ndarray, nodes: np.ndarray) -> None:
    """Send new nodes of the trees of n requests.

    Args:
        stamps: base lengths are the sequences' lengths in the worker.
        counts: [n] nodes of each request, may be 0.
        nodes: [sum of counts, NODE_WORDS] int32, contiguous: id, parent, token, acceptance bucket.
    """
    outbox.extend(_NODES, stamps, counts, nodes, NODE_WORDS)


def put_external_nodes(
    outbox: Outbox, stamps: Stamps, counts: np.ndarray, nodes: np.ndarray
) -> None:
    """Send nodes from other proposers for the trees of n requests.

    Args:
        counts: [n] nodes of each request.
        nodes: [sum of counts] `EXTERNAL_NODE`, contiguous.
    """
    outbox.extend(MessageKind.EXTERNAL_NODES, stamps, counts, nodes, _EXTERNAL_NODE_WORDS)


def put_close(outbox: Outbox, slot: int, generation: int) -> None:
    """Tell the worker that the request has ended."""
    outbox.append(MessageKind.CLOSE, slot=slot, generation=generation)


def put_stop(outbox: Outbox) -> None:
    """Ask the worker to exit."""
    outbox.append(MessageKind.STOP)


def put_hello(outbox: Outbox, hello: Hello) -> None:
    """Send the first message of a worker."""
    outbox.append(MessageKind.HELLO, np.array([(hello.vocab_size,)], _HELLO), value=hello.protocol)


def put_heartbeat(outbox: Outbox, counter: int) -> None:
    """Send a sign of life; `counter` is taken modulo 2**32."""
    outbox.append(MessageKind.HEARTBEAT, value=counter & 0xFFFFFFFF)


def put_refused(outbox: Outbox, slot: int, generation: int, refusal: Refusal) -> None:
    """Tell the engine that the worker does not draft for this request."""
    outbox.append(MessageKind.REFUSED, slot=slot, generation=generation, value=refusal)


def read_hello(messages: Messages) -> Hello | None:
    """Parse the last of some HELLO messages; None if it is not of version `PROTOCOL`."""
    header = messages.headers[-1]
    if header["words"] * 4 != _HELLO.itemsize or header["value"] != PROTOCOL:
        return None
    hello = messages.words[-_HELLO.itemsize // 4 :].view(_HELLO)[0]
    return Hello(int(hello["vocab_size"]), protocol=int(header["value"]))
