"""What engine and draft worker tell each other: records of a header and 32-bit words.

From the engine:
- OPEN: a request; base_length: tokens of its prompt; depth; words: `OPENING`.
- PROMPT: a piece of its prompt; base_length: tokens of it sent before; words: tokens.
- COMMIT: new tokens; base_length: tokens known before; words: the new ones.
- REQUEST: asks for drafts; base_length: tokens known; round; depth: most nodes on a path; value:
  most nodes in all; words: `OUTCOME`s to draft for, none for what is committed.
- CLOSE: the request has ended. STOP: the worker is to end.

From the worker:
- HELLO: see `Hello`; value: `PROTOCOL`. BEAT: it lives; value counts up.
- DRAFT: base_length and round of the REQUEST; value: which outcome; words: `NODE`s.
- REFUSED: no drafts for a request; value: `Refusal`.

Slot and generation stamp every record about a request: what was meant for a slot's former request
is known by its generation, what was drafted for an older text by its base length.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PROTOCOL = 1
"""Version of the records; `Hello` tells the worker's."""

MAX_WORDS = 6648
"""Most words of one record (csrc/ring.h)."""

PROMPT_CHUNK = 4096
"""Tokens of one PROMPT record."""

AS_COMMITTED = 0xFFFFFFFF
"""The outcome of a draft that follows what is committed, not one of a request's outcomes."""

HEADER = np.dtype(
    [("kind", "<u2"), ("flags", "<u2")]
    + [
        (name, "<u4")
        for name in ("slot", "generation", "base_length", "round", "words", "depth", "value")
    ]
)
"""The record's header, as csrc/ring.h has it. `flags` is what the consumer found out."""

SOUND = 1
"""Flag of a draft that was checked and is one."""

NODE = np.dtype([("token", "<i4"), ("parent", "<i2"), ("unused", "<i2"), ("log_prob", "<f4")])
"""One node of a draft: parents come first, -1 is the last known token."""

OUTCOME = np.dtype([("accepted", "<i4"), ("token", "<i4")])
"""What may come of the round being verified: so many nodes accepted, then this token."""

OPENING = np.dtype([("seed", "<u8"), ("sample_index", "<u4"), ("temperature", "<f4")])
"""What an OPEN record tells beside its header."""

_HELLO = np.dtype(
    [("tokenizer", "<u8"), ("vocab_size", "<u4"), ("max_context", "<u4"), ("max_slots", "<u4")]
)
_FIRST_RECORDS, _FIRST_WORDS = 256, 1 << 14


class Kind(enum.IntEnum):
    """What a record is."""

    OPEN = 1
    PROMPT = 2
    COMMIT = 3
    REQUEST = 4
    CLOSE = 5
    STOP = 6
    HELLO = 17
    BEAT = 18
    DRAFT = 19
    REFUSED = 20
    NODES = 21


class Refusal(enum.IntEnum):
    """Why a worker drafts nothing for a request."""

    TOO_LONG = 1  # its prompt is longer than the worker's context
    LOST_RECORD = 2  # something that came before is missing: open it again
    NO_ROOM = 3  # no memory for its KV
    BAD_TOKEN = 4  # a token id that the draft model does not have


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records, oldest first. The arrays are the holder's own.

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
        if len(kinds) == 0:
            return
        edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1 if len(kinds) > 1 else ()
        if len(edges) == 0:
            yield int(kinds[0]), self
            return
        ends = np.concatenate([[0], np.cumsum(self.headers["words"], dtype=np.int64)])
        bounds = [0, *edges, len(kinds)]
        for first, last in zip(bounds[:-1], bounds[1:], strict=True):
            words = self.words[ends[first] : ends[last]]
            yield int(kinds[first]), Records(self.headers[first:last], words)

    def only(self, wanted: np.ndarray) -> Records:
        """Those records where `wanted`, [n] bool, is true."""
        words = self.words[np.repeat(wanted, self.headers["words"])]
        return Records(self.headers[wanted], words)


