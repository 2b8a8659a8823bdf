"""Compiled functions of `tree_pool.TreePool`. Each handles all slots in one call and allocates
nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_llm.spec_decode.array_table import BORROWING
from hetero_llm.spec_decode.draft_model.node_buckets import bucket_of, external_bucket
from hetero_llm.spec_decode.draft_model.tree_arrays import (
    BUCKET,
    ID,
    PARENT,
    TOKEN,
    acceptance_rate,
    compute_path_probs,
    find_child,
    find_node,
    follow,
    key_of,
    move_node,
    number_of,
    prob_of_key,
    push_largest,
    renumber_subtree,
    sort_descending,
)
from hetero_llm.utils.jit import njit

WINDOW = 64
"""KV places of a slot's tree: the maximum number of nodes with computed KV."""
CAPACITY = 256
"""Maximum nodes of a tree. When it is full, the least likely nodes without KV are evicted."""

_ROOM = 64  # nodes evicted at once
_MIN_SIBLING_PROB = np.float32(0.01)  # given its parent, of candidates after the first
_MIN_RUN_PROB = np.float32(0.002)  # path probability below which a node is never run
_BESIDE = 1.05  # step time with further nodes, relative to that with the urgent ones alone
_NO_TIME = 1e-9  # seconds, instead of 0

_POSITION, _PLACE = 4, 5  # further columns: position in the sequence; KV place, -1: none
NUM_COLUMNS = 6
LENGTH, COUNT, USED, READY, _NEXT_ID, _SENT_ID, _SENT_LENGTH = range(7)
_NOISY, _DEPTH, _HAS_EXTERNAL = range(7, 10)
NUM_NUMBERS = 10
_ONE = np.float32(1.0)


class TreeArrays(NamedTuple):
    """The arrays of all trees.

    Attributes:
        nodes: [slots, CAPACITY, 6] int32 with the columns ID .. BUCKET, _POSITION, _PLACE.
        path_probs: [slots, CAPACITY] float32 probability that the sequence goes through a node.
        min_probs: [slots, CAPACITY] float32 lower bound of a node's probability given its parent.
        bits: [slots, CAPACITY] uint64 ancestor bits: the KV places that a node with KV attends to.
        state: [slots, 10] int64: LENGTH of the sequence (0: closed), number of nodes (COUNT),
            number of KV places USED, whether the root's children are known (READY), next node id,
            last node id and length sent to the engine, whether scores contain noise, maximum depth,
            whether external nodes may be present.
        table: [buckets, 2] float32 of the `BucketStats`.
    """

    nodes: np.ndarray
    path_probs: np.ndarray
    min_probs: np.ndarray
    bits: np.ndarray
    state: np.ndarray
    table: np.ndarray


class Scratch(NamedTuple):
    """Working memory of the compiled functions."""

    heap: np.ndarray
    spare: np.ndarray
    picked: np.ndarray
    left: np.ndarray
    places: np.ndarray
    owners: np.ndarray


class Moves(NamedTuple):
    """KV copies inside the tree windows that commits require.

    Attributes:
        sources, targets: [M] KV places before and after, counted from the end of the committed
            prefix before the commit; grouped by slot, ascending, no target above its source.
        counts: [R] copies of each slot.
        paths: [R] the first copies of a slot that are committed tokens: from now on they belong to
            the committed prefix.
        ready: [R] bool, whether the new root's children are known, so that its tree can grow at
            once. Otherwise the tokens after the path must be run first and all other KV is dropped.
    """

    sources: np.ndarray
    targets: np.ndarray
    counts: np.ndarray
    paths: np.ndarray
    ready: np.ndarray


class TreeNodes(NamedTuple):
    """Tree nodes to run, grouped by slot. Arrays are int32 except `ancestors`, which is uint64.

    Attributes:
        slots, counts: [G] distinct slots and their numbers of nodes.
        tokens: [N] token ids.
        depths: [N] depth below the root: 1 for its children.
        places: [N] KV places, the next free ones of the slot's window in order.
        ancestors: [N] bits of the KV places that a node attends to, its own included.
    """

    slots: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    depths: np.ndarray
    places: np.ndarray
    ancestors: np.ndarray


class Chosen(NamedTuple):
    """Nodes to run next, and in which tree they are: their ids and slots, [N] int32 each."""

    nodes: TreeNodes
    ids: np.ndarray
    owners: np.ndarray


