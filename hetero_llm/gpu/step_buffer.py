"""How a step's inputs lie in one packet, which one copy uploads; `packing` fills it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS
from hetero_llm.gpu.kernels.sample import ROW_FIELDS

A = TypeVar("A", np.ndarray, torch.Tensor)
_HEADER = 16
GROUP_FIELDS = 3


@dataclass(frozen=True, slots=True)
class PacketLayout:
    """Sizes of a packet: rows, drawn tokens, work items and cut rows of each of `windows` work
    lists, block-table writes, and where draft trees are verified, `groups` of drawn tokens. Where
    the drawn tokens' part lies depends on `samples` alone."""

    rows: int
    samples: int
    items: int
    cut_rows: int
    writes: int
    windows: int
    groups: int = 0

    @property
    def words(self) -> int:
        per_window = WORK_FIELDS * self.items + CUT_ROW_FIELDS * self.cut_rows
        rows = 5 * _even(self.rows)
        samples = (2 + ROW_FIELDS) * _even(self.samples)
        if self.groups:
            rows += _even(2 * self.rows)
            samples += 3 * _even(self.samples) + GROUP_FIELDS * _even(self.groups)
        return _HEADER + rows + samples + 3 * _even(self.writes) + self.windows * per_window


def _even(count: int) -> int:
    """Parts begin at multiples of 16 bytes, which kernels load with fewer instructions."""
    return -(-count // 4) * 4


@dataclass(frozen=True, slots=True)
class TreeInputs(Generic[A]):
    """What verification adds; see `kernels.walk.walk_trees`.

    Attributes:
        ancestors: [T] int64 bits of tree nodes.
        draft_tokens, parents, cache_rows: [N] int32 of the sampled rows.
        groups: [3, G] int32 first sample, samples, slot.
    """

    ancestors: A
    draft_tokens: A
    parents: A
    cache_rows: A
    groups: A


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[A]):
    """Views into a packet, on the host or on the device. All int32.

    Attributes:
        num_writes: [1]. work_counts: [windows, 2] items and cut rows in use.
        token_ids, row_slots, positions, limits, cache_rows: [T]; a padding row has cache row -1.
        sample_rows: [N] row of each drawn token; sample_slots: [N], -1 for padding.
        pick: [8, N], see `kernels.pick.PickRows`.
        writes: [3, K] block-table writes.
        items: [windows][W, 8]; cut_rows: [windows][C, 8].
        tree: None unless the layout has groups.
    """

    num_writes: A
    work_counts: A
    token_ids: A
    row_slots: A
    positions: A
    limits: A
    cache_rows: A
    sample_rows: A
    sample_slots: A
    pick: A
    writes: A
    items: tuple[A, ...]
    cut_rows: tuple[A, ...]
    tree: TreeInputs[A] | None


def packet_views(buffer: A, layout: PacketLayout) -> StepInputs[A]:
    """The parts of a packet that begins with `buffer`, [>= layout.words] int32."""
    place = _HEADER

    def take(count: int) -> A:
        nonlocal place
        part = buffer[place : place + count]
        place += _even(count)
        return part

    samples = [take(layout.samples) for _ in range(2)]
    wide = _even(layout.samples)
    pick = take(ROW_FIELDS * wide).reshape(ROW_FIELDS, wide)[:, : layout.samples]
    rows = [take(layout.rows) for _ in range(5)]
    wide = _even(layout.writes)
    writes = take(3 * wide).reshape(3, wide)[:, : layout.writes]
    windows = range(layout.windows)
    items = tuple(take(WORK_FIELDS * layout.items).reshape(-1, WORK_FIELDS) for _ in windows)
    cut = tuple(take(CUT_ROW_FIELDS * layout.cut_rows).reshape(-1, CUT_ROW_FIELDS) for _ in windows)
    tree = None
    if layout.groups:
        ancestors = _as_int64(take(2 * layout.rows))
        sampled = [take(layout.samples) for _ in range(3)]
        wide = _even(layout.groups)
        groups = take(GROUP_FIELDS * wide).reshape(GROUP_FIELDS, wide)[:, : layout.groups]
        tree = TreeInputs(ancestors, *sampled, groups)
    assert place == layout.words
    counts = buffer[2 : 2 + 2 * layout.windows].reshape(layout.windows, 2)
    return StepInputs(buffer[:1], counts, *rows, *samples, pick, writes, items, cut, tree)


def _as_int64(part: A) -> A:
    return part.view(torch.int64 if isinstance(part, torch.Tensor) else np.int64)


@functools.lru_cache(maxsize=512)
def packet_offsets(layout: PacketLayout) -> np.ndarray:
    """Where the parts of a packet begin, and its sizes, for compiled code: int64, in the order of
    the code below and then, for each window, items and cut rows."""
    views = packet_views(np.arange(layout.words, dtype=np.int32), layout)
    tree = views.tree

    def begin(part: np.ndarray | None) -> int:
        return 0 if part is None or part.size == 0 else int(part.view(np.int32).flat[0])

    offsets = [
        layout.rows,
        layout.samples,
        _even(layout.samples),
        layout.writes,
        _even(layout.writes),
        layout.groups,
        _even(layout.groups),
        *(begin(views.sample_rows), begin(views.sample_slots), begin(views.pick)),
        *(begin(views.token_ids), begin(views.row_slots), begin(views.positions)),
        *(begin(views.limits), begin(views.cache_rows), begin(views.writes)),
        begin(tree.ancestors if tree else None),
        begin(tree.draft_tokens if tree else None),
        begin(tree.parents if tree else None),
        begin(tree.cache_rows if tree else None),
        begin(tree.groups if tree else None),
    ]
    for items, cut_rows in zip(views.items, views.cut_rows, strict=True):
        offsets += [begin(items), len(items), begin(cut_rows), len(cut_rows)]
    return np.array(offsets, np.int64)


NUM_OFFSETS = 21
"""Numbers that `packet_offsets` begins with; four for each window follow."""
