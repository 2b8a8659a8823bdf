"""Where a step's keys and values go: into the KV cache, or first to the other ranks as well.

In a step whose tokens several ranks share (`runner.sequence_parallel`) the kernel that makes keys
and values writes those of the own tokens into a buffer in place of the cache, already rotated and
in the model's type. A gather brings the rows of all ranks, and one more launch stores those of the
whole step. A cache of 8 bits gets the same bits either way: what is stored is the same number in
the model's type, times the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.attention_context import AttentionContext
from hetero_llm.gpu.kernels.rope_store import store
from hetero_llm.gpu.uploads import Uploads
from hetero_llm.models.collectives import Collectives
from hetero_llm.runner.sequence_parallel import SequenceParallel, gather_rows
from hetero_llm.runner.split_step import RowPlaces, SplitStep, ranges


@dataclass(frozen=True, slots=True)
class KVTarget:
    """Arguments of `rope_store` and `store`: where a layer's keys and values are written.

    Attributes:
        keys, values: [blocks, block size, N, D].
        slot_mapping: [T] of the tokens whose keys and values are made.
        inverses: see `PagedKVCache`.
    """

    keys: Tensor
    values: Tensor
    slot_mapping: Tensor
    inverses: Tensor | None


class CacheKV:
    """The KV cache.

    Args:
        slot_mapping: [T] int32 KV slots.
    """

    def __init__(self, context: AttentionContext, slot_mapping: Tensor) -> None:
        self._context = context
        self._slot_mapping = slot_mapping

    def target(self, layer: int) -> KVTarget:
        """Where the layer's keys and values are written."""
        context = self._context
        return KVTarget(
            context.keys[layer], context.values[layer], self._slot_mapping, context.inverses[layer]
        )

    def stored(self, layer: int) -> None:
        """Called once they are: brings what is missing into the cache."""


class GatheredKV:
    """A buffer that all ranks gather, as `CacheKV`.

    Args:
        rows: where the rows of all ranks' tokens lie.
        num_own: tokens of this rank.
        slots: [width * ranks] int32 KV slot of each gathered row, -1 where it has no token.
    """

    def __init__(
        self,
        context: AttentionContext,
        collectives: Collectives,
        rows: RowPlaces,
        num_own: int,
        slots: Tensor,
    ) -> None:
        self._context, self._collectives = context, collectives
        self._rows, self._slots = rows, slots
        self._kv_heads, self._head_dim = context.keys[0].shape[2:]
        self._buffer = torch.empty(
            (rows.width, 2, self._kv_heads, self._head_dim),
            dtype=context.dtype,
            device=slots.device,
        )
        self._own_slots = torch.arange(num_own, dtype=torch.int32, device=slots.device)

    def target(self, layer: int) -> KVTarget:
        keys, values = self._buffer.unsqueeze(1).unbind(2)  # as blocks of one token
        return KVTarget(keys, values, self._own_slots, None)

    def stored(self, layer: int) -> None:
        gathered = gather_rows(self._buffer.flatten(1), self._rows, self._collectives)
        keys, values = gathered.view(-1, 2, self._kv_heads, self._head_dim).unbind(1)
        context = self._context
        store(
            keys, values, self._slots, context.keys[layer], context.values[layer],
            inverses=context.inverses[layer],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedRows:
    """What a rank needs to run its part of one step.

    Attributes:
        own: see `SplitStep`.
        kv: for its attention.
        collectives: between the ranks.
        rows: of the hidden states that are gathered: those of samples, or of all tokens.
        places: [R] int32 on the device, `rows.places`.
        of_samples: `rows` are those of samples.
    """

    own: SchedulerOutput
    kv: GatheredKV
    collectives: Collectives
    rows: RowPlaces
    places: Tensor
    of_samples: bool

    def gather(self, hidden: Tensor) -> Tensor:
        """Hidden states of all ranks.

        Args:
            hidden: [R, hidden] of the own samples, or if there are none of any token, see
                `SampledRowsPlanner`; or [own tokens, hidden].

        Returns:
            [samples, hidden], or [T, hidden].
        """
        if self.rows.width == 0:  # the step samples nothing
            return hidden[:0]
        return gather_rows(hidden, self.rows, self.collectives).index_select(0, self.places)

    def own_samples(self, hidden: Tensor) -> Tensor:
        """[own tokens, hidden] to the rows of the own samples, or to one row if there are none."""
        own = self.own
        lasts = np.repeat(np.cumsum(own.num_scheduled_tokens) - 1, own.num_samples)
        if len(lasts) == 0:
            return hidden[:1]
        return hidden.index_select(0, torch.from_numpy(lasts.astype(np.int64)).to(hidden.device))


class StepSharer:
    """Splits a runner's steps between ranks, and sends the device what that takes.

    Args:
        max_tokens: most tokens of a step.
    """

    def __init__(
        self, context: AttentionContext, sequence: SequenceParallel, *, max_tokens: int
    ) -> None:
        self._context = context
        self._sequence = sequence
        padding = 64 * sequence.collectives.rank.size
        self._uploads = Uploads(2 * max_tokens + padding, context.block_tables.device)

    def split(self, step: SchedulerOutput) -> SplitStep | None:
        """See `SequenceParallel`."""
        return self._sequence.split(step)

    def send(
        self, step: SchedulerOutput, part: SplitStep, block_tables: np.ndarray, *, samples: bool
    ) -> SharedRows:
        """
        Args:
            part: result of `split`.
            block_tables: [slots, columns] block ids on the host, with the step's writes.
            samples: nothing but the step's samples needs hidden states behind the model.
        """
        size = self._context.cache.shape.block_size
        counts = step.num_scheduled_tokens
        indices = ranges(step.num_computed_tokens.astype(np.int64), counts)
        blocks = block_tables[np.repeat(step.request_slots, counts), indices // size]
        tokens = part.tokens
        slots = np.full(tokens.width * tokens.size, -1, np.int32)
        slots[tokens.places] = blocks * size + indices % size
        rows = part.samples if samples else tokens
        sent = self._uploads.send(np.concatenate((slots, rows.places)).astype(np.int32))
        collectives = self._sequence.collectives
        num_own = int(part.own.num_scheduled_tokens.sum())
        kv = GatheredKV(self._context, collectives, tokens, num_own, sent[: len(slots)])
        return SharedRows(part.own, kv, collectives, rows, sent[len(slots) :], samples)


class NoStepSharer:
    """In the place of `StepSharer` where each rank computes all tokens of a step."""

    def split(self, step: SchedulerOutput) -> None:
        return None
