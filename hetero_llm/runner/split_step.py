"""Splits the tokens of one step over the ranks of sequence parallelism: which rank computes what.

A long chunk of a prompt is cut "zig-zag" into 2 N pieces for N ranks: rank r has pieces r and
2 N - 1 - r. A token attends to all tokens before it, so the first piece costs least and the last
one most, and each such pair costs as much as any other ("Striped Attention", Brandon et al. 2023,
names the imbalance; the pairing is that of Llama 3's context parallelism, arXiv 2407.21783, 3.3.2).
Short chunks, single tokens and draft trees are not cut: each goes to the rank with the fewest
tokens so far, and long chunks make up for what ranks have more or less.

A piece is a sequence of its own in the rank's step: same request slot, and everything before it
counts as computed, since all ranks have the keys and values of the whole step before they attend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.models.collectives import Rank

_ALIGNED_ROWS = 32
"""Rows that follow each other in a group when ranks exchange them: collectives move
whole tiles, of which the keys and values of one token may fill a part."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What the tokens of a step are cut into, in their order. All [P] int64.

    Attributes:
        sequences: index in the step of the sequence that a piece belongs to.
        firsts: index of its first token among those of the sequence in this step.
        lengths: tokens.
        owners: the rank that computes it.
    """

    sequences: np.ndarray
    firsts: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where rows of all ranks lie in what they gather of each other.

    Attributes:
        width: rows that each rank gives, its last ones without meaning; a multiple of `group`.
        group: rows of a rank that lie next to each other.
        places: [R] int64 place of each row.
        size: number of ranks.
    """

    width: int
    group: int
    places: np.ndarray
    size: int

    @staticmethod
    def of(owners: np.ndarray, size: int) -> RowPlaces:
        """
        Args:
            owners: [R] the rank that has each row. A rank gives its rows in this order.
        """
        counts = np.bincount(owners, minlength=size)
        width = -(-int(counts.max()) // _ALIGNED_ROWS) * _ALIGNED_ROWS
        within = np.empty(len(owners), np.int64)
        within[np.argsort(owners, kind="stable")] = ranges(np.zeros(size, np.int64), counts)
        group = within // _ALIGNED_ROWS * size + owners
        return RowPlaces(width, _ALIGNED_ROWS, group * _ALIGNED_ROWS + within % _ALIGNED_ROWS, size)


@dataclass(frozen=True, slots=True)
class SplitStep:
    """One rank's part of a step.

    Attributes:
        own: the step that this rank computes: its pieces as sequences. A sequence's samples come
            with the piece that has its last token. It has block-table writes, admissions and loads
            of the whole step, and no `prompt_logprob_spans`.
        tokens: where the rows of the step's tokens lie.
        samples: where those of its samples lie, each of a token as often as it is sampled after.
    """

    own: SchedulerOutput
    tokens: RowPlaces
    samples: RowPlaces


def split(step: SchedulerOutput, rank: Rank, *, least_tokens: int) -> SplitStep | None:
    """Splits a step.

    Args:
        least_tokens: of the step's chunks together, for a split to pay.

    Returns:
        The rank's part; None: every rank computes the whole step. All ranks decide alike.
    """
    counts, nodes = step.num_scheduled_tokens, _nodes(step)
    chunks = counts - nodes
    if int(chunks[chunks > 1].sum()) < least_tokens or step.kv_loads:
        return None
    least = max(rank.size, least_tokens // (4 * rank.size))
    pieces = cut(counts, nodes > 0, rank.size, least=least)
    token_owners = np.repeat(pieces.owners, pieces.lengths)
    if (np.bincount(token_owners, minlength=rank.size) == 0).any():
        return None
    lasts = np.cumsum(counts) - 1
    sample_owners = np.repeat(token_owners[lasts], step.num_samples)
    return SplitStep(
        _own_step(step, pieces, nodes, rank.index),
        RowPlaces.of(token_owners, rank.size),
        RowPlaces.of(sample_owners, rank.size),
    )


def cut(counts: np.ndarray, is_tree: np.ndarray, size: int, *, least: int) -> Pieces:
    """Cuts the tokens of a step into pieces, none of them empty.

    Args:
        counts: [S] tokens of each sequence, all positive.
        is_tree: [S] bool, sequences that are not cut whatever their length.
        least: tokens from which on a sequence is cut; at least `size`.
    """
    is_whole = is_tree | (counts < least)
    totals = np.zeros(size, np.int64)
    parts: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0), np.empty(0))] * len(counts)
    for sequence in np.flatnonzero(is_whole).tolist():
        owner = int(totals.argmin())
        totals[owner] += counts[sequence]
        parts[sequence] = np.array([counts[sequence]]), np.array([owner])
    for sequence in np.flatnonzero(~is_whole).tolist():
        shares = even_shares(totals, int(counts[sequence]))
        totals += shares
        parts[sequence] = zigzag(shares)
    lengths = np.concatenate([part[0] for part in parts]).astype(np.int64)
    owners = np.concatenate([part[1] for part in parts]).astype(np.int64)
    sequences = np.repeat(np.arange(len(counts)), [len(part[0]) for part in parts])
    begins = np.cumsum(lengths) - lengths
    firsts = begins - (np.cumsum(counts) - counts)[sequences]
    kept = lengths > 0
    return Pieces(sequences[kept], firsts[kept], lengths[kept], owners[kept])


