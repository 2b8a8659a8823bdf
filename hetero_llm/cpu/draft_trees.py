"""Draft trees on the host: their rows before a step, the walk after it.

The walk's twin is `gpu.kernels.walk.walk_trees_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_llm.core.draft import DraftBatch
from hetero_llm.core.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Rows of a step with drafts: T in all, of S sequences.

    Attributes:
        token_ids: [T] int32, nodes included.
        depths: [T] int32 distance from the tree's root; 0 for other rows.
        ancestors: [T] uint64 bits of a tree row's ancestors and itself, counted from the root; 0
            for other rows.
        is_tree: [S] uint8.
        parents: of each tree, the row of each row's parent within the tree; -1 for the root.
    """

    token_ids: np.ndarray
    depths: np.ndarray
    ancestors: np.ndarray
    is_tree: np.ndarray
    parents: list[list[int]]


def tree_rows(step: SchedulerOutput, drafts: DraftBatch) -> TreeRows:
    """Lays a step's drafts out as rows."""
    total = int(step.counts.sum())
    token_ids = np.empty(total, np.int32)
    depths, ancestors = np.zeros(total, np.int32), np.zeros(total, np.uint64)
    is_node = np.zeros(total, bool)
    parents: list[list[int]] = []
    row = node = 0
    above = drafts.parents.tolist()
    for count, nodes in zip(step.counts.tolist(), drafts.counts.tolist(), strict=True):
        if nodes:
            assert count == nodes + 1
            own = [-1, *(parent + 1 for parent in above[node : node + nodes])]
            bits, depth = [1], [0]
            for index in range(1, count):
                bits.append(bits[own[index]] | 1 << index)
                depth.append(depth[own[index]] + 1)
            ancestors[row : row + count] = bits
            depths[row : row + count] = depth
            is_node[row + 1 : row + count] = True
            parents.append(own)
            node += nodes
        row += count
    token_ids[~is_node] = step.token_ids
    token_ids[is_node] = drafts.token_ids
    return TreeRows(token_ids, depths, ancestors, (drafts.counts > 0).astype(np.uint8), parents)


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
