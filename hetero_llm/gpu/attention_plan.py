"""Cuts a step's attention into pieces of equal length: the work list of `kernels.paged_attention`.

Neighbouring sequences whose block tables begin with the same blocks attend to those keys together:
one tile with the tokens of all reads them once, and each sequence has a tile of its own for the
keys behind them (Hydragen, Juravsky et al. 2024, arXiv 2402.05099).

Compiled for the host by numba: between two verify steps the device waits for it. It needs positions
only, which the host knows even while token ids are on the device alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS
from hetero_llm.utils.jit import njit

_WAVES = (1, 2, 3, 4, 6)
_ITEM_COST = 96
"""Cost of starting a work item, in keys read by one program (a guess; only ratios matter)."""
_GOOD_ENOUGH = 1.05  # times the even share
_SHARED_STEPS = 8
"""Fewest key steps that a group shares (512 keys where a step has 64). A row's piece, written and
read, moves the bytes of two keys for each query head: the two pieces of a row in a group of 64
matrix rows take 256 keys, and the tile more takes `_ITEM_COST`; two members have to save more."""
_Sequences = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Request slots, computed and scheduled tokens, whether a tree, whether chosen: see `plan_into`."""
_NO_BLOCK_TABLES = np.zeros((0, 0), np.int32)


