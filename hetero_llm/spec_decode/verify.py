"""Draft trees on the host: their rows before a step, the walk after it.

The walk's twin is `gpu.kernels.tree_verify.walk_trees_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Rows of a step with drafts: T in all, of S sequences.

    Attributes:
        token_ids: [T] int32, nodes included.
        places: [T] int32 index of each row's KV in its sequence's: they follow each other.
        positions: [T] int32 position of each row: that of a node is its root's plus its depth.
        ancestors: [T] uint64 bits of a tree row's ancestors and itself, counted from the root; 0
            for other rows.
        is_tree: [S] uint8.
        parents: of each sequence, the row of each row's parent within its tree, -1 for the root;
            empty without a tree.
        bases: [S] int32, of each tree the index in its sequence's KV that the lowest bit of
            `ancestors` stands for; None: its first row's.
    """

    token_ids: np.ndarray
    places: np.ndarray
    positions: np.ndarray
    ancestors: np.ndarray
    is_tree: np.ndarray
    parents: list[list[int]]
    bases: np.ndarray | None = None


def tree_rows(step: SchedulerOutput, drafts: DraftBatch) -> TreeRows:
    """Lays a step's drafts out as rows."""
    counts = step.num_scheduled_tokens
    total = int(counts.sum())
    token_ids = np.empty(total, np.int32)
    places = row_places(step)
    positions, ancestors = places.copy(), np.zeros(total, np.uint64)
    is_node = np.zeros(total, bool)
    parents: list[list[int]] = []
    row = node = 0
    above = drafts.parents.tolist()
    for start, count, nodes in zip(
        step.num_computed_tokens.tolist(), counts.tolist(), drafts.counts.tolist(), strict=True
    ):
        own: list[int] = []
        if nodes:
            assert count == nodes + 1
            own = [-1, *(parent + 1 for parent in above[node : node + nodes])]
            bits, depth = [1], [0]
            for index in range(1, count):
                bits.append(bits[own[index]] | 1 << index)
                depth.append(depth[own[index]] + 1)
            ancestors[row : row + count] = bits
            positions[row : row + count] = start + np.array(depth)
            is_node[row + 1 : row + count] = True
            node += nodes
        parents.append(own)
        row += count
    token_ids[~is_node] = step.token_ids
    token_ids[is_node] = drafts.token_ids
    is_tree = (drafts.counts > 0).astype(np.uint8)
    return TreeRows(token_ids, places, positions, ancestors, is_tree, parents)


def row_places(step: SchedulerOutput) -> np.ndarray:
    """[T] int32 index of each row's KV in its sequence's."""
    counts = step.num_scheduled_tokens
    before = (np.cumsum(counts) - counts - step.num_computed_tokens).astype(np.int32)
    return np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(before, counts)


def walk_tree(drawn: list[int], token_ids: list[int], parents: list[int]) -> list[int]:
    """The rows that the target agrees with, the root first.

    Args:
        drawn: the target's token after each row.
        token_ids: each row's own token; the root's is not looked at.
        parents: row of each row's parent, which comes before it. Of children with the same token
            the first counts.
    """
    path = [0]
    for row in range(1, len(drawn)):
        if parents[row] == path[-1] and token_ids[row] == drawn[path[-1]]:
            path.append(row)
    return path


def next_row(row: int, drawn: int, token_ids: list[int], parents: list[int]) -> int | None:
    """One step of the same walk: the child of `row` that carries the token drawn there."""
    for child in range(row + 1, len(parents)):
        if parents[child] == row and token_ids[child] == drawn:
            return child
    return None
