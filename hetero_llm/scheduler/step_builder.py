"""Builds a step: the arrays for the runner, and the record of what was scheduled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.lora import AdapterLoad
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import LAST_SAMPLED, AdmittedSequence, PromptLogprobSpan, SchedulerOutput
from hetero_llm.kv_cache.table_changes import TableChanges


@dataclass(slots=True)
class InFlight:
    """A step in flight: what was scheduled, whatever has become of the sequences since.

    Attributes:
        sequences: those scheduled; the lists below have one entry for each.
        epochs: `Sequence.epoch` at scheduling. A sequence whose epoch has changed has left its
            request slot: its results are void, and the slot may belong to another.
        num_computed_tokens: tokens computed before the step.
        num_scheduled_tokens: tokens of the step, draft nodes aside.
        num_samples: tokens to sample, as in `SchedulerOutput`.
        num_nodes: draft nodes.
        num_prompt_tokens: prompt tokens that the step computes, of all sequences together.
        proposed: the drafter was asked for drafts for it.
        looked: forced tokens of grammars were looked for.
        is_steady: made before its sequences got the tokens of the step before (steady_batch.py).
    """

    step: SchedulerOutput
    sequences: list[Sequence]
    epochs: list[int]
    num_computed_tokens: list[int]
    num_scheduled_tokens: list[int]
    num_samples: list[int]
    num_nodes: list[int]
    num_prompt_tokens: int
    proposed: bool = False
    looked: bool = False
    is_steady: bool = False


def build_step(
    sequences: list[Sequence],
    num_scheduled_tokens: list[int],
    admitted: tuple[AdmittedSequence, ...],
    changes: TableChanges,
    drafts: DraftBatch | None = None,
    loads: tuple[int, ...] = (),
    adapter_loads: tuple[AdapterLoad, ...] = (),
) -> InFlight:
    """Makes a step of the next `num_scheduled_tokens[i]` tokens of each sequence, and counts these
    as computed and the tokens to sample as pending: a later step comes after them.

    Args:
        drafts: one draft per sequence; a drafted sequence has one token scheduled. Nodes do not
            count as computed.
        loads: transfer ids that the step waits for.
        adapter_loads: adapter slots that it fills first.
    """
    token_ids: list[int] = []
    num_computed_tokens: list[int] = []
    request_slots: list[int] = []
    epochs: list[int] = []
    num_samples: list[int] = []
    logprob_spans: list[PromptLogprobSpan] = []
    num_prompt_tokens = 0
    for sequence, count in zip(sequences, num_scheduled_tokens, strict=True):
        start = sequence.num_computed_tokens
        end = start + count
        tokens = sequence.token_ids
        num_known = len(tokens)
        request = sequence.request
        if start < sequence.num_prompt_tokens:
            num_prompt_tokens += min(end, sequence.num_prompt_tokens) - start
            if request.prompt_logprobs is not None:
                first = max(start, len(request.prompt_logprobs) - 1)
                last = min(end, sequence.num_prompt_tokens - 1)
                if first < last:
                    span = PromptLogprobSpan(len(epochs), first - start, last - first)
                    logprob_spans.append(span)
        num_computed_tokens.append(start)
        request_slots.append(sequence.request_slot)
        epochs.append(sequence.epoch)
        if count == 1:
            token_ids.append(tokens[start] if start < num_known else LAST_SAMPLED)
        else:
            token_ids.extend(tokens[start:end])
        samples = 0
        if end >= num_known:
            samples = request.num_first_samples if len(request.sequences) == 1 else 1
        num_samples.append(samples)
        sequence.num_computed_tokens = end
        sequence.num_pending_tokens += samples
    scheduled, num_nodes = with_nodes(np.array(num_scheduled_tokens, np.int32), drafts)
    step = SchedulerOutput(
        request_slots=np.array(request_slots, np.int32),
        num_computed_tokens=np.array(num_computed_tokens, np.int32),
        num_scheduled_tokens=scheduled,
        token_ids=np.array(token_ids, np.int32),
        num_samples=np.array(num_samples, np.int32),
        prompt_logprob_spans=tuple(logprob_spans),
        admitted=admitted,
        block_table_writes=changes.writes(),
        block_copies=block_copies(changes),
        drafts=drafts,
        kv_loads=loads,
        adapter_loads=adapter_loads,
    )
    return InFlight(
        step,
        sequences,
        epochs,
        num_computed_tokens,
        num_scheduled_tokens,
        num_samples,
        num_nodes,
        num_prompt_tokens,
    )


def with_nodes(
    num_scheduled: NDArray[np.int32], drafts: DraftBatch | None
) -> tuple[NDArray[np.int32], list[int]]:
    """[S] scheduled tokens with the nodes of the drafts, and the nodes of each sequence."""
    if drafts is None:
        return num_scheduled, [0] * len(num_scheduled)
    num_scheduled += drafts.counts
    return num_scheduled, drafts.counts.tolist()


def block_copies(changes: TableChanges) -> NDArray[np.int32]:
    """[2, M], see `SchedulerOutput`."""
    if not changes.copy_to:
        return _NO_COPIES
    return np.array((changes.copy_from, changes.copy_to), np.int32)


def admitted_sequence(sequence: Sequence, adapter_slot: int) -> AdmittedSequence:
    """What the runner has to know of a sequence that enters its request slot."""
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
        request.grammar,
        adapter_slot,
        request.num_virtual_tokens,
    )


_NO_COPIES = np.zeros((2, 0), np.int32)
