"""The draft model's KV pages, and the rows of its steps laid out over them.

Every slot owns a fixed set of blocks, in the order of its row of `tables`: the sink (the text's
first block), then its trunk (the last tokens of the committed text), then `WINDOW` places for the
tree. KV places are no positions: where the trunk would outgrow its room its oldest block goes to
the end of the row and everything behind it moves up by a block, tree included. Keys were rotated by
their positions, so nothing is computed again.

    sink | trunk, oldest block first | tree: WINDOW places, the first behind the last trunk token
    0    | BLOCK ...                 | filled ... filled + WINDOW

A text's tokens wait (`pending`) until a step runs them. A long text is not run as a whole: behind
the sink only its last `window` tokens are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from hetero_llm.core.errors import PromptError
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW, Moves
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.spec_decode.draft_model.tree_arrays import INT32, fit
from hetero_llm.spec_decode.lookahead.suffix_trie import BORROWING

BLOCK = 16

_LENGTH, _DONE, _FILLED = range(3)


class Trunk(NamedTuple):
    """Committed tokens to run: `counts` [N] int32 of `slots` [N] int32, none twice."""

    slots: np.ndarray
    counts: np.ndarray


class Branches(NamedTuple):
    """Tree nodes to run, those of a slot together: what `Forest.choose` returns begins with them.
    Arrays are int32 but for `ancestors`, which is uint64.

    Attributes:
        slots, counts: [G] rows of each slot; no slot twice.
        tokens: [R]. depths: [R] below the root: 1 for its children.
        places: [R] in the slot's tree window, the free ones in order.
        ancestors: [R] bits of the window places that a row sees, its own included.
    """

    slots: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    depths: np.ndarray
    places: np.ndarray
    ancestors: np.ndarray


class Sampling(NamedTuple):
    """[slots] float32 temperatures (0: greedy), uint64 seeds, int32 sample indices."""

    temperatures: np.ndarray
    seeds: np.ndarray
    indices: np.ndarray


class StepArrays(NamedTuple):
    """A step's rows and the draws after them: see `cpu.executor.StepInput` and `StepSamples`."""

    token_ids: np.ndarray
    positions: np.ndarray
    cache_rows: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    is_tree: np.ndarray
    bases: np.ndarray
    ancestors: np.ndarray
    draw_rows: np.ndarray
    draw_positions: np.ndarray
    temperatures: np.ndarray
    seeds: np.ndarray
    sample_indices: np.ndarray


class StepSize(NamedTuple):
    """How much of `StepArrays` a step fills. ready: trunk draws, which come before the others."""

    rows: int
    sequences: int
    draws: int
    ready: int


def no_branches() -> Branches:
    """None at all."""
    none = np.zeros(0, np.int32)
    return Branches(none, none, none, none, none, np.zeros(0, np.uint64))


