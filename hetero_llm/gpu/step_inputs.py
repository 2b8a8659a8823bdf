"""A step's inputs as one packet: packed on the host with numpy, uploaded with one copy.

Law of this file: the host's copy of the block tables lives here; the runner applies the same
writes to the device's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from hetero_llm.core.step import SchedulerOutput, SlotState
from hetero_llm.gpu.attention_plan import PlanLimits, plan_work
from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS
from hetero_llm.gpu.kernels.pick import ROW_FIELDS, pack_rows
from hetero_llm.sampling.noise import signed_seed

A = TypeVar("A", np.ndarray, torch.Tensor)
_RING = 4
"""Host buffers: a step is packed while up to two others are under way."""
_HEADER = 16
GROUP_FIELDS = 3
_TOP_P_OFF = 2.0


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
        items: [windows][W, 8]; cut_rows: [windows][C, 4].
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


class SamplingTable:
    """Sampling parameters of every slot, ready to be gathered into a packet."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._packed = np.zeros((ROW_FIELDS, max_num_seqs), np.int32)

    def admit(self, state: SlotState) -> None:
        """Takes over a sequence's parameters; replaces what the slot held."""
        params = state.params
        top_k = params.top_k if params.top_k > 0 else self._vocab_size
        self._packed[:, state.slot] = pack_rows(
            np.array([0.0 if params.greedy else params.temperature]),
            np.array([min(top_k, self._vocab_size)]),
            np.array([params.top_p if params.top_p < 1.0 else _TOP_P_OFF]),
            min_p=np.array([params.min_p]),
            seeds=np.array([signed_seed(state.seed)], np.int64),
            sample_indices=np.array([state.sample_index]),
            positions=np.array([0]),
        )[:, 0]

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """[8, N] parameters of N slots; the positions are still to be set."""
        return self._packed[:, slots]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step amounts to, before it is packed.

    first_rows: [S] index of each sequence's first row. drafted: [S] bool, its rows are a draft
    tree; None: none are. samples: [S] tokens drawn for each, one for every row of a tree.
    items, cut_rows: of each window.
    """

    num_rows: int
    num_samples: int
    first_rows: np.ndarray
    drafted: np.ndarray | None
    samples: np.ndarray
    items: tuple[np.ndarray, ...]
    cut_rows: tuple[np.ndarray, ...]

    @property
    def any_cut(self) -> bool:
        return any(len(cut) for cut in self.cut_rows)


def shape_step(
    step: SchedulerOutput,
    windows: tuple[int | None, ...],
    limits: PlanLimits,
    planned: np.ndarray | None = None,
) -> StepShape:
    """Plans attention and counts rows.

    Args:
        windows: the different sliding windows of the model's layers.
        planned: [S] bool, sequences that the work list shall cover; None: all.
    """
    counts, samples = step.counts, step.num_samples
    first_rows = np.cumsum(counts, dtype=np.int32) - counts
    drafted = None
    if step.parents is not None:
        drafted = (counts > 1) & (
            step.parents[np.minimum(first_rows + 1, len(step.parents) - 1)] >= 0
        )
        samples = np.where(drafted, counts, samples)
    arguments = (step.slots, step.starts, counts, first_rows)
    trees = drafted
    if planned is not None:
        arguments = tuple(a[planned] for a in arguments)
        trees = None if drafted is None else drafted[planned]
    works = [
        plan_work(*arguments, trees, window, limits)
        if len(arguments[0])
        else (np.zeros((0, WORK_FIELDS), np.int32), np.zeros((0, CUT_ROW_FIELDS), np.int32))
        for window in windows
    ]
    return StepShape(
        int(counts.sum()),
        int(samples.sum()),
        first_rows,
        drafted,
        samples,
        tuple(items for items, _ in works),
        tuple(cut for _, cut in works),
    )


class StepPacker:
    """Host side of the packets: block tables, sampling parameters, pinned buffers.

    Args:
        max_words: of the largest packet.
        pin: page-locked buffers, so that uploads are asynchronous.
    """

    def __init__(
        self,
        max_words: int,
        *,
        max_num_seqs: int,
        columns: int,
        block_size: int,
        vocab_size: int,
        pin: bool,
    ) -> None:
        self.sampling = SamplingTable(max_num_seqs, vocab_size)
        self.tables = np.zeros((max_num_seqs, columns), np.int32)
        self._block_size = block_size
        self._ring = [
            torch.zeros(max_words, dtype=torch.int32, pin_memory=pin) for _ in range(_RING)
        ]
        self._next = 0

    def write_tables(self, step: SchedulerOutput) -> None:
        """Applies the step's block-table writes to the host's copy."""
        slots, columns, blocks = step.table_writes
        self.tables[slots, columns] = blocks

    def pack(self, step: SchedulerOutput, shape: StepShape, layout: PacketLayout) -> torch.Tensor:
        """Fills the next host buffer; [layout.words] int32 to be uploaded.

        The buffer is used again `_RING` packets later: at most two steps may be under way.
        """
        buffer = self._ring[self._next][: layout.words]
        self._next = (self._next + 1) % _RING
        views = packet_views(buffer.numpy(), layout)
        assert (views.tree is None) == (shape.drafted is None)
        depths = self._pack_rows(step, shape, views)
        self._pack_samples(step, shape, views, depths)
        writes = step.table_writes
        num_writes = writes.shape[1] if writes.shape[1] <= layout.writes else 0
        views.num_writes[0] = num_writes
        views.writes[:, :num_writes] = writes[:, :num_writes]
        for window, (items, cut) in enumerate(zip(shape.items, shape.cut_rows, strict=True)):
            views.work_counts[window] = len(items), len(cut)
            views.items[window][: len(items)] = items
            views.cut_rows[window][: len(cut)] = cut
        return buffer

    def _pack_rows(
        self, step: SchedulerOutput, shape: StepShape, views: StepInputs[np.ndarray]
    ) -> np.ndarray | None:
        """Returns each row's depth in its draft tree, None if there are none."""
        total, counts = shape.num_rows, step.counts
        slots, places = step.slots, step.starts
        sequence = None
        if total != len(counts):
            sequence = np.repeat(np.arange(len(counts)), counts)
            slots = slots[sequence]
            places = np.arange(total) - (shape.first_rows - step.starts)[sequence]
        size = self._block_size
        views.token_ids[:total] = step.token_ids
        views.row_slots[:total] = slots
        views.positions[:total] = places
        views.limits[:total] = places + 1
        views.cache_rows[:total] = self.tables[slots, places // size] * size + places % size
        for part in (views.token_ids, views.row_slots, views.positions, views.limits):
            part[total:] = 0
        views.cache_rows[total:] = -1
        if views.tree is None:
            return None
        assert sequence is not None and shape.drafted is not None and step.parents is not None
        in_tree = shape.drafted[sequence]
        bits, depths = tree_rows(step.parents, shape.first_rows, counts, shape.drafted)
        starts = step.starts[sequence]
        views.positions[:total] = np.where(in_tree, starts + depths, places)
        views.limits[:total] = np.where(in_tree, starts, places + 1)
        views.tree.ancestors[:total] = bits
        views.tree.ancestors[total:] = 0
        return depths

    def _pack_samples(
        self,
        step: SchedulerOutput,
        shape: StepShape,
        views: StepInputs[np.ndarray],
        depths: np.ndarray | None,
    ) -> None:
        total, samples = shape.num_samples, shape.samples
        rows = shape.first_rows + step.counts - 1
        drawn_at = step.starts + step.counts
        slots = step.slots
        several = within = None
        if total != len(samples) or (samples != 1).any():
            sequence = np.repeat(np.arange(len(samples)), samples)
            within = np.arange(total) - np.repeat(np.cumsum(samples) - samples, samples)
            several = samples[sequence] > 1
            slots, rows, drawn_at = slots[sequence], rows[sequence], drawn_at[sequence]
            if shape.drafted is not None:
                assert depths is not None
                in_tree = shape.drafted[sequence]
                rows = np.where(in_tree, shape.first_rows[sequence] + within, rows)
                drawn_at = np.where(in_tree, step.starts[sequence] + depths[rows] + 1, drawn_at)
                several &= ~in_tree
        pick = self.sampling.rows(slots)
        if several is not None:  # a prompt's end that forks: sample indices 0, 1, ...
            pick[6] = np.where(several, within, pick[6])
        pick[7] = drawn_at
        views.pick[:, :total] = pick
        views.pick[7, total:] = -1
        views.sample_rows[:total] = rows
        views.sample_rows[total:] = 0
        views.sample_slots[:total] = slots
        views.sample_slots[total:] = -1
        if views.tree is not None:
            self._pack_groups(step, shape, views, rows)

    def _pack_groups(
        self,
        step: SchedulerOutput,
        shape: StepShape,
        views: StepInputs[np.ndarray],
        rows: np.ndarray,
    ) -> None:
        """Every draw is a group of its own, but a tree's rows are one group."""
        tree, total = views.tree, shape.num_samples
        assert tree is not None and step.parents is not None
        tree.draft_tokens[:total] = step.token_ids[rows]
        tree.parents[:total] = step.parents[rows]
        tree.cache_rows[:total] = views.cache_rows[rows]
        firsts, sizes, slots = sample_groups(step, shape)
        tree.groups[:, len(firsts) :] = 0
        tree.groups[2, len(firsts) :] = -1
        tree.groups[0, : len(firsts)] = firsts
        tree.groups[1, : len(firsts)] = sizes
        tree.groups[2, : len(firsts)] = slots


def sample_groups(
    step: SchedulerOutput, shape: StepShape
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First sample, samples and slot of each group of a step with draft trees."""
    assert shape.drafted is not None
    groups = np.where(shape.drafted, 1, shape.samples)
    sequence = np.repeat(np.arange(len(groups)), groups)
    sizes = np.where(shape.drafted, shape.samples, 1)[sequence]
    return np.cumsum(sizes) - sizes, sizes, step.slots[sequence]


def tree_rows(
    parents: np.ndarray, first_rows: np.ndarray, counts: np.ndarray, drafted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ancestor bits (a node's own included) and depth of every row; zeros outside trees.

    Args:
        parents: [T] index of a row's parent within its sequence's rows, -1 for roots and rows
            outside trees.
        first_rows, counts, drafted: [S].

    Returns:
        [T] int64, [T] int64. The root has bit 0 and depth 0.
    """
    bits = np.zeros(len(parents), np.uint64)
    depths = np.zeros(len(parents), np.int64)
    first, count = first_rows[drafted], counts[drafted]
    bits[first] = 1
    for node in range(1, int(count.max(initial=1))):
        rows = first[count > node] + node
        above = rows - node + parents[rows]
        bits[rows] = bits[above] | np.uint64(1 << node)
        depths[rows] = depths[above] + 1
    return bits.view(np.int64), depths
