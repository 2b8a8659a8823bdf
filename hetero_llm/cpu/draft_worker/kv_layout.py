"""The draft model's KV layout, and the inputs of its steps.

Every request slot owns a fixed set of KV blocks, listed in its row of `block_tables`: the sink (the
sequence's first block), the committed prefix (its last tokens), then `WINDOW` KV places for tree
nodes. A KV place is not a position: when the prefix outgrows its room, its oldest block moves to
the end of the row, and all later blocks, the tree's included, move up by one. Keys keep the
rotation of their positions, so nothing is recomputed.

    sink | prefix, oldest block first | tree: WINDOW places, the first after the last prefix token
    0    | BLOCK ...                  | filled ... filled + WINDOW

Appended tokens are pending until a step runs them. Of a long sequence only the sink and the last
`window` tokens are run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hetero_llm.core.errors import PromptError
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW, Moves, TreeNodes
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.spec_decode.array_table import BORROWING
from hetero_llm.spec_decode.draft_model.tree_arrays import INT32, fit
from hetero_llm.utils.jit import njit

BLOCK = 16

_LENGTH, _COMPUTED, _FILLED = range(3)


class PrefixTokens(NamedTuple):
    """Committed tokens to run: the next `counts`, [N] int32, of each of `slots`, [N] int32,
    distinct."""

    slots: np.ndarray
    counts: np.ndarray


class Sampling(NamedTuple):
    """Of each slot: float32 temperatures (0: greedy), uint64 seeds, int32 sample indices."""

    temperatures: np.ndarray
    seeds: np.ndarray
    indices: np.ndarray


class StepArrays(NamedTuple):
    """A step's tokens and its samples: see `cpu.executor.StepInput` and `StepSamples`."""

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    is_tree: np.ndarray
    bases: np.ndarray
    ancestors: np.ndarray
    sample_rows: np.ndarray
    sample_positions: np.ndarray
    temperatures: np.ndarray
    seeds: np.ndarray
    sample_indices: np.ndarray


class StepSize(NamedTuple):
    """How much of `StepArrays` a step fills. ready: samples after prefixes; they come first."""

    rows: int
    sequences: int
    samples: int
    ready: int


def no_tree_nodes() -> TreeNodes:
    """An empty `TreeNodes`."""
    none = np.zeros(0, np.int32)
    return TreeNodes(none, none, none, none, none, np.zeros(0, np.uint64))


