"""Which drafts run in a step: a drafter is asked, and of its answer runs what fits.

Nothing here changes a request or a sequence; blocks are taken for the nodes that run.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.request import Sequence
from hetero_llm.kv_cache.block_manager import BlockManager


def choose_drafts(
    drafter: Drafter,
    sequences: list[Sequence],
    counts: list[int],
    blocks: BlockManager,
    budget: int,
) -> DraftBatch | None:
    """Drafts for the scheduled sequences, with KV blocks behind them; None if there are none.

    Nobody is preempted for a draft, now or at the next step: nodes take blocks only as long as one
    stays free for every scheduled sequence. What does not fit is cut off.

    Args:
        sequences, counts: of the step so far, their blocks taken; nothing is in flight.
        budget: rows that the step can still hold.

    Returns:
        One draft per scheduled sequence.
    """
    wanted: list[Sequence] = []
    limits: list[int] = []
    places: list[int] = []
    most = min(MAX_NODES, budget)
    for index, sequence in enumerate(sequences):
        request = sequence.request
        if not request.may_draft:
            continue
        known = len(sequence.token_ids)
        # If all nodes are accepted, one more token follows them.
        limit = request.max_total_tokens - known - 1
        if counts[index] != 1 or limit <= 0 or sequence.num_computed_tokens != known - 1:
            continue
        if known == sequence.num_prompt_tokens and request.num_first_samples > 1:
            continue  # its row draws the first tokens of several samples
        wanted.append(sequence)
        limits.append(limit if limit < most else most)
        places.append(index)
    if not wanted or most <= 0:
        return None
    proposed = drafter.propose(wanted, limits, sum(counts))
    assert len(proposed.counts) == len(wanted), "a drafter answers every request"
    sizes: list[int] = proposed.counts.tolist()
    kept = _take_blocks(sizes, wanted, limits, blocks, budget, reserve=len(sequences))
    if not any(kept):
        return None
    if kept != sizes:
        proposed = _cut(proposed, kept)
    if len(wanted) == len(sequences):
        return proposed
    everyone = np.zeros(len(sequences), np.int32)
    everyone[places] = proposed.counts
    return DraftBatch(everyone, proposed.token_ids, proposed.parents)


def num_before_end(sequence: Sequence, new: list[int]) -> int:
    """How many of the new tokens come before the first that ends the sequence, or before the last.

    The length ends it at the last one at the earliest: a tree has no more nodes than that.
    """
    end_ids = sequence.request.end_ids
    if not end_ids.isdisjoint(new):
        length = len(sequence.token_ids)
        for index, token in enumerate(new):
            if token in end_ids and sequence.may_end(length + index + 1):
                return index
    return len(new) - 1


def _take_blocks(
    sizes: list[int],
    sequences: list[Sequence],
    limits: list[int],
    blocks: BlockManager,
    budget: int,
    *,
    reserve: int,
) -> list[int]:
    """How many nodes of each draft can run; their blocks are taken, and `reserve` stay free."""
    kept: list[int] = []
    room = blocks.num_writable
    plenty = reserve + blocks.blocks_for(MAX_NODES) + 1
    for sequence, size, limit in zip(sequences, sizes, limits, strict=True):
        assert size <= limit, "a drafter keeps to its limits"
        nodes = size if size < budget else budget
        start = sequence.num_computed_tokens
        if nodes and room[sequence.request_slot] < start + 1 + nodes:
            if blocks.num_free < plenty:
                nodes = max(0, _fitting(blocks, sequence, nodes, reserve))
            if nodes and not blocks.allocate(sequence.request_slot, start, start + 1 + nodes):
                nodes = 0
        kept.append(nodes)
        budget -= nodes
    return kept


def _fitting(blocks: BlockManager, sequence: Sequence, nodes: int, reserve: int) -> int:
    """How many of `nodes` rows behind the sequence's next one fit if `reserve` blocks stay free."""
    held = len(blocks.block_ids(sequence.request_slot)) + max(blocks.num_free - reserve, 0)
    return min(nodes, held * blocks.block_size - sequence.num_computed_tokens - 1)


def _cut(drafts: DraftBatch, kept: list[int]) -> DraftBatch:
    """The first nodes of each draft: parents come first, so none is missing."""
    firsts = np.cumsum(drafts.counts) - drafts.counts
    within = np.arange(len(drafts.token_ids)) - np.repeat(firsts, drafts.counts)
    counts = np.array(kept, np.int32)
    stays = within < np.repeat(counts, drafts.counts)
    return DraftBatch(counts, drafts.token_ids[stays], drafts.parents[stays])
