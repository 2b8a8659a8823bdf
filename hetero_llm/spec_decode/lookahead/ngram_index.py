"""TACO-LLM's Raw cache: what followed an n-gram before is drafted after it again.

A hash table leads from an n-gram to its cell, a few phrases that followed it. A phrase is a
position in the text and a signature of its first tokens; its tokens are read from the text when
drafted, as in LLMA (Yang et al., "Inference with Reference", arXiv 2304.04487). Cells keep
frequencies and forget by threshold and decay, much like the draft tables of Ant's Flood.

One index serves many texts: a salt, part of every key, keeps them apart. Everything lies in flat
arrays; only `NgramIndex.reserve` allocates. One thread writes at a time, without readers; any
number of threads may propose at once, each into rows of its own.
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
from hetero_llm.utils.jit import njit

SIGNATURE_TOKENS = 4
"""Phrases of one cell are the same if their first `SIGNATURE_TOKENS` tokens are."""

_MAX_NODES = 63
_ONE_TOKEN_DEPTH = 2
"""Most tokens drafted after a match of one token, which is seldom right."""
_KEY, _CELL = 0, 1  # columns of `slots`
_POS, _SIG, _FREQ, _TICK = 0, 1, 2, 3  # columns of `entries`
_COUNT_BITS = 16  # a cell is its first entry's index and, in the lowest bits, its entries' count
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_NUM_KEYS, _NUM_USED, _FREE = 0, 1, 2  # places in `state`
_NUM_CLASSES = _COUNT_BITS + 1
_BLOCKS_IN_USE = _FREE + _NUM_CLASSES
_MIN_SLOTS = 64
_MAX_ENTRIES = 2**31 - 1

NUM_LEVELS, NUM_DEPTHS = 5, 8
"""Acceptance buckets by tokens matched, up to 4, and by depth, up to 8: the bucket of a node is
min(matched, 4) * NUM_DEPTHS + min(depth, 8) - 1."""
FIRST_RATES = np.array([0.0, 0.15, 0.5, 0.55, 0.6])
FURTHER_RATES = np.array([0.0, 0.5, 0.6, 0.7, 0.75])
"""By tokens matched: rate of acceptance of the first drafted token, and of each further one if the
one before was accepted. Rough figures from chains of 7 on source code, where a match of two tokens
was followed by an accepted token in half of all steps, and by 2.4 of them then."""
_RANK_SHARE = np.float32(0.5)
"""Each phrase of a cell counts half as much as the one ranked before it: only one can be right."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(32)


class NgramParams(NamedTuple):
    """Parameters under the names of lookahead_cache_config.json.

    Of exactly these types: another type in any field compiles every function once more.

    Attributes:
        match_length: tokens of an n-gram, at least 1.
        is_hybrid: n-grams of every length from match_length down to 1.
        copy_length: most tokens of a drafted phrase, 1 .. 63.
        top_k: most phrases drafted at once, at least 1.
        cell_max_size: most phrases of a cell, 1 .. 65535.
        threshold: a full cell gives up its oldest phrase whose frequency is not above this.
        decay: factor for the frequencies of a full cell in which all are above the threshold.
    """

    match_length: int
    is_hybrid: bool
    copy_length: int
    top_k: int
    cell_max_size: int
    threshold: float
    decay: float


class NgramArrays(NamedTuple):
    """An index as the compiled functions see it.

    Attributes:
        slots: [2^k, 2] int64, at most half of them taken: the key (0: empty), then the cell.
            Linear probing.
        entries: [E, 4] int32 phrases: position, signature, (frequency), tick. A cell has a block
            of consecutive entries, the smallest power of two that holds them; a free block's
            first field is the next free block of its size.
        freqs: [E, 4] float32, the same memory as `entries`: of use is the frequency's column.
        state: int64: keys held; entries ever handed out; for each block size (2^c entries) the
            first free block or -1; for each block size the number of blocks in use.
    """

    slots: Int64Matrix
    entries: Int32Matrix
    freqs: Float32Matrix
    state: Int64Vector


