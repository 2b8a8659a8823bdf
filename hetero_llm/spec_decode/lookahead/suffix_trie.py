"""A suffix trie with lazy leaves: what followed each context of up to `max_depth` tokens.

A context that occurred once is a leaf that holds the position of the token that followed. Only when
the context occurs again does that token move into a cell, and the position one node down: so the
work of an insert is proportional to what repeats, and a text that never repeats costs one node a
token. Contexts start from a hash table of `key_length` tokens and a salt; from there each node's
cell, a few tokens with frequencies that decay, leads on.

The suffix tree of SuffixDecoding (Oliaro et al., arXiv 2411.04975) made lazy and its depth capped,
with the cells of TACO-LLM's lookahead cache. One trie serves many texts: salts keep them apart.
Everything lies in flat arrays; only `SuffixTrie.reserve` allocates. One thread writes at a time,
without readers; any number may read at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_llm.spec_decode.array_table import (
    BORROWING,
    INLINED,
    Float32Matrix,
    Int32Matrix,
    Int64Matrix,
    Int64Vector,
)
from hetero_llm.spec_decode.lookahead.ngram_index import find_slot, hash_tokens
from hetero_llm.utils.jit import njit

MAX_CELL = 256
"""Largest `cell_max_size`."""

FRESH, CONTINUED = -1, -2
"""For active[0]: no token before `begin` counts; or those back to a separator do, see `insert`."""

KEY, ROOT = 0, 1  # columns of `slots`
REF, SIZE = 0, 1  # columns of `nodes`
TOKEN, CHILD, FREQ, LAST = 0, 1, 2, 3  # columns of `entries`

_NUM_KEYS, _NUM_NODES, _NODES_USED, _FREE_NODE, _ENTRIES_USED, _EPOCH = range(6)  # of `state`
_FREE = 6
_NUM_CLASSES = 9  # blocks of 1, 2, 4 .. MAX_CELL entries
_BLOCKS_IN_USE = _FREE + _NUM_CLASSES
_RUN, _LONGEST, _CONTEXTS = 0, 1, 2  # places in `active`; its last one holds the epoch
_EPOCH_MASK = 0x7FFFFFFF
_MIN_SLOTS = 64
_MAX_ROWS = 2**31 - 1


class TrieParams(NamedTuple):
    """Of exactly these types: another type in any field compiles every function once more.

    Attributes:
        key_length: tokens of the shortest context, at least 1.
        max_depth: tokens of the longest path, context and continuation; above key_length.
        cell_max_size: most continuations of a context, 1 .. MAX_CELL.
        threshold: a full cell gives up its oldest entry whose frequency is not above this.
        decay: factor for the frequencies of a full cell in which all are above the threshold.
    """

    key_length: int
    max_depth: int
    cell_max_size: int
    threshold: float
    decay: float


class TrieArrays(NamedTuple):
    """A trie as the compiled functions see it.

    Attributes:
        slots: [2^k, 2] int64 hash table with linear probing: key (0: empty) and node.
        nodes: [N, 2] int32. A leaf: the position of the token that followed, and 0. An inner node:
            its first entry and how many it has. A free node: the next free one, and -1.
        entries: [M, 4] int32: token, node of the context with that token (-1 at full depth),
            (frequency), position of its last occurrence. A node's entries are a block of the
            smallest power of two that holds them; a free block starts with the next free one.
        freqs: [M, 4] float32, the same memory as `entries`: of use is the frequency's column.
        state: int64 counters and heads of free lists.
    """

    slots: Int64Matrix
    nodes: Int32Matrix
    entries: Int32Matrix
    freqs: Float32Matrix
    state: Int64Vector


class SuffixTrie:
    """Owner of a trie's arrays.

    Args:
        params: that the trie will be used with.
        tokens: of ordinary text that it will hold: with that much room it seldom has to grow. The
            system grants the memory as it fills.

    Attributes:
        params: as given.
        arrays: to be read anew after `reserve` and `clear`. Arrays read before stay as they were,
            for readers that still hold them.
    """

    def __init__(self, params: TrieParams, tokens: int = 0) -> None:
        assert 1 <= params.key_length < params.max_depth, params
        assert 1 <= params.cell_max_size <= MAX_CELL, params
        self.params = params
        self._levels = params.max_depth - params.key_length
        self._largest_class = (params.cell_max_size - 1).bit_length()
        # Source code takes 1.7 to 2.3 nodes and as many entries a token.
        self.arrays = _new_arrays(_num_slots(tokens // 3), 5 * tokens // 2, 5 * tokens // 2)
        _rehash(self.arrays.slots[:0], self.arrays.slots)  # compiles, before the trie ever grows

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, room for more included."""
        arrays = self.arrays
        return sum(a.nbytes for a in (arrays.slots, arrays.nodes, arrays.entries, arrays.state))

    @property
    def num_nodes(self) -> int:
        return int(self.arrays.state[_NUM_NODES])

    @property
    def num_keys(self) -> int:
        return int(self.arrays.state[_NUM_KEYS])

    @property
    def num_entries(self) -> int:
        """Entries in use, the unused rest of their blocks included."""
        blocks = self.arrays.state[_BLOCKS_IN_USE : _BLOCKS_IN_USE + _NUM_CLASSES]
        return int((blocks << np.arange(_NUM_CLASSES)).sum())

    def reserve(self, tokens: int) -> None:
        """Makes room for inserting `tokens` more tokens in one call.

        Raises:
            MemoryError: there is none; the trie stays as it was.
        """
        arrays = self.arrays
        state: list[int] = arrays.state.tolist()
        # A token adds an entry to a context in two ways. A leaf's remembered token moves down: at
        # most once at every level. Or the context did not know the token: then its run of
        # repetitions ends, and a token starts only one run.
        added = tokens * (self._levels + 1) + self._levels
        # Blocks that a cell moves through on its way to n entries have fewer than 4 n; a cell
        # that exists already may double at its first new entry.
        entries = state[_ENTRIES_USED] + 4 * added
        for size_class in range(self._largest_class):
            entries += min(added, state[_BLOCKS_IN_USE + size_class]) << (size_class + 1)
        nodes = state[_NODES_USED] + added + tokens
        slots = _num_slots(state[_NUM_KEYS] + tokens)
        held = [len(arrays.slots), len(arrays.nodes), len(arrays.entries)]
        if slots <= held[0] and nodes <= held[1] and entries <= held[2]:
            return
        nodes = held[1] if nodes <= held[1] else max(nodes, 2 * held[1])
        entries = held[2] if entries <= held[2] else max(entries, 2 * held[2])
        if max(nodes, entries) > _MAX_ROWS:
            raise MemoryError(f"the lookahead cache cannot hold {max(nodes, entries)} rows")
        grown = _new_arrays(max(slots, held[0]), nodes, entries)
        used = state[_NODES_USED]
        grown.nodes[:used] = arrays.nodes[:used]
        used = state[_ENTRIES_USED]
        grown.entries[:used] = arrays.entries[:used]
        grown.state[:] = arrays.state
        if slots > held[0]:
            _rehash(arrays.slots, grown.slots)
        else:
            grown.slots[:] = arrays.slots
        self.arrays = grown

    def clear(self) -> None:
        """Forgets everything and keeps the room."""
        arrays = self.arrays
        self.arrays = _new_arrays(len(arrays.slots), len(arrays.nodes), len(arrays.entries))


