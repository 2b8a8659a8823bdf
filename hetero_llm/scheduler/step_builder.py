"""A step from its making to its update: the arrays for the runner, and what was scheduled.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import LAST_SAMPLED, AdmittedSequence, PromptLogprobSpan, SchedulerOutput
from hetero_llm.kv_cache.table_changes import TableChanges


@dataclass(slots=True)
class InFlight:
    """A step in flight: what was scheduled, whatever became of it since.

    One entry per scheduled sequence. A sequence whose epoch moved on has left its slot: its
    results are void, and the slot may belong to another. `counts` are rows of known or drawn
    tokens, `nodes` the rows of draft nodes that follow. `prompt_tokens` of the rows are prompts'.
    """

    step: SchedulerOutput
    sequences: list[Sequence]
    epochs: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[int]
    nodes: list[int]
    prompt_tokens: int


def pack(
    sequences: list[Sequence],
    counts: list[int],
    admitted: tuple[AdmittedSequence, ...],
    changes: TableChanges,
    drafts: DraftBatch | None = None,
    loads: tuple[int, ...] = (),
) -> InFlight:
    """Makes a step of the next `counts[i]` rows of each sequence, and takes them as computed:
    rows of a later step come after these.

    Args:
        drafts: of each sequence, for rows after its one row, which are not taken as computed.
        loads: tickets that the step waits for.
    """
    token_ids: list[int] = []
    starts: list[int] = []
    slots: list[int] = []
    epochs: list[int] = []
    samples: list[int] = []
    prompt_rows: list[PromptLogprobSpan] = []
    prompt_tokens = 0
    for sequence, count in zip(sequences, counts, strict=True):
        start = sequence.num_computed_tokens
        end = start + count
        tokens = sequence.token_ids
        known = len(tokens)
        request = sequence.request
        if start < sequence.num_prompt_tokens:
            prompt_tokens += min(end, sequence.num_prompt_tokens) - start
            if request.prompt_logprobs is not None:
                first = max(start, len(request.prompt_logprobs) - 1)
                last = min(end, sequence.num_prompt_tokens - 1)
                if first < last:
                    prompt_rows.append(PromptLogprobSpan(len(starts), first - start, last - first))
        starts.append(start)
        slots.append(sequence.request_slot)
        epochs.append(sequence.epoch)
        if count == 1:
            token_ids.append(tokens[start] if start < known else LAST_SAMPLED)
        else:
            token_ids.extend(tokens[start:end])
        drawn = 0
        if end >= known:
            drawn = request.num_first_samples if len(request.sequences) == 1 else 1
        samples.append(drawn)
        sequence.num_computed_tokens = end
        sequence.num_pending_tokens += drawn
    rows = np.array(counts, np.int32)
    nodes = [0] * len(sequences)
    if drafts is not None:
        rows += drafts.counts
        nodes = drafts.counts.tolist()
    step = SchedulerOutput(
        request_slots=np.array(slots, np.int32),
        num_computed_tokens=np.array(starts, np.int32),
        num_scheduled_tokens=rows,
        token_ids=np.array(token_ids, np.int32),
        num_samples=np.array(samples, np.int32),
        prompt_logprob_spans=tuple(prompt_rows),
        admitted=admitted,
        block_table_writes=changes.writes() if changes.runs else _NO_WRITES,
        block_copies=_NO_COPIES
        if not changes.copy_to
        else np.array((changes.copy_from, changes.copy_to), np.int32),
        drafts=drafts,
        kv_loads=loads,
    )
    return InFlight(step, sequences, epochs, starts, counts, samples, nodes, prompt_tokens)


def slot_state(sequence: Sequence) -> AdmittedSequence:
    """What the runner has to know of a sequence that enters its slot."""
    request = sequence.request
    return AdmittedSequence(
        sequence.request_slot,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        request.params,
        request.seed,
        sequence.index,
        request.num_logprobs,
        request.num_prompt_logprobs,
        tuple(request.end_ids),
        request.bad_word_ids,
        request.images,
    )


_NO_WRITES = np.zeros((3, 0), np.int32)
_NO_COPIES = np.zeros((2, 0), np.int32)
