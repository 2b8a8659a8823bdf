"""The step input buffer: all inputs of one step in one piece of memory, which one kernel fetches.

The host fills a buffer in page-locked memory (`fill_step`), the step's first kernel copies it to
the device (`kernels.exchange`), and all other kernels read views into that copy. `step_offsets`
alone says where each part lies; host and device both take the parts by their names.

    header | samples | tokens | block-table writes | attention work | draft trees
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.attention_plan import PlanLimits
from hetero_llm.gpu.kernels.paged_attention import CUT_ROW_FIELDS, WORK_FIELDS, TileShape
from hetero_llm.gpu.kernels.sample import ROW_FIELDS

A = TypeVar("A", np.ndarray, torch.Tensor)

RING = 4
"""Buffers in host memory: one is filled while up to two earlier steps still run."""
GROUP_FIELDS = 3
_HEADER = 16
LEAST_WRITES = 256
"""Block-table writes that the buffer of every captured step holds."""
_MOST_WRITES = 4096
"""Block-table writes in a buffer; those of a longer prefix hit (65,536 tokens) go separately."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Capacity of a step input buffer.

    Attributes:
        tokens: input tokens.
        samples: sampled tokens. Where their part lies depends on this number alone.
        items, cut_rows: work items and cut rows in the work list of each window.
        writes: block-table writes.
        windows: different sliding windows of the model's layers; each has a work list.
        groups: groups of sampled tokens that are verified together; 0: the step verifies nothing,
            and the buffer has no part for draft trees.
    """

    tokens: int
    samples: int
    items: int
    cut_rows: int
    writes: int
    windows: int
    groups: int = 0


_PARTS = (
    *("sample_rows", "sample_slots", "sampling"),
    *("token_ids", "token_slots", "positions", "limits", "slot_mapping"),
    *("writes", "items", "cut_rows"),
    *("ancestors", "draft_tokens", "parents", "sample_slot_mapping", "groups"),
)
_SIZES = (
    *("num_tokens", "num_samples", "num_items", "num_cut_rows", "num_writes", "num_groups"),
    *("sample_stride", "write_stride", "group_stride"),
)
OFFSETS = np.dtype(
    [(name, np.int64) for name in ("write_count", "work_counts", *_PARTS, *_SIZES, "words")]
)
"""One record for each layout, which compiled code reads by field names (a record array costs a call
0.3 us more than a plain array; a named tuple of as many numbers 3.4 us)."""


@functools.lru_cache(maxsize=512)
def step_offsets(layout: StepLayout) -> np.ndarray:
    """Where the parts of a buffer begin, in int32 words, and how large they are.

    Returns:
        [1] of `OFFSETS`: `write_count`, `work_counts` and the fields of `StepInputs` and
        `TreeInputs` are first words; `num_*` repeat the layout's capacities; `*_stride` is the
        distance between the rows of a part with several fields; `words` is the buffer's length.
        A layout without groups has no tree parts: their offsets are the buffer's end.
    """
    samples, tokens = _aligned(layout.samples), _aligned(layout.tokens)
    writes, groups = _aligned(layout.writes), _aligned(layout.groups)
    verified_tokens, verified_samples = (tokens, samples) if layout.groups else (0, 0)
    lengths = (
        *(samples, samples, ROW_FIELDS * samples),
        *(tokens,) * 5,
        3 * writes,
        layout.windows * WORK_FIELDS * layout.items,
        layout.windows * CUT_ROW_FIELDS * layout.cut_rows,
        2 * verified_tokens,  # int64
        *(verified_samples,) * 3,
        GROUP_FIELDS * groups,
    )
    offsets = np.zeros(1, OFFSETS)
    at = offsets[0]
    at["work_counts"] = 2
    begin = _HEADER
    for name, length in zip(_PARTS, lengths, strict=True):
        at[name] = begin
        begin += length
    at["words"] = begin
    at["num_tokens"], at["num_samples"] = layout.tokens, layout.samples
    at["num_items"], at["num_cut_rows"] = layout.items, layout.cut_rows
    at["num_writes"], at["num_groups"] = layout.writes, layout.groups
    at["sample_stride"], at["write_stride"], at["group_stride"] = samples, writes, groups
    offsets.setflags(write=False)
    return offsets


def _aligned(count: int) -> int:
    """Parts begin at multiples of 16 bytes, which kernels load with fewer instructions."""
    return -(-count // 4) * 4


@dataclass(frozen=True, slots=True)
class TreeInputs(Generic[A]):
    """What verification reads besides; see `kernels.tree_verify.verify_trees`.

    Attributes:
        ancestors: [T] int64, bits of tree nodes.
        draft_tokens, parents, slot_mapping: [N] int32, of the tokens that are sampled after.
        groups: [3, G] int32 first sample, number of samples, request slot.
    """

    ancestors: A
    draft_tokens: A
    parents: A
    slot_mapping: A
    groups: A


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[A]):
    """Views into a buffer, on the host or on the device. All int32.

    Attributes:
        write_count: [1] block-table writes in use.
        work_counts: [windows, 2] work items and cut rows in use.
        token_ids, token_slots, positions, limits, slot_mapping: [T] of each input token: its id,
            its request slot, its position, see `kernels.paged_attention.RowMasks`, its KV slot. A
            padding token has KV slot -1.
        sample_rows: [N] input token after which each sample is drawn.
        sample_slots: [N] request slot of each sample; -1 for padding.
        sampling: [9, N], see `kernels.sample.SampleRows`.
        writes: [3, K] block-table writes: request slot, column, block.
        items: [windows][W, 8] work items.
        cut_rows: [windows][C, 8].
        tree: None unless the layout has groups.
    """

    write_count: A
    work_counts: A
    token_ids: A
    token_slots: A
    positions: A
    limits: A
    slot_mapping: A
    sample_rows: A
    sample_slots: A
    sampling: A
    writes: A
    items: tuple[A, ...]
    cut_rows: tuple[A, ...]
    tree: TreeInputs[A] | None


def step_views(words: A, layout: StepLayout) -> StepInputs[A]:
    """The parts of a buffer by name.

    Args:
        words: [>= the layout's length] int32.
    """
    at = {name: int(step_offsets(layout)[0][name]) for name in OFFSETS.names or ()}

    def part(name: str, count: int) -> A:
        return words[at[name] : at[name] + count]

    def fields(name: str, count: int, stride: int, used: int) -> A:
        return part(name, count * stride).reshape(count, stride)[:, :used]

    def lists(name: str, count: int, width: int) -> tuple[A, ...]:
        each = part(name, layout.windows * count * width).reshape(layout.windows, count, width)
        return tuple(each[window] for window in range(layout.windows))

    samples = layout.samples
    tree = None
    if layout.groups:
        tree = TreeInputs(
            _as_int64(part("ancestors", 2 * layout.tokens)),
            part("draft_tokens", samples),
            part("parents", samples),
            part("sample_slot_mapping", samples),
            fields("groups", GROUP_FIELDS, at["group_stride"], layout.groups),
        )
    return StepInputs(
        write_count=part("write_count", 1),
        work_counts=part("work_counts", 2 * layout.windows).reshape(layout.windows, 2),
        token_ids=part("token_ids", layout.tokens),
        token_slots=part("token_slots", layout.tokens),
        positions=part("positions", layout.tokens),
        limits=part("limits", layout.tokens),
        slot_mapping=part("slot_mapping", layout.tokens),
        sample_rows=part("sample_rows", samples),
        sample_slots=part("sample_slots", samples),
        sampling=fields("sampling", ROW_FIELDS, at["sample_stride"], samples),
        writes=fields("writes", 3, at["write_stride"], layout.writes),
        items=lists("items", layout.items, WORK_FIELDS),
        cut_rows=lists("cut_rows", layout.cut_rows, CUT_ROW_FIELDS),
        tree=tree,
    )


def _as_int64(part: A) -> A:
    return part.view(torch.int64 if isinstance(part, torch.Tensor) else np.int64)


@dataclass(frozen=True, slots=True)
class StepBuffer:
    """The step input buffer of one kind of step, as the host fills it and the device reads it.

    Attributes:
        layout, offsets: see `step_offsets`.
        limits: of the kind's attention work list.
        words: [length] int32 on the device, where the buffer is fetched to.
        inputs: views into `words`.
    """

    layout: StepLayout
    offsets: np.ndarray
    limits: PlanLimits
    words: torch.Tensor
    inputs: StepInputs[torch.Tensor]


class DeviceStepBuffers:
    """The buffer on the device. All kinds of steps share its memory: they run one at a time.

    Args:
        context: of attention.
        max_num_seqs: most sequences of a step.
        max_tokens: most tokens of a step.
        max_graph_tokens: most tokens of a captured step that may have draft trees.
        max_prompt_tokens: the same of one without.
        max_decode_tokens: most tokens of a captured step that only decodes.
        drafts: there will be steps with draft trees.

    Attributes:
        num_words: length of the largest buffer.
    """

    def __init__(
        self,
        context: AttentionContext,
        *,
        max_num_seqs: int,
        max_tokens: int,
        max_graph_tokens: int,
        max_prompt_tokens: int,
        max_decode_tokens: int,
        drafts: bool,
    ) -> None:
        self._context = context
        self._max_decode_tokens = max_decode_tokens
        if drafts:
            largest = self._layout(max_tokens, max_tokens, _MOST_WRITES, groups=max_num_seqs)
        else:
            largest = self._layout(max_tokens, max_num_seqs, _MOST_WRITES)
        captured = self._model_layout(max_prompt_tokens), self._verify_layout(max_graph_tokens)
        self.num_words = max(int(step_offsets(x)["words"][0]) for x in (largest, *captured))
        device = context.block_tables.device
        self._words = torch.zeros(self.num_words, dtype=torch.int32, device=device)

    def decode(self, bucket: int, tile: TileShape, *, cut: bool) -> StepBuffer:
        """Of graphs in which every sequence decodes one token. `cut`: attention may be cut."""
        return self._buffer(self._layout(bucket, bucket, max(LEAST_WRITES, 2 * bucket)), tile, cut)

    def model(self, bucket: int, tile: TileShape) -> StepBuffer:
        """Of graphs of the model alone. The part that the separate "head" graphs read lies at the
        same place for all buckets."""
        return self._buffer(self._model_layout(bucket), tile, cut=True)

    def verify(self, bucket: int, tile: TileShape, *, cut: bool) -> StepBuffer:
        """Of graphs that verify draft trees. `cut`: attention may be cut."""
        return self._buffer(self._verify_layout(bucket), tile, cut)

    def exact(
        self, step: SchedulerOutput, tile: TileShape, *, samples: int, groups: int, cut: bool
    ) -> StepBuffer:
        """Of one uncaptured step. `cut`: attention may be cut."""
        num_tokens = int(step.num_scheduled_tokens.sum())
        layout = StepLayout(
            num_tokens,
            samples,
            self._context.limits(tile).most_items(step.num_scheduled_tokens),
            num_tokens,
            min(step.block_table_writes.shape[1], _MOST_WRITES),
            len(self._context.windows),
            groups,
        )
        return self._buffer(layout, tile, cut)

    def _verify_layout(self, bucket: int) -> StepLayout:
        """Any token may be sampled after, and be a group of its own."""
        return self._layout(bucket, bucket, max(LEAST_WRITES, 2 * bucket), groups=bucket)

    def _model_layout(self, bucket: int) -> StepLayout:
        return self._layout(bucket, self._max_decode_tokens, _MOST_WRITES)

    def _layout(self, tokens: int, samples: int, writes: int, groups: int = 0) -> StepLayout:
        """Of a bucket, with room for the work list of any step of that many tokens."""
        return StepLayout(
            tokens,
            samples,
            tokens + self._context.max_pieces,
            tokens,
            writes,
            len(self._context.windows),
            groups,
        )

    def _buffer(self, layout: StepLayout, tile: TileShape, cut: bool) -> StepBuffer:
        offsets = step_offsets(layout)
        return StepBuffer(
            layout,
            offsets,
            self._context.limits(tile, cut=cut),
            self._words[: int(offsets["words"][0])],
            step_views(self._words, layout),
        )
