"""Which draft nodes run in a step: the drafter proposes trees for the scheduled sequences, and what
exceeds the token budget or the free KV blocks is cut off.

Nothing here changes a request or a sequence; blocks are allocated for the nodes that run.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch, join_trees
from hetero_llm.core.drafter import Drafter
from hetero_llm.core.request import Sequence
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.scheduler.grammar_drafts import GrammarDrafts, NoGrammarDrafts


def choose_drafts(
    drafter: Drafter | None,
    grammars: GrammarDrafts | NoGrammarDrafts,
    sequences: list[Sequence],
    num_scheduled_tokens: list[int],
    blocks: BlockManager,
    budget: int,
) -> DraftBatch | None:
    """Proposes drafts for the scheduled sequences and allocates KV blocks for their nodes.

    No sequence is preempted for a draft, now or in the next step: nodes take blocks only as long as
    one stays free for every scheduled sequence.

    Args:
        drafter: None: forced tokens alone are drafted.
        grammars: of the sequences; if it is idle, drafts stay as they are.
        sequences, num_scheduled_tokens: of the step so far, whose blocks are allocated. No step is
            in flight.
        budget: tokens that the step can still hold.

    Returns:
        One draft per scheduled sequence; None if all are empty.
    """
    asked: list[Sequence] = []
    limits: list[int] = []
    indexes: list[int] = []
    num_tokens = sum(num_scheduled_tokens)
    if drafter is None:
        budget = min(budget, grammars.most_tokens - num_tokens)
    most = min(MAX_NODES, budget)
    for index, sequence in enumerate(sequences):
        request = sequence.request
        if not request.may_draft:
            continue
        num_known = len(sequence.token_ids)
        # If all nodes are accepted, one more token follows them.
        limit = request.max_total_tokens - num_known - 1
        if num_scheduled_tokens[index] != 1 or limit <= 0:
            continue
        if sequence.num_computed_tokens != num_known - 1:
            continue
        if num_known == sequence.num_prompt_tokens and request.num_first_samples > 1:
            continue  # the first tokens of several samples are sampled from its token
        asked.append(sequence)
        limits.append(limit if limit < most else most)
        indexes.append(index)
    if not asked or most <= 0:
        return None
    if drafter is None:
        proposed = join_trees([None] * len(asked))
    else:
        proposed = drafter.propose(asked, limits, num_tokens)
    if not grammars.idle:
        own = [sequence.request.params.num_speculative_tokens for sequence in asked]
        most_own = [
            limit if wanted is None else min(limit, wanted)
            for limit, wanted in zip(limits, own, strict=True)
        ]
        proposed = grammars.constrained(asked, most_own, proposed)
    assert len(proposed.counts) == len(asked), "a drafter answers every request"
    assert (proposed.counts <= np.array(limits)).all(), "a drafter keeps to its limits"
    kept = allocate_nodes(
        proposed,
        [sequence.request_slot for sequence in asked],
        [sequence.num_computed_tokens for sequence in asked],
        blocks,
        budget,
        reserve=len(sequences),
    )
    if kept is None or len(asked) == len(sequences):
        return kept
    counts = np.zeros(len(sequences), np.int32)
    counts[indexes] = kept.counts
    return DraftBatch(counts, kept.token_ids, kept.parents)


def allocate_nodes(
    drafts: DraftBatch,
    request_slots: list[int],
    num_computed_tokens: list[int],
    blocks: BlockManager,
    budget: int,
    *,
    reserve: int,
) -> DraftBatch | None:
    """Allocates blocks for each sequence's draft so that `reserve` blocks stay free.

    Args:
        drafts: of S sequences. request_slots, num_computed_tokens: [S].
        budget: nodes that the step can still hold.

    Returns:
        The nodes that can run; None if none can.
    """
    kept: list[int] = []
    sizes: list[int] = drafts.counts.tolist()
    num_writable = blocks.num_writable
    plenty = reserve + blocks.blocks_for(MAX_NODES) + 1
    for slot, start, size in zip(request_slots, num_computed_tokens, sizes, strict=True):
        num_nodes = size if size < budget else budget
        end = start + 1 + num_nodes
        if num_nodes and num_writable[slot] < end:
            if blocks.num_free < plenty:
                num_nodes = max(0, _num_fitting(blocks, slot, start, num_nodes, reserve))
                end = start + 1 + num_nodes
            if num_nodes and not blocks.allocate(slot, start, end):
                num_nodes = 0
        kept.append(num_nodes)
        budget -= num_nodes
    if not any(kept):
        return None
    return drafts if kept == sizes else _truncate(drafts, kept)


def _num_fitting(
    blocks: BlockManager, slot: int, num_computed: int, num_nodes: int, reserve: int
) -> int:
    """How many of `num_nodes` nodes behind a sequence's next token fit into its blocks and the free
    ones but `reserve`; may be negative."""
    num_blocks = len(blocks.block_ids(slot)) + max(blocks.num_free - reserve, 0)
    return min(num_nodes, num_blocks * blocks.block_size - num_computed - 1)


def _truncate(drafts: DraftBatch, kept: list[int]) -> DraftBatch:
    """The first `kept[i]` nodes of each draft: parents come first, so none is missing."""
    first_nodes = np.cumsum(drafts.counts) - drafts.counts
    within = np.arange(len(drafts.token_ids)) - np.repeat(first_nodes, drafts.counts)
    counts = np.array(kept, np.int32)
    stays = within < np.repeat(counts, drafts.counts)
    return DraftBatch(counts, drafts.token_ids[stays], drafts.parents[stays])
