"""Fills the step input buffer on the host.

Compiled by numba: between two verify steps the device waits for it. The host's copy of the block
tables lives here; the step's first kernel applies the same writes to the device's.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.gpu.attention_plan import PlanLimits, plan_into
from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS
from hetero_llm.gpu.kernels.sample import (
    MASK_PLACE,
    POSITION,
    ROW_FIELDS,
    SAMPLE_INDEX,
    pack_rows,
)
from hetero_llm.gpu.step_buffer import RING, StepBuffer, StepLayout, step_offsets, step_views
from hetero_llm.gpu.uploads import Uploads
from hetero_llm.sampling.noise import signed_seed
from hetero_llm.utils.gc_control import usual_wakeups
from hetero_llm.utils.jit import njit

_TOP_P_OFF = 2.0
_NO_NODES = np.zeros(0, np.int32)
_NO_PLACES = np.zeros(0, np.int32)
_MAX_TREE = 64
_MOST_WRITES = 1 << 18
"""Block-table writes that a step may bring without waiting: 64 prompts of 64K tokens."""


class SamplingTable:
    """Sampling parameters of every request slot: `packed` is [9, slots] int32, see `pack_rows`."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.packed = np.zeros((ROW_FIELDS, max_num_seqs), np.int32)

    def admit(self, state: AdmittedSequence) -> None:
        """Stores a sequence's parameters in place of what the slot held."""
        params = state.params
        top_k = params.top_k if params.top_k > 0 else self._vocab_size
        self.packed[:, state.request_slot] = pack_rows(
            np.array([0.0 if params.greedy else params.temperature]),
            np.array([min(top_k, self._vocab_size)]),
            np.array([params.top_p if params.top_p < 1.0 else _TOP_P_OFF]),
            min_p=np.array([params.min_p]),
            seeds=np.array([signed_seed(state.seed)], np.int64),
            sample_indices=np.array([state.sample_index]),
            positions=np.array([0]),
        )[:, 0]