def new_active(params: TrieParams) -> np.ndarray:
    """[max_depth + 2] int32: a fresh text's state for `insert`."""
    return np.full(params.max_depth + 2, FRESH, np.int32)


def _num_slots(keys: int) -> int:
    """A power of two that is at most two thirds full."""
    return max(_MIN_SLOTS, 1 << (keys * 3 // 2).bit_length())


def _new_arrays(num_slots: int, num_nodes: int, num_entries: int) -> TrieArrays:
    """Empty arrays: pages come from the system when they are first written."""
    entries = np.zeros((num_entries, 4), np.int32)
    state = np.zeros(_BLOCKS_IN_USE + _NUM_CLASSES, np.int64)
    state[_FREE_NODE] = -1
    state[_FREE:_BLOCKS_IN_USE] = -1
    slots = np.zeros((num_slots, 2), np.int64)
    nodes = np.zeros((num_nodes, 2), np.int32)
    return TrieArrays(slots, nodes, entries, entries.view(np.float32), state)


@njit(**BORROWING)
def _rehash(old: np.ndarray, new: np.ndarray) -> None:
    """Moves the keys of `old` to `new`, which is empty and larger."""
    for slot in range(len(old)):
        if old[slot, KEY] != 0:
            place = find_slot(new, old[slot, KEY])
            new[place, KEY] = old[slot, KEY]
            new[place, ROOT] = old[slot, ROOT]


@njit(**BORROWING)
def _take_leaf(arrays: TrieArrays, position: int) -> int:
    """A new leaf of a context that went on at `position`."""
    state = arrays.state
    node = state[_FREE_NODE]
    if node >= 0:
        state[_FREE_NODE] = arrays.nodes[node, REF]
    else:
        node = state[_NODES_USED]
        state[_NODES_USED] = node + 1
        assert node < len(arrays.nodes)  # reserve comes before insert
    state[_NUM_NODES] += 1
    arrays.nodes[node, REF] = position
    arrays.nodes[node, SIZE] = 0
    return node


@njit(**BORROWING)
def _size_class(count: int) -> int:
    """Of the block for `count` entries."""
    size_class = 0
    while (1 << size_class) < count:
        size_class += 1
    return size_class


@njit(**BORROWING)
def _take_block(arrays: TrieArrays, size_class: int) -> int:
    """A block of 2^size_class entries, of any content."""
    state = arrays.state
    block = state[_FREE + size_class]
    if block >= 0:
        state[_FREE + size_class] = arrays.entries[block, TOKEN]
    else:
        block = state[_ENTRIES_USED]
        state[_ENTRIES_USED] = block + (1 << size_class)
        assert state[_ENTRIES_USED] <= len(arrays.entries)  # reserve comes before insert
    state[_BLOCKS_IN_USE + size_class] += 1
    return block


@njit(**BORROWING)
def _give_block(arrays: TrieArrays, block: int, count: int) -> None:
    """Frees the block of `count` entries."""
    size_class = _size_class(count)
    arrays.entries[block, TOKEN] = arrays.state[_FREE + size_class]
    arrays.state[_FREE + size_class] = block
    arrays.state[_BLOCKS_IN_USE + size_class] -= 1


@njit(**BORROWING)
def _give_nodes(arrays: TrieArrays, top: int, active: np.ndarray) -> None:
    """Frees a node and all below it, and strikes them from `active`.

    Nodes still to be freed form a chain through the last fields of their first entries.
    """
    nodes, entries, state = arrays.nodes, arrays.entries, arrays.state
    waiting = -1
    node = top
    while node >= 0:
        block, size = nodes[node, REF], nodes[node, SIZE]
        if size > 0:
            if node != top:
                waiting = entries[block, LAST]
            for row in range(block, block + size):
                child = entries[row, CHILD]
                if child < 0:
                    continue
                if nodes[child, SIZE] > 0:
                    entries[nodes[child, REF], LAST] = waiting
                    waiting = child
                else:
                    _give_node(nodes, state, child, active)
            _give_block(arrays, block, size)
        _give_node(nodes, state, node, active)
        node = waiting


@njit(**BORROWING)
def _give_node(nodes: np.ndarray, state: np.ndarray, node: int, active: np.ndarray) -> None:
    nodes[node, REF] = state[_FREE_NODE]
    nodes[node, SIZE] = -1
    state[_FREE_NODE] = node
    state[_NUM_NODES] -= 1
    for place in range(_CONTEXTS, len(active) - 1):
        if active[place] == node:
            active[place] = -1


@njit(**BORROWING)
def _victim(arrays: TrieArrays, params: TrieParams, block: int, size: int) -> int:
    """The entry of a full cell that makes room for a new one."""
    entries, freqs = arrays.entries, arrays.freqs
    victim = -1
    for row in range(block, block + size):
        if freqs[row, FREQ] <= params.threshold and (
            victim < 0 or entries[row, LAST] < entries[victim, LAST]
        ):
            victim = row
    if victim >= 0:
        return victim
    for row in range(block, block + size):
        freqs[row, FREQ] *= params.decay
        if victim < 0 or (
            freqs[row, FREQ] < freqs[victim, FREQ]
            or (
                freqs[row, FREQ] == freqs[victim, FREQ]
                and entries[row, LAST] < entries[victim, LAST]
            )
        ):
            victim = row
    return victim


@njit(**BORROWING)
def _add(
    arrays: TrieArrays,
    params: TrieParams,
    node: int,
    token: int,
    position: int,
    inner: bool,
    freq: float,
    active: np.ndarray,
) -> None:
    """Enters a token that followed a node's context and that its cell does not hold.

    Args:
        position: of the token; a leaf if the cell is to hold its first entry.
        inner: the context with the token gets a node too.
    """
    nodes, entries = arrays.nodes, arrays.entries
    size = nodes[node, SIZE]
    block = nodes[node, REF]
    if size == params.cell_max_size:
        row = _victim(arrays, params, block, size)
        if entries[row, CHILD] >= 0:
            _give_nodes(arrays, entries[row, CHILD], active)
            arrays.state[_EPOCH] = (arrays.state[_EPOCH] + 1) & _EPOCH_MASK
    else:
        if size & (size - 1) == 0:  # no block yet, or a full one
            larger = _take_block(arrays, _size_class(size + 1))
            for index in range(size):
                for column in range(4):
                    entries[larger + index, column] = entries[block + index, column]
            if size > 0:
                _give_block(arrays, block, size)
            block = larger
            nodes[node, REF] = block
        nodes[node, SIZE] = size + 1
        row = block + size
    entries[row, TOKEN] = token
    entries[row, CHILD] = _take_leaf(arrays, position + 1) if inner else -1
    entries[row, LAST] = position
    arrays.freqs[row, FREQ] = freq


@njit(**BORROWING)
def _follow(
    arrays: TrieArrays,
    params: TrieParams,
    text: np.ndarray,
    node: int,
    position: int,
    inner: bool,
    freq: float,
    active: np.ndarray,
) -> int:
    """Enters the token at `position` behind a context that occurred before.

    Returns:
        The node of the context with the token if that is a repetition too, else -1.
    """
    nodes, entries = arrays.nodes, arrays.entries
    if nodes[node, SIZE] == 0:
        before = nodes[node, REF]
        if before < len(text) and text[before] >= 0:
            _add(arrays, params, node, text[before], before, inner, freq, active)
    token = text[position]
    size = nodes[node, SIZE]
    block = nodes[node, REF]
    for row in range(block, block + size):
        if entries[row, TOKEN] == token:
            arrays.freqs[row, FREQ] += 1.0
            entries[row, LAST] = position
            return entries[row, CHILD]
    _add(arrays, params, node, token, position, inner, freq, active)
    return -1


@njit(**INLINED)
def holds_key(arrays: TrieArrays, key: int) -> bool:
    """Whether the trie has a context that begins with `key_length` tokens of this hash."""
    return bool(arrays.slots[find_slot(arrays.slots, key), KEY] != 0)


@njit(**INLINED)
def find(
    arrays: TrieArrays,
    key_length: int,
    arena: np.ndarray,
    text: np.ndarray,
    salt: int,
    end: int,
    length: int,
) -> tuple[int, int]:
    """Where the trie has the context of the `length` tokens before `end`.

    Args:
        arena: the text that the trie was made of.
        text, end, length: the context; at least key_length tokens.

    Returns:
        (node, 0): the context's node. (leaf, n): the leaf's context and the n tokens that followed
        it are this one, so the next one stands n behind the leaf's position. (-1, 0): unknown.
    """
    key = hash_tokens(text, end - length, end - length + key_length, salt)
    if key == 0:
        return -1, 0
    slot = find_slot(arrays.slots, key)
    if arrays.slots[slot, KEY] == 0:
        return -1, 0
    nodes, entries = arrays.nodes, arrays.entries
    node = arrays.slots[slot, ROOT]
    for position in range(end - length + key_length, end):
        token = text[position]
        block, size = nodes[node, REF], nodes[node, SIZE]
        if size == 0:
            left = end - position
            if block + left > len(arena):
                return -1, 0
            for offset in range(left):
                token = text[position + offset]
                if token < 0 or arena[block + offset] != token:
                    return -1, 0
            return node, left
        row = block
        while row < block + size and entries[row, TOKEN] != token:
            row += 1
        if row == block + size or entries[row, CHILD] < 0:
            return -1, 0
        node = np.int64(entries[row, CHILD])
    return node, 0


@njit(**BORROWING)
def _resume(
    arrays: TrieArrays,
    params: TrieParams,
    text: np.ndarray,
    salt: int,
    begin: int,
    active: np.ndarray,
) -> None:
    """Brings `active` up to date: the nodes of all contexts before `begin` that are repetitions."""
    if active[_RUN] == CONTINUED:
        run = 0
        while run < min(params.max_depth - 1, begin) and text[begin - 1 - run] >= 0:
            run += 1
        active[_RUN] = run
    elif active[_RUN] == FRESH:
        active[_RUN] = 0
        active[_LONGEST] = 0
        return
    elif active[_LONGEST] == 0 or active[-1] == arrays.state[_EPOCH]:
        return
    active[_LONGEST] = 0
    for length in range(params.key_length, min(active[_RUN], params.max_depth - 1) + 1):
        node, offset = find(arrays, params.key_length, text, text, salt, begin, length)
        # A leaf that points to `begin` stands for this very occurrence.
        repeats = (
            node >= 0
            and offset == 0
            and (arrays.nodes[node, SIZE] > 0 or arrays.nodes[node, REF] != begin)
        )
        active[_CONTEXTS + length - params.key_length] = node if repeats else -1
        if repeats:
            active[_LONGEST] = length


@njit(**BORROWING)
def insert(
    arrays: TrieArrays,
    params: TrieParams,
    text: np.ndarray,
    salt: int,
    begin: int,
    end: int,
    active: np.ndarray,
    freq: float,
) -> None:
    """Appends the tokens at begin .. end-1 to a text.

    Every context of key_length to max_depth - 1 tokens that ends before one of them is followed by
    it once more. Higher positions are newer: of one salt, later inserts have higher ones.

    Args:
        arrays: with room for end - begin tokens, see `SuffixTrie.reserve`.
        text: int32. No context reaches across a separator (-1). Behind the tokens inserted of a
            text stands a separator, the text's next token, or the end of the array.
        begin, end: positions, below 2^31 - 1.
        active: [max_depth + 2] int32, the state of this text from one call to the next. active[0]
            is FRESH for a new text. It is CONTINUED for one whose last max_depth - 1 tokens, which
            were inserted elsewhere under the same salt, are repeated before `begin` and behind a
            separator: their contexts go on here and nothing is counted twice, but what a leaf
            remembers ends where its piece of the text does.
        freq: of an entry that its cell does not hold; 1 is added to that of one that it does.
    """
    _resume(arrays, params, text, salt, begin, active)
    key_length, deepest = params.key_length, params.max_depth - 1
    base = _CONTEXTS - key_length
    run, longest = active[_RUN], active[_LONGEST]
    for position in range(begin, end):
        if text[position] < 0:
            run = longest = 0
            continue
        grown = 0
        # Longest first: a context's place is free when the next shorter one grows into it.
        for length in range(longest, key_length - 1, -1):
            inner = length < deepest
            node = active[base + length]
            child = -1
            if node >= 0:
                child = _follow(arrays, params, text, node, position, inner, freq, active)
            if inner:
                active[base + length + 1] = child
                if child >= 0 and grown == 0:
                    grown = length + 1
        run = min(run + 1, params.max_depth)
        active[base + key_length] = -1
        if run >= key_length:
            key = hash_tokens(text, position + 1 - key_length, position + 1, salt)
            slot = find_slot(arrays.slots, key)
            if arrays.slots[slot, KEY] == 0:
                arrays.slots[slot, KEY] = key
                arrays.slots[slot, ROOT] = _take_leaf(arrays, position + 1)
                arrays.state[_NUM_KEYS] += 1
            else:
                active[base + key_length] = arrays.slots[slot, ROOT]
                grown = max(grown, key_length)
        longest = grown
    active[_RUN], active[_LONGEST] = run, longest
    active[-1] = arrays.state[_EPOCH]


@njit(**BORROWING)
def insert_all(
    arrays: TrieArrays,
    params: TrieParams,
    text: np.ndarray,
    salts: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    actives: np.ndarray,
    freq: float,
) -> None:
    """`insert` for several texts: a call from Python costs as much as some twenty tokens.

    Args:
        salts, begins, ends: [S] int64.
        actives: [S, max_depth + 2] int32.
    """
    for index in range(len(salts)):
        active, salt = actives[index], salts[index]
        insert(arrays, params, text, salt, begins[index], ends[index], active, freq)


@njit(**BORROWING)
def remove(
    arrays: TrieArrays, params: TrieParams, text: np.ndarray, salt: int, begin: int, end: int
) -> None:
    """Forgets a salt whose text was inserted within begin .. end-1 and stands there unchanged.

    Later slots move up into the hole that a key leaves (Knuth 6.4, algorithm R), nodes and blocks
    go back to the free lists: nothing is left behind.
    """
    slots = arrays.slots
    mask = len(slots) - 1
    no_active = text[:0]
    for last in range(begin + params.key_length, end + 1):
        key = hash_tokens(text, last - params.key_length, last, salt)
        if key == 0:
            continue
        hole = find_slot(slots, key)
        if slots[hole, KEY] == 0:
            continue
        _give_nodes(arrays, slots[hole, ROOT], no_active)
        slot = (hole + 1) & mask
        while slots[slot, KEY] != 0:
            if ((slot - slots[slot, KEY]) & mask) >= ((slot - hole) & mask):
                slots[hole, KEY] = slots[slot, KEY]
                slots[hole, ROOT] = slots[slot, ROOT]
                hole = slot
            slot = (slot + 1) & mask
        slots[hole, KEY] = 0
        arrays.state[_NUM_KEYS] -= 1
    arrays.state[_EPOCH] = (arrays.state[_EPOCH] + 1) & _EPOCH_MASK