class Unsent(NamedTuple):
    """New nodes for the engine's replica.

    Attributes:
        slots, counts: [G] slots and their numbers of nodes, which may be 0.
        lengths: [G] length of the sequence if all children of its last token are in this message or
            an earlier one; else 0.
        nodes: [N, 4] id, parent, token and bucket, parents before their children. Parent -L is the
            last token of a sequence of L tokens.
    """

    slots: np.ndarray
    counts: np.ndarray
    lengths: np.ndarray
    nodes: np.ndarray


@njit(**BORROWING)
def _compact(trees: TreeArrays, slot: int, root: int, places: np.ndarray) -> None:
    """Move nodes and their other arrays to the rows `places`, see `move_node`."""
    nodes, bits = trees.nodes[slot], trees.bits[slot]
    path_probs, min_probs = trees.path_probs[slot], trees.min_probs[slot]
    for node in range(trees.state[slot, COUNT]):
        place = places[node]
        if place >= 0:
            move_node(nodes, node, root, places, NUM_COLUMNS)
            path_probs[place], min_probs[place] = path_probs[node], min_probs[node]
            bits[place] = bits[node]


@njit(**BORROWING)
def _update_path_probs(trees: TreeArrays, slot: int, left: np.ndarray) -> None:
    compute_path_probs(
        trees.nodes[slot], trees.state[slot, COUNT], trees.table, trees.min_probs[slot],
        trees.path_probs[slot], left,
    )  # fmt: skip


@njit(**BORROWING)
def _evict(trees: TreeArrays, slot: int, heap: np.ndarray, places: np.ndarray) -> None:
    """Make room for `_ROOM` nodes by evicting the least likely nodes without KV.

    Of equally likely nodes the first stay, so no remaining node loses its parent.
    """
    nodes, path_probs, state = trees.nodes[slot], trees.path_probs[slot], trees.state[slot]
    count, size = state[COUNT], 0
    most = CAPACITY - _ROOM - state[USED]
    for node in range(count):
        if nodes[node, _PLACE] < 0:
            size = push_largest(heap, size, most, key_of(path_probs[node], node))
    kept = 0
    for node in range(count):
        places[node] = -1
        if nodes[node, _PLACE] >= 0 or key_of(path_probs[node], node) >= heap[0]:
            places[node] = kept
            kept += 1
    _compact(trees, slot, -1, places)
    state[COUNT] = kept


@njit(**BORROWING)
def _append_node(
    trees: TreeArrays, slot: int, parent: int, token: int, bucket: int, path_prob: float
) -> None:
    """Append a node; the tree has room for it."""
    nodes, state = trees.nodes[slot], trees.state[slot]
    node = state[COUNT]
    nodes[node, ID], nodes[node, PARENT] = state[_NEXT_ID], parent
    nodes[node, TOKEN], nodes[node, BUCKET] = token, bucket
    nodes[node, _POSITION] = nodes[parent, _POSITION] + 1 if parent >= 0 else state[LENGTH]
    nodes[node, _PLACE] = -1
    trees.path_probs[slot, node], trees.min_probs[slot, node] = path_prob, np.float32(0.0)
    state[_NEXT_ID] += 1
    state[COUNT] += 1


@njit(**BORROWING)
def commit(
    trees: TreeArrays,
    scratch: Scratch,
    slots: np.ndarray,
    bases: np.ndarray,
    tokens: np.ndarray,
    sizes: np.ndarray,
    moves: Moves,
) -> int:
    """See `TreePool.commit`. Returns the number of KV copies, -1 if a base is wrong."""
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
            state[_HAS_EXTERNAL] = 0
        moves.counts[i], moves.paths[i] = total - before, path
        moves.ready[i] = state[READY] == 1
    return total


@njit(**BORROWING)
def _reroot(
    trees: TreeArrays, scratch: Scratch, slot: int, root: int, path: int, moves: Moves, total: int
) -> int:
    """Keep the subtree below `root` and close the gaps in its KV places. Returns the new total of
    KV copies."""
    nodes, bits, state = trees.nodes[slot], trees.bits[slot], trees.state[slot]
    owners = scratch.owners
    count = renumber_subtree(nodes, state[COUNT], root, scratch.places)
    _compact(trees, slot, root, scratch.places)
    state[COUNT] = count
    owners[:] = -1
    for node in range(count):
        if nodes[node, _PLACE] >= 0:
            owners[nodes[node, _PLACE]] = node
    used = 0
    for place in range(WINDOW):  # parents have lower places than their children
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
    _update_path_probs(trees, slot, scratch.left)
    return total


