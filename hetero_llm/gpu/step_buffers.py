"""Which packet each kind of step takes: its layout, its plan's limits, its place on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.attention_plan import PlanLimits
from hetero_llm.gpu.kernels.paged_attention import TileShape
from hetero_llm.gpu.paged_attention import AttentionContext
from hetero_llm.gpu.step_buffer import PacketLayout, StepInputs, packet_views

_MOST_WRITES = 4096
"""Block-table writes in a packet; a longer prefix hit (65,536 tokens) uploads them apart."""


@dataclass(frozen=True, slots=True)
class Packet:
    """How a kind of step is planned and packed, and where its packet goes on the device."""

    layout: PacketLayout
    limits: PlanLimits
    target: torch.Tensor


class StepPackets:
    """The packet on the device, shared by all kinds of steps: one runs after the other.

    Args:
        context: of attention.
        max_num_seqs: most sequences of a step.
        most_rows: most rows of a step.
        captured: most rows of a captured one. decoded: of a captured one that only decodes.
        drafts: there will be steps with draft trees.

    Attributes:
        words: of the largest packet.
    """

    def __init__(
        self,
        context: AttentionContext,
        *,
        max_num_seqs: int,
        most_rows: int,
        captured: int,
        decoded: int,
        drafts: bool,
    ) -> None:
        self._context = context
        self._decoded = decoded
        if drafts:
            largest = self._layout(most_rows, most_rows, _MOST_WRITES, groups=max_num_seqs)
        else:
            largest = self._layout(most_rows, max_num_seqs, _MOST_WRITES)
        layouts = (largest, self.rows(captured), self.verify(captured))
        self.words = max(layout.words for layout in layouts)
        self._data = torch.zeros(self.words, dtype=torch.int32, device=context.tables.device)

    def decode(self, bucket: int) -> PacketLayout:
        """Of a "decode" graph."""
        return self._layout(bucket, bucket, max(256, 2 * bucket))

    def verify(self, bucket: int) -> PacketLayout:
        """Of a "verify" graph: any row may be drawn from, and be a group of its own."""
        return self._layout(bucket, bucket, max(256, 2 * bucket), groups=bucket)

    def rows(self, bucket: int) -> PacketLayout:
        """Of a "rows" graph: the part that "head" graphs read lies at the same place in all."""
        return self._layout(bucket, self._decoded, _MOST_WRITES)

    def exact(
        self, step: SchedulerOutput, tile: TileShape, samples: int, groups: int
    ) -> PacketLayout:
        """Of an uncaptured step."""
        num_rows = int(step.num_scheduled_tokens.sum())
        return PacketLayout(
            num_rows,
            samples,
            self._context.limits(tile).most_items(step.num_scheduled_tokens),
            num_rows,
            min(step.block_table_writes.shape[1], _MOST_WRITES),
            len(self._context.windows),
            groups,
        )

    def packet(self, layout: PacketLayout, tile: TileShape, *, cut: bool = True) -> Packet:
        """Of steps whose attention runs with `tile`; `cut`: it may be cut into pieces."""
        limits = self._context.limits(tile, cut=cut)
        return Packet(layout, limits, self._data[: layout.words])

    def views(self, layout: PacketLayout) -> StepInputs[torch.Tensor]:
        """The parts of the packet on the device."""
        return packet_views(self._data, layout)

    def _layout(self, rows: int, samples: int, writes: int, groups: int = 0) -> PacketLayout:
        """Of a bucket, with room for any step of so many rows."""
        return PacketLayout(
            rows,
            samples,
            rows + self._context.max_pieces,
            rows,
            writes,
            len(self._context.windows),
            groups,
        )
