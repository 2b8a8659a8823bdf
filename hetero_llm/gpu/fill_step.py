"""Fills a step's packet on the host.

Compiled by numba: between two verify steps the device waits for this. The host's copy of the block
tables lives here; the first kernel of a step applies the same writes to the device's.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import AdmittedSequence, ModelRunnerOutput, SchedulerOutput
from hetero_llm.gpu.attention_plan import PlanLimits, plan_into
from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS
from hetero_llm.gpu.kernels.sample import ROW_FIELDS, pack_rows
from hetero_llm.gpu.step_buffer import NUM_OFFSETS, PacketLayout, packet_offsets, packet_views
from hetero_llm.sampling.noise import signed_seed

RING = 4
"""Packets in host memory: a step is packed while up to two others are under way."""
_TOP_P_OFF = 2.0
_NO_NODES = np.zeros(0, np.int32)
_MAX_TREE = 64


class SamplingTable:
    """Sampling parameters of every slot: `packed` is [8, slots] int32, see `pick.pack_rows`."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.packed = np.zeros((ROW_FIELDS, max_num_seqs), np.int32)

    def admit(self, state: AdmittedSequence) -> None:
        """Takes over a sequence's parameters; replaces what the slot held."""
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


class StepPacker:
    """Host side of the packets: block tables, sampling parameters, pinned buffers.

    Args:
        max_words: of the largest packet.
        windows: the different sliding windows of the model's layers.
        pin: page-locked packets, which kernels can read.

    Attributes:
        ring: [RING, max_words] int32, the packets, taken in turn: the first step's is the first.
    """

    def __init__(
        self,
        max_words: int,
        *,
        max_num_seqs: int,
        columns: int,
        block_size: int,
        vocab_size: int,
        windows: tuple[int | None, ...],
        pin: bool,
    ) -> None:
        self.sampling = SamplingTable(max_num_seqs, vocab_size)
        self.tables = np.zeros((max_num_seqs, columns), np.int32)
        self._block_size = block_size
        self._windows = np.array([window or 0 for window in windows], np.int64)
        self.ring = torch.zeros(RING, max_words, dtype=torch.int32, pin_memory=pin)
        self._arrays = list(self.ring.numpy())
        self._everyone = np.ones(max_num_seqs, np.bool_)
        self._next = 0
        self._compile()

    def _compile(self) -> None:
        """Packs and reads a step of one drafted row, so that no request waits for the compiler."""
        one = np.ones(1, np.int32)
        none = np.zeros((3, 0), np.int32)
        drafts = DraftBatch(one, one, one - 2)
        step = SchedulerOutput(one - 1, one - 1, 2 * one, one, one, (), (), none, none[:2], drafts)
        layout = PacketLayout(2, 2, 2, 2, 0, len(self._windows), 1)
        self.pack(step, layout, PlanLimits(1, 16, 1, 0, 16))
        verified_output(step, np.ones(3, np.int64), 1)
        self._next = 0
        self.ring.zero_()  # steps that are captured fetch a packet, too: one without content

    def write_tables(self, step: SchedulerOutput) -> None:
        """Applies the step's block-table writes to the host's copy."""
        if step.block_table_writes.shape[1]:
            slots, columns, blocks = step.block_table_writes
            self.tables[slots, columns] = blocks

    def pack(
        self,
        step: SchedulerOutput,
        layout: PacketLayout,
        limits: PlanLimits,
        chosen: np.ndarray | None = None,
    ) -> bool:
        """Fills the ring's next packet; it is filled again `RING` packets later.

        Args:
            chosen: [S] bool, sequences whose attention the work list covers; None: all.

        Returns:
            Whether attention is cut into pieces.
        """
        index = self._next
        self._next = (index + 1) % RING
        drafts = step.drafts
        nodes, node_ids, parents = (
            (_NO_NODES, _NO_NODES, _NO_NODES)
            if drafts is None
            else (drafts.counts, drafts.token_ids, drafts.parents)
        )
        cut: bool = fill_packet(
            self._arrays[index],
            packet_offsets(layout),
            step.request_slots,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            step.token_ids,
            step.num_samples,
            nodes,
            node_ids,
            parents,
            step.block_table_writes,
            self.tables,
            self.sampling.packed,
            self._block_size,
            self._windows,
            limits.as_tuple(),
            self._everyone if chosen is None else chosen,
        )
        return cut

    def withdraw_trees(self, layout: PacketLayout) -> None:
        """Makes all groups of the packet filled last groups of padding: the walk then accepts
        nothing, moves no KV and leaves every slot's last token alone."""
        tree = packet_views(self._arrays[self._next - 1], layout).tree
        assert tree is not None
        _, counts, slots = tree.groups
        counts[:], slots[:] = 0, -1


