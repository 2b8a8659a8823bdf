"""Which replica of a model gets a request: the one whose prefix cache probably holds most of it,
unless it has too much to do. Data parallelism and the router share this module.

A request is cut into *pieces* of 256 bytes (64 token ids, or text), each named by a hash of itself
and all pieces before it. The chooser remembers of every replica which pieces it was sent last; no
replica is asked. A replica's score is the length of the remembered prefix less its load, both in
pieces, so one figure weighs computing a prefix again against waiting behind others. The idea of an
approximate index over hashed pieces is that of SGLang's cache-aware router and of llm-d.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

PIECE_BYTES = 256
_MOST_PIECES = 1 << 14
"""Of one request; what lies behind them is 4 MiB away from its beginning."""
_MOST_SESSIONS = 1 << 16


def piece_hashes(data: bytes, root: Hashable = 0, most: int = _MOST_PIECES) -> list[int]:
    """Hashes of the whole pieces of `data`, at most `most`. Equal hashes at one place mean equal
    data up to the end of that piece. They are good within this process only.

    Args:
        root: what else has to be equal, such as an adapter's name.
    """
    found: list[int] = []
    before = hash(root)
    for end in range(PIECE_BYTES, min(len(data), most * PIECE_BYTES) + 1, PIECE_BYTES):
        before = hash((before, data[end - PIECE_BYTES : end]))
        found.append(before)
    return found


@dataclass(frozen=True, slots=True)
class ChoiceWeights:
    """Worth and cost, in pieces to compute.

    Attributes:
        prefix: worth of a piece that a replica's cache holds.
        load: cost of a piece that others wait for on a replica.
        request: load of an unfinished request besides its pieces: its output.
        session: worth of having served the request's session before.
    """

    prefix: float = 1.0
    load: float = 1.0
    request: float = 4.0
    session: float = 64.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request's place.

    Attributes:
        replica: its number.
        num_matched: leading pieces that the replica probably holds.
        pieces_to_compute: the others; load of the replica until the request is answered.
    """

    replica: int
    num_matched: int
    pieces_to_compute: float


class PrefixIndex:
    """The pieces that were last sent to one replica.

    A piece is younger than all that follow it, so the oldest one never has a successor: where a
    piece is known, all pieces before it are, too, and the matched length is found by bisection.

    Args:
        capacity: pieces kept.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1
        self._capacity = capacity
        self._pieces: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, piece: int) -> bool:
        return piece in self._pieces

    def match(self, pieces: Sequence[int]) -> int:
        """How many leading pieces are known."""
        known = self._pieces
        low, high = 0, len(pieces)
        while low < high:
            middle = (low + high) // 2
            if pieces[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, pieces: Sequence[int]) -> None:
        """Notes a request's pieces as the youngest; forgets the oldest beyond the capacity."""
        known = self._pieces
        for piece in reversed(pieces[: self._capacity]):
            known[piece] = None
            known.move_to_end(piece)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        self._pieces.clear()


class ReplicaChooser:
    """Chooses replicas and keeps account of what each has to do. One thread at a time.

    No replica starves: as long as one has nothing to do, none other gets a request whose load
    exceeds what the longest known prefix and a session are worth.

    Args:
        num_replicas: numbered from 0.
        capacity: pieces remembered of each replica.
        seed: of the choice among equals.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        weights: ChoiceWeights | None = None,
        capacity: int = 1 << 17,
        seed: int = 0,
    ) -> None:
        assert num_replicas >= 1
        self.weights = weights or ChoiceWeights()
        self._indexes = [PrefixIndex(capacity) for _ in range(num_replicas)]
        self._pieces = [0.0] * num_replicas  # that wait to be computed
        self._requests = [0] * num_replicas  # unfinished
        self._chosen_at = [0] * num_replicas
        self._num_choices = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()  # the longest unused first
        self._random = random.Random(seed)

    def load(self, replica: int) -> float:
        """What a replica has to do, in pieces."""
        return self._pieces[replica] + self.weights.request * self._requests[replica]

    def num_requests(self, replica: int) -> int:
        """Unfinished requests of a replica."""
        return self._requests[replica]

    def score(self, replica: int, pieces: Sequence[int], session: str = "") -> float:
        """The larger, the better a replica is for a request."""
        worth = self.weights.prefix * self._indexes[replica].match(pieces)
        if session and self._sessions.get(session) == replica:
            worth += self.weights.session
        return worth - self.weights.load * self.load(replica)

    def choose(
        self,
        pieces: Sequence[int],
        session: str = "",
        *,
        usable: Collection[int] | None = None,
        num_pieces: float | None = None,
    ) -> Assignment:
        """The replica with the highest score gets the request: its load grows at once, and it
        counts as holding the pieces. Of several with the highest score two are drawn, and the one
        with less to do is taken, or else the one that was chosen longer ago.

        Args:
            pieces: `piece_hashes` of the request.
            session: name of a conversation whose requests should stay together; empty: none.
            usable: the replicas to choose from, at least one; None: all.
            num_pieces: length of the request; None: that of `pieces`.
        """
        candidates = range(len(self._indexes)) if usable is None else sorted(usable)
        assert len(candidates) > 0, "no replica to choose from"
        scores = [(self.score(each, pieces, session), each) for each in candidates]
        best = max(scores)[0]
        equals = [each for score, each in scores if score == best]
        if len(equals) > 2:
            equals = self._random.sample(equals, 2)
        replica = min(equals, key=lambda each: (self.load(each), self._chosen_at[each], each))
        matched = self._indexes[replica].match(pieces)
        length = len(pieces) if num_pieces is None else num_pieces
        assignment = Assignment(replica, matched, max(length - matched, 0.0))
        self._indexes[replica].add(pieces)
        self._pieces[replica] += assignment.pieces_to_compute
        self._requests[replica] += 1
        self._num_choices += 1
        self._chosen_at[replica] = self._num_choices
        if session:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return assignment

    def answered(self, assignment: Assignment) -> None:
        """Called once with a request's first output: its pieces are computed."""
        self._pieces[assignment.replica] -= assignment.pieces_to_compute

    def finished(self, assignment: Assignment, *, answered: bool) -> None:
        """Called once at a request's end, however it ends. `answered`: so was `answered`."""
        if not answered:
            self.answered(assignment)
        self._requests[assignment.replica] -= 1
        if not self._requests[assignment.replica]:
            self._pieces[assignment.replica] = 0.0  # rounding leaves nothing

    def forget(self, replica: int) -> None:
        """Called when a replica's cache is empty again: after a restart, or a reset."""
        self._indexes[replica].clear()
        for session in [name for name, one in self._sessions.items() if one == replica]:
            del self._sessions[session]

    def check_integrity(self) -> None:
        """Asserts that no account is below zero, and that an idle replica has no load."""
        for pieces, requests in zip(self._pieces, self._requests, strict=True):
            assert requests >= 0 and pieces >= 0.0
            assert requests or pieces == 0.0