def even_shares(totals: np.ndarray, count: int) -> np.ndarray:
    """[N] int64: `count` tokens dealt out one by one, each to the rank with the fewest.

    Args:
        totals: [N] tokens that the ranks have.
    """
    order = np.argsort(totals, kind="stable")
    for num in range(len(totals), 0, -1):
        lowest = order[:num]
        level, rest = divmod(int(totals[lowest].sum()) + count, num)
        if level >= totals[lowest[-1]]:
            break
    shares = np.zeros(len(totals), np.int64)
    shares[lowest] = level - totals[lowest]
    shares[np.sort(lowest)[:rest]] += 1
    return shares


def zigzag(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 2 N pieces of a sequence of which rank r gets `shares[r]` tokens, in two halves.

    Returns:
        [2 N] lengths, of which any may be 0; [2 N] owners.
    """
    ranks = np.arange(len(shares))
    halves = shares // 2
    return np.concatenate((shares - halves, halves[::-1])), np.concatenate((ranks, ranks[::-1]))


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[sum of counts] int64: starts[0], starts[0] + 1, ... (counts[0] numbers), starts[1], ..."""
    return np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


def _nodes(step: SchedulerOutput) -> np.ndarray:
    """[S] draft nodes of each sequence."""
    if step.drafts is None:
        return np.zeros(len(step.request_slots), np.int32)
    return step.drafts.counts


def _own_step(
    step: SchedulerOutput, pieces: Pieces, nodes: np.ndarray, rank: int
) -> SchedulerOutput:
    own = pieces.owners == rank
    sequences, firsts, lengths = pieces.sequences[own], pieces.firsts[own], pieces.lengths[own]
    counts = step.num_scheduled_tokens
    is_last = firsts + lengths == counts[sequences]
    given = counts - nodes  # input tokens of each sequence
    ids = ranges((np.cumsum(given) - given)[sequences] + firsts, lengths - nodes[sequences])
    drafts = None
    if step.drafts is not None:
        chosen = ranges((np.cumsum(nodes) - nodes)[sequences], nodes[sequences])
        drafts = DraftBatch(
            nodes[sequences], step.drafts.token_ids[chosen], step.drafts.parents[chosen]
        )
    return replace(
        step,
        request_slots=step.request_slots[sequences],
        num_computed_tokens=(step.num_computed_tokens[sequences] + firsts).astype(np.int32),
        num_scheduled_tokens=lengths.astype(np.int32),
        token_ids=step.token_ids[ids],
        num_samples=np.where(is_last, step.num_samples[sequences], 0).astype(np.int32),
        prompt_logprob_spans=(),
        drafts=drafts,
    )
