"""Tokens of draft trees, and their verification."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.spec_decode.verify import next_node, tree_tokens, verify_trees


def test_tokens_of_a_step() -> None:
    """A chunk, a tree, a decoding sequence, a tree of one node."""
    drafts = DraftBatch(
        *(np.array(a, np.int32) for a in ([0, 4, 0, 1], [50, 51, 52, 53, 60], [-1, -1, 1, 2, -1]))
    )
    step = SchedulerOutput(
        request_slots=np.array([3, 0, 2, 1], np.int32),
        num_computed_tokens=np.array([4, 10, 7, 0], np.int32),
        num_scheduled_tokens=np.array([3, 5, 1, 2], np.int32),
        token_ids=np.array([1, 2, 3, 4, 5, 6], np.int32),
        num_samples=np.array([0, 1, 1, 1], np.int32),
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=np.zeros((3, 0), np.int32),
        block_copies=np.zeros((2, 0), np.int32),
        drafts=drafts,
    )
    trees = tree_tokens(step, drafts)
    assert trees.token_ids.tolist() == [1, 2, 3, 4, 50, 51, 52, 53, 5, 6, 60]
    assert trees.kv_indices.tolist() == [4, 5, 6, 10, 11, 12, 13, 14, 7, 0, 1]
    assert trees.positions.tolist() == [4, 5, 6, 10, 11, 11, 12, 13, 7, 0, 1]
    assert trees.ancestors.tolist() == [0, 0, 0, 1, 3, 5, 13, 29, 0, 1, 3]
    assert trees.is_tree.tolist() == [0, 1, 0, 1]
    assert trees.parents == [[], [-1, 0, 0, 2, 3], [], [-1, 0]]
    for column in (trees.token_ids, trees.kv_indices, trees.positions):
        assert column.dtype == np.int32


@pytest.mark.parametrize(
    ("sampled", "tokens", "parents", "path"),
    [
        ([5], [0], [-1], [0]),
        ([5, 6, 7], [0, 5, 6], [-1, 0, 1], [0, 1, 2]),
        ([5, 6, 7], [0, 4, 5], [-1, 0, 0], [0, 2]),
        ([5, 6, 7, 8], [0, 5, 5, 6], [-1, 0, 0, 2], [0, 1]),  # the first of two alike counts
        ([5, 1, 6, 8], [0, 4, 5, 6], [-1, 0, 0, 2], [0, 2, 3]),
        ([5, 5, 5], [0, 4, 5], [-1, 0, 1], [0]),
    ],
)
def test_walk(sampled: list[int], tokens: list[int], parents: list[int], path: list[int]) -> None:
    nodes = len(tokens) - 1
    drafts = DraftBatch(
        np.array([nodes], np.int32),
        np.array(tokens[1:], np.int32),
        np.array(parents[1:], np.int32) - 1,
    )
    step = SchedulerOutput(
        *(np.array([value], np.int32) for value in (0, 9, nodes + 1, tokens[0], 1)),
        *((), (), np.zeros((3, 0), np.int32), np.zeros((2, 0), np.int32)),
        drafts,
    )
    trees = tree_tokens(step, drafts)
    if nodes:  # a root alone is no tree
        assert trees.parents == [parents]

    def sample(reached: dict[int, int]) -> list[int | None]:
        return [sampled[node] for node in reached.values()]

    assert verify_trees(step, trees, sample) == [path]
    node: int | None = 0
    visited = []
    while node is not None:
        visited.append(node)
        node = next_node(node, sampled[node], tokens, parents)
    assert visited == path
