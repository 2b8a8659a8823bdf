"""The engine's copy of the worker's trees: drafts without asking.

The worker tells nodes as it makes them. When tokens have come, `commit` walks them down the tree:
what stands below is the draft. The worker may be ahead of the engine in its trees and behind it in
the text, and any record may be late, lost, told twice or nonsense; a draft is still a part of a
tree that the worker made for exactly this text.

Each tree hangs from an anchor: a place P in the text, and the node that stands for the token before
it, if the worker made one. At P = L, the text's length, what is stored are the anchor's
descendants. At P < L nothing is stored, for all that is known is wrong: nodes that come from the
worker move the anchor as far as they follow the text, and a node that says it is a child of
position L0 > P takes the anchor there.

Arrays are int32 unless said otherwise; what `caught_up` returns is overwritten by its next call.
One thread at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hetero_llm.bridge.ipc.messages import (
    BASE_LENGTH,
    GENERATION,
    HEADER,
    HEADER_WORDS,
    NODE_WORDS,
    SLOT,
    WORDS,
    Kind,
    Records,
)
from hetero_llm.spec_decode.array_table import (
    BORROWING,
    ArrayTable,
    Float32Matrix,
    Int32Cube,
    Int64Matrix,
    Int64Vector,
    UInt64Vector,
    reader_of,
)
from hetero_llm.spec_decode.draft_model.node_buckets import NUM_KINDS, Record
from hetero_llm.spec_decode.draft_model.tree_arrays import (
    ID,
    INT32,
    KIND,
    PARENT,
    TOKEN,
    below,
    chances_of,
    find,
    fit,
    follow,
    key_of,
    number_of,
    offer,
    sort_down,
)
from hetero_llm.spec_decode.proposals import Proposals

CAPACITY = 1024
"""Nodes of a tree: children of all that the worker can have run, and what it has evicted."""
TAIL = 64
"""Tokens of a text behind its anchor that are known; beyond, the anchor lets go of its node."""

STALE, MALFORMED, FULL = range(3)
"""Why nodes were dropped: for `Mirror.dropped`."""

_LEAST_SURVIVAL = np.float32(0.01)  # of a node of a draft: what does not pay is cut off later
_NUM_COLUMNS = 4
# State of a slot: its generation, -1 if it is closed; length of the text; id of the anchor's node,
# 0 if nobody knows; size of the tail; nodes; last id that came; largest length for which the worker
# has told the children of the last token. Then the tail: tokens of the text from the anchor on.
_GENERATION, _LENGTH, _ANCHOR, _TAIL, _COUNT, _LAST, _SEEN = range(7)
_NUM_NUMBERS = 7
_CLOSED = -1
_ONE = np.float32(1.0)


class MirrorArrays(NamedTuple):
    """A mirror as compiled functions see it.

    Attributes:
        nodes: [slots, CAPACITY, 4] int32, see trees.py. state: [slots, columns] int64, see above.
        learned: [kinds, 2] float32, the record for `commit_all`; maybe empty. table: the record.
        heap, floats, places: memory to work in, since they allocate nothing.
    """

    nodes: Int32Cube
    state: Int64Matrix
    learned: Float32Matrix
    table: Float32Matrix
    heap: UInt64Vector
    floats: Float32Matrix
    places: Int64Matrix


class _Arrays:
    """What `add` finds by name."""

    nodes: Int32Cube
    state: Int64Matrix
    dropped: Int64Vector


_read = reader_of(_Arrays)


class Mirror:
    """See the module.

    Args:
        slots: places for sequences, as in the worker.
        vocab_size: tokens of this or above are dropped.
        record: what came of earlier nodes: the estimates of drafts.
        learns: `commit` enters into the record what came of the nodes. Else somebody else does.

    Attributes:
        arrays: its state, the same as long as it lives.
    """

    def __init__(self, slots: int, *, vocab_size: int, record: Record, learns: bool = True) -> None:
        assert slots > 0
        self._vocab_size = vocab_size
        self.arrays = MirrorArrays(
            nodes=np.zeros((slots, CAPACITY, _NUM_COLUMNS), np.int32),
            state=np.zeros((slots, _NUM_NUMBERS + TAIL), np.int64),
            learned=record.table if learns else record.table[:0],
            table=record.table,
            heap=np.zeros(CAPACITY, np.uint64),
            floats=np.zeros((3, CAPACITY + 1), np.float32),
            places=np.zeros((2, CAPACITY), np.int64),
        )
        self._state = self.arrays.state
        self._state[:, _GENERATION] = _CLOSED
        self._dropped = np.zeros(3, np.int64)
        self._bound = ArrayTable(_Arrays)
        self._bound.put("nodes", self.arrays.nodes)
        self._bound.put("state", self._state)
        self._bound.put("dropped", self._dropped)
        self._all_depths = np.full(slots, CAPACITY, np.int32)
        self._caught_up = np.zeros(slots, np.bool_)

    def open(self, slot: int, generation: int, length: int) -> None:
        """A new text of `length` > 0 tokens. generation >= 0: what the worker is told, too."""
        assert length > 0 and generation >= 0
        self._state[slot, :_NUM_NUMBERS] = (generation, length, 0, 0, 0, 0, 0)

    def close(self, slot: int) -> None:
        """The slot is free for another text; what comes for it is dropped."""
        self._state[slot, :_NUM_NUMBERS] = (_CLOSED, 0, 0, 0, 0, 0, 0)

    def num_nodes(self, slot: int) -> int:
        """Nodes below a text."""
        return int(self._state[slot, _COUNT])

    @property
    def dropped(self) -> dict[str, int]:
        """Nodes that were dropped. Stale: of an earlier text of the slot, told twice, or beside the
        text; malformed: such as no worker sends; full: beyond the capacity."""
        counts = self._dropped
        return {
            "stale": int(counts[STALE]),
            "malformed": int(counts[MALFORMED]),
            "full": int(counts[FULL]),
        }

    def add(self, records: Records) -> bool:
        """Takes in NODES records of the worker, whatever is in them.

        `commit` must have told every text that the worker was told before: a record that knows more
        than the engine is malformed.

        Returns:
            False, and nothing is changed, if one of them has no whole nodes.
        """
        fine: bool = _add_bound(
            self._bound.table, self._vocab_size, records.header_words, records.words
        )
        return fine

    def commit(
        self, slots: np.ndarray, bases: np.ndarray, tokens: np.ndarray, sizes: np.ndarray
    ) -> None:
        """New tokens of texts.

        Args:
            slots: [R] that are open. bases: [R] lengths of the texts so far.
            tokens: what comes behind them, one text after the other. sizes: [R] of each.
        """
        fine = commit_all(
            self.arrays, fit(slots, INT32), fit(bases, INT32), fit(tokens, INT32),
            fit(sizes, INT32),
        )  # fmt: skip
        assert fine, "a text does not go on where it ended"

    def proposals(
        self,
        slots: np.ndarray,
        limits: np.ndarray,
        found: Proposals,
        depths: np.ndarray | None = None,
    ) -> None:
        """Fills the rows of `found` with the likeliest nodes below the texts.

        A negative slot has none, nor has a closed one. Kinds are those of `Record`; where `commit`
        learns already, nobody else is to judge the draft by them.

        Args:
            slots: [R]. limits: [R] most nodes. depths: [R] most tokens of a path; None: all.
            found: R rows; the first len(slots) are overwritten.
        """
        if depths is None:
            if len(slots) > len(self._all_depths):
                self._all_depths = np.full(2 * len(slots), CAPACITY, np.int32)
            depths = self._all_depths
        propose_all(self.arrays, fit(slots, INT32), fit(limits, INT32), fit(depths, INT32), found)

    def caught_up(self, slots: np.ndarray) -> np.ndarray:
        """[R] bool: for this text nothing is worth waiting for. The worker has told children of the
        last token, or that there are none; or the slot is negative or closed."""
        if len(slots) > len(self._caught_up):
            self._caught_up = np.zeros(2 * len(slots), np.bool_)
        ask_all(self._state, fit(slots, INT32), self._caught_up)
        return self._caught_up[: len(slots)]

    @staticmethod
    def compile() -> None:
        """Goes once through everything that is compiled at its first use: seconds, the first time
        on a machine."""
        mirror = Mirror(1, vocab_size=2, record=Record())
        mirror.open(0, 0, 1)
        one = np.ones(1, np.int32)
        header = np.array([(Kind.NODES, 0, 0, 1, NODE_WORDS, 0, 0)], HEADER)
        mirror.add(Records(header, np.array([1, -1, 1, 1], np.int32)))
        mirror.commit(0 * one, one, one, one)
        mirror.proposals(0 * one, one, Proposals.empty(1))
        mirror.caught_up(0 * one)


# -- compiled -------------------------------------------------------------------------------


@njit(**BORROWING)
def _cut_tail(state: np.ndarray, tokens: int) -> None:
    """The anchor is so many tokens further on."""
    state[_TAIL] -= tokens
    for place in range(_NUM_NUMBERS, _NUM_NUMBERS + state[_TAIL]):
        state[place] = state[place + tokens]


@njit(cache=True)  # with the GIL: it takes less than getting that back may
def _add_bound(table: np.ndarray, vocab_size: int, headers: np.ndarray, words: np.ndarray) -> bool:
    """See `Mirror.add`."""
    nodes, state, dropped = _read(table, "nodes"), _read(table, "state"), _read(table, "dropped")
    return _add(nodes, state, dropped, vocab_size, headers, words)


@njit(**BORROWING)
def _add(
    nodes: np.ndarray,
    state: np.ndarray,
    dropped: np.ndarray,
    vocab_size: int,
    headers: np.ndarray,
    words: np.ndarray,
) -> bool:
    """The records are int32: what is beyond comes as negative numbers."""
    total = 0
    for first in range(0, len(headers), HEADER_WORDS):
        size = headers[first + WORDS]
        if size < 0 or size % NODE_WORDS != 0:
            return False
        total += size
    if total != len(words):
        return False
    end = 0
    for first in range(0, len(headers), HEADER_WORDS):
        slot, length = headers[first + SLOT], headers[first + BASE_LENGTH]
        begin, end = end, end + headers[first + WORDS]
        count = (end - begin) // NODE_WORDS
        if slot < 0 or slot >= len(state):
            dropped[MALFORMED] += count
            continue
        row = state[slot]
        if row[_GENERATION] < 0 or row[_GENERATION] != headers[first + GENERATION]:
            dropped[STALE] += count
            continue
        if length < 0 or length > row[_LENGTH]:
            dropped[MALFORMED] += count
            continue
        for at in range(begin, end, NODE_WORDS):
            identity, token, kind = words[at + ID], words[at + TOKEN], words[at + KIND]
            if identity <= row[_LAST]:
                dropped[STALE if identity > 0 else MALFORMED] += 1
                continue
            row[_LAST] = identity
            if token < 0 or token >= vocab_size or kind < 0 or kind >= NUM_KINDS:
                dropped[MALFORMED] += 1
                continue
            _hang(nodes[slot], row, dropped, identity, words[at + PARENT], token, kind)
        row[_SEEN] = max(row[_SEEN], np.int64(length))
    return True


@njit(**BORROWING)
def _hang(
    nodes: np.ndarray,
    state: np.ndarray,
    dropped: np.ndarray,
    identity: int,
    above: int,
    token: int,
    kind: int,
) -> None:
    """Puts a node where it belongs, or drops it."""
    position, parent = state[_LENGTH] - state[_TAIL], -1
    if above > 0 and above != state[_ANCHOR]:
        parent = find(nodes, state[_COUNT], above)
        if parent < 0:
            dropped[STALE] += 1
            return
    elif above <= 0 and -above != position:
        if above == 0 or -above > state[_LENGTH]:
            dropped[MALFORMED] += 1
            return
        if -above < position:
            dropped[STALE] += 1
            return
        _cut_tail(state, -above - position)
        state[_ANCHOR] = 0
    if state[_TAIL] > 0:
        if token == state[_NUM_NUMBERS]:
            _cut_tail(state, 1)
            state[_ANCHOR] = identity
        else:
            dropped[STALE] += 1
        return
    node = state[_COUNT]
    if node == CAPACITY:
        dropped[FULL] += 1
        return
    nodes[node, ID], nodes[node, PARENT] = identity, parent
    nodes[node, TOKEN], nodes[node, KIND] = token, kind
    state[_COUNT] += 1


@njit(**BORROWING)
def commit_all(
    mirror: MirrorArrays,
    slots: np.ndarray,
    bases: np.ndarray,
    tokens: np.ndarray,
    sizes: np.ndarray,
) -> bool:
    """See `Mirror.commit`; all arrays are int32. False if a base is wrong."""
    table, places = mirror.learned, mirror.places
    first = 0
    for i in range(len(slots)):
        slot, size = slots[i], sizes[i]
        nodes, state = mirror.nodes[slot], mirror.state[slot]
        if state[_GENERATION] < 0 or state[_LENGTH] != bases[i]:
            return False
        node, followed = follow(nodes, state[_COUNT], tokens, first, first + size, table)
        if node >= 0:
            state[_ANCHOR] = nodes[node, ID]
        kept = 0
        if followed == size:
            kept = below(nodes, state[_COUNT], node, places[0])
            for old in range(state[_COUNT]):
                new, parent = places[0, old], nodes[old, PARENT]
                if new >= 0:
                    for column in range(_NUM_COLUMNS):
                        nodes[new, column] = nodes[old, column]
                    nodes[new, PARENT] = places[0, parent] if parent > node else -1
        state[_COUNT] = kept
        state[_LENGTH] += size
        rest = size - followed
        over = state[_TAIL] + rest - TAIL
        if over > 0:
            state[_ANCHOR] = 0
            _cut_tail(state, min(over, state[_TAIL]))
            rest = min(rest, TAIL)
        for token in tokens[first + size - rest : first + size]:
            state[_NUM_NUMBERS + state[_TAIL]] = token
            state[_TAIL] += 1
        first += size
    return True


@njit(**BORROWING)
def propose_all(
    mirror: MirrorArrays,
    slots: np.ndarray,
    limits: np.ndarray,
    depths: np.ndarray,
    found: Proposals,
) -> None:
    """See `Mirror.proposals`; the other arrays are int32."""
    heap, table = mirror.heap, mirror.table
    chances, left, given = mirror.floats
    order, levels = mirror.places
    for i in range(len(slots)):
        slot = slots[i]
        found.counts[i] = 0
        if slot < 0:
            continue
        nodes, count = mirror.nodes[slot], mirror.state[slot, _COUNT]
        chances_of(nodes, count, table, given, chances, left)
        most, size = min(np.int64(limits[i]), found.tokens.shape[1]), 0
        for node in range(count):
            parent = nodes[node, PARENT]
            depth = levels[parent] + 1 if parent >= 0 else 1
            levels[node] = depth
            if depth <= depths[i] and chances[node] >= _LEAST_SURVIVAL:
                size = offer(heap, size, most, key_of(chances[node], node))
        sort_down(heap, size)
        for place in range(size):
            node = number_of(heap[place])
            parent = nodes[node, PARENT]
            order[node] = place
            found.tokens[i, place] = nodes[node, TOKEN]
            found.parents[i, place] = order[parent] if parent >= 0 else -1
            found.path_probs[i, place] = chances[node]
            found.buckets[i, place] = nodes[node, KIND]
        found.counts[i] = size


@njit(**BORROWING)
def ask_all(state: np.ndarray, slots: np.ndarray, out: np.ndarray) -> None:
    """See `Mirror.caught_up`; slots is int32, out bool."""
    for i in range(len(slots)):
        out[i] = True
        if slots[i] >= 0:
            row = state[slots[i]]
            known = row[_COUNT] > 0 or row[_SEEN] == row[_LENGTH]
            out[i] = row[_GENERATION] < 0 or known
