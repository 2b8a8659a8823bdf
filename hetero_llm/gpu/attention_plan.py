"""Cuts a step's attention into pieces of equal length: the work list of `kernels.paged_attention`.

Plain numpy on the host; positions are known there even when tokens are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS

_WAVES = (1, 2, 3, 4, 6)
_GOOD_ENOUGH = 1.05  # times the even share
_ITEM_COST = 96
"""What starting a work item costs, in keys read by one program (a guess; only ratios matter)."""


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


def plan_work(
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    first_rows: np.ndarray,
    is_tree: np.ndarray | None,
    window: int | None,
    limits: PlanLimits,
) -> tuple[np.ndarray, np.ndarray]:
    """The items of a step, pieces as equal as can be, and the rows of tiles that are cut.

    Args:
        slots, starts, counts, first_rows: [S] int32 of sequences with at least one row: slot, keys
            in the cache before the step, rows of the step, index of the first row.
        is_tree: [S] bool, rows form a draft tree (every row may see any of them); None: none do.
        window: as in the kernel.

    Returns:
        [W, 8] int32, see `WORK_FIELDS`; [C, 4] int32, see `CUT_ROW_FIELDS`.
    """
    per_sequence = -(-counts // limits.tile_rows)
    if len(counts) == int(per_sequence.sum()):
        slot, row, rows = slots, first_rows, counts
        end = starts + counts
        position = starts
    else:
        sequence = np.repeat(np.arange(len(counts)), per_sequence)
        within = np.arange(len(sequence)) - np.repeat(
            np.cumsum(per_sequence) - per_sequence, per_sequence
        )
        offset = within * limits.tile_rows
        slot = slots[sequence]
        row = first_rows[sequence] + offset
        rows = np.minimum(counts[sequence] - offset, limits.tile_rows)
        position = starts[sequence] + offset
        end = position + rows
        if is_tree is not None:
            end = np.where(is_tree[sequence], starts[sequence] + counts[sequence], end)
            position = np.where(is_tree[sequence], starts[sequence], position)
    step = limits.key_step
    begin = np.zeros_like(end)
    if window is not None:
        begin = np.maximum(position - window + 1, 0) // step * step
    steps = -(-(end - begin) // step)  # lengths in key steps
    pieces = _cut(steps, limits)
    size = -(-steps // pieces)
    pieces = -(-steps // size)  # rounding up may have left the last piece empty
    items = _items(slot, row, rows, begin, end, size * step, pieces)
    return items, _cut_rows(row, rows, pieces)


def _cut(steps: np.ndarray, limits: PlanLimits) -> np.ndarray:
    """[tiles] pieces of each tile: the cut with the shortest estimated time."""
    shortest = max(1, limits.min_keys // limits.key_step)
    cost = _ITEM_COST / limits.key_step
    total = int(steps.sum())
    best = np.ones_like(steps)
    if limits.max_pieces == 0:
        return best
    best_time = _time(steps, best, limits.parallel, cost)
    tried = 0
    for waves in _WAVES:
        size = max(shortest, -(-total // (limits.parallel * waves)))
        if size == tried or best_time <= _GOOD_ENOUGH * (total / limits.parallel + cost):
            break
        tried = size
        pieces = -(-steps // size)
        if int(pieces[pieces > 1].sum()) > limits.max_pieces:
            break
        time = _time(steps, pieces, limits.parallel, cost)
        if time < best_time:
            best, best_time = pieces, time
    return best


def _time(steps: np.ndarray, pieces: np.ndarray, parallel: int, cost: float) -> float:
    """Time of the busiest program, in key steps: programs take items with a fixed stride."""
    lengths = np.repeat(-(-steps // pieces), pieces) + cost
    lanes = np.zeros(-(-len(lengths) // parallel) * parallel)
    lanes[: len(lengths)] = lengths
    return float(lanes.reshape(-1, parallel).sum(axis=0).max())


def _items(
    slot: np.ndarray,
    row: np.ndarray,
    rows: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    length: np.ndarray,
    pieces: np.ndarray,
) -> np.ndarray:
    """Arguments: [tiles] each; `length` keys in a piece, the last one shorter."""
    total = int(pieces.sum())
    items = np.zeros((total, WORK_FIELDS), np.int32)
    if total == len(pieces):
        items[:, 0], items[:, 1], items[:, 2] = slot, row, rows
        items[:, 3], items[:, 4], items[:, 5] = begin, end, -1
        return items
    tile = np.repeat(np.arange(len(pieces)), pieces)
    within = np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    items[:, 0], items[:, 1], items[:, 2] = slot[tile], row[tile], rows[tile]
    first = begin[tile] + within * length[tile]
    items[:, 3] = first
    items[:, 4] = np.minimum(first + length[tile], end[tile])
    items[:, 5] = np.where(pieces[tile] > 1, _first_pieces(pieces)[tile] + within, -1)
    return items


def _cut_rows(row: np.ndarray, rows: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    cut = np.flatnonzero(pieces > 1)
    if len(cut) == 0:
        return np.zeros((0, CUT_ROW_FIELDS), np.int32)
    each = rows[cut]
    tile = np.repeat(cut, each)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(each) - each, each)
    return np.stack(
        (row[tile] + within, _first_pieces(pieces)[tile], pieces[tile], within), axis=1
    ).astype(np.int32)


def _first_pieces(pieces: np.ndarray) -> np.ndarray:
    """[tiles] index of each tile's first piece among those of cut tiles."""
    cut = np.where(pieces > 1, pieces, 0)
    return np.cumsum(cut) - cut