class Pages:
    """KV of `slots` sequences, their texts, and how far each has been run. One thread at a time.

    Args:
        shape: of the cache; blocks of `BLOCK` tokens.
        window: tokens of a text that stay visible behind its sink, a multiple of `BLOCK`.
        max_positions: tokens of the longest text.
        vocab_size: tokens of this or above are refused.
        most_rows: of a step.

    Attributes:
        cache: the KV cache. tables: [slots, columns] int32 block ids.
        capacity: most tokens that sink and trunk hold; `window` of them are the last ones.
        arrays: of the step that `fill` laid out last; ready: [slots] int32 slots whose text it
            brings to its end.
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
        self.tables = np.arange(slots * columns, dtype=np.int32).reshape(slots, columns)
        self.cache = PagedKVCache(shape, slots * columns, torch.device("cpu"))
        # [blocks, layers * 2, BLOCK, kv_heads * head_dim], whatever the type: for copies.
        pieces = self.cache.data.view(torch.int16).numpy()
        self._pieces = pieces.reshape(slots * columns, shape.num_layers * 2, BLOCK, -1)
        self._text = np.zeros((slots, max_positions), np.int32)
        self._state = np.zeros((slots, 3), np.int32)
        self._sampling = Sampling(
            np.zeros(slots, np.float32), np.zeros(slots, np.uint64), np.zeros(slots, np.int32)
        )
        self._trunk = Trunk(np.zeros(slots, np.int32), np.zeros(slots, np.int32))
        self.arrays = _step_arrays(most_rows, slots)
        self.ready = np.zeros(slots, np.int32)
        self._limits = (window, self.capacity, max_positions)
        self._compile()

    def _compile(self) -> None:
        """Goes once through every compiled function, so that no sequence waits for the compiler."""
        self.open(0, np.zeros(1, np.int32), temperature=0.0, seed=0, sample_index=0)
        self.fill(self.plan_trunk(1), no_branches())
        none = np.zeros(1, np.int32)
        self.keep(none, Moves(none, none, none, none, np.zeros(1, np.bool_)))
        self.pending(0)
        self.close(0)

    # -- texts ------------------------------------------------------------------------------

    def open(
        self, slot: int, tokens: np.ndarray, *, temperature: float, seed: int, sample_index: int
    ) -> None:
        """Starts a sequence; whatever the slot held is forgotten.

        Args:
            tokens: [n] its text so far.
            temperature, seed, sample_index: of its draws, see `sampling/noise.py`; temperature 0
                is greedy. seed: unsigned, 64 bits.

        Raises:
            PromptError: a token beyond the vocabulary, or too many; the slot is left empty.
        """
        self._state[slot] = 0
        sampling = self._sampling
        sampling.temperatures[slot], sampling.seeds[slot] = temperature, seed
        sampling.indices[slot] = sample_index
        self.append(slot, tokens)

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Adds committed tokens to a text.

        Raises:
            PromptError: as `open`; the text stays as it was.
        """
        before = int(self._state[slot, _LENGTH])
        after = before + len(tokens)
        if after > self._max_positions:
            reason = f"the draft model's context has {self._max_positions} tokens"
            raise PromptError("tokens", after, reason)
        self._text[slot, before:after] = tokens
        wrong = _first_wrong(self._text, int(slot), before, after, self._vocab_size)
        if wrong >= 0:
            reason = f"the draft model's vocabulary has {self._vocab_size}"
            raise PromptError("tokens", int(tokens[wrong - before]), reason)
        self._state[slot, _LENGTH] = after

    def close(self, slot: int) -> None:
        """Forgets a sequence."""
        self._state[slot] = 0

    def length(self, slot: int) -> int:
        """Tokens of the text."""
        return int(self._state[slot, _LENGTH])

    def room(self, slot: int) -> int:
        """Positions left behind the text: a tree may be as deep."""
        return self._max_positions - int(self._state[slot, _LENGTH])

    def pending(self, slot: int) -> int:
        """Rows still to run until the tokens that may follow the text are known."""
        return int(_pending(self._state, int(slot), self._window))

    # -- steps ------------------------------------------------------------------------------

    def plan_trunk(self, most_rows: int) -> Trunk:
        """What of the pending tokens to run next: shortest first, so that few slots wait.

        Returns:
            At most `most_rows` rows; views that the next call overwrites.
        """
        trunk = self._trunk
        count = _plan_trunk(self._state, self._window, most_rows, trunk.slots, trunk.counts)
        return Trunk(trunk.slots[:count], trunk.counts[:count])

    def fill(self, trunk: Trunk, branches: Branches) -> StepSize:
        """Lays a step out in `arrays` and takes its trunk rows for done.

        Sequences, rows and draws come in the order of the arguments, trunk first. There is a draw
        after the last row of every text that comes to its end, and after every branch row.
        """
        size = StepSize(
            *_fill(
                trunk, branches, self._state, self._text, self.tables, self._sampling, self._limits,
                self.arrays, self.ready,
            )
        )  # fmt: skip
        assert size.rows >= 0, _MISUSE[size.rows]
        return size

    def keep(self, slots: np.ndarray, moves: Moves) -> None:
        """Moves KV of tree rows that stay when roots move down their trees.

        Args:
            slots: [R] int32 whose commits the moves are of; the committed tokens are in the texts
                (`append`). The rows of a slot's path become the trunk's, and its window begins
                behind them then.
        """
        failed = _keep(
            self._pieces, self.tables, self._state, fit(slots, INT32), moves.sources,
            moves.targets, moves.counts, moves.paths, self.capacity,
        )  # fmt: skip
        assert failed < 0, f"slot {slots[failed]}: a move outside the window or beyond the text"