class NgramIndex:
    """Owner of an index's arrays.

    Args:
        params: that the index will be used with.
        tokens: room to begin with, as in `reserve`.

    Attributes:
        params: as given.
        arrays: to be read anew after `reserve` and `clear`. Arrays read before stay as they were,
            for readers that still hold them.
    """

    def __init__(self, params: NgramParams, tokens: int = 0) -> None:
        assert params.match_length >= 1 and params.top_k >= 1, params
        assert 1 <= params.copy_length <= _MAX_NODES, params
        assert 1 <= params.cell_max_size <= _COUNT_MASK, params
        self.params = params
        self._keys_per_token = params.match_length if params.is_hybrid else 1
        self._largest_class = (params.cell_max_size - 1).bit_length()
        self.arrays = _new_arrays(_MIN_SLOTS, 0)
        _rehash(self.arrays.slots[:0], self.arrays.slots)  # compiles, before the index ever grows
        self.reserve(tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, room for more included."""
        arrays = self.arrays
        return arrays.slots.nbytes + arrays.entries.nbytes + arrays.state.nbytes

    @property
    def num_keys(self) -> int:
        """N-grams that it knows."""
        return int(self.arrays.state[_NUM_KEYS])

    @property
    def num_blocks(self) -> list[int]:
        """Blocks in use of 1, 2, 4, ... entries."""
        return self.arrays.state[_BLOCKS_IN_USE:].tolist()  # type: ignore[no-any-return]

    @property
    def num_entries(self) -> int:
        """Entries ever handed out, those of free blocks included."""
        return int(self.arrays.state[_NUM_USED])

    def check_integrity(self) -> None:
        """Asserts that keys and blocks are counted, and that each entry ever handed out is in one
        block, free or of a cell."""
        slots, entries, state = self.arrays.slots, self.arrays.entries, self.arrays.state
        cells = slots[slots[:, _KEY] != 0, _CELL].tolist()
        assert len(cells) == self.num_keys <= len(slots) // 2
        blocks = [(cell >> _COUNT_BITS, ((cell & _COUNT_MASK) - 1).bit_length()) for cell in cells]
        num_blocks = [0] * _NUM_CLASSES
        for _, size_class in blocks:
            num_blocks[size_class] += 1
        assert num_blocks == self.num_blocks
        for size_class in range(_NUM_CLASSES):
            block = int(state[_FREE + size_class])
            while block >= 0:
                blocks.append((block, size_class))
                block = int(entries[block, _POS])
        taken = sorted(
            entry
            for block, size_class in blocks
            for entry in range(block, block + (1 << size_class))
        )
        assert taken == list(range(self.num_entries))

    def reserve(self, tokens: int) -> None:
        """Makes room for inserting `tokens` more tokens.

        Raises:
            MemoryError: there is none; the index stays as it was.
        """
        arrays = self.arrays
        state: list[int] = arrays.state.tolist()
        new = tokens * self._keys_per_token
        # Blocks that a cell moves through on its way to n entries have fewer than 4 n; a cell
        # that exists already may double at its first new entry.
        entries = state[_NUM_USED] + 4 * new
        for size_class in range(self._largest_class):
            entries += min(new, state[_BLOCKS_IN_USE + size_class]) << (size_class + 1)
        slots = 2 * (state[_NUM_KEYS] + new)
        held_slots, held_entries = len(arrays.slots), len(arrays.entries)
        if slots <= held_slots and entries <= held_entries:
            return
        if slots > held_slots:
            held_slots = 1 << (slots - 1).bit_length()
        if entries > held_entries:
            held_entries = max(entries, 2 * held_entries)
        if held_entries > _MAX_ENTRIES:
            raise MemoryError(f"the lookahead cache cannot hold {held_entries} entries")
        grown = _new_arrays(held_slots, held_entries)
        used = state[_NUM_USED]
        grown.entries[:used] = arrays.entries[:used]
        grown.state[:] = arrays.state
        if held_slots > len(arrays.slots):
            _rehash(arrays.slots, grown.slots)
        else:
            grown.slots[:] = arrays.slots
        self.arrays = grown

    def clear(self) -> None:
        """Forgets everything and keeps the room."""
        self.arrays = _new_arrays(len(self.arrays.slots), len(self.arrays.entries))


def _new_arrays(num_slots: int, num_entries: int) -> NgramArrays:
    """Empty arrays: pages come from the system when they are first written."""
    entries = np.zeros((num_entries, 4), np.int32)
    state = np.zeros(_BLOCKS_IN_USE + _NUM_CLASSES, np.int64)
    state[_FREE:_BLOCKS_IN_USE] = -1
    return NgramArrays(np.zeros((num_slots, 2), np.int64), entries, entries.view(np.float32), state)


@njit(**BORROWING)
def hash_tokens(text: np.ndarray, begin: int, end: int, salt: int) -> int:
    """Hash of a salt and the tokens at begin .. end-1, as int64; 0 if a separator is among them.

    Products with the golden ratio's odd multiplier, folded (Fibonacci hashing, Knuth 6.4). Without
    a separator never 0; equal for different tokens once in 2^64.
    """
    mixed = (np.uint64(salt) + _MULTIPLIER) * _MULTIPLIER
    mixed ^= mixed >> _FOLD
    for position in range(begin, end):
        token = text[position]
        if token < 0:
            return np.int64(0)
        mixed = (mixed ^ np.uint64(token)) * _MULTIPLIER
        mixed ^= mixed >> _FOLD
    return np.int64(1) if mixed == np.uint64(0) else np.int64(mixed)


@njit(**BORROWING)
def find_slot(slots: np.ndarray, key: int) -> int:
    """The slot that holds the key, or the empty one where it would go."""
    mask = len(slots) - 1
    slot = key & mask
    while slots[slot, _KEY] != 0 and slots[slot, _KEY] != key:
        slot = (slot + 1) & mask
    return slot


@njit(**BORROWING)
def _rehash(old: np.ndarray, new: np.ndarray) -> None:
    """Moves the keys of `old` to `new`, which is empty and larger."""
    for slot in range(len(old)):
        key = old[slot, _KEY]
        if key != 0:
            place = find_slot(new, key)
            new[place, _KEY] = key
            new[place, _CELL] = old[slot, _CELL]


@njit(**BORROWING)
def _take_block(arrays: NgramArrays, size_class: int) -> int:
    """A block of 2^size_class entries, of any content."""
    state = arrays.state
    block = state[_FREE + size_class]
    if block >= 0:
        state[_FREE + size_class] = arrays.entries[block, _POS]
    else:
        block = state[_NUM_USED]
        state[_NUM_USED] = block + (1 << size_class)
        assert state[_NUM_USED] <= len(arrays.entries)  # reserve comes before insert
    state[_BLOCKS_IN_USE + size_class] += 1
    return block


@njit(**BORROWING)
def _give_block(arrays: NgramArrays, block: int, size_class: int) -> None:
    arrays.entries[block, _POS] = arrays.state[_FREE + size_class]
    arrays.state[_FREE + size_class] = block
    arrays.state[_BLOCKS_IN_USE + size_class] -= 1


@njit(**BORROWING)
def _size_class(count: int) -> int:
    """Of the block for `count` entries."""
    size_class = 0
    while (1 << size_class) < count:
        size_class += 1
    return size_class


@njit(**BORROWING)
def _is_older(entries: np.ndarray, row: int, other: int) -> bool:
    """By tick, then by position: within a salt, later tokens have higher ones."""
    if entries[row, _TICK] != entries[other, _TICK]:
        return entries[row, _TICK] < entries[other, _TICK]
    return entries[row, _POS] < entries[other, _POS]


@njit(**BORROWING)
def _is_weaker(arrays: NgramArrays, row: int, other: int) -> bool:
    """By frequency, then by age."""
    if arrays.freqs[row, _FREQ] != arrays.freqs[other, _FREQ]:
        return arrays.freqs[row, _FREQ] < arrays.freqs[other, _FREQ]
    return _is_older(arrays.entries, row, other)


@njit(**BORROWING)
def _evict(arrays: NgramArrays, params: NgramParams, block: int, count: int) -> int:
    """The entry of a full cell that makes room for a new one."""
    freqs = arrays.freqs
    victim = -1
    for row in range(block, block + count):
        if freqs[row, _FREQ] <= params.threshold and (
            victim < 0 or _is_older(arrays.entries, row, victim)
        ):
            victim = row
    if victim >= 0:
        return victim
    for row in range(block, block + count):
        freqs[row, _FREQ] *= params.decay
    victim = block
    for row in range(block + 1, block + count):
        if _is_weaker(arrays, row, victim):
            victim = row
    return victim


@njit(**BORROWING)
def _place(arrays: NgramArrays, params: NgramParams, key: int, signature: int) -> tuple[int, bool]:
    """The entry of the key's cell for this phrase, and whether it was there before."""
    slots, entries = arrays.slots, arrays.entries
    slot = find_slot(slots, key)
    if slots[slot, _KEY] == 0:
        block = _take_block(arrays, 0)
        slots[slot, _KEY] = key
        slots[slot, _CELL] = (block << _COUNT_BITS) | 1
        arrays.state[_NUM_KEYS] += 1
        return block, False
    block = slots[slot, _CELL] >> _COUNT_BITS
    count = slots[slot, _CELL] & _COUNT_MASK
    for row in range(block, block + count):
        if entries[row, _SIG] == signature:
            return row, True
    if count >= params.cell_max_size:
        return _evict(arrays, params, block, count), False
    if count & (count - 1) == 0:  # its block is full
        size_class = _size_class(count)
        larger = _take_block(arrays, size_class + 1)
        for index in range(count):
            for column in range(4):
                entries[larger + index, column] = entries[block + index, column]
        _give_block(arrays, block, size_class)
        block = larger
    slots[slot, _CELL] = (block << _COUNT_BITS) | (count + 1)
    return block + count, False


@njit(**BORROWING)
def insert(
    arrays: NgramArrays,
    params: NgramParams,
    text: np.ndarray,
    salt: int,
    first: int,
    begin: int,
    end: int,
    freq: float,
    tick: int,
) -> None:
    """Enters every phrase that the tokens at begin .. end-1 complete.

    A phrase is complete once its first min(copy_length, 4) tokens are known. So a text may come in
    pieces of any size, each beginning where the last ended, and the last three positions of a text
    begin no phrase. A text that is continued elsewhere (in a chunk of another arena, say) loses
    nothing if its last match_length + 3 tokens are repeated there between `first` and `begin`.

    Args:
        arrays: with room for end - begin tokens, see `NgramIndex.reserve`.
        text: int32; no phrase has a separator (-1) in its n-gram or in its first tokens.
        salt: of the text.
        first: no n-gram begins before it.
        begin, end: the new tokens, first <= begin; positions below 2^31.
        freq: of a phrase that its cell does not hold; 1 is added to that of one that it does.
        tick: time, 0 .. 2^31 - 1, never less than at the call before.
    """
    length = min(params.copy_length, SIGNATURE_TOKENS)
    shortest = 1 if params.is_hybrid else params.match_length
    for last in range(begin, end):
        position = last + 1 - length
        if position - shortest < first:
            continue
        phrase = hash_tokens(text, position, last + 1, 0)
        if phrase == 0:
            continue
        signature = np.int32(phrase)
        for size in range(shortest, min(params.match_length, position - first) + 1):
            key = hash_tokens(text, position - size, position, salt)
            if key == 0:
                break
            row, known = _place(arrays, params, key, signature)
            if known:
                arrays.freqs[row, _FREQ] += 1.0
            else:
                arrays.freqs[row, _FREQ] = freq
                arrays.entries[row, _SIG] = signature
            arrays.entries[row, _POS] = position
            arrays.entries[row, _TICK] = tick


@njit(**BORROWING)
def remove(
    arrays: NgramArrays, params: NgramParams, text: np.ndarray, salt: int, first: int, end: int
) -> None:
    """Forgets a salt whose text was inserted from `first` on and never beyond `end`.

    Blocks go back to the free lists and later slots move up (Knuth 6.4, algorithm R), so that
    nothing is left behind. The text has to be as it was inserted.
    """
    slots = arrays.slots
    mask = len(slots) - 1
    shortest = 1 if params.is_hybrid else params.match_length
    for position in range(first + shortest, end):
        for size in range(shortest, min(params.match_length, position - first) + 1):
            key = hash_tokens(text, position - size, position, salt)
            if key == 0:
                break
            hole = find_slot(slots, key)
            if slots[hole, _KEY] == 0:
                continue
            cell = slots[hole, _CELL]
            _give_block(arrays, cell >> _COUNT_BITS, _size_class(cell & _COUNT_MASK))
            arrays.state[_NUM_KEYS] -= 1
            slot = (hole + 1) & mask
            while slots[slot, _KEY] != 0:
                # A key may move up to the hole unless that lies before the slot it hashes to.
                if (slot - slots[slot, _KEY]) & mask >= (slot - hole) & mask:
                    slots[hole, _KEY] = slots[slot, _KEY]
                    slots[hole, _CELL] = slots[slot, _CELL]
                    hole = slot
                slot = (slot + 1) & mask
            slots[hole, _KEY] = 0


@njit(**BORROWING)
def insert_all(
    arrays: NgramArrays,
    params: NgramParams,
    text: np.ndarray,
    salts: np.ndarray,
    firsts: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    freq: float,
    tick: int,
) -> None:
    """`insert` for each of [S] texts."""
    for i in range(len(ends)):
        insert(arrays, params, text, salts[i], firsts[i], begins[i], ends[i], freq, tick)


@njit(**BORROWING)
def remove_all(
    arrays: NgramArrays,
    params: NgramParams,
    text: np.ndarray,
    salts: np.ndarray,
    firsts: np.ndarray,
    ends: np.ndarray,
) -> None:
    """`remove` for each of [S] texts."""
    for i in range(len(ends)):
        remove(arrays, params, text, salts[i], firsts[i], ends[i])


@njit(**INLINED)
def _draft(
    arrays: NgramArrays,
    arena: np.ndarray,
    known: int,
    key: int,
    size: int,
    wraps: bool,
    path: np.ndarray,
    params: NgramParams,
    limit: int,
    rates: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    path_probs: np.ndarray,
    buckets: np.ndarray,
) -> int:
    """Drafts the best phrases of a key's cell as a tree; returns the number of nodes.

    Args:
        arena, known: the index's text; its tokens before `known` may be drafted.
        size: tokens of the n-gram.
        wraps: the draft follows at `known`, so that a phrase which reaches it continues with the
            draft's own tokens: a loop shorter than a draft is drafted as often as it fits.
        path: [63] int32, scratch.
        limit: most nodes, at most 63.
        tokens, parents, path_probs, buckets: rows of the caller's arrays.
    """
    slot = find_slot(arrays.slots, key)
    if arrays.slots[slot, _KEY] == 0:
        return 0
    block = arrays.slots[slot, _CELL] >> _COUNT_BITS
    end = block + (arrays.slots[slot, _CELL] & _COUNT_MASK)
    depth = min(params.copy_length, _ONE_TOKEN_DEPTH) if size == 1 else params.copy_length
    level = min(size, NUM_LEVELS - 1)
    share = np.float32(1.0)
    count = 0
    taken = -1
    for _ in range(params.top_k):
        best = -1
        for row in range(block, end):
            if (taken < 0 or _is_weaker(arrays, row, taken)) and (
                best < 0 or _is_weaker(arrays, best, row)
            ):
                best = row
        if best < 0:
            break
        taken = best
        begin = np.int64(arrays.entries[best, _POS])
        node = -1
        path_prob = share
        share *= _RANK_SHARE
        last = begin + depth if wraps else min(begin + depth, known)
        for position in range(begin, last):
            token = arena[position] if position < known else path[position - known]
            if token < 0:
                break
            path[position - begin] = token
            step = min(position - begin, NUM_DEPTHS - 1)
            path_prob *= rates[level, step]
            child = node + 1
            while child < count and (parents[child] != node or tokens[child] != token):
                child += 1
            if child == count:
                if count == limit:
                    return count
                tokens[count] = token
                parents[count] = node
                path_probs[count] = path_prob
                buckets[count] = level * NUM_DEPTHS + step
                count += 1
            node = child
    return count


@njit(**INLINED)
def propose_one(
    local: NgramArrays,
    text: np.ndarray,
    first: int,
    end: int,
    salt: int,
    namespace: int,
    globals_: tuple[tuple[NgramArrays, np.ndarray], ...],
    params: NgramParams,
    path: np.ndarray,
    limit: int,
    rates: np.ndarray,
    row: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> int:
    """Drafts what followed the longest known n-gram that ends a sequence.

    Longest n-gram first, and for each length the sequence's own text, then the global ones in
    order; the first that knows it wins. Of its phrases the `top_k` with the highest frequency, of
    equal ones the newest, are merged into a tree. A match of a single token drafts at most two.

    Args:
        local, text: index and int32 tokens of the running sequences.
        first, end: where the sequence lies in `text`; all of it may be drafted, and a phrase that
            reaches the end continues with what was drafted.
        salt: of the sequence's own entries. namespace: its salt in the global indices.
        globals_: three times (index, its text: int32, cut after the last token that is known).
        path: [63] int32, scratch.
        limit: most nodes of the draft.
        rates: [NUM_LEVELS, NUM_DEPTHS] float32 rates of acceptance, given the parent's.
        row: [63] tokens, parents, path_probs and buckets, written: int32, but for path_probs, which
            are float32 products of rates, halved for each phrase ranked before.

    Returns:
        The number of nodes.
    """
    shortest = 1 if params.is_hybrid else params.match_length
    limit = min(limit, _MAX_NODES)
    count = 0
    for size in range(min(params.match_length, end - first), shortest - 1, -1):
        if count > 0 or limit <= 0:
            break
        key = hash_tokens(text, end - size, end, salt)
        if key == 0:
            continue
        count = _draft(local, text, end, key, size, True, path, params, limit, rates, *row)
        key = hash_tokens(text, end - size, end, namespace)
        for arrays, arena in globals_:
            if count == 0:
                known = len(arena)
                count = _draft(
                    arrays, arena, known, key, size, False, path, params, limit, rates, *row
                )
    return count
