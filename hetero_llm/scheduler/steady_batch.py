"""The next step of a batch in which every sequence decodes, made from arrays.

Between the results of a step with drafts and the launch of the next step the device waits. So the
scheduler collects what the next step depends on while the device still works (`steady_batch`).
Once the results are there, `SteadyBatch.advance` takes them in and says whether the next step runs
the same sequences again. The sequences themselves are updated behind the launch of that step, and
come to the state that the arrays had before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.table_changes import TableChanges
from hetero_llm.scheduler.step_builder import (
    InFlight,
    block_copies,
    block_table_writes,
    with_nodes,
)

_NO_TOKEN = -1  # pads `end_ids`


@dataclass(frozen=True, slots=True, eq=False)
class SteadyBatch:
    """S running sequences with a step in flight that samples one token of each, or verifies a draft
    of each. Arrays are of the time before that step's results.

    Attributes:
        sequences, epochs: those of the step, in its order.
        rows: [S] int64, the drafter's names of them.
        request_slots: [S] int32.
        num_tokens: [S] int64 tokens known.
        max_tokens: [S] int64 tokens at which each sequence ends.
        end_ids: [S, E] int64 tokens that end it, padded with -1.
        num_writable: [S] int64 leading positions with KV blocks of its own.
        most_nodes: of one draft, by the token budget.
    """

    sequences: list[Sequence]
    epochs: list[int]
    rows: NDArray[np.int64]
    request_slots: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    end_ids: NDArray[np.int64]
    num_writable: NDArray[np.int64]
    most_nodes: int

    def advance(self, token_ids: NDArray[np.int64], sizes: NDArray[np.int64]) -> Advanced | None:
        """Takes in the results of the step in flight.

        Args:
            token_ids: sampled tokens, one sequence after the other. sizes: [S] of each.

        Returns:
            None if a sequence ends, or has no room for its next token or for a draft: then the next
            step has to be scheduled sequence by sequence.
        """
        known = self.num_tokens + sizes
        # If all nodes are accepted, one more token follows them.
        limits = np.minimum(self.max_tokens - known - 1, self.most_nodes)
        if sizes.min() < 1 or limits.min() < 1 or (self.num_writable < known).any():
            return None
        if self.end_ids.shape[1]:
            owners = np.repeat(np.arange(len(sizes)), sizes)
            if (token_ids[:, None] == self.end_ids[owners]).any():
                return None
        last = token_ids[np.cumsum(sizes) - 1]
        return Advanced(limits, (known - 1).astype(np.int32), last.astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Advanced:
    """A steady batch behind the results of its step.

    Attributes:
        limits: [S] int64 most nodes of each draft.
        num_computed_tokens: [S] int32, before the next step.
        token_ids: [S] int32 last token of each sequence, the input of the next step.
    """

    limits: NDArray[np.int64]
    num_computed_tokens: NDArray[np.int32]
    token_ids: NDArray[np.int32]


def steady_batch(
    flight: InFlight, rows: NDArray[np.int64], blocks: BlockManager, token_budget: int
) -> SteadyBatch:
    """Collects a batch while its step is in flight.

    Args:
        flight: the step; it samples once for each of its sequences.
        rows: [S] the drafter's names of the sequences.
        token_budget: tokens of a step.
    """
    sequences = flight.sequences
    size = max(len(sequence.request.end_ids) for sequence in sequences)
    num_tokens, max_tokens, num_writable = [], [], []
    slots: list[int] = []
    end_ids: list[list[int]] = []
    for sequence in sequences:
        request, slot = sequence.request, sequence.request_slot
        slots.append(slot)
        num_tokens.append(len(sequence.token_ids))
        max_tokens.append(request.max_total_tokens)
        num_writable.append(blocks.num_writable[slot])
        ends = list(request.end_ids)
        end_ids.append(ends + [_NO_TOKEN] * (size - len(ends)))
    return SteadyBatch(
        sequences=sequences,
        epochs=flight.epochs,
        rows=rows,
        request_slots=np.array(slots, np.int32),
        num_tokens=np.array(num_tokens, np.int64),
        max_tokens=np.array(max_tokens, np.int64),
        end_ids=np.array(end_ids, np.int64).reshape(len(sequences), size),
        num_writable=np.array(num_writable, np.int64),
        most_nodes=min(MAX_NODES, token_budget - len(sequences)),
    )


def build_steady_step(
    batch: SteadyBatch, advanced: Advanced, changes: TableChanges, drafts: DraftBatch | None
) -> InFlight:
    """Makes the step behind a batch's results: one token of each sequence, and its draft. The
    sequences are left alone: see `count_as_scheduled`."""
    count = len(batch.sequences)
    ones = [1] * count
    num_scheduled = np.ones(count, np.int32)
    scheduled, num_nodes = with_nodes(num_scheduled.copy(), drafts)
    step = SchedulerOutput(
        request_slots=batch.request_slots,
        num_computed_tokens=advanced.num_computed_tokens,
        num_scheduled_tokens=scheduled,
        token_ids=advanced.token_ids,
        num_samples=num_scheduled,
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=block_table_writes(changes),
        block_copies=block_copies(changes),
        drafts=drafts,
    )
    num_computed = advanced.num_computed_tokens.tolist()
    return InFlight(
        step, batch.sequences, batch.epochs, num_computed, ones, ones, num_nodes, 0,
        proposed=True, is_steady=True,
    )  # fmt: skip


def count_as_scheduled(flight: InFlight) -> None:
    """Counts the tokens of a steady step as computed and pending, as `build_step` does at once.
    Called when its sequences have got the tokens of the step before."""
    for sequence, epoch, num_computed in zip(
        flight.sequences, flight.epochs, flight.num_computed_tokens, strict=True
    ):
        if sequence.epoch == epoch:
            assert len(sequence.token_ids) == num_computed + 1, "the arrays and the sequence differ"
            sequence.num_computed_tokens = num_computed + 1
            sequence.num_pending_tokens += 1