class KVLayout:
    """KV and token buffers of `slots` sequences, and how far each has been run. One thread at a
    time.

    Args:
        shape: shape of the cache, with blocks of `BLOCK` tokens.
        slots: number of request slots.
        window: tokens at the end of a sequence that stay visible besides its sink; a multiple of
            `BLOCK`.
        max_positions: longest sequence in tokens.
        vocab_size: token ids of this or above are refused.
        most_rows: maximum tokens of a step.

    Attributes:
        cache: the KV cache.
        block_tables: [slots, columns] int32 block ids.
        capacity: maximum tokens of sink and prefix together.
        arrays: inputs of the last step that `fill` laid out.
        ready: [slots] int32: the slots whose last pending token that step runs come first.
    """

    def __init__(
        self,
        shape: KVCacheShape,
        slots: int,
        *,
        window: int,
        max_positions: int,
        vocab_size: int,
        most_rows: int,
    ) -> None:
        assert shape.block_size == BLOCK and window % BLOCK == 0 and window > 0
        self._window, self._max_positions, self._vocab_size = window, max_positions, vocab_size
        self.capacity = _capacity(window, max_positions)
        columns = num_columns(window, max_positions)
        self.block_tables = np.arange(slots * columns, dtype=np.int32).reshape(slots, columns)
        self.cache = PagedKVCache(shape, slots * columns, torch.device("cpu"))
        # [blocks, layers * 2, BLOCK, row] int16 view for copies, whatever the element type.
        pieces = self.cache.data.view(torch.int16).numpy()
        self._pieces = pieces.reshape(slots * columns, shape.num_layers * 2, BLOCK, -1)
        self._token_ids = np.zeros((slots, max_positions), np.int32)
        self._state = np.zeros((slots, 3), np.int32)
        self._sampling = Sampling(
            np.zeros(slots, np.float32), np.zeros(slots, np.uint64), np.zeros(slots, np.int32)
        )
        self._prefix = PrefixTokens(np.zeros(slots, np.int32), np.zeros(slots, np.int32))
        self.arrays = _step_arrays(most_rows, slots)
        self.ready = np.zeros(slots, np.int32)
        self._limits = (window, self.capacity, max_positions)
        self._compile()

    def _compile(self) -> None:
        """Call every compiled function once, so that no step waits for the compiler."""
        self.open(0, np.zeros(1, np.int32))
        self.fill(self.plan_prefix(1), no_tree_nodes())
        none = np.zeros(1, np.int32)
        self.keep(none, Moves(none, none, none, none, np.zeros(1, np.bool_)))
        self.pending(0)
        self.close(0)

    # -- sequences --------------------------------------------------------------------------

    def open(
        self,
        slot: int,
        tokens: np.ndarray,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        sample_index: int = 0,
    ) -> None:
        """Open a slot for a sequence; what it held before is dropped.

        Args:
            tokens: [n] its tokens so far.
            temperature: 0 for greedy sampling.
            seed, sample_index: key of its sampling noise (`sampling/noise.py`); seed: unsigned,
                64 bits.

        Raises:
            PromptError: a token outside the vocabulary, or too many tokens; the slot stays empty.
        """
        self._state[slot] = 0
        sampling = self._sampling
        sampling.temperatures[slot], sampling.seeds[slot] = temperature, seed
        sampling.indices[slot] = sample_index
        self.append(slot, tokens)

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Append committed tokens to a sequence; before `keep`, if KV of tree nodes stays.

        Raises:
            PromptError: as `open`; the sequence is unchanged.
        """
        before = int(self._state[slot, _LENGTH])
        after = before + len(tokens)
        if after > self._max_positions:
            reason = f"the draft model's context has {self._max_positions} tokens"
            raise PromptError("tokens", after, reason)
        self._token_ids[slot, before:after] = tokens
        wrong = _first_invalid(self._token_ids, int(slot), before, after, self._vocab_size)
        if wrong >= 0:
            reason = f"the draft model's vocabulary has {self._vocab_size}"
            raise PromptError("tokens", int(tokens[wrong - before]), reason)
        self._state[slot, _LENGTH] = after

    def close(self, slot: int) -> None:
        """Free the slot."""
        self._state[slot] = 0

    def token_ids(self, slot: int) -> np.ndarray:
        """[length] int32 view of the slot's committed tokens; empty for a closed slot."""
        return self._token_ids[slot, : self._state[slot, _LENGTH]]

    def room(self, slot: int) -> int:
        """Positions left after the sequence: the maximum depth of its tree."""
        return self._max_positions - int(self._state[slot, _LENGTH])

    def pending(self, slot: int) -> int:
        """Number of committed tokens still to run before candidates are known."""
        return int(_pending(self._state, int(slot), self._window))

    # -- steps ------------------------------------------------------------------------------

    def plan_prefix(self, most_rows: int) -> PrefixTokens:
        """Choose pending tokens to run next, slots with the fewest first, so that few slots wait.

        Returns:
            At most `most_rows` tokens; views that the next call overwrites.
        """
        prefix = self._prefix
        count = _plan_prefix(self._state, self._window, most_rows, prefix.slots, prefix.counts)
        return PrefixTokens(prefix.slots[:count], prefix.counts[:count])

    def fill(self, prefix: PrefixTokens, nodes: TreeNodes) -> StepSize:
        """Write a step's inputs to `arrays` and mark its committed tokens as computed.

        Sequences, tokens and samples come in the order of the arguments, prefixes first. There is a
        sample after the last token of each sequence without further pending tokens, and after each
        tree node.
        """
        size = StepSize(
            *_fill(
                prefix, nodes, self._state, self._token_ids, self.block_tables, self._sampling,
                self._limits, self.arrays, self.ready,
            )
        )  # fmt: skip
        assert size.rows >= 0, _FILL_ERRORS[size.rows]
        return size

    def keep(self, slots: np.ndarray, moves: Moves) -> None:
        """Move the KV of tree nodes that stay when roots move down their trees. The nodes on a
        slot's path become part of its committed prefix, and its tree window begins after them.

        Args:
            slots: [R] int32 slots of the commits; `append` was called with the committed tokens.
            moves: result of `TreePool.commit`.
        """
        failed = _keep(
            self._pieces, self.block_tables, self._state, fit(slots, INT32), moves.sources,
            moves.targets, moves.counts, moves.paths, self.capacity,
        )  # fmt: skip
        assert failed < 0, f"slot {slots[failed]}: a move outside the window or beyond the sequence"


