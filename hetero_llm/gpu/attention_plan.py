"""Cuts a step's attention into pieces of equal length: the work list of `kernels.paged_attention`.

Compiled for the host by numba: a verify step waits for it. Positions are known on the host even
when tokens are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS

_WAVES = (1, 2, 3, 4, 6)
_ITEM_COST = 96
"""What starting a work item costs, in keys read by one program (a guess; only ratios matter)."""
_GOOD_ENOUGH = 1.05  # times the even share


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What the device can hold and likes.

    tile_rows: query rows of a tile. key_step: pieces begin at multiples of it. parallel: items that
    run at once (resident programs / KV heads). max_pieces: pieces that the workspace holds; 0: cut
    nothing. min_keys: shortest piece worth its merge.
    """

    tile_rows: int
    key_step: int
    parallel: int
    max_pieces: int
    min_keys: int

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        return self.tile_rows, self.key_step, self.parallel, self.max_pieces, self.min_keys

    def most_items(self, counts: np.ndarray) -> int:
        """Items that a step with these rows can have at most."""
        return int((-(-counts // self.tile_rows)).sum()) + self.max_pieces


@njit(cache=True, nogil=True)
def plan_into(
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    trees: np.ndarray,
    chosen: np.ndarray,
    window: int,
    limits: tuple[int, int, int, int, int],
    items: np.ndarray,
    cut_rows: np.ndarray,
) -> tuple[int, int]:
    """Writes the work list of one window.

    Args:
        slots, starts, counts: [S] int32 slot, keys in the cache before the step, rows of the step.
        trees: [S] bool, rows form a draft tree: every one may see any of them.
        chosen: [S] bool, sequences that the list covers.
        window: 0 for none.
        limits: `PlanLimits.as_tuple`.
        items: [>= most_items, 8] int32, see `WORK_FIELDS`; written.
        cut_rows: [>= rows, 4] int32, see `CUT_ROW_FIELDS`; written.

    Returns:
        How many items and cut rows there are.
    """
    tile_rows, key_step, parallel, max_pieces, min_keys = limits
    num_tiles = 0
    for sequence in range(len(slots)):
        if chosen[sequence]:
            num_tiles += (counts[sequence] + tile_rows - 1) // tile_rows
    tiles = np.empty((num_tiles, 5), np.int64)  # slot, row, rows, begin, end
    steps = np.empty(num_tiles, np.int64)
    tile = row = 0
    for sequence in range(len(slots)):
        start, count = starts[sequence], counts[sequence]
        if chosen[sequence]:
            for offset in range(0, count, tile_rows):
                rows = min(tile_rows, count - offset)
                position, end = start + offset, start + offset + rows
                if trees[sequence]:
                    position, end = start, start + count
                begin = 0
                if window > 0:
                    begin = max(position - window + 1, 0) // key_step * key_step
                tiles[tile, 0], tiles[tile, 1], tiles[tile, 2] = slots[sequence], row + offset, rows
                tiles[tile, 3], tiles[tile, 4] = begin, end
                steps[tile] = (end - begin + key_step - 1) // key_step
                tile += 1
        row += count
    pieces = _cut(steps, parallel, max_pieces, min_keys // key_step, _ITEM_COST / key_step)
    num_items = num_cut = piece = 0
    for tile in range(num_tiles):
        size = (steps[tile] + pieces[tile] - 1) // pieces[tile]
        count = (steps[tile] + size - 1) // size  # rounding up may have left the last one empty
        slot, row, rows, begin, end = tiles[tile]
        if count > 1:
            for within in range(rows):
                cut_rows[num_cut, 0], cut_rows[num_cut, 1] = row + within, piece
                cut_rows[num_cut, 2], cut_rows[num_cut, 3] = count, within
                num_cut += 1
        for part in range(count):
            first = begin + part * size * key_step
            last = min(first + size * key_step, end)
            item = items[num_items]
            item[0], item[1], item[2], item[3], item[4] = slot, row, rows, first, last
            item[5] = piece if count > 1 else -1
            num_items += 1
            if count > 1:
                piece += 1
    return num_items, num_cut


@njit(cache=True, nogil=True)
def _cut(
    steps: np.ndarray, parallel: int, max_pieces: int, shortest: int, cost: float
) -> np.ndarray:
    """[tiles] pieces of each tile: the cut with the shortest estimated time."""
    best = np.ones(len(steps), np.int64)
    if max_pieces == 0 or len(steps) == 0:
        return best
    total = steps.sum()
    pieces = np.empty(len(steps), np.int64)
    best_time = _time(steps, best, parallel, cost)
    tried = 0
    for waves in _WAVES:
        size = max(shortest, 1, (total + parallel * waves - 1) // (parallel * waves))
        if size == tried or best_time <= _GOOD_ENOUGH * (total / parallel + cost):
            break
        tried = size
        used = 0
        for tile in range(len(steps)):
            pieces[tile] = (steps[tile] + size - 1) // size
            if pieces[tile] > 1:
                used += pieces[tile]
        if used > max_pieces:
            break
        time = _time(steps, pieces, parallel, cost)
        if time < best_time:
            best[:] = pieces
            best_time = time
    return best


@njit(cache=True, nogil=True)
def _time(steps: np.ndarray, pieces: np.ndarray, parallel: int, cost: float) -> float:
    """Time of the busiest program, in key steps: programs take items with a fixed stride."""
    lanes = np.zeros(parallel)
    lane = 0
    for tile in range(len(steps)):
        length = (steps[tile] + pieces[tile] - 1) // pieces[tile] + cost
        for _ in range(pieces[tile]):
            lanes[lane] += length
            lane = (lane + 1) % parallel
    return lanes.max()


def plan_work(
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    is_tree: np.ndarray | None,
    window: int | None,
    limits: PlanLimits,
) -> tuple[np.ndarray, np.ndarray]:
    """The items [W, 8] and cut rows [C, 4] of a step, see `plan_into`; is_tree None: no trees."""
    none = np.zeros(len(slots), np.bool_)
    items = np.zeros((limits.most_items(counts), WORK_FIELDS), np.int32)
    cut_rows = np.zeros((int(counts.sum()), CUT_ROW_FIELDS), np.int32)
    trees = none if is_tree is None else is_tree
    num_items, num_cut = plan_into(
        slots, starts, counts, trees, ~none, window or 0, limits.as_tuple(), items, cut_rows
    )
    return items[:num_items], cut_rows[:num_cut]
