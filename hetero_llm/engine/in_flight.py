"""A step from its making to its update: the arrays for the runner, and what was scheduled.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_llm.core.request import Sequence
from hetero_llm.core.step import LAST_DRAWN, PromptRows, SchedulerOutput, SlotState
from hetero_llm.engine.block_manager import TableChanges


@dataclass(slots=True)
class InFlight:
    """A step in flight: what was scheduled, whatever became of it since.

    One entry per scheduled sequence. A sequence whose epoch moved on has left its slot: its
    results are void, and the slot may belong to another.
    """

    step: SchedulerOutput
    sequences: list[Sequence]
    epochs: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[int]


def pack(
    sequences: list[Sequence],
    counts: list[int],
    admitted: tuple[SlotState, ...],
    changes: TableChanges,
) -> InFlight:
    """Makes a step of the next `counts[i]` rows of each sequence, and takes them as computed:
    rows of a later step come after these."""
    token_ids: list[int] = []
    starts: list[int] = []
    slots: list[int] = []
    epochs: list[int] = []
    samples: list[int] = []
    prompt_rows: list[PromptRows] = []
    for index, sequence in enumerate(sequences):
        start = sequence.num_computed
        count = counts[index]
        end = start + count
        tokens = sequence.token_ids
        starts.append(start)
        slots.append(sequence.slot)
        epochs.append(sequence.epoch)
        if count == 1:
            token_ids.append(tokens[start] if start < len(tokens) else LAST_DRAWN)
        else:
            token_ids.extend(tokens[start:end])
        request = sequence.request
        if end < len(tokens):
            drawn = 0
        elif len(request.sequences) == 1 and not request.params.use_beam_search:
            drawn = request.params.width
        else:
            drawn = 1
        samples.append(drawn)
        sequence.num_computed = end
        sequence.num_unknown += drawn
        if request.prompt_logprobs is not None and start < sequence.num_prompt:
            first = max(start, len(request.prompt_logprobs) - 1)
            last = min(end, sequence.num_prompt - 1)
            if first < last:
                prompt_rows.append(PromptRows(index, first - start, last - first))
    step = SchedulerOutput(
        slots=np.array(slots, np.int32),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        token_ids=np.array(token_ids, np.int32),
        num_samples=np.array(samples, np.int32),
        prompt_rows=tuple(prompt_rows),
        admitted=admitted,
        table_writes=np.array((changes.tables, changes.columns, changes.blocks), np.int32),
        block_copies=np.array((changes.copy_from, changes.copy_to), np.int32),
    )
    return InFlight(step, sequences, epochs, starts, counts, samples)