class PlanLimits(NamedTuple):
    """Limits of a work list, from the tile's shape and the device; compiled code takes it as it is.

    Attributes:
        tile_rows: most tokens of a tile.
        key_step: pieces begin at multiples of it.
        parallel: items that run at once: resident programs / KV heads.
        max_pieces: pieces that the workspace holds; 0: no tile is cut.
        min_keys: shortest piece worth its merge.
    """

    tile_rows: int
    key_step: int
    parallel: int
    max_pieces: int
    min_keys: int

    def most_items(self, num_scheduled_tokens: np.ndarray) -> int:
        """Upper bound of the items of a step with these [S] numbers of tokens."""
        return int((-(-num_scheduled_tokens // self.tile_rows)).sum()) + self.max_pieces


@njit(cache=True, nogil=True)
def plan_into(
    request_slots: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    trees: np.ndarray,
    chosen: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    window: int,
    limits: PlanLimits,
    items: np.ndarray,
    cut_rows: np.ndarray,
) -> tuple[int, int]:
    """Writes the work list of one window.

    Args:
        request_slots, num_computed_tokens, num_scheduled_tokens: [S] int32, as in
            `SchedulerOutput`.
        trees: [S] bool, the sequence's tokens form a draft tree: each may see any of them.
        chosen: [S] bool, sequences that the list covers.
        block_tables: [slots, columns] int32 block ids; [0, 0]: no keys are read together.
        block_size: keys of a block.
        window: 0 for none. With one, no keys are read together.
        limits: of the tile shape and the device.
        items: [>= most_items, 8] int32, see `WORK_FIELDS`; written.
        cut_rows: [>= tokens, 8] int32, see `CUT_ROW_FIELDS`; written.

    Returns:
        Number of items, number of cut rows.
    """
    key_step, max_pieces = limits.key_step, limits.max_pieces
    parallel, tile_rows = limits.parallel, limits.tile_rows
    shortest, cost = limits.min_keys // key_step, _ITEM_COST / key_step
    sequences = request_slots, num_computed_tokens, num_scheduled_tokens, trees, chosen
    members = np.zeros(len(request_slots), np.int64)
    shared = np.zeros(len(request_slots), np.int64)
    tiles = _tiles(sequences, window, tile_rows, key_step, members, shared)
    pieces, time = _cut(tiles, key_step, parallel, max_pieces, shortest, cost)
    may_share = window == 0 and max_pieces > 0 and block_tables.size > 0
    if may_share and _share(sequences, block_tables, block_size, limits, members, shared):
        joined = _tiles(sequences, window, tile_rows, key_step, members, shared)
        others, other_time = _cut(joined, key_step, parallel, max_pieces, shortest, cost)
        if other_time < time:  # else the chip has room to read them again, and less to merge
            tiles, pieces = joined, others
    return _write(tiles, pieces, key_step, items, cut_rows)


@njit(cache=True, nogil=True)
def _share(
    sequences: _Sequences,
    block_tables: np.ndarray,
    block_size: int,
    limits: PlanLimits,
    members: np.ndarray,
    shared: np.ndarray,
) -> bool:
    """Finds groups of sequences that read keys together. Returns whether there are any.

    Args:
        sequences .. limits: see `plan_into`.
        members: [S] int64 zeros; written at a group's first sequence: its number of sequences.
        shared: [S] int64, written there too: the keys that they read together.
    """
    request_slots = sequences[0]
    tile_rows, key_step, max_pieces = limits.tile_rows, limits.key_step, limits.max_pieces
    unit = key_step // math.gcd(key_step, block_size) * block_size
    least = max(_SHARED_STEPS * key_step, limits.min_keys)
    left = max_pieces  # a group takes one for its shared tile and one for each member at least
    first = 0
    while first < len(request_slots) - 1 and left > 2:
        size = 1
        if block_tables[request_slots[first], 0] == block_tables[request_slots[first + 1], 0]:
            size, keys = _neighbours(
                first, sequences, block_tables, block_size, tile_rows, unit, least
            )
            size = min(size, left - 1)
            if size > 1:
                members[first], shared[first] = size, keys
                left -= size + 1
        first += size
    return left < max_pieces


@njit(cache=True, nogil=True)
def _neighbours(
    first: int,
    sequences: _Sequences,
    block_tables: np.ndarray,
    block_size: int,
    tile_rows: int,
    unit: int,
    least: int,
) -> tuple[int, int]:
    """Sequences of the group that begins with `first`, and the keys that they share.

    The tokens of all fit one tile and see every shared key. The shared keys end at a multiple of
    `unit`, before the own tokens of any member, and are at least `least`.
    """
    request_slots, num_computed_tokens, num_scheduled_tokens, _, chosen = sequences
    size, keys, rows = 1, 0, num_scheduled_tokens[first]
    table, most = request_slots[first], num_computed_tokens[first] // block_size
    if not chosen[first]:
        return size, keys
    for other in range(first + 1, len(request_slots)):
        rows += num_scheduled_tokens[other]
        most = min(most, num_computed_tokens[other] // block_size)
        if not chosen[other] or rows > tile_rows or most * block_size < least:
            break
        same = 0
        while same < most and block_tables[table, same] == block_tables[request_slots[other], same]:
            same += 1
        reach = same * block_size // unit * unit
        # A sequence that shares too little for the group to save more begins another group.
        if reach < least or reach * size <= keys * (size - 1):
            break
        size, keys, most = size + 1, reach, same
    return size, keys


@njit(cache=True, nogil=True)
def _tiles(
    sequences: _Sequences,
    window: int,
    tile_rows: int,
    key_step: int,
    members: np.ndarray,
    shared: np.ndarray,
) -> np.ndarray:
    """[tiles, 6] int64 request slot, first token, tokens, key begin, key end, index of the shared
    tile whose keys these tokens see besides (-1: none; a shared tile names itself).

    Shared tiles come first and those of their members last: items are dealt out with a fixed
    stride, and long ones that alternate with short ones could all fall to the same programs.
    `members` and `shared` are those of `_share`.
    """
    request_slots, num_computed_tokens, num_scheduled_tokens, trees, chosen = sequences
    num_tiles = 0
    for sequence in range(len(request_slots)):
        if chosen[sequence]:
            num_tiles += (num_scheduled_tokens[sequence] + tile_rows - 1) // tile_rows
        if members[sequence] > 0:
            num_tiles += 1
    tiles = np.empty((num_tiles, 6), np.int64)
    tile = row = 0
    late = num_tiles  # where those of members begin
    for sequence in range(len(request_slots)):
        size = members[sequence]
        if size > 0:
            tiles[tile, 0], tiles[tile, 1] = request_slots[sequence], row
            tokens = 0
            for member in range(sequence, sequence + size):
                tokens += num_scheduled_tokens[member]
                if num_scheduled_tokens[member] > 0:
                    late -= 1
            tiles[tile, 2] = tokens
            tiles[tile, 3], tiles[tile, 4], tiles[tile, 5] = 0, shared[sequence], tile
            tile += 1
        row += num_scheduled_tokens[sequence]
    row = keys = joined = 0  # joined: members of the present group from this sequence on
    group = -1
    for sequence in range(len(request_slots)):
        start, count = num_computed_tokens[sequence], num_scheduled_tokens[sequence]
        if members[sequence] > 0:
            joined, keys, group = members[sequence], shared[sequence], group + 1
        if chosen[sequence]:
            for offset in range(0, count, tile_rows):
                rows = min(tile_rows, count - offset)
                position, end = start + offset, start + offset + rows
                if trees[sequence]:
                    position, end = start, start + count
                begin, at = 0, tile
                if window > 0:
                    begin = max(position - window + 1, 0) // key_step * key_step
                if joined > 0:
                    begin, at = keys, late
                    late += 1
                else:
                    tile += 1
                tiles[at, 0], tiles[at, 1], tiles[at, 2] = (
                    request_slots[sequence],
                    row + offset,
                    rows,
                )
                tiles[at, 3], tiles[at, 4], tiles[at, 5] = begin, end, group if joined > 0 else -1
        row += count
        joined -= 1
    return tiles


@njit(cache=True, nogil=True)
def _write(
    tiles: np.ndarray, pieces: np.ndarray, key_step: int, items: np.ndarray, cut_rows: np.ndarray
) -> tuple[int, int]:
    """Writes the items and cut rows of `_tiles`, each cut into `pieces`. Returns both counts."""
    first_pieces = np.zeros((len(tiles), 2), np.int64)  # of shared tiles: first piece, pieces
    num_items = num_cut = piece = 0
    for tile in range(len(tiles)):
        slot, row, rows = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        begin, end, group = tiles[tile, 3], tiles[tile, 4], tiles[tile, 5]
        steps = (end - begin + key_step - 1) // key_step
        size = (steps + pieces[tile] - 1) // pieces[tile]
        count = (steps + size - 1) // size  # rounding up may have left the last one empty
        kept = count > 1 or group >= 0
        if group == tile:
            first_pieces[tile, 0], first_pieces[tile, 1] = piece, count
        elif kept:
            for within in range(rows):
                cut = cut_rows[num_cut]
                cut[0], cut[1], cut[2], cut[3] = row + within, piece, count, within
                cut[4], cut[5], cut[6], cut[7] = 0, 0, 0, 0
                if group >= 0:
                    cut[4], cut[5] = first_pieces[group, 0], first_pieces[group, 1]
                    cut[6] = row + within - tiles[group, 1]
                num_cut += 1
        for part in range(count):
            first = begin + part * size * key_step
            last = min(first + size * key_step, end)
            item = items[num_items]
            item[0], item[1], item[2], item[3], item[4] = slot, row, rows, first, last
            item[5] = piece if kept else -1
            num_items += 1
            if kept:
                piece += 1
    return num_items, num_cut


@njit(cache=True, nogil=True)
def _cut(
    tiles: np.ndarray, key_step: int, parallel: int, max_pieces: int, shortest: int, cost: float
) -> tuple[np.ndarray, float]:
    """The cut with the shortest estimated time: [tiles] pieces of each tile, and that time.

    Tiles of groups count as pieces even when they are whole. max_pieces 0: nothing is cut.
    """
    best = np.ones(len(tiles), np.int64)
    if max_pieces == 0 or len(tiles) == 0:
        return best, 0.0
    steps, pieces = np.empty(len(tiles), np.int64), np.empty(len(tiles), np.int64)
    total = 0
    for tile in range(len(steps)):
        steps[tile] = (tiles[tile, 4] - tiles[tile, 3] + key_step - 1) // key_step
        total += steps[tile]
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
            if pieces[tile] > 1 or tiles[tile, 5] >= 0:
                used += pieces[tile]
        if used > max_pieces:
            break
        time = _time(steps, pieces, parallel, cost)
        if time < best_time:
            best_time = time
            for tile in range(len(steps)):
                best[tile] = pieces[tile]
    return best, best_time


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
    busiest = 0.0
    for length in lanes:
        busiest = max(busiest, length)
    return busiest


def plan_work(
    request_slots: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    is_tree: np.ndarray | None,
    window: int | None,
    limits: PlanLimits,
    block_tables: np.ndarray | None = None,
    block_size: int = 1,
    chosen: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The items [W, 8] and cut rows [C, 8] of a step, see `plan_into`.

    is_tree None: no draft trees. block_tables None: no keys are read together. chosen None: all.
    """
    none = np.zeros(len(request_slots), np.bool_)
    items = np.zeros((limits.most_items(num_scheduled_tokens), WORK_FIELDS), np.int32)
    cut_rows = np.zeros((int(num_scheduled_tokens.sum()), CUT_ROW_FIELDS), np.int32)
    trees = none if is_tree is None else is_tree
    num_items, num_cut = plan_into(
        request_slots,
        num_computed_tokens,
        num_scheduled_tokens,
        trees,
        ~none if chosen is None else chosen,
        _NO_BLOCK_TABLES if block_tables is None else block_tables,
        block_size,
        window or 0,
        limits,
        items,
        cut_rows,
    )
    assert num_items <= len(items) and num_cut <= len(cut_rows)
    return items[:num_items], cut_rows[:num_cut]