def num_columns(window: int, max_positions: int) -> int:
    """Number of blocks of a slot."""
    return -(-(_capacity(window, max_positions) + WINDOW) // BLOCK)


def _capacity(window: int, max_positions: int) -> int:
    """Maximum tokens of sink and prefix: one spare block, so that `window` remain after a drop."""
    return min(2 * BLOCK + window, max_positions)


def _step_arrays(most_rows: int, slots: int) -> StepArrays:
    def integers(count: int) -> np.ndarray:
        return np.zeros(count, np.int32)

    return StepArrays(
        token_ids=integers(most_rows),
        positions=integers(most_rows),
        slot_mapping=integers(most_rows),
        slots=integers(slots),
        starts=integers(slots),
        counts=integers(slots),
        is_tree=np.zeros(slots, np.uint8),
        bases=integers(slots),
        ancestors=np.zeros(most_rows, np.uint64),
        sample_rows=integers(most_rows),
        sample_positions=integers(most_rows),
        temperatures=np.zeros(most_rows, np.float32),
        seeds=np.zeros(most_rows, np.uint64),
        sample_indices=integers(most_rows),
    )


@njit(**BORROWING)
def _first_invalid(tokens: np.ndarray, slot: int, first: int, last: int, vocab_size: int) -> int:
    """Index of the first invalid token id, -1 if all are valid."""
    for place in range(first, last):
        if tokens[slot, place] < 0 or tokens[slot, place] >= vocab_size:
            return place
    return -1


@njit(**BORROWING)
def _pending(state: np.ndarray, slot: int, window: int) -> int:
    length, computed = state[slot, _LENGTH], state[slot, _COMPUTED]
    sink = max(0, min(length, BLOCK) - computed)
    return sink + min(length - computed - sink, window)


@njit(**BORROWING)
def _skip_beyond_window(state: np.ndarray, slot: int, window: int) -> None:
    """If the sink is computed and more than `window` tokens are pending, skip those before the last
    `window`, which attend to none of them."""
    length, computed = state[slot, _LENGTH], state[slot, _COMPUTED]
    if computed >= BLOCK and length - computed > window:
        state[slot, _COMPUTED], state[slot, _FILLED] = length - window, BLOCK


@njit(**BORROWING)
def _make_room(
    block_tables: np.ndarray, state: np.ndarray, slot: int, rows: int, capacity: int
) -> None:
    """Drop the prefix's oldest blocks until `rows` more tokens fit."""
    filled = state[slot, _FILLED]
    blocks = max(0, filled + rows - capacity + BLOCK - 1) // BLOCK
    columns = block_tables.shape[1]
    for _ in range(blocks):
        oldest = block_tables[slot, 1]
        for column in range(1, columns - 1):
            block_tables[slot, column] = block_tables[slot, column + 1]
        block_tables[slot, columns - 1] = oldest
    state[slot, _FILLED] = filled - blocks * BLOCK


@njit(**BORROWING)
def _plan_prefix(
    state: np.ndarray, window: int, most_rows: int, slots: np.ndarray, counts: np.ndarray
) -> int:
    """See `KVLayout.plan_prefix`; returns the number of slots. Insertion sort, since few slots have
    pending tokens."""
    number = 0
    for slot in range(len(state)):
        count = _pending(state, slot, window)
        if count == 0:
            continue
        place = number
        while place > 0 and counts[place - 1] > count:
            slots[place], counts[place] = slots[place - 1], counts[place - 1]
            place -= 1
        slots[place], counts[place] = slot, count
        number += 1
    left = most_rows
    for place in range(number):
        if left <= 0:
            return place
        counts[place] = min(counts[place], left)
        left -= counts[place]
    return number


_FILL_ERRORS = {
    -1: "more rows than a step has",
    -2: "a prefix has fewer pending tokens",
    -3: "a tree whose root was not run",
    -4: "a tree's rows do not follow each other in its window",
    -5: "a tree is deeper than the model's context",
}


@njit(**BORROWING)
def _fill(
    prefix: PrefixTokens,
    nodes: TreeNodes,
    state: np.ndarray,
    tokens: np.ndarray,
    block_tables: np.ndarray,
    sampling: Sampling,
    limits: tuple[int, int, int],
    out: StepArrays,
    ready: np.ndarray,
) -> tuple[int, int, int, int]:
    """See `KVLayout.fill`; returns a `StepSize`, or a key of `_FILL_ERRORS` as its first item."""
    window, capacity, max_positions = limits
    row = sequence = sample = 0
    if prefix.counts.sum() + nodes.counts.sum() > len(out.token_ids):
        return -1, 0, 0, 0
    for i in range(len(prefix.slots)):
        slot, count = prefix.slots[i], prefix.counts[i]
        if count < 1 or count > _pending(state, slot, window):
            return -2, 0, 0, 0
        _skip_beyond_window(state, slot, window)
        _make_room(block_tables, state, slot, count, capacity)
        start = state[slot, _FILLED]
        out.slots[sequence], out.starts[sequence] = slot, start
        out.counts[sequence], out.bases[sequence] = count, start
        out.is_tree[sequence] = 0
        for place in range(start, start + count):
            position = state[slot, _COMPUTED]
            out.token_ids[row], out.positions[row] = tokens[slot, position], position
            out.slot_mapping[row] = block_tables[slot, place // BLOCK] * BLOCK + place % BLOCK
            out.ancestors[row] = 0
            row += 1
            state[slot, _COMPUTED], state[slot, _FILLED] = position + 1, place + 1
            _skip_beyond_window(state, slot, window)  # at the end of the sink
        if state[slot, _COMPUTED] == state[slot, _LENGTH]:
            out.sample_rows[sample], out.sample_positions[sample] = row - 1, state[slot, _LENGTH]
            _copy_sampling(sampling, slot, out, sample)
            ready[sample] = slot
            sample += 1
        sequence += 1
    num_ready, node = sample, 0
    for i in range(len(nodes.slots)):
        slot, count = nodes.slots[i], nodes.counts[i]
        length, base = state[slot, _LENGTH], state[slot, _FILLED]
        if count < 1 or length == 0 or state[slot, _COMPUTED] != length:
            return -3, 0, 0, 0
        first = nodes.places[node]
        if first < 0 or first + count > WINDOW:
            return -4, 0, 0, 0
        out.slots[sequence], out.starts[sequence] = slot, base + first
        out.counts[sequence], out.bases[sequence] = count, base
        out.is_tree[sequence] = 1
        for within in range(count):
            if nodes.places[node] != first + within:
                return -4, 0, 0, 0
            place, position = base + first + within, length - 1 + nodes.depths[node]
            if position >= max_positions:
                return -5, 0, 0, 0
            out.token_ids[row], out.positions[row] = nodes.tokens[node], position
            out.slot_mapping[row] = block_tables[slot, place // BLOCK] * BLOCK + place % BLOCK
            out.ancestors[row] = nodes.ancestors[node]
            out.sample_rows[sample], out.sample_positions[sample] = row, position + 1
            _copy_sampling(sampling, slot, out, sample)
            row, sample, node = row + 1, sample + 1, node + 1
        sequence += 1
    return row, sequence, sample, num_ready


@njit(**BORROWING)
def _copy_sampling(sampling: Sampling, slot: int, out: StepArrays, sample: int) -> None:
    out.temperatures[sample] = sampling.temperatures[slot]
    out.seeds[sample] = sampling.seeds[slot]
    out.sample_indices[sample] = sampling.indices[slot]


@njit(**BORROWING)
def _keep(
    pieces: np.ndarray,
    block_tables: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    counts: np.ndarray,
    paths: np.ndarray,
    capacity: int,
) -> int:
    """See `KVLayout.keep`. Returns -1, or the index of the first commit with an invalid move, which
    is not applied."""
    first = 0
    for i in range(len(slots)):
        slot, last = slots[i], first + counts[i]
        computed, base = state[slot, _COMPUTED] + paths[i], state[slot, _FILLED]
        if paths[i] > counts[i] or computed > state[slot, _LENGTH]:
            return i
        for move in range(first, last):
            target, source = targets[move], sources[move]
            if target < 0 or target > source or source >= WINDOW:
                return i
        for move in range(first, last):  # ascending, so no source is overwritten before it is read
            if sources[move] != targets[move]:
                _copy(pieces, block_tables, slot, base + sources[move], base + targets[move])
        state[slot, _COMPUTED], state[slot, _FILLED] = computed, base + paths[i]
        _make_room(block_tables, state, slot, 0, capacity)
        first = last
    return -1


@njit(**BORROWING)
def _copy(
    pieces: np.ndarray, block_tables: np.ndarray, slot: int, source: int, target: int
) -> None:
    """Copy K and V of one KV place, all layers."""
    old, new = block_tables[slot, source // BLOCK], block_tables[slot, target // BLOCK]
    source, target = source % BLOCK, target % BLOCK
    for piece in range(pieces.shape[1]):
        for element in range(pieces.shape[3]):
            pieces[new, piece, target, element] = pieces[old, piece, source, element]
