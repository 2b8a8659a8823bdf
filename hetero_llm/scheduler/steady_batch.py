"""The next step of a batch in which every sequence decodes, made from arrays.

Between the results of a step with drafts and the launch of the next step the device waits. So the
scheduler collects what the next step depends on while the device still works (`steady_batch`).
Once the results are there, the drafter takes them in and drafts for the sequences that go on, in
arrays (`core.drafter.ArrayDrafter`), and `build_steady_step` makes the step. The sequences
themselves are updated behind its launch, and come to the state that the arrays had before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.drafter import SteadyStep
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.table_changes import TableChanges
from hetero_llm.scheduler.step_builder import InFlight, block_copies

_NO_TOKEN = -1  # pads the end tokens of `SteadyBatch.numbers`


@dataclass(frozen=True, slots=True, eq=False)
class SteadyBatch:
    """S running sequences with a step in flight that samples one token of each, or verifies a draft
    of each, before that step's results.

    Attributes:
        sequences, epochs: those of the step, in its order.
        request_slots: [S] int32.
        numbers: [S, 4 + E] int64, see `core.drafter.FIRST_END_ID`.
        ones: [S] int32, all 1.
        most_nodes: of one draft, by the token budget.
    """

    sequences: list[Sequence]
    epochs: list[int]
    request_slots: NDArray[np.int32]
    numbers: NDArray[np.int64]
    ones: NDArray[np.int32]
    most_nodes: int


def steady_batch(
    flight: InFlight, rows: NDArray[np.int64], blocks: BlockManager, token_budget: int
) -> SteadyBatch | None:
    """Collects a batch while its step is in flight; None if the next step has no room for a draft.

    Args:
        flight: the step; it samples once for each of its sequences.
        rows: [S] the drafter's numbers of the sequences.
        token_budget: tokens of a step.
    """
    sequences = flight.sequences
    most_nodes = min(MAX_NODES, token_budget - len(sequences))
    if most_nodes < 1:
        return None
    size = max(len(sequence.request.end_ids) for sequence in sequences)
    num_writable = blocks.num_writable
    slots: list[int] = []
    numbers: list[list[int]] = []
    for sequence, row in zip(sequences, rows.tolist(), strict=True):
        request, slot = sequence.request, sequence.request_slot
        ends = list(request.end_ids)
        slots.append(slot)
        numbers.append([
            row, len(sequence.token_ids), request.max_total_tokens, num_writable[slot], *ends,
            *[_NO_TOKEN] * (size - len(ends)),
        ])  # fmt: skip
    return SteadyBatch(
        sequences,
        flight.epochs,
        np.array(slots, np.int32),
        np.array(numbers, np.int64),
        np.ones(len(slots), np.int32),
        most_nodes,
    )


def build_steady_step(
    batch: SteadyBatch, following: SteadyStep, changes: TableChanges, drafts: DraftBatch | None
) -> InFlight:
    """Makes the step after the one whose results the drafter has taken in. Each sequence that has
    not ended runs its last token and its draft. The sequences are left alone: see
    `count_as_scheduled`.

    Args:
        following: see `ArrayDrafter.propose_next`.
        drafts: those of its drafts that have blocks; None if all are empty.
    """
    sequences, epochs = batch.sequences, batch.epochs
    slots, ones = batch.request_slots, batch.ones
    if following.going_on is not None:
        going_on = following.going_on.tolist()
        sequences = [sequences[index] for index in going_on]
        epochs = [epochs[index] for index in going_on]
        slots, ones = slots[following.going_on], ones[: len(sequences)]
    step = SchedulerOutput(
        request_slots=slots,
        num_computed_tokens=following.num_computed_tokens,
        num_scheduled_tokens=ones if drafts is None else drafts.counts + 1,
        token_ids=following.token_ids,
        num_samples=ones,
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=changes.writes(),
        block_copies=block_copies(changes),
        drafts=drafts,
    )
    count = len(sequences)
    one_each = [1] * count
    num_nodes = [0] * count if drafts is None else drafts.counts.tolist()
    return InFlight(
        step, sequences, epochs, following.num_computed_tokens.tolist(), one_each, one_each,
        num_nodes, 0, proposed=True, is_steady=True,
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
