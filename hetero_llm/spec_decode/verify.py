"""Draft trees on the host: the tokens of a step with drafts, and the verification of its trees.

Every runner that verifies on the host goes through `verify_trees`, or through `walk_sampled` where
a token is sampled after every node beforehand; `gpu.kernels.tree_verify` does the same on the
device. No torch: how the target samples is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.utils.jit import njit

SampleNodes = Callable[[dict[int, int]], list[int | None]]
"""Sequences (indices in the step, ascending) with the node that each one's walk has reached, to the
target's token after each of these nodes; None: the walk ends before the node."""


@dataclass(frozen=True, slots=True)
class TreeTokens:
    """The T tokens of a step of S sequences, draft nodes included.

    Attributes:
        token_ids: [T] int32.
        kv_indices: [T] int32 index of each token's KV within its sequence; those of one sequence
            are consecutive.
        positions: [T] int32 position of each token. A node's is its root's plus its depth.
        ancestors: [T] uint64, of a tree's token the bits of its ancestors and itself, counted from
            the root; 0 for other tokens.
        is_tree: [S] uint8, whether the sequence has draft nodes.
        parents: for each sequence the index of each token's parent within its tree, -1 for the
            root; empty without a tree.
        node_ids: for each sequence the tokens of its nodes, -1 for the root; empty without a tree.
        bases: [S] int32, for each tree the index within its sequence's KV that the lowest bit of
            `ancestors` stands for; None: that of its root.
    """

    token_ids: np.ndarray
    kv_indices: np.ndarray
    positions: np.ndarray
    ancestors: np.ndarray
    is_tree: np.ndarray
    parents: list[list[int]]
    node_ids: list[list[int]]
    bases: np.ndarray | None = None


def tree_tokens(step: SchedulerOutput, drafts: DraftBatch | None) -> TreeTokens:
    """Inserts a step's draft nodes behind their roots. Without drafts there are no trees."""
    counts = step.num_scheduled_tokens
    before = (np.cumsum(counts) - counts - step.num_computed_tokens).astype(np.int32)
    kv_indices = np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(before, counts)
    ancestors = np.zeros(len(kv_indices), np.uint64)
    parents: list[list[int]] = [[] for _ in counts]
    node_ids: list[list[int]] = [[] for _ in counts]
    if drafts is None:
        is_tree = np.zeros(len(counts), np.uint8)
        return TreeTokens(
            step.token_ids, kv_indices, kv_indices, ancestors, is_tree, parents, node_ids
        )
    token_ids, positions = np.empty(len(kv_indices), np.int32), kv_indices.copy()
    is_node = np.zeros(len(kv_indices), bool)
    first = node = 0
    all_parents, all_ids = drafts.parents.tolist(), drafts.token_ids.tolist()
    for sequence, (start, count, nodes) in enumerate(
        zip(step.num_computed_tokens.tolist(), counts.tolist(), drafts.counts.tolist(), strict=True)
    ):
        if nodes:
            assert count == nodes + 1
            own = [-1, *(parent + 1 for parent in all_parents[node : node + nodes])]
            parents[sequence], node_ids[sequence] = own, [-1, *all_ids[node : node + nodes]]
            bits, depth = [1], [0]
            for index in range(1, count):
                bits.append(bits[own[index]] | 1 << index)
                depth.append(depth[own[index]] + 1)
            ancestors[first : first + count] = bits
            positions[first : first + count] = start + np.array(depth)
            is_node[first + 1 : first + count] = True
            node += nodes
        first += count
    token_ids[~is_node] = step.token_ids
    token_ids[is_node] = drafts.token_ids
    is_tree = (drafts.counts > 0).astype(np.uint8)
    return TreeTokens(token_ids, kv_indices, positions, ancestors, is_tree, parents, node_ids)


