"""The engine's replica of the worker's draft trees, so that a proposal needs no round trip.

The worker sends nodes as it creates them. `commit` walks new tokens down the replica; the nodes
below the last one are the next draft. The worker's trees may be ahead of the engine's and its
sequences behind, and a message may be late, lost, duplicated or garbage; a draft is still always
part of a tree that the worker made for exactly this sequence.

Each tree hangs from an anchor: a position P of the sequence, and the node of the token before P, if
the worker made one. If P is the sequence's length L, the stored nodes are the anchor's descendants.
If P < L, no node is stored, since all known ones left the sequence: nodes from the worker then move
the anchor forward as far as they follow the sequence, and a node whose parent is the last token of
a sequence of P0 > P tokens moves the anchor to P0.

Arrays are int32 unless said otherwise; `slot` is a request slot. One thread at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_llm.bridge.ipc.messages import (
    BASE_LENGTH,
    GENERATION,
    HEADER,
    HEADER_WORDS,
    NODE_WORDS,
    SLOT,
    WORDS,
    MessageKind,
    Messages,
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
from hetero_llm.spec_decode.draft_model.node_buckets import NUM_BUCKETS, BucketStats
from hetero_llm.spec_decode.draft_model.tree_arrays import (
    BUCKET,
    ID,
    INT32,
    PARENT,
    TOKEN,
    compute_path_probs,
    find_node,
    fit,
    follow,
    key_of,
    move_node,
    number_of,
    push_largest,
    renumber_subtree,
    sort_descending,
)
from hetero_llm.spec_decode.proposals import Proposals
from hetero_llm.utils.jit import njit

CAPACITY = 1024
"""Maximum nodes of a tree: children of all nodes that the worker can have run, and evicted ones."""
TAIL = 64
"""Maximum tokens kept after an anchor; if there are more, the anchor moves and loses its node."""

STALE, MALFORMED, FULL = range(3)
"""Reasons to drop nodes, see `TreeReplica.dropped`."""

_MIN_PATH_PROB = np.float32(0.01)  # of proposed nodes; the budget cuts more
_NUM_COLUMNS = 4
# State of a slot: generation (-1: closed); length of the sequence; id of the anchor's node (0:
# unknown); number of tokens after the anchor; number of nodes; last node id received; largest
# length for which the worker has sent the children of the last token. After these, the tokens that
# follow the anchor.
_GENERATION, _LENGTH, _ANCHOR, _TAIL, _COUNT, _LAST, _SEEN = range(7)
_NUM_NUMBERS = 7
_CLOSED = -1
_ONE = np.float32(1.0)


class ReplicaArrays(NamedTuple):
    """The replica's arrays, for compiled functions.

    Attributes:
        nodes: [slots, CAPACITY, 4] int32, see `tree_arrays`.
        state: [slots, columns] int64, see above.
        table: [buckets, 2] float32 statistics, which estimate path probabilities; `commit_all`
            updates them.
        heap, floats, places: working memory, since compiled functions allocate nothing.
    """

    nodes: Int32Cube
    state: Int64Matrix
    table: Float32Matrix
    heap: UInt64Vector
    floats: Float32Matrix
    places: Int64Matrix


class _Arrays:
    """What `add` finds by name in compiled code."""

    nodes: Int32Cube
    state: Int64Matrix
    dropped: Int64Vector


_read = reader_of(_Arrays)


class TreeReplica:
    """See the module.

    Args:
        slots: number of request slots, as in the worker.
        vocab_size: nodes with a token id of this or above are dropped.
        stats: acceptance statistics, for path probabilities; `commit` updates them.

    Attributes:
        arrays: the state; the same objects for the replica's life.
    """

    def __init__(self, slots: int, *, vocab_size: int, stats: BucketStats) -> None:
        assert slots > 0
        self._vocab_size = vocab_size
        self.arrays = ReplicaArrays(
            nodes=np.zeros((slots, CAPACITY, _NUM_COLUMNS), np.int32),
            state=np.zeros((slots, _NUM_NUMBERS + TAIL), np.int64),
            table=stats.table,
            heap=np.zeros(CAPACITY, np.uint64),
            floats=np.zeros((3, CAPACITY + 1), np.float32),
            places=np.zeros((2, CAPACITY), np.int64),
        )
        self._state = self.arrays.state
        self._state[:, _GENERATION] = _CLOSED
        self._dropped = np.zeros(3, np.int64)
        self._table = ArrayTable(_Arrays)
        self._table.put("nodes", self.arrays.nodes)
        self._table.put("state", self._state)
        self._table.put("dropped", self._dropped)

    def open(self, slot: int, generation: int, length: int) -> None:
        """Open a slot for a sequence of `length` > 0 tokens; `generation` >= 0 as sent to the
        worker."""
        assert length > 0 and generation >= 0
        self._state[slot, :_NUM_NUMBERS] = (generation, length, 0, 0, 0, 0, 0)

    def close(self, slot: int) -> None:
        """Free the slot; nodes that still come for it are dropped."""
        self._state[slot, :_NUM_NUMBERS] = (_CLOSED, 0, 0, 0, 0, 0, 0)

    def num_nodes(self, slot: int) -> int:
        """Number of nodes below the sequence."""
        return int(self._state[slot, _COUNT])

    @property
    def dropped(self) -> dict[str, int]:
        """Numbers of dropped nodes by reason. Stale: for an earlier sequence of the slot,
        duplicate, or off the sequence; malformed: no worker sends such; full: beyond the
        capacity."""
        counts = self._dropped
        return {
            "stale": int(counts[STALE]),
            "malformed": int(counts[MALFORMED]),
            "full": int(counts[FULL]),
        }

    def add(self, messages: Messages) -> bool:
        """Add the nodes of NODES messages, whose content may be garbage.

        Call `commit` for tokens before sending them to the worker: a message with a greater base
        length than the engine's is malformed.

        Returns:
            False, without changes, if a body is not a multiple of `NODE_WORDS`.
        """
        fine: bool = _add_messages(
            self._table.table, self._vocab_size, messages.header_words, messages.words
        )
        return fine

    def commit(
        self, slots: np.ndarray, bases: np.ndarray, tokens: np.ndarray, sizes: np.ndarray
    ) -> None:
        """Append tokens to sequences.

        Args:
            slots: [R] open slots.
            bases: [R] lengths of the sequences before.
            tokens: new tokens, concatenated.
            sizes: [R] new tokens of each.
        """
        fine = commit_all(
            self.arrays, fit(slots, INT32), fit(bases, INT32), fit(tokens, INT32),
            fit(sizes, INT32),
        )  # fmt: skip
        assert fine, "a sequence does not go on where it ended"

    def proposals(
        self,
        slots: np.ndarray,
        limits: np.ndarray,
        found: Proposals,
        depths: np.ndarray | None = None,
    ) -> None:
        """Fill the rows of `found` with the most likely nodes below the sequences. Negative and
        closed slots get none. `found.buckets` are the buckets of `BucketStats`.

        Args:
            slots: [R].
            limits: [R] maximum number of nodes.
            depths: [R] maximum depth; None: no limit.
            found: at least R rows; the first R are overwritten.
        """
        if depths is None:
            depths = np.full(len(slots), CAPACITY, np.int32)
        propose_all(self.arrays, fit(slots, INT32), fit(limits, INT32), fit(depths, INT32), found)

    def caught_up(self, slots: np.ndarray) -> np.ndarray:
        """[R] bool: there is no first level to wait for: the worker has sent the children of the
        last token, or that it has none; or the slot is negative or closed."""
        caught_up = np.empty(len(slots), np.bool_)
        caught_up_all(self._state, fit(slots, INT32), caught_up)
        return caught_up

    @staticmethod
    def compile() -> None:
        """Call every compiled function once, so that no step waits for the compiler: seconds, the
        first time on a machine."""
        replica = TreeReplica(1, vocab_size=2, stats=BucketStats())
        replica.open(0, 0, 1)
        one = np.ones(1, np.int32)
        header = np.array([(MessageKind.NODES, 0, 0, 1, NODE_WORDS, 0, 0)], HEADER)
        replica.add(Messages(header, np.array([1, -1, 1, 1], np.int32)))
        replica.commit(0 * one, one, one, one)
        replica.proposals(0 * one, one, Proposals.empty(1))
        replica.caught_up(0 * one)


# -- compiled -------------------------------------------------------------------------------


@njit(**BORROWING)
def _advance_anchor(state: np.ndarray, tokens: int) -> None:
    """Move the anchor forward by `tokens` tokens."""
    state[_TAIL] -= tokens
    for place in range(_NUM_NUMBERS, _NUM_NUMBERS + state[_TAIL]):
        state[place] = state[place + tokens]


@njit(cache=True)  # keeps the GIL: reacquiring it may take longer than the call
def _add_messages(
    table: np.ndarray, vocab_size: int, headers: np.ndarray, words: np.ndarray
) -> bool:
    """See `TreeReplica.add`."""
    nodes, state, dropped = _read(table, "nodes"), _read(table, "state"), _read(table, "dropped")
    return _append_node(nodes, state, dropped, vocab_size, headers, words)


@njit(**BORROWING)
def _append_node(
    nodes: np.ndarray,
    state: np.ndarray,
    dropped: np.ndarray,
    vocab_size: int,
    headers: np.ndarray,
    words: np.ndarray,
) -> bool:
    """Add the nodes of messages; their unsigned words are read as int32."""
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
            node_id, token, bucket = words[at + ID], words[at + TOKEN], words[at + BUCKET]
            if node_id <= row[_LAST]:
                dropped[STALE if node_id > 0 else MALFORMED] += 1
                continue
            row[_LAST] = node_id
            if token < 0 or token >= vocab_size or bucket < 0 or bucket >= NUM_BUCKETS:
                dropped[MALFORMED] += 1
                continue
            _attach(nodes[slot], row, dropped, node_id, words[at + PARENT], token, bucket)
        row[_SEEN] = max(row[_SEEN], np.int64(length))
    return True


@njit(**BORROWING)
def _attach(
    nodes: np.ndarray,
    state: np.ndarray,
    dropped: np.ndarray,
    node_id: int,
    above: int,
    token: int,
    bucket: int,
) -> None:
    """Append a node to its tree, or move the anchor along it, or drop it."""
    position, parent = state[_LENGTH] - state[_TAIL], -1
    if above > 0 and above != state[_ANCHOR]:
        parent = find_node(nodes, state[_COUNT], above)
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
        _advance_anchor(state, -above - position)
        state[_ANCHOR] = 0
    if state[_TAIL] > 0:
        if token == state[_NUM_NUMBERS]:
            _advance_anchor(state, 1)
            state[_ANCHOR] = node_id
        else:
            dropped[STALE] += 1
        return
    node = state[_COUNT]
    if node == CAPACITY:
        dropped[FULL] += 1
        return
    nodes[node, ID], nodes[node, PARENT] = node_id, parent
    nodes[node, TOKEN], nodes[node, BUCKET] = token, bucket
    state[_COUNT] += 1


@njit(**BORROWING)
def commit_all(
    replica: ReplicaArrays,
    slots: np.ndarray,
    bases: np.ndarray,
    tokens: np.ndarray,
    sizes: np.ndarray,
) -> bool:
    """See `TreeReplica.commit`; all arrays are int32. Returns False if a base is wrong."""
    table, places = replica.table, replica.places
    first = 0
    for i in range(len(slots)):
        slot, size = slots[i], sizes[i]
        nodes, state = replica.nodes[slot], replica.state[slot]
        if state[_GENERATION] < 0 or state[_LENGTH] != bases[i]:
            return False
        node, followed = follow(nodes, state[_COUNT], tokens, first, first + size, table)
        if node >= 0:
            state[_ANCHOR] = nodes[node, ID]
        kept = 0
        if followed == size:
            kept = renumber_subtree(nodes, state[_COUNT], node, places[0])
            for old in range(state[_COUNT]):
                if places[0, old] >= 0:
                    move_node(nodes, old, node, places[0], _NUM_COLUMNS)
        state[_COUNT] = kept
        state[_LENGTH] += size
        rest = size - followed
        over = state[_TAIL] + rest - TAIL
        if over > 0:
            state[_ANCHOR] = 0
            _advance_anchor(state, min(over, state[_TAIL]))
            rest = min(rest, TAIL)
        for token in tokens[first + size - rest : first + size]:
            state[_NUM_NUMBERS + state[_TAIL]] = token
            state[_TAIL] += 1
        first += size
    return True


@njit(**BORROWING)
def propose_all(
    replica: ReplicaArrays,
    slots: np.ndarray,
    limits: np.ndarray,
    depths: np.ndarray,
    found: Proposals,
) -> None:
    """See `TreeReplica.proposals`; the other arrays are int32."""
    heap, table = replica.heap, replica.table
    path_probs, left, min_probs = replica.floats
    order, levels = replica.places
    for i in range(len(slots)):
        slot = slots[i]
        found.counts[i] = 0
        if slot < 0:
            continue
        nodes, count = replica.nodes[slot], replica.state[slot, _COUNT]
        compute_path_probs(nodes, count, table, min_probs, path_probs, left)
        most, size = min(np.int64(limits[i]), found.tokens.shape[1]), 0
        for node in range(count):
            parent = nodes[node, PARENT]
            depth = levels[parent] + 1 if parent >= 0 else 1
            levels[node] = depth
            if depth <= depths[i] and path_probs[node] >= _MIN_PATH_PROB:
                size = push_largest(heap, size, most, key_of(path_probs[node], node))
        sort_descending(heap, size)
        for place in range(size):
            node = number_of(heap[place])
            parent = nodes[node, PARENT]
            order[node] = place
            found.tokens[i, place] = nodes[node, TOKEN]
            found.parents[i, place] = order[parent] if parent >= 0 else -1
            found.path_probs[i, place] = path_probs[node]
            found.buckets[i, place] = nodes[node, BUCKET]
        found.counts[i] = size


@njit(**BORROWING)
def has_answered(state: np.ndarray, slot: int) -> bool:
    """Whether the worker has sent nodes of the slot's sequence: it knows the prompt, then."""
    return state[slot, _LAST] > 0


@njit(**BORROWING)
def caught_up_all(state: np.ndarray, slots: np.ndarray, out: np.ndarray) -> None:
    """See `TreeReplica.caught_up`; slots is int32, out bool."""
    for i in range(len(slots)):
        out[i] = True
        if slots[i] >= 0:
            row = state[slots[i]]
            known = row[_COUNT] > 0 or row[_SEEN] == row[_LENGTH]
            out[i] = row[_GENERATION] < 0 or known