def num_columns(window: int, max_positions: int) -> int:
    """Blocks of a slot."""
    return -(-(_capacity(window, max_positions) + WINDOW) // BLOCK)


def _capacity(window: int, max_positions: int) -> int:
    """Tokens of sink and trunk: with a block of spare, so that `window` are left after a drop."""
    return min(2 * BLOCK + window, max_positions)


def _step_arrays(most_rows: int, slots: int) -> StepArrays:
    def integers(count: int) -> np.ndarray:
        return np.zeros(count, np.int32)

    return StepArrays(
        token_ids=integers(most_rows),
        positions=integers(most_rows),
        cache_rows=integers(most_rows),
        slots=integers(slots),
        starts=integers(slots),
        counts=integers(slots),
        is_tree=np.zeros(slots, np.uint8),
        bases=integers(slots),
        ancestors=np.zeros(most_rows, np.uint64),
        draw_rows=integers(most_rows),
        draw_positions=integers(most_rows),
        temperatures=np.zeros(most_rows, np.float32),
        seeds=np.zeros(most_rows, np.uint64),
        sample_indices=integers(most_rows),
    )


@njit(**BORROWING)
def _first_wrong(text: np.ndarray, slot: int, first: int, last: int, vocab_size: int) -> int:
    """Place of the first token that is none, -1 if all are."""
    for place in range(first, last):
        if text[slot, place] < 0 or text[slot, place] >= vocab_size:
            return place
    return -1


@njit(**BORROWING)
def _pending(state: np.ndarray, slot: int, window: int) -> int:
    length, done = state[slot, _LENGTH], state[slot, _DONE]
    sink = max(0, min(length, BLOCK) - done)
    return sink + min(length - done - sink, window)


@njit(**BORROWING)
def _skip(state: np.ndarray, slot: int, window: int) -> None:
    """Behind the sink, goes on with the last `window` tokens if more are pending: all others are
    out of their sight."""
    length, done = state[slot, _LENGTH], state[slot, _DONE]
    if done >= BLOCK and length - done > window:
        state[slot, _DONE], state[slot, _FILLED] = length - window, BLOCK


@njit(**BORROWING)
def _make_room(tables: np.ndarray, state: np.ndarray, slot: int, rows: int, capacity: int) -> None:
    """Drops the trunk's oldest blocks until so many rows fit."""
    filled = state[slot, _FILLED]
    blocks = max(0, filled + rows - capacity + BLOCK - 1) // BLOCK
    columns = tables.shape[1]
    for _ in range(blocks):
        oldest = tables[slot, 1]
        for column in range(1, columns - 1):
            tables[slot, column] = tables[slot, column + 1]
        tables[slot, columns - 1] = oldest
    state[slot, _FILLED] = filled - blocks * BLOCK


@njit(**BORROWING)
def _plan_trunk(
    state: np.ndarray, window: int, most_rows: int, slots: np.ndarray, counts: np.ndarray
) -> int:
    """Number of slots with rows; an insertion sort, for few slots wait at a time."""
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


_MISUSE = {
    -1: "more rows than a step has",
    -2: "a trunk has fewer pending tokens",
    -3: "a tree whose root was not run",
    -4: "a tree's rows do not follow each other in its window",
    -5: "a tree is deeper than the model's context",
}


@njit(**BORROWING)
def _fill(
    trunk: Trunk,
    branches: Branches,
    state: np.ndarray,
    text: np.ndarray,
    tables: np.ndarray,
    sampling: Sampling,
    limits: tuple[int, int, int],
    out: StepArrays,
    ready: np.ndarray,
) -> tuple[int, int, int, int]:
    """`StepSize`, or in place of the rows a key of `_MISUSE`."""
    window, capacity, max_positions = limits
    row = sequence = draw = 0
    if trunk.counts.sum() + branches.counts.sum() > len(out.token_ids):
        return -1, 0, 0, 0
    for i in range(len(trunk.slots)):
        slot, count = trunk.slots[i], trunk.counts[i]
        if count < 1 or count > _pending(state, slot, window):
            return -2, 0, 0, 0
        _skip(state, slot, window)
        _make_room(tables, state, slot, count, capacity)
        start = state[slot, _FILLED]
        out.slots[sequence], out.starts[sequence] = slot, start
        out.counts[sequence], out.bases[sequence] = count, start
        out.is_tree[sequence] = 0
        for place in range(start, start + count):
            position = state[slot, _DONE]
            out.token_ids[row], out.positions[row] = text[slot, position], position
            out.cache_rows[row] = tables[slot, place // BLOCK] * BLOCK + place % BLOCK
            out.ancestors[row] = 0
            row += 1
            state[slot, _DONE], state[slot, _FILLED] = position + 1, place + 1
            _skip(state, slot, window)  # where the sink ends
        if state[slot, _DONE] == state[slot, _LENGTH]:
            out.draw_rows[draw], out.draw_positions[draw] = row - 1, state[slot, _LENGTH]
            _copy_sampling(sampling, slot, out, draw)
            ready[draw] = slot
            draw += 1
        sequence += 1
    num_ready, node = draw, 0
    for i in range(len(branches.slots)):
        slot, count = branches.slots[i], branches.counts[i]
        length, base = state[slot, _LENGTH], state[slot, _FILLED]
        if count < 1 or length == 0 or state[slot, _DONE] != length:
            return -3, 0, 0, 0
        first = branches.places[node]
        if first < 0 or first + count > WINDOW:
            return -4, 0, 0, 0
        out.slots[sequence], out.starts[sequence] = slot, base + first
        out.counts[sequence], out.bases[sequence] = count, base
        out.is_tree[sequence] = 1
        for within in range(count):
            if branches.places[node] != first + within:
                return -4, 0, 0, 0
            place, position = base + first + within, length - 1 + branches.depths[node]
            if position >= max_positions:
                return -5, 0, 0, 0
            out.token_ids[row], out.positions[row] = branches.tokens[node], position
            out.cache_rows[row] = tables[slot, place // BLOCK] * BLOCK + place % BLOCK
            out.ancestors[row] = branches.ancestors[node]
            out.draw_rows[draw], out.draw_positions[draw] = row, position + 1
            _copy_sampling(sampling, slot, out, draw)
            row, draw, node = row + 1, draw + 1, node + 1
        sequence += 1
    return row, sequence, draw, num_ready


@njit(**BORROWING)
def _copy_sampling(sampling: Sampling, slot: int, out: StepArrays, draw: int) -> None:
    out.temperatures[draw] = sampling.temperatures[slot]
    out.seeds[draw] = sampling.seeds[slot]
    out.sample_indices[draw] = sampling.indices[slot]


@njit(**BORROWING)
def _keep(
    pieces: np.ndarray,
    tables: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    counts: np.ndarray,
    paths: np.ndarray,
    capacity: int,
) -> int:
    """See `Pages.keep`. Returns -1, or the first commit whose moves cannot be; it is left out."""
    first = 0
    for i in range(len(slots)):
        slot, last = slots[i], first + counts[i]
        done, base = state[slot, _DONE] + paths[i], state[slot, _FILLED]
        if paths[i] > counts[i] or done > state[slot, _LENGTH]:
            return i
        for move in range(first, last):
            target, source = targets[move], sources[move]
            if target < 0 or target > source or source >= WINDOW:
                return i
        for move in range(first, last):  # ascending: nothing is overwritten that is still read
            if sources[move] != targets[move]:
                _copy(pieces, tables, slot, base + sources[move], base + targets[move])
        state[slot, _DONE], state[slot, _FILLED] = done, base + paths[i]
        _make_room(tables, state, slot, 0, capacity)
        first = last
    return -1


@njit(**BORROWING)
def _copy(pieces: np.ndarray, tables: np.ndarray, slot: int, source: int, target: int) -> None:
    """Copies K and V of a place in all layers."""
    old, new = tables[slot, source // BLOCK], tables[slot, target // BLOCK]
    source, target = source % BLOCK, target % BLOCK
    for piece in range(pieces.shape[1]):
        for element in range(pieces.shape[3]):
            pieces[new, piece, target, element] = pieces[old, piece, source, element]
