"""Rows of the sequences that run already. Part of the scheduler, which alone calls it."""

from __future__ import annotations

from collections.abc import Callable

from hetero_llm.core.request import Sequence
from hetero_llm.kv_cache.block_manager import BlockManager


def running_rows(
    running: list[Sequence],
    blocks: BlockManager,
    most: int,
    sequences: list[Sequence],
    counts: list[int],
    preempt: Callable[[Sequence], None] | None,
) -> int | None:
    """Chooses rows for running sequences, oldest first, and takes blocks for them.

    Args:
        running: changed by `preempt`, which takes slot and blocks from a sequence and its siblings.
            None: a step is in flight, nobody may be preempted.
        most: rows of the step.
        sequences, counts: who has how many rows; written.

    Returns:
        Rows that are left; None if blocks ran out and nobody may be preempted. Blocks taken so far
        stay with their tables, which need them next.
    """
    budget = most
    room = blocks.num_writable
    index = 0
    chosen: set[Sequence] = set()  # when somebody was preempted last
    while index < len(running) and budget > 0:
        sequence = running[index]
        computed = sequence.num_computed_tokens
        known = len(sequence.token_ids)
        unknown = sequence.num_pending_tokens
        count = known + unknown - computed
        if count > budget:
            count = budget
        # No row for a beam whose siblings are not done yet, nor while a step in flight forks
        # the sequence or draws its last token.
        if (
            count == 0
            or (unknown and (unknown > 1 or known + unknown >= sequence.request.max_total_tokens))
            or sequence in chosen
        ):
            index += 1
            continue
        slot, end = sequence.request_slot, computed + count
        if room[slot] >= end or blocks.allocate(slot, computed, end):
            sequences.append(sequence)
            counts.append(count)
            budget -= count
            index += 1
            continue
        if preempt is None:
            return None
        preempt(running[-1])
        # A preempted beam takes its whole group along, members already chosen included.
        kept = [(s, c) for s, c in zip(sequences, counts, strict=True) if s.request_slot >= 0]
        sequences[:] = [s for s, _ in kept]
        counts[:] = [c for _, c in kept]
        budget = most - sum(counts)
        chosen = set(sequences)
        index = 0
    return budget
