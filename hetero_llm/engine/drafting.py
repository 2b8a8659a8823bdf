"""Where the scheduler meets whoever drafts: what a drafter is asked, and what of its answer runs.

Nothing here changes a request or a sequence; blocks are taken for the nodes that run.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Protocol

from hetero_llm.core.draft import MAX_NODES, DraftTree
from hetero_llm.core.request import Sequence
from hetero_llm.engine.block_manager import BlockManager


@dataclass(slots=True)
class DraftRequest:
    """A sequence that could use a draft now.

    Attributes:
        sample_index: which of its request's samples it is.
        num_prompt: how many of `token_ids` are the prompt.
        token_ids: all its tokens; the scheduler's own list, not to be changed or kept.
        max_nodes: most nodes of the answer, at least 1.
    """

    request_id: str
    sample_index: int
    num_prompt: int
    token_ids: list[int]
    max_nodes: int


class Drafter(Protocol):
    """Guesses what comes next. Any guess is safe: it changes how fast tokens come, never which."""

    @property
    def idle(self) -> bool:
        """Whether it expects to propose nothing. It is not asked then, and a step may be launched
        before the tokens of the last one are known."""
        ...

    def propose(self, wanted: abc.Sequence[DraftRequest]) -> list[DraftTree | None]:
        """One answer for each, in order; None or a tree without nodes for no draft."""
        ...

    def close(self, request_id: str) -> None:
        """A request has ended, whether it was ever asked about or not."""
        ...


def choose_trees(
    drafter: Drafter,
    sequences: list[Sequence],
    counts: list[int],
    blocks: BlockManager,
    budget: int,
) -> list[DraftTree | None] | None:
    """Drafts for the scheduled sequences, with KV blocks behind them; None if there are none.

    Nobody is preempted for a draft, now or at the next step: nodes take blocks only as long as one
    stays free for every scheduled sequence. What does not fit is cut off.

    Args:
        sequences, counts: of the step so far, their blocks taken; nothing is in flight.
        budget: rows that the step can still hold.

    Returns:
        One entry per sequence.
    """
    if not all(sequence.request.may_draft for sequence in sequences):
        return None  # such draws take another way on the device, and a step goes one way
    wanted: list[DraftRequest] = []
    places: list[int] = []
    for index, sequence in enumerate(sequences):
        limit = _node_limit(sequence, counts[index], budget)
        if limit > 0:
            places.append(index)
            wanted.append(
                DraftRequest(
                    sequence.request.request_id,
                    sequence.index,
                    sequence.num_prompt,
                    sequence.token_ids,
                    limit,
                )
            )
    if not wanted:
        return None
    proposed = drafter.propose(wanted)
    assert len(proposed) == len(wanted), "a drafter answers every request"
    chosen: list[DraftTree | None] = [None] * len(sequences)
    found = False
    plenty = len(sequences) + blocks.blocks_for(MAX_NODES)
    for index, asked, tree in zip(places, wanted, proposed, strict=True):
        if tree is None:
            continue
        size = len(tree.token_ids)
        assert size <= asked.max_nodes, "a drafter keeps to max_nodes"
        sequence = sequences[index]
        start = sequence.num_computed
        nodes = size if size < budget else budget
        if blocks.num_free < plenty:
            nodes = _fitting(blocks, sequence, nodes, len(sequences))
        if nodes > 0 and blocks.grow(sequence.slot, start, start + 1 + nodes):
            chosen[index] = tree if nodes == size else tree.first(nodes)
            budget -= nodes
            found = True
    return chosen if found else None


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


def _node_limit(sequence: Sequence, count: int, budget: int) -> int:
    """Most draft nodes for a sequence with `count` rows in the step; 0 or less for none."""
    request = sequence.request
    known = len(sequence.token_ids)
    if not request.may_draft or count != 1 or sequence.num_computed != known - 1:
        return 0
    if known == sequence.num_prompt and request.params.width > 1:
        return 0  # its row draws the first tokens of several samples
    # If all nodes are accepted, one more token follows them.
    return min(MAX_NODES, budget, request.max_total_tokens - known - 1)


def _fitting(blocks: BlockManager, sequence: Sequence, nodes: int, reserve: int) -> int:
    """How many of `nodes` rows behind the sequence's next one fit if `reserve` blocks stay free."""
    held = len(blocks.block_ids(sequence.slot)) + max(blocks.num_free - reserve, 0)
    return min(nodes, held * blocks.block_size - sequence.num_computed - 1)