class StepFiller:
    """The ring of step input buffers in host memory, and the host's state that goes into them.

    Args:
        num_words: length of the largest buffer.
        device_block_tables: [slots, columns] int32, the device's copy of the block tables.
        block_size: tokens of a block.
        windows: the different sliding windows of the model's layers.
        compiles: compile what it calls now, so that no request waits for it.

    Attributes:
        block_tables: [slots, columns] int32, the host's copy; a step's writes go there by
            `write_tables`, before `fill`.
        sampling: of every request slot.
        ring: [RING, num_words] int32, page-locked beside a GPU; steps take its rows in turn, the
            first step the first one.
        filled: [num_words] int32 view of the buffer that was filled last.
        mask_places: [N] int32 place of the mask of each sample of the next step, -1 for none;
            empty: no sample has one. To be set before each `fill`.
    """

    def __init__(
        self,
        num_words: int,
        device_block_tables: torch.Tensor,
        *,
        block_size: int,
        vocab_size: int,
        windows: tuple[int | None, ...],
        compiles: bool = True,
    ) -> None:
        max_num_seqs, _ = device_block_tables.shape
        device = device_block_tables.device
        self.block_tables = np.zeros(device_block_tables.shape, np.int32)
        self.sampling = SamplingTable(max_num_seqs, vocab_size)
        pin = device.type == "cuda"  # else Triton's interpreter: for tests
        self.ring = torch.zeros(RING, num_words, dtype=torch.int32, pin_memory=pin)
        self._arrays = list(self.ring.numpy())
        self.filled = self._arrays[-1]
        self.mask_places = _NO_PLACES
        self._next = 0
        self._device_block_tables = device_block_tables
        self._uploads = Uploads(3 * min(self.block_tables.size, _MOST_WRITES), device)
        self._block_size = block_size
        self._windows = np.array([window or 0 for window in windows], np.int64)
        self._all_chosen = np.ones(max_num_seqs, np.bool_)
        if compiles:
            self._compile()

    def _compile(self) -> None:
        """Fills a buffer for one drafted token."""
        one = np.ones(1, np.int32)
        none = np.zeros((3, 0), np.int32)
        drafts = DraftBatch(one, one, one - 2)
        step = SchedulerOutput(one - 1, one - 1, 2 * one, one, one, (), (), none, none[:2], drafts)
        layout = _one_drafted_token(len(self._windows))
        words = torch.zeros(int(step_offsets(layout)["words"][0]), dtype=torch.int32)
        limits = PlanLimits(1, 16, 1, 0, 16)
        views = step_views(words, layout)
        self.write_tables(none)
        self.fill(step, StepBuffer(layout, step_offsets(layout), limits, words, views))
        self._next = 0
        self.ring.zero_()  # graphs fetch a buffer while they are captured: one without content

    def write_tables(self, writes: np.ndarray) -> None:
        """Applies block-table writes to the host's copy; [3, K] int32, see `SchedulerOutput`."""
        _write_tables(self.block_tables, writes)

    def fill(
        self, step: SchedulerOutput, buffer: StepBuffer, chosen: np.ndarray | None = None
    ) -> bool:
        """Fills the ring's next buffer; `RING` steps later it is filled again.

        Args:
            chosen: [S] bool, sequences whose attention the work list covers; None: all.

        Returns:
            Whether the work list cuts tiles into pieces.
        """
        writes = step.block_table_writes
        if writes.shape[1] > buffer.layout.writes:  # a long prefix hit: more than the buffer holds
            blocks = self.block_tables[writes[0], writes[1]]
            sent = self._uploads.send(np.stack((writes[0], writes[1], blocks)).astype(np.int32))
            self._device_block_tables[sent[0].long(), sent[1].long()] = sent[2]
        index = self._next
        self._next = (index + 1) % RING
        self.filled = self._arrays[index]
        drafts = step.drafts
        nodes, node_ids, parents = (
            (_NO_NODES, _NO_NODES, _NO_NODES)
            if drafts is None
            else (drafts.counts, drafts.token_ids, drafts.parents)
        )
        cut: bool = fill_buffer(
            self.filled,
            buffer.offsets,
            step.request_slots,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            step.token_ids,
            step.num_samples,
            nodes,
            node_ids,
            parents,
            writes,
            self.block_tables,
            self.sampling.packed,
            self._block_size,
            self._windows,
            self.mask_places,
            buffer.limits,
            self._all_chosen if chosen is None else chosen,
        )
        return cut

    def withdraw_trees(self, layout: StepLayout) -> None:
        """Turns all groups of the buffer filled last into padding: verification then accepts
        nothing, moves no KV and leaves the last token of every slot alone."""
        tree = step_views(self.filled, layout).tree
        assert tree is not None
        _, num_samples, slots = tree.groups
        num_samples[:], slots[:] = 0, -1


def compile_in_thread() -> None:
    """Compiles what fillers call, in a thread: it takes ten seconds at a first start, in which
    weights load and Triton's compiler runs. A filler that is made meanwhile waits for the end."""

    def compile_all() -> None:
        usual_wakeups()
        num_words = int(step_offsets(_one_drafted_token(0))["words"][0])
        block_tables = torch.zeros(1, 1, dtype=torch.int32)
        StepFiller(num_words, block_tables, block_size=16, vocab_size=2, windows=())

    threading.Thread(target=compile_all, name="hetero-llm-fill-step", daemon=True).start()


def _one_drafted_token(num_windows: int) -> StepLayout:
    """Of a step with a token and a draft of one node."""
    return StepLayout(2, 2, 2, 2, 0, num_windows, 1)


@njit(cache=True, nogil=True)
def _write_tables(block_tables: np.ndarray, writes: np.ndarray) -> None:
    for index in range(writes.shape[1]):
        block_tables[writes[0, index], writes[1, index]] = writes[2, index]