def verify_trees(step: SchedulerOutput, trees: TreeTokens, sample: SampleNodes) -> list[list[int]]:
    """Walks the draft trees of a step from their roots, side by side, one depth at a time.

    At each visited node the target samples one token. The walk continues at the child that carries
    this token, the first of several, and ends where no child does. So the tokens are those of
    plain decoding, whatever was drafted. A sequence that samples without a tree is a root alone.

    Args:
        sample: called once for each depth.

    Returns:
        The nodes that each sequence's walk visited, the root (0) first; empty where `sample`
        rejected the root or the step samples nothing.
    """
    paths: list[list[int]] = [[] for _ in trees.parents]
    reached = {s: 0 for s, count in enumerate(step.num_samples.tolist()) if count}
    while reached:
        children: dict[int, int] = {}
        for (sequence, node), token in zip(reached.items(), sample(reached), strict=True):
            if token is None:
                continue
            paths[sequence].append(node)
            child = next_node(node, token, trees.node_ids[sequence], trees.parents[sequence])
            if child is not None:
                children[sequence] = child
        reached = children
    return paths


@njit(cache=True, nogil=True)
def walk_sampled(
    num_scheduled_tokens: np.ndarray,
    num_samples: np.ndarray,
    node_counts: np.ndarray,
    node_ids: np.ndarray,
    parents: np.ndarray,
    sampled: np.ndarray,
    slot_mapping: np.ndarray,
    kept: np.ndarray,
    num_tokens: np.ndarray,
    moves: np.ndarray,
) -> tuple[int, int]:
    """`verify_trees` and `compact_kv` for trees after whose every token one was sampled.

    Args:
        num_scheduled_tokens, num_samples: of `SchedulerOutput`.
        node_counts, node_ids, parents: of its `DraftBatch`.
        sampled: int64 tokens: one after each token of a tree, `num_samples` of other sequences.
        slot_mapping: int32 KV slot of each token.
        kept: int64, written: the tokens that sequences get.
        num_tokens: [S] int64, written: how many of these are each sequence's.
        moves: [2, at least T] int32, written: KV slots to read and to write.

    Returns:
        Number of tokens kept, number of moves.
    """
    first = taken = node = num_kept = num_moves = 0
    for sequence in range(len(node_counts)):
        before, nodes = num_kept, node_counts[sequence]
        if nodes == 0:
            own = num_samples[sequence]
            for sample in range(own):
                kept[num_kept] = sampled[taken + sample]
                num_kept += 1
        else:
            own = nodes + 1
            reached = 0
            while reached >= 0:
                token = sampled[taken + reached]
                kept[num_kept] = token
                depth = num_kept - before
                if reached != depth:
                    moves[0, num_moves] = slot_mapping[first + reached]
                    moves[1, num_moves] = slot_mapping[first + depth]
                    num_moves += 1
                num_kept += 1
                following = -1
                for child in range(reached, nodes):  # nodes count from 1, the root is 0
                    if parents[node + child] + 1 == reached and node_ids[node + child] == token:
                        following = child + 1
                        break
                reached = following
        num_tokens[sequence] = num_kept - before
        taken += own
        node += nodes
        first += num_scheduled_tokens[sequence]
    return num_kept, num_moves


def next_node(node: int, token: int, token_ids: list[int], parents: list[int]) -> int | None:
    """The first child of `node` that carries `token`; None if none does.

    Args:
        token_ids: of the tree's nodes.
        parents: of the tree's nodes; a parent comes before its children.
    """
    for child in range(node + 1, len(parents)):
        if parents[child] == node and token_ids[child] == token:
            return child
    return None


def compact_kv(
    step: SchedulerOutput,
    paths: list[list[int]],
    slot_mapping: np.ndarray,
    move_tokens: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Moves the KV of visited nodes behind their roots' where the path leaves nodes out.

    Args:
        paths: of `verify_trees`.
        slot_mapping: [T] KV slot of each token.
        move_tokens: takes the KV slots to read and to write; called at most once.
    """
    moved = [sequence for sequence, path in enumerate(paths) if has_gaps(path)]
    if not moved:
        return
    firsts = (np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens).tolist()
    move_tokens(
        np.concatenate([slot_mapping[firsts[s] + np.array(paths[s])] for s in moved]),
        np.concatenate([slot_mapping[firsts[s] : firsts[s] + len(paths[s])] for s in moved]),
    )


def has_gaps(path: list[int]) -> bool:
    """Whether a path, ascending from 0, leaves nodes out."""
    return bool(path) and path[-1] >= len(path)