@njit(**BORROWING)
def _collect_candidates(
    trees: TreeArrays,
    scratch: Scratch,
    max_positions: int,
    weights: np.ndarray,
    urgent: np.ndarray,
    wanted: bool,
    most: int,
) -> int:
    """Collect the most likely nodes that can be run, of the urgent slots (`wanted`) or the others,
    as keys in the heap in descending order. Returns their number."""
    size = 0
    for slot in range(len(weights)):
        state, weight = trees.state[slot], weights[slot]
        if state[READY] == 0 or not weight > 0 or urgent[slot] != wanted:
            continue
        nodes, path_probs = trees.nodes[slot], trees.path_probs[slot]
        room, few = WINDOW - state[USED], 0
        has_room = room >= state[COUNT] - state[USED]
        end = min(state[LENGTH] - 1 + state[_DEPTH], max_positions)
        for node in range(state[COUNT]):
            if nodes[node, _PLACE] >= 0 or nodes[node, _POSITION] >= end:
                continue
            parent = nodes[node, PARENT]
            if path_probs[node] < _MIN_RUN_PROB or (parent >= 0 and nodes[parent, _PLACE] < 0):
                continue
            key = key_of(path_probs[node] * weight, slot * CAPACITY + node)
            if has_room:
                size = push_largest(scratch.heap, size, most, key)
            else:
                few = push_largest(scratch.spare, few, room, key)
        for i in range(few):
            size = push_largest(scratch.heap, size, most, scratch.spare[i])
    sort_descending(scratch.heap, size)
    return size


@njit(**BORROWING)
def _best_count(keys: np.ndarray, size: int, seconds: np.ndarray, gained: float) -> int:
    """Number of first keys that maximizes gain per second."""
    best, rows = gained / max(seconds[0], _NO_TIME), 0
    for i in range(size):
        gained += prob_of_key(keys[i])
        rate = gained / max(seconds[i + 1], _NO_TIME)
        if rate > best:
            best, rows = rate, i + 1
    return rows


@njit(**BORROWING)
def choose(
    trees: TreeArrays,
    scratch: Scratch,
    max_positions: int,
    weights: np.ndarray,
    urgent: np.ndarray,
    seconds: np.ndarray,
    most: int,
    gained: float,
    out: Chosen,
) -> tuple[int, int]:
    """See `TreePool.choose`. Returns the numbers of slots and nodes."""
    heap, picked, found = scratch.heap, scratch.picked, out.nodes
    rows = 0
    for wanted in (True, False):
        size = _collect_candidates(
            trees, scratch, max_positions, weights, urgent, wanted, most - rows
        )
        more = 0
        if rows == 0:
            more = _best_count(heap, size, seconds, gained)
        else:
            while more < size and seconds[rows + more + 1] <= _BESIDE * seconds[rows]:
                more += 1
        for i in range(more):
            # Equal probabilities sort by ascending number: by slot, then by node.
            push_largest(picked, rows + i, most, key_of(0.0, number_of(heap[i])))
        rows += more
    sort_descending(picked, rows)
    groups = 0
    for row in range(rows):
        number = number_of(picked[row])
        slot, node = number // CAPACITY, number % CAPACITY
        nodes, state = trees.nodes[slot], trees.state[slot]
        if groups == 0 or found.slots[groups - 1] != slot:
            found.slots[groups], found.counts[groups] = slot, 0
            groups += 1
        place = state[USED] + found.counts[groups - 1]
        found.counts[groups - 1] += 1
        parent = nodes[node, PARENT]
        out.ids[row], out.owners[row] = nodes[node, ID], slot
        found.tokens[row] = nodes[node, TOKEN]
        found.depths[row] = nodes[node, _POSITION] - state[LENGTH] + 1
        found.places[row] = place
        found.ancestors[row] = np.uint64(1) << np.uint64(place)
        if parent >= 0:
            found.ancestors[row] |= trees.bits[slot, parent]
    return groups, rows