@dataclass(frozen=True, slots=True, eq=False)
class Stamps:
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
        tokenizer: hash of it, unsigned 64 bits.
        max_context: most tokens of a request.
        max_slots: requests at a time.
    """

    vocab_size: int
    max_context: int
    max_slots: int
    tokenizer: int = 0
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts that a reader can rely on: see `read_drafts`.

    Attributes:
        headers: [n] `HEADER`.
        counts: [n] nodes of each.
        nodes: [sum of counts] `NODE`.
        num_bad: records left out.
    """

    headers: np.ndarray
    counts: np.ndarray
    nodes: np.ndarray
    num_bad: int


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

    @property
    def headers_at(self) -> int:
        """Address of the oldest header, until something is appended."""
        return self._headers_at + self._first * HEADER.itemsize

    @property
    def words_at(self) -> int:
        """Address of the oldest body, until something is appended."""
        return self._words_at + self._first_word * 4

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
        """One record, of round 0. `body`: any array whose bytes are whole words."""
        words = 0 if body is None else body.nbytes // 4
        assert words <= MAX_WORDS, words
        start, used = self._take(1, words)
        self._headers[start] = (kind, 0, slot, generation, base_length, 0, words, depth, value)
        if body is not None:
            self._words[used : used + words] = np.ascontiguousarray(body).reshape(-1).view(np.int32)

    def extend(
        self,
        kind: Kind,
        stamps: Stamps,
        words: np.ndarray,
        *,
        bodies: np.ndarray,
        rounds: np.ndarray | int = 0,
        depths: np.ndarray | int = 0,
        values: np.ndarray | int = 0,
    ) -> None:
        """Several records of one kind.

        Args:
            words: [n] words of each body, at most `MAX_WORDS`.
            bodies: the bodies, one after the other, [sum of words] int32.
            rounds, depths, values: [n], or one for all.
        """
        count = len(stamps.slots)
        first, used = self._take(count, len(bodies))
        self._words[used : used + len(bodies)] = bodies
        if count == 1:  # three times as fast as column by column
            whose = (stamps.slots[0], stamps.generations[0], stamps.base_lengths[0])
            rest = (_only(rounds), words[0], _only(depths), _only(values))
            self._headers[first] = (kind, 0, *whose, *rest)
            return
        rows = slice(first, first + count)
        fields = self._fields
        fields["kind"][rows] = kind
        fields["slot"][rows] = stamps.slots
        fields["generation"][rows] = stamps.generations
        fields["base_length"][rows] = stamps.base_lengths
        fields["round"][rows] = rounds
        fields["words"][rows] = words
        fields["depth"][rows] = depths
        fields["value"][rows] = values

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
        self._fields = {name: self._headers[name] for name in HEADER.names or ()}


def _only(value: np.ndarray | int) -> int:
    """The one value."""
    return value[0] if isinstance(value, np.ndarray) else value


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
    outbox.extend(Kind.COMMIT, stamps, counts, bodies=token_ids)


def put_requests(
    outbox: Outbox,
    stamps: Stamps,
    rounds: np.ndarray,
    *,
    depths: np.ndarray,
    max_nodes: np.ndarray,
    counts: np.ndarray | None = None,
    outcomes: np.ndarray | None = None,
) -> None:
    """Asks for drafts for several requests.

    Args:
        rounds: [n] numbers that come back with the drafts.
        depths, max_nodes: [n] most nodes on a path, and in all.
        counts: [n] outcomes of each to draft for; None: what is committed only.
        outcomes: [sum of counts] `OUTCOME`, contiguous.
    """
    words = np.zeros(len(rounds), np.int64) if counts is None else counts * 2
    bodies = _NO_WORDS if outcomes is None else outcomes.view(np.int32)
    outbox.extend(
        Kind.REQUEST,
        stamps,
        words,
        bodies=bodies,
        rounds=rounds,
        depths=depths,
        values=max_nodes,
    )


def put_drafts(
    outbox: Outbox,
    stamps: Stamps,
    rounds: np.ndarray,
    *,
    counts: np.ndarray,
    nodes: np.ndarray,
    outcomes: np.ndarray | int = AS_COMMITTED,
) -> None:
    """Drafts for several requests.

    Args:
        rounds: [n] of the requests that asked.
        counts: [n] nodes of each.
        nodes: [sum of counts] `NODE`, contiguous.
        outcomes: [n] index of the request's outcome that the draft follows.
    """
    bodies = nodes.view(np.int32)
    outbox.extend(Kind.DRAFT, stamps, counts * 3, bodies=bodies, rounds=rounds, values=outcomes)


def put_close(outbox: Outbox, slot: int, generation: int) -> None:
    """No more drafts for this request."""
    outbox.append(Kind.CLOSE, slot=slot, generation=generation)


def put_stop(outbox: Outbox) -> None:
    """The worker is to end."""
    outbox.append(Kind.STOP)


def put_hello(outbox: Outbox, hello: Hello) -> None:
    """What a worker says first."""
    sizes = (hello.tokenizer, hello.vocab_size, hello.max_context, hello.max_slots)
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
    if header["words"] * 4 != _HELLO.itemsize:
        return None
    told = records.words[-_HELLO.itemsize // 4 :].view(_HELLO)[0]
    return Hello(
        vocab_size=int(told["vocab_size"]),
        max_context=int(told["max_context"]),
        max_slots=int(told["max_slots"]),
        tokenizer=int(told["tokenizer"]),
        protocol=int(header["value"]),
    )


def read_outcomes(records: Records) -> tuple[np.ndarray, np.ndarray]:
    """Of REQUEST records: [n] outcomes of each, and the outcomes, `OUTCOME`."""
    return records.headers["words"] // 2, records.words.view(OUTCOME)


def read_drafts(records: Records) -> Drafts:
    """Drafts that fit a `DraftTree`, of DRAFT records; the others are counted.

    A `Consumer` that knows the vocabulary has checked them: whole nodes, at most `MAX_NODES`,
    tokens in the vocabulary, parents before their children, log-probabilities that are numbers.
    Without such a check none counts as sound. Whether a draft is for the text as it is now is for
    the reader to compare.
    """
    num_records = len(records)
    flags = records.headers["flags"]
    if 0 in flags.tolist():
        records = records.only(flags == SOUND)
    counts = records.headers["words"] // 3
    return Drafts(records.headers, counts, records.words.view(NODE), num_records - len(records))


_NO_WORDS = np.zeros(0, np.int32)
