"""Compiled parts of the worker's trees, see forest.py: all slots in one call, nothing allocated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from hetero_llm.spec_decode.array_table import BORROWING
from hetero_llm.spec_decode.draft_model.node_buckets import grafted_kind, kind_of
from hetero_llm.spec_decode.draft_model.tree_arrays import (
    ID,
    KIND,
    PARENT,
    TOKEN,
    below,
    chance_of,
    chances_of,
    child,
    find,
    follow,
    key_of,
    number_of,
    offer,
    sort_down,
)

WINDOW = 64
"""KV places of a slot: as many nodes of a tree have been run at most."""
CAPACITY = 256
"""Nodes of a tree; the unlikeliest that have not been run go when it is full."""
MOST_CANDIDATES = 16

_ROOM = 64  # nodes that go at once
_LEAST = np.float32(0.01)  # chance, given its parent, of a candidate other than the first
_LEAST_RUN = np.float32(0.002)  # chance of a node that is worth running, even if nothing else is
_BESIDE = 1.05  # times the seconds of the urgent rows alone, for others beside them
_NO_TIME = 1e-9  # seconds of a step that takes none

_POSITION, _PLACE = 4, 5  # columns of a node: of its token in the text; of its KV, -1 without
NUM_COLUMNS = 6
LENGTH, COUNT, USED, READY, _NEXT_ID, _TOLD, _TOLD_LENGTH = range(7)
_NOISY, _DEPTH, _GRAFTS = range(7, 10)
NUM_NUMBERS = 10
_ONE = np.float32(1.0)


class Trees(NamedTuple):
    """All trees as compiled functions see them.

    Attributes:
        nodes: [slots, CAPACITY, 6] int32, see trees.py.
        chances: [slots, CAPACITY] float32 that the text goes through a node; `given`: its chance,
            given its parent, is no less.
        bits: [slots, CAPACITY] uint64 window places that a node which was run sees.
        state: [slots, 10] int64. LENGTH of the text (0: closed), nodes, places USED, whether the
            root's children are known (READY), next id, last id and last length that were told,
            NOISY, DEPTH of the tree, whether there may be GRAFTS.
        table: of the `Record`.
    """

    nodes: np.ndarray
    chances: np.ndarray
    given: np.ndarray
    bits: np.ndarray
    state: np.ndarray
    table: np.ndarray


class Scratch(NamedTuple):
    """For compiled functions, which allocate nothing."""

    heap: np.ndarray
    spare: np.ndarray
    picked: np.ndarray
    left: np.ndarray
    places: np.ndarray
    owners: np.ndarray


class Moves(NamedTuple):
    """What commits make of the KV in the windows.

    Attributes:
        sources, targets: [M] window places before and after, counted from the end of the trunk
            before the commit; those of a slot together, ascending, no target above its source.
        counts: [R] of each slot.
        paths: [R] so many first ones of a slot are committed tokens: they belong to the trunk now.
        ready: [R] bool, whether the new root's children are known, so that its tree can grow at
            once. Otherwise the tokens behind the path have to be run, and no other KV is left.
    """

    sources: np.ndarray
    targets: np.ndarray
    counts: np.ndarray
    paths: np.ndarray
    ready: np.ndarray


class Chosen(NamedTuple):
    """Nodes to run next: the first six fields are a `Branches`.

    Attributes:
        slots, counts: [G] rows of each slot.
        tokens: [N]. depths: [N] below the root: 1 for its children.
        places: [N] in the slot's window, the free ones in order.
        ancestors: [N] uint64 bits of the window places that a row sees, its own included.
        ids: [N] of the nodes. owners: [N] their slots.
    """

    slots: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    depths: np.ndarray
    places: np.ndarray
    ancestors: np.ndarray
    ids: np.ndarray
    owners: np.ndarray


class Unsent(NamedTuple):
    """Nodes for the engine's mirror.

    Attributes:
        slots, counts: [G] nodes of each slot, which may be none.
        lengths: [G] of the text, once all children of its last token are in this record or an
            earlier one; 0 before.
        nodes: [N, 4] id, parent, token and kind, as records tell them; children after their
            parents. -L as a parent stands for the last token of a text of L tokens.
    """

    slots: np.ndarray
    counts: np.ndarray
    lengths: np.ndarray
    nodes: np.ndarray


@njit(**BORROWING)
def _pack(trees: Trees, slot: int, root: int, places: np.ndarray) -> None:
    """Moves nodes to their `places`, see `below`; `root` is what counts as the root."""
    nodes, chances, given, bits = (
        trees.nodes[slot], trees.chances[slot], trees.given[slot], trees.bits[slot]
    )  # fmt: skip
    for node in range(trees.state[slot, COUNT]):
        place = places[node]
        if place < 0:
            continue
        parent = nodes[node, PARENT]
        for column in range(NUM_COLUMNS):
            nodes[place, column] = nodes[node, column]
        nodes[place, PARENT] = places[parent] if parent > root else -1
        chances[place], given[place], bits[place] = chances[node], given[node], bits[node]


@njit(**BORROWING)
def _rate_all(trees: Trees, slot: int, left: np.ndarray) -> None:
    chances_of(
        trees.nodes[slot], trees.state[slot, COUNT], trees.table, trees.given[slot],
        trees.chances[slot], left,
    )  # fmt: skip


@njit(**BORROWING)
def _evict(trees: Trees, slot: int, heap: np.ndarray, places: np.ndarray) -> None:
    """Makes room for `_ROOM` nodes: the unlikeliest that have not been run go.

    Of equally likely ones the first stay, so no node loses its parent.
    """
    nodes, chances, state = trees.nodes[slot], trees.chances[slot], trees.state[slot]
    count, size = state[COUNT], 0
    most = CAPACITY - _ROOM - state[USED]
    for node in range(count):
        if nodes[node, _PLACE] < 0:
            size = offer(heap, size, most, key_of(chances[node], node))
    kept = 0
    for node in range(count):
        places[node] = -1
        if nodes[node, _PLACE] >= 0 or key_of(chances[node], node) >= heap[0]:
            places[node] = kept
            kept += 1
    _pack(trees, slot, -1, places)
    state[COUNT] = kept


@njit(**BORROWING)
def _add(trees: Trees, slot: int, parent: int, token: int, kind: int, chance: float) -> None:
    """There is room for it."""
    nodes, state = trees.nodes[slot], trees.state[slot]
    node = state[COUNT]
    nodes[node, ID], nodes[node, PARENT] = state[_NEXT_ID], parent
    nodes[node, TOKEN], nodes[node, KIND] = token, kind
    nodes[node, _POSITION] = nodes[parent, _POSITION] + 1 if parent >= 0 else state[LENGTH]
    nodes[node, _PLACE] = -1
    trees.chances[slot, node], trees.given[slot, node] = chance, np.float32(0.0)
    state[_NEXT_ID] += 1
    state[COUNT] += 1


@njit(**BORROWING)
def commit(
    trees: Trees,
    scratch: Scratch,
    slots: np.ndarray,
    bases: np.ndarray,
    tokens: np.ndarray,
    sizes: np.ndarray,
    moves: Moves,
) -> int:
    """See `Forest.commit`. Returns the number of moves, -1 if a base is wrong."""
    first = total = 0
    for i in range(len(slots)):
        slot, size = slots[i], sizes[i]
        nodes, state = trees.nodes[slot], trees.state[slot]
        if state[LENGTH] == 0 or state[LENGTH] != bases[i]:
            return -1
        node, followed = follow(
            nodes, state[COUNT], tokens, first, first + size, trees.table
        )  # fmt: skip
        first += size
        before = total
        above = node
        for depth in range(followed - 1, -1, -1):
            scratch.places[depth] = nodes[above, _PLACE]
            above = nodes[above, PARENT]
        path = 0
        while path < followed and scratch.places[path] >= 0:
            moves.sources[total], moves.targets[total] = scratch.places[path], path
            total, path = total + 1, path + 1
        state[READY] = 1 if state[READY] == 1 and path == size else 0
        state[LENGTH] += size
        if followed == size:
            total = _reroot(trees, scratch, slot, node, path, moves, total)
        else:
            state[COUNT] = state[USED] = 0
        if state[COUNT] == 0:
            state[_GRAFTS] = 0
        moves.counts[i], moves.paths[i] = total - before, path
        moves.ready[i] = state[READY] == 1
    return total


@njit(**BORROWING)
def _reroot(
    trees: Trees, scratch: Scratch, slot: int, root: int, path: int, moves: Moves, total: int
) -> int:
    """Leaves what is below a node and closes the ranks of its KV. Returns the number of moves."""
    nodes, bits, state = trees.nodes[slot], trees.bits[slot], trees.state[slot]
    owners = scratch.owners
    count = below(nodes, state[COUNT], root, scratch.places)
    _pack(trees, slot, root, scratch.places)
    state[COUNT] = count
    owners[:] = -1
    for node in range(count):
        if nodes[node, _PLACE] >= 0:
            owners[nodes[node, _PLACE]] = node
    used = 0
    for place in range(WINDOW):  # parents were run before their children
        node = owners[place]
        if node < 0:
            continue
        parent = nodes[node, PARENT]
        nodes[node, _PLACE] = used
        bits[node] = np.uint64(1) << np.uint64(used)
        if parent >= 0:
            bits[node] |= bits[parent]
        moves.sources[total], moves.targets[total] = place, path + used
        total, used = total + 1, used + 1
    state[USED] = used
    _rate_all(trees, slot, scratch.left)
    return total


@njit(**BORROWING)
def _gather(
    trees: Trees,
    scratch: Scratch,
    max_positions: int,
    weights: np.ndarray,
    urgent: np.ndarray,
    wanted: bool,
    most: int,
) -> int:
    """The likeliest nodes that can be run, of slots that are urgent or of the others, as keys in
    the heap, the largest first. Returns their number."""
    size = 0
    for slot in range(len(weights)):
        state, weight = trees.state[slot], weights[slot]
        if state[READY] == 0 or not weight > 0 or urgent[slot] != wanted:
            continue
        nodes, chances = trees.nodes[slot], trees.chances[slot]
        room, few = WINDOW - state[USED], 0
        has_room = room >= state[COUNT] - state[USED]
        end = min(state[LENGTH] - 1 + state[_DEPTH], max_positions)
        for node in range(state[COUNT]):
            if nodes[node, _PLACE] >= 0 or nodes[node, _POSITION] >= end:
                continue
            parent = nodes[node, PARENT]
            if chances[node] < _LEAST_RUN or (parent >= 0 and nodes[parent, _PLACE] < 0):
                continue
            key = key_of(chances[node] * weight, slot * CAPACITY + node)
            if has_room:
                size = offer(scratch.heap, size, most, key)
            else:
                few = offer(scratch.spare, few, room, key)
        for i in range(few):
            size = offer(scratch.heap, size, most, scratch.spare[i])
    sort_down(scratch.heap, size)
    return size


@njit(**BORROWING)
def _best(keys: np.ndarray, size: int, seconds: np.ndarray, gained: float) -> int:
    """How many of the likeliest nodes make the gain by the second largest."""
    best, rows = gained / max(seconds[0], _NO_TIME), 0
    for i in range(size):
        gained += chance_of(keys[i])
        rate = gained / max(seconds[i + 1], _NO_TIME)
        if rate > best:
            best, rows = rate, i + 1
    return rows


@njit(**BORROWING)
def choose(
    trees: Trees,
    scratch: Scratch,
    max_positions: int,
    weights: np.ndarray,
    urgent: np.ndarray,
    seconds: np.ndarray,
    most: int,
    gained: float,
    out: Chosen,
) -> tuple[int, int]:
    """See `Forest.choose`. Returns the numbers of slots and rows."""
    heap, picked = scratch.heap, scratch.picked
    rows = 0
    for wanted in (True, False):
        size = _gather(trees, scratch, max_positions, weights, urgent, wanted, most - rows)
        more = 0
        if rows == 0:
            more = _best(heap, size, seconds, gained)
        else:
            while more < size and seconds[rows + more + 1] <= _BESIDE * seconds[rows]:
                more += 1
        for i in range(more):
            # At equal chances the lower number comes first, which is what is wanted here.
            offer(picked, rows + i, most, key_of(0.0, number_of(heap[i])))
        rows += more
    sort_down(picked, rows)
    groups = 0
    for row in range(rows):
        number = number_of(picked[row])
        slot, node = number // CAPACITY, number % CAPACITY
        nodes, state = trees.nodes[slot], trees.state[slot]
        if groups == 0 or out.slots[groups - 1] != slot:
            out.slots[groups], out.counts[groups] = slot, 0
            groups += 1
        place = state[USED] + out.counts[groups - 1]
        out.counts[groups - 1] += 1
        parent = nodes[node, PARENT]
        out.tokens[row], out.ids[row], out.owners[row] = nodes[node, TOKEN], nodes[node, ID], slot
        out.depths[row] = nodes[node, _POSITION] - state[LENGTH] + 1
        out.places[row] = place
        out.ancestors[row] = np.uint64(1) << np.uint64(place)
        if parent >= 0:
            out.ancestors[row] |= trees.bits[slot, parent]
    return groups, rows


@njit(**BORROWING)
def grow(
    trees: Trees,
    scratch: Scratch,
    ready: np.ndarray,
    slots: np.ndarray,
    ids: np.ndarray,
    places: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray,
) -> bool:
    """See `Forest.grow`. False if a row was not to be run."""
    for slot in ready:
        if trees.state[slot, LENGTH] == 0 or trees.state[slot, READY] == 1:
            return False
        trees.state[slot, READY] = 1
    # What has been run is never evicted: so all rows are marked before any gets children.
    for row in range(len(slots)):
        nodes, state = trees.nodes[slots[row]], trees.state[slots[row]]
        node = find(nodes, state[COUNT], ids[row])
        if node < 0 or nodes[node, _PLACE] >= 0 or places[row] != state[USED]:
            return False
        parent, place = nodes[node, PARENT], np.uint64(places[row])
        bits = trees.bits[slots[row]]
        bits[node] = np.uint64(1) << place
        if parent >= 0:
            if nodes[parent, _PLACE] < 0:
                return False
            bits[node] |= bits[parent]
        nodes[node, _PLACE] = places[row]
        state[USED] += 1
    first = len(ready)
    for row in range(first):
        _add_candidates(trees, scratch, ready[row], 0, tokens[row], log_probs[row])
    for row in range(len(slots)):
        _add_candidates(
            trees, scratch, slots[row], ids[row], tokens[first + row], log_probs[first + row]
        )
    return True


@njit(**BORROWING)
def _add_candidates(
    trees: Trees,
    scratch: Scratch,
    slot: int,
    wanted: int,
    tokens: np.ndarray,
    log_probs: np.ndarray,
) -> None:
    """Children of the node with this id, 0 for the root."""
    state, table = trees.state[slot], trees.table
    if state[COUNT] + len(tokens) > CAPACITY:
        _evict(trees, slot, scratch.heap, scratch.places)
    nodes = trees.nodes[slot]
    parent = find(nodes, state[COUNT], wanted) if wanted > 0 else -1
    chance, left = trees.chances[slot, parent] if parent >= 0 else _ONE, _ONE
    has_grafts, known = state[_GRAFTS] == 1, state[COUNT]
    for rank in range(len(tokens)):
        kind = kind_of(np.float64(log_probs[rank]), rank, state[_NOISY] == 1)
        if kind < 0:
            continue
        rate = (table[kind, 0] + _ONE) / (table[kind, 1] + np.float32(2.0))
        rate = min(rate, left)
        node = child(nodes, known, parent, tokens[rank]) if has_grafts else -1
        if node >= 0:
            nodes[node, KIND] = kind
        elif rank == 0 or rate >= _LEAST:
            _add(trees, slot, parent, tokens[rank], kind, chance * rate)
        else:
            continue
        left -= rate
    if has_grafts:
        _rate_all(trees, slot, scratch.left)


@njit(**BORROWING)
def graft(
    trees: Trees,
    scratch: Scratch,
    slot: int,
    length: int,
    vocab_size: int,
    parents: np.ndarray,
    tokens: np.ndarray,
    chances: np.ndarray,
) -> int:
    """See `Forest.graft`."""
    nodes, state = trees.nodes[slot], trees.state[slot]
    if length != state[LENGTH] or length == 0:
        return 0
    ids, taken = scratch.owners, 0  # 0 for the root, -1 for what was left out
    for i in range(len(tokens)):
        above, token = parents[i], tokens[i]
        ids[i] = -1
        if above < -1 or above >= i or token < 0 or token >= vocab_size:
            continue
        whole = chances[above] if above >= 0 else _ONE
        if not whole > 0.0:
            continue
        share = chances[i] / whole
        kind = grafted_kind(min(np.float64(share), 1.0))
        wanted = ids[above] if above >= 0 else np.int64(0)
        if state[COUNT] == CAPACITY:
            _rate_all(trees, slot, scratch.left)
            _evict(trees, slot, scratch.heap, scratch.places)
        parent = find(nodes, state[COUNT], wanted) if wanted > 0 else -1
        if kind < 0 or wanted < 0 or (wanted > 0 and parent < 0):
            continue
        node = child(nodes, state[COUNT], parent, token)
        if node < 0:
            node = state[COUNT]
            _add(trees, slot, parent, token, kind, np.float32(0.0))
        trees.given[slot, node] = max(trees.given[slot, node], min(share, _ONE))
        ids[i] = nodes[node, ID]
        taken += 1
    state[_GRAFTS] = 1
    _rate_all(trees, slot, scratch.left)
    return taken


@njit(**BORROWING)
def unsent(trees: Trees, out: Unsent) -> tuple[int, int]:
    """See `Forest.unsent`. Returns the numbers of slots and nodes."""
    groups = rows = 0
    for slot in range(len(trees.state)):
        state = trees.state[slot]
        nodes, count, length = trees.nodes[slot], state[COUNT], np.int64(0)
        first = count
        while first > 0 and nodes[first - 1, ID] > state[_TOLD]:
            first -= 1
        if state[READY] == 1:
            length = state[LENGTH]
        # A root that has no children at all is news, too.
        if first == count and (count > 0 or state[_TOLD_LENGTH] >= length):
            continue
        out.slots[groups], out.counts[groups], out.lengths[groups] = slot, count - first, length
        groups += 1
        for node in range(first, count):
            parent = nodes[node, PARENT]
            told = out.nodes[rows]
            told[ID], told[TOKEN] = nodes[node, ID], nodes[node, TOKEN]
            told[PARENT] = nodes[parent, ID] if parent >= 0 else -state[LENGTH]
            told[KIND] = nodes[node, KIND]
            rows += 1
        if count > 0:
            state[_TOLD] = nodes[count - 1, ID]
        state[_TOLD_LENGTH] = length
    return groups, rows