@njit(**BORROWING)
def expand(
    trees: TreeArrays,
    scratch: Scratch,
    ready: np.ndarray,
    slots: np.ndarray,
    ids: np.ndarray,
    places: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray,
) -> bool:
    """See `TreePool.expand`. False if a row is not a node that can be run."""
    for slot in ready:
        if trees.state[slot, LENGTH] == 0 or trees.state[slot, READY] == 1:
            return False
        trees.state[slot, READY] = 1
    # Mark all rows before adding children: nodes with KV are never evicted.
    for row in range(len(slots)):
        nodes, state = trees.nodes[slots[row]], trees.state[slots[row]]
        node = find_node(nodes, state[COUNT], ids[row])
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
    trees: TreeArrays,
    scratch: Scratch,
    slot: int,
    wanted: int,
    tokens: np.ndarray,
    log_probs: np.ndarray,
) -> None:
    """Add candidates as children of the node with the id `wanted`; 0 is the root."""
    state, table = trees.state[slot], trees.table
    if state[COUNT] + len(tokens) > CAPACITY:
        _evict(trees, slot, scratch.heap, scratch.places)
    nodes = trees.nodes[slot]
    parent = find_node(nodes, state[COUNT], wanted) if wanted > 0 else -1
    path_prob, left = trees.path_probs[slot, parent] if parent >= 0 else _ONE, _ONE
    has_external, known = state[_HAS_EXTERNAL] == 1, state[COUNT]
    for rank in range(len(tokens)):
        bucket = bucket_of(np.float64(log_probs[rank]), rank, state[_NOISY] == 1)
        if bucket < 0:
            continue
        rate = min(acceptance_rate(table, bucket), left)
        node = find_child(nodes, known, parent, tokens[rank]) if has_external else -1
        if node >= 0:
            nodes[node, BUCKET] = bucket
        elif rank == 0 or rate >= _MIN_SIBLING_PROB:
            _append_node(trees, slot, parent, tokens[rank], bucket, path_prob * rate)
        else:
            continue
        left -= rate
    if has_external:
        _update_path_probs(trees, slot, scratch.left)


@njit(**BORROWING)
def add_external_nodes(
    trees: TreeArrays,
    scratch: Scratch,
    slot: int,
    length: int,
    vocab_size: int,
    parents: np.ndarray,
    tokens: np.ndarray,
    path_probs: np.ndarray,
) -> int:
    """See `TreePool.add_external_nodes`. Returns the number of nodes added or already present."""
    nodes, state = trees.nodes[slot], trees.state[slot]
    if length != state[LENGTH] or length == 0:
        return 0
    ids, taken = scratch.owners, 0  # of the tree's nodes; 0 for the root, -1 for a skipped node
    for i in range(len(tokens)):
        above, token = parents[i], tokens[i]
        ids[i] = -1
        if above < -1 or above >= i or token < 0 or token >= vocab_size:
            continue
        whole = path_probs[above] if above >= 0 else _ONE
        if not whole > 0.0:
            continue
        share = path_probs[i] / whole
        bucket = external_bucket(min(np.float64(share), 1.0))
        wanted = ids[above] if above >= 0 else np.int64(0)
        if state[COUNT] == CAPACITY:
            _update_path_probs(trees, slot, scratch.left)
            _evict(trees, slot, scratch.heap, scratch.places)
        parent = find_node(nodes, state[COUNT], wanted) if wanted > 0 else -1
        if bucket < 0 or wanted < 0 or (wanted > 0 and parent < 0):
            continue
        node = find_child(nodes, state[COUNT], parent, token)
        if node < 0:
            node = state[COUNT]
            _append_node(trees, slot, parent, token, bucket, np.float32(0.0))
        trees.min_probs[slot, node] = max(trees.min_probs[slot, node], min(share, _ONE))
        ids[i] = nodes[node, ID]
        taken += 1
    state[_HAS_EXTERNAL] = 1
    _update_path_probs(trees, slot, scratch.left)
    return taken


@njit(**BORROWING)
def unsent(trees: TreeArrays, out: Unsent) -> tuple[int, int]:
    """See `TreePool.unsent`. Returns the numbers of slots and nodes."""
    groups = rows = 0
    for slot in range(len(trees.state)):
        state = trees.state[slot]
        nodes, count, length = trees.nodes[slot], state[COUNT], np.int64(0)
        first = count
        while first > 0 and nodes[first - 1, ID] > state[_SENT_ID]:
            first -= 1
        if state[READY] == 1:
            length = state[LENGTH]
        # That the root has no children must be sent, too.
        if first == count and (count > 0 or state[_SENT_LENGTH] >= length):
            continue
        out.slots[groups], out.counts[groups], out.lengths[groups] = slot, count - first, length
        groups += 1
        for node in range(first, count):
            parent = nodes[node, PARENT]
            sent = out.nodes[rows]
            sent[ID], sent[TOKEN] = nodes[node, ID], nodes[node, TOKEN]
            sent[PARENT] = nodes[parent, ID] if parent >= 0 else -state[LENGTH]
            sent[BUCKET] = nodes[node, BUCKET]
            rows += 1
        if count > 0:
            state[_SENT_ID] = nodes[count - 1, ID]
        state[_SENT_LENGTH] = length
    return groups, rows