# large: one pass over the sequences writes every part of the buffer.
@njit(cache=True, nogil=True)
def fill_buffer(
    buffer: np.ndarray,
    offsets: np.ndarray,
    request_slots: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    token_ids: np.ndarray,
    num_samples: np.ndarray,
    nodes: np.ndarray,
    node_ids: np.ndarray,
    parents: np.ndarray,
    table_writes: np.ndarray,
    block_tables: np.ndarray,
    sampling: np.ndarray,
    block_size: int,
    windows: np.ndarray,
    mask_places: np.ndarray,
    limits: PlanLimits,
    chosen: np.ndarray,
) -> bool:
    """Writes every part of a buffer, padding included. Returns whether any tile is cut.

    Args:
        buffer: int32, at least as long as the layout. offsets: its `step_offsets`.
        request_slots .. num_samples, table_writes: of the step.
        nodes, node_ids, parents: of its `DraftBatch`, empty if it has none.
        block_tables: the host's, with the step's writes. sampling: `SamplingTable.packed`.
        windows: [windows] int64, 0 for none. mask_places: see `StepFiller`. limits, chosen: see
            `plan_into`.
    """
    at = offsets[0]
    trees = np.zeros(len(request_slots), np.bool_)
    own, up = np.zeros(_MAX_TREE, np.int64), np.zeros(_MAX_TREE, np.int64)
    bits, depths = np.zeros(_MAX_TREE, np.int64), np.zeros(_MAX_TREE, np.int64)
    verifies = at.num_groups > 0
    row = sample = group = token = node = 0  # row: index of the sequence's first token in the step
    for sequence in range(len(request_slots)):
        slot = request_slots[sequence]
        start, count = num_computed_tokens[sequence], num_scheduled_tokens[sequence]
        tree = trees[sequence] = len(nodes) > 0 and nodes[sequence] > 0
        if tree:
            assert count == nodes[sequence] + 1 and count <= _MAX_TREE
            own[0] = token_ids[token]
            for i in range(1, count):
                own[i] = node_ids[node + i - 1]
            _measure_tree(parents[node : node + count - 1], up, bits, depths)
            node += count - 1
        for i in range(count):
            place = start + i
            buffer[at.token_ids + row + i] = own[i] if tree else token_ids[token + i]
            buffer[at.token_slots + row + i] = slot
            buffer[at.positions + row + i] = start + depths[i] if tree else place
            buffer[at.limits + row + i] = start if tree else place + 1
            block = block_tables[slot, place // block_size]
            buffer[at.slot_mapping + row + i] = block * block_size + place % block_size
            if verifies:
                _put_long(buffer, at.ancestors + 2 * (row + i), bits[i] if tree else 0)
        for draw in range(count if tree else num_samples[sequence]):
            source = row + draw if tree else row + count - 1
            buffer[at.sample_rows + sample] = source
            buffer[at.sample_slots + sample] = slot
            for field in range(ROW_FIELDS):
                parameter = at.sampling + field * at.sample_stride + sample
                buffer[parameter] = sampling[field, slot]
            if not tree and num_samples[sequence] > 1:  # a forking prompt: sample indices 0, 1, ...
                buffer[at.sampling + SAMPLE_INDEX * at.sample_stride + sample] = draw
            if len(mask_places):
                place = at.sampling + MASK_PLACE * at.sample_stride + sample
                buffer[place] = mask_places[sample] + 1
            position = start + (depths[draw] + 1 if tree else count)
            buffer[at.sampling + POSITION * at.sample_stride + sample] = position
            if verifies:
                buffer[at.draft_tokens + sample] = buffer[at.token_ids + source]
                buffer[at.parents + sample] = up[draw] if tree else -1
                buffer[at.sample_slot_mapping + sample] = buffer[at.slot_mapping + source]
                if not tree or draw == 0:
                    size = count if tree else 1
                    _put_group(buffer, offsets, group, sample, size, slot)
                    group += 1
            sample += 1
        row, token = row + count, token + (1 if tree else count)
    assert row <= at.num_tokens and sample <= at.num_samples
    assert not verifies or group <= at.num_groups
    _pad(buffer, offsets, row, sample, group)
    _put_writes(buffer, offsets, table_writes, block_tables)
    return _put_work(
        buffer,
        offsets,
        request_slots,
        num_computed_tokens,
        num_scheduled_tokens,
        trees,
        chosen,
        block_tables,
        block_size,
        windows,
        limits,
    )


@njit(cache=True, nogil=True)
def _measure_tree(
    parents: np.ndarray, up: np.ndarray, bits: np.ndarray, depths: np.ndarray
) -> None:
    """Writes each token's parent, ancestor bits (its own included) and depth; the root is token 0.

    Args:
        parents: [n] of the nodes, -1 for the root.
        up, bits, depths: [> n] int64.
    """
    up[0], bits[0], depths[0] = -1, 1, 0
    for row in range(1, len(parents) + 1):
        parent = parents[row - 1] + 1
        assert 0 <= parent < row, "a node's parent comes before it"
        up[row] = parent
        bits[row], depths[row] = bits[parent] | (1 << row), depths[parent] + 1


@njit(cache=True, nogil=True)
def _put_group(
    buffer: np.ndarray, offsets: np.ndarray, group: int, first: int, num_samples: int, slot: int
) -> None:
    """Writes the three fields of a group of samples, see `TreeInputs.groups`."""
    at = offsets[0]
    buffer[at.groups + group] = first
    buffer[at.groups + at.group_stride + group] = num_samples
    buffer[at.groups + 2 * at.group_stride + group] = slot


@njit(cache=True, nogil=True)
def _put_writes(
    buffer: np.ndarray, offsets: np.ndarray, table_writes: np.ndarray, block_tables: np.ndarray
) -> None:
    """Block-table writes; none if they are more than the buffer holds.

    An entry may be written twice in a step (a hit block gives way to its copy, a request slot
    changes hands). The device writes in any order, so both carry the last value.
    """
    at = offsets[0]
    count = table_writes.shape[1]
    if count > at.num_writes:
        count = 0
    buffer[at.write_count] = count
    for index in range(count):
        slot, column = table_writes[0, index], table_writes[1, index]
        buffer[at.writes + index] = slot
        buffer[at.writes + at.write_stride + index] = column
        buffer[at.writes + 2 * at.write_stride + index] = block_tables[slot, column]


@njit(cache=True, nogil=True)
def _put_work(
    buffer: np.ndarray,
    offsets: np.ndarray,
    request_slots: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    trees: np.ndarray,
    chosen: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    windows: np.ndarray,
    limits: PlanLimits,
) -> bool:
    """Writes the work list of every window. Returns whether any tile is cut."""
    at = offsets[0]
    item_words, cut_words = at.num_items * WORK_FIELDS, at.num_cut_rows * CUT_ROW_FIELDS
    any_cut = False
    for window in range(len(windows)):
        items = at.items + window * item_words
        cut_rows = at.cut_rows + window * cut_words
        num_items, num_cut = plan_into(
            request_slots,
            num_computed_tokens,
            num_scheduled_tokens,
            trees,
            chosen,
            block_tables,
            block_size,
            windows[window],
            limits,
            buffer[items : items + item_words].reshape(-1, WORK_FIELDS),
            buffer[cut_rows : cut_rows + cut_words].reshape(-1, CUT_ROW_FIELDS),
        )
        buffer[at.work_counts + 2 * window] = num_items
        buffer[at.work_counts + 2 * window + 1] = num_cut
        any_cut = any_cut or num_cut > 0
    return any_cut


@njit(cache=True, nogil=True)
def _put_long(buffer: np.ndarray, place: int, value: int) -> None:
    """An int64 as two int32 words, the low one first."""
    low = value & 0xFFFFFFFF
    buffer[place] = low - (1 << 32) if low >= 1 << 31 else low
    buffer[place + 1] = value >> 32


@njit(cache=True, nogil=True)
def _pad(buffer: np.ndarray, offsets: np.ndarray, row: int, sample: int, group: int) -> None:
    """Writes padding from token `row`, sample `sample` and group `group` on."""
    at = offsets[0]
    for index in range(row, at.num_tokens):
        buffer[at.token_ids + index] = 0
        buffer[at.token_slots + index] = 0
        buffer[at.positions + index] = 0
        buffer[at.limits + index] = 0
        buffer[at.slot_mapping + index] = -1
        if at.num_groups > 0:
            _put_long(buffer, at.ancestors + 2 * index, 0)
    for index in range(sample, at.num_samples):
        buffer[at.sample_rows + index] = 0
        buffer[at.sample_slots + index] = -1
        buffer[at.sampling + POSITION * at.sample_stride + index] = -1
    for index in range(group, at.num_groups):
        _put_group(buffer, offsets, index, 0, 0, -1)