@njit(cache=True, nogil=True)
def fill_packet(
    packet: np.ndarray,
    at: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    token_ids: np.ndarray,
    num_samples: np.ndarray,
    nodes: np.ndarray,
    node_ids: np.ndarray,
    parents: np.ndarray,
    table_writes: np.ndarray,
    tables: np.ndarray,
    sampling: np.ndarray,
    block_size: int,
    windows: np.ndarray,
    limits: tuple[int, int, int, int, int],
    chosen: np.ndarray,
) -> bool:
    """Writes every part of a packet, padding included; whether any tile is cut.

    Args:
        packet: int32, as long as the layout says at least. at: `packet_offsets` of it.
        slots .. num_samples, table_writes: of the step.
        nodes, node_ids, parents: of its `DraftBatch`, empty if it has none.
        tables: the host's, with the step's writes. sampling: `SamplingTable.packed`.
        windows: 0 for none. limits, chosen: see `plan_into`.
    """
    trees = np.zeros(len(slots), np.bool_)
    own, up = np.zeros(_MAX_TREE, np.int64), np.zeros(_MAX_TREE, np.int64)
    bits, depths = np.zeros(_MAX_TREE, np.int64), np.zeros(_MAX_TREE, np.int64)
    verifies = at[5] > 0
    input_at, slot_at, position_at, limit_at, cache_at = at[10], at[11], at[12], at[13], at[14]
    row = sample = group = token = node = 0
    for sequence in range(len(slots)):
        slot, start, count = slots[sequence], starts[sequence], counts[sequence]
        tree = trees[sequence] = len(nodes) > 0 and nodes[sequence] > 0
        if tree:
            assert count == nodes[sequence] + 1 and count <= _MAX_TREE
            own[0] = token_ids[token]
            own[1:count] = node_ids[node : node + count - 1]
            _measure_tree(parents[node : node + count - 1], up, bits, depths)
            node += count - 1
        for i in range(count):
            place = start + i
            packet[input_at + row + i] = own[i] if tree else token_ids[token + i]
            packet[slot_at + row + i] = slot
            packet[position_at + row + i] = start + depths[i] if tree else place
            packet[limit_at + row + i] = start if tree else place + 1
            block = tables[slot, place // block_size]
            packet[cache_at + row + i] = block * block_size + place % block_size
            if verifies:
                _put_long(packet, at[16] + 2 * (row + i), bits[i] if tree else 0)
        draws = count if tree else num_samples[sequence]
        for draw in range(draws):
            source = row + draw if tree else row + count - 1
            packet[at[7] + sample] = source
            packet[at[8] + sample] = slot
            for field in range(ROW_FIELDS):
                packet[at[9] + field * at[2] + sample] = sampling[field, slot]
            if draws > 1 and not tree:  # a prompt's end that forks: sample indices 0, 1, ...
                packet[at[9] + 6 * at[2] + sample] = draw
            packet[at[9] + 7 * at[2] + sample] = start + (depths[draw] + 1 if tree else count)
            if verifies:
                packet[at[17] + sample] = packet[input_at + source]
                packet[at[18] + sample] = up[draw] if tree else -1
                packet[at[19] + sample] = packet[cache_at + source]
                if not tree or draw == 0:
                    packet[at[20] + group] = sample
                    packet[at[20] + at[6] + group] = count if tree else 1
                    packet[at[20] + 2 * at[6] + group] = slot
                    group += 1
            sample += 1
        row, token = row + count, token + (1 if tree else count)
    assert row <= at[0] and sample <= at[1] and (at[5] == 0 or group <= at[5])
    _pad(packet, at, row, sample, group)
    _put_writes(packet, at, table_writes, tables)
    return _put_work(
        packet, at, slots, starts, counts, trees, chosen, tables, block_size, windows, limits
    )


@njit(cache=True, nogil=True)
def _measure_tree(
    parents: np.ndarray, up: np.ndarray, bits: np.ndarray, depths: np.ndarray
) -> None:
    """Parent row, ancestor bits (its own included) and depth of each row; the root comes first."""
    up[0], bits[0], depths[0] = -1, 1, 0
    for row in range(1, len(parents) + 1):
        parent = parents[row - 1] + 1
        assert 0 <= parent < row, "a node's parent comes before it"
        up[row] = parent
        bits[row], depths[row] = bits[parent] | (1 << row), depths[parent] + 1


@njit(cache=True, nogil=True)
def _put_writes(
    packet: np.ndarray, at: np.ndarray, table_writes: np.ndarray, tables: np.ndarray
) -> None:
    """Block-table writes; none if they are more than the packet holds.

    An entry may be written twice in a step (a hit block gives way to its copy, a slot changes
    hands). The device writes in any order, so both carry the last value.
    """
    count = table_writes.shape[1]
    packet[0] = count if count <= at[3] else 0
    for index in range(packet[0]):
        slot, column = table_writes[0, index], table_writes[1, index]
        packet[at[15] + index] = slot
        packet[at[15] + at[4] + index] = column
        packet[at[15] + 2 * at[4] + index] = tables[slot, column]


@njit(cache=True, nogil=True)
def _put_work(
    packet: np.ndarray,
    at: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    trees: np.ndarray,
    chosen: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    windows: np.ndarray,
    limits: tuple[int, int, int, int, int],
) -> bool:
    """The work list of every window; whether any tile is cut."""
    any_cut = False
    for window in range(len(windows)):
        place = at[NUM_OFFSETS + 4 * window : NUM_OFFSETS + 4 * window + 4]
        items = packet[place[0] : place[0] + place[1] * WORK_FIELDS].reshape(-1, WORK_FIELDS)
        cut_rows = packet[place[2] : place[2] + place[3] * CUT_ROW_FIELDS]
        num_items, num_cut = plan_into(
            slots,
            starts,
            counts,
            trees,
            chosen,
            tables,
            block_size,
            windows[window],
            limits,
            items,
            cut_rows.reshape(-1, CUT_ROW_FIELDS),
        )
        packet[2 + 2 * window] = num_items
        packet[3 + 2 * window] = num_cut
        any_cut = any_cut or num_cut > 0
    return any_cut


@njit(cache=True, nogil=True)
def _put_long(packet: np.ndarray, place: int, value: int) -> None:
    """An int64 as two int32 words, the low one first."""
    low = value & 0xFFFFFFFF
    packet[place] = low - (1 << 32) if low >= 1 << 31 else low
    packet[place + 1] = value >> 32


@njit(cache=True, nogil=True)
def _pad(packet: np.ndarray, at: np.ndarray, row: int, sample: int, group: int) -> None:
    """Rows and samples beyond the step's own."""
    for index in range(row, at[0]):
        for part in range(10, 14):
            packet[at[part] + index] = 0
        packet[at[14] + index] = -1
        if at[5] > 0:
            packet[at[16] + 2 * index] = 0
            packet[at[16] + 2 * index + 1] = 0
    for index in range(sample, at[1]):
        packet[at[7] + index] = 0
        packet[at[8] + index] = -1
        packet[at[9] + 7 * at[2] + index] = -1
    for index in range(group, at[5]):
        packet[at[20] + index] = 0
        packet[at[20] + at[6] + index] = 0
        packet[at[20] + 2 * at[6] + index] = -1


def verified_output(
    step: SchedulerOutput, packed: np.ndarray, num_groups: int
) -> ModelRunnerOutput:
    """The tokens of a step with draft trees.

    Args:
        packed: [G + N] int64, a `WalkResult.packed` of G = `num_groups` groups, those of padding
            included.
    """
    drafts = step.drafts
    assert drafts is not None
    num_tokens = np.empty(len(step.request_slots), np.int64)
    token_ids = np.empty(len(packed) - num_groups, np.int64)
    total = _read_walk(packed, num_groups, drafts.counts, step.num_samples, token_ids, num_tokens)
    return ModelRunnerOutput(token_ids[:total].tolist(), None, {}, {}, num_tokens.tolist())


@njit(cache=True, nogil=True)
def _read_walk(
    packed: np.ndarray,
    num_groups: int,
    nodes: np.ndarray,
    num_samples: np.ndarray,
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
) -> int:
    """Gathers the tokens that each sequence got; returns how many they are in all."""
    total = group = 0
    sample = num_groups
    for sequence in range(len(nodes)):
        if nodes[sequence] > 0:
            emitted, drawn = packed[group], nodes[sequence] + 1
            group += 1
        else:  # every draw is a group of one
            emitted = drawn = num_samples[sequence]
            group += drawn
        num_tokens[sequence] = emitted
        for i in range(emitted):
            token_ids[total + i] = packed[sample + i]
        total += emitted
        sample += drawn
    return total
