"""Tokens of draft trees, and their verification."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.spec_decode.verify import (
    compact_kv,
    next_node,
    tree_tokens,
    verify_trees,
    walk_sampled,
)


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


def random_step(rng: np.random.Generator) -> SchedulerOutput:
    """A chunk, and sequences that decode with trees of few different tokens, or without."""
    count = int(rng.integers(1, 6))
    nodes = rng.integers(0, 9, count).astype(np.int32)
    nodes[0] *= int(rng.integers(0, 2))
    chunk = int(rng.integers(2, 5)) if nodes[0] == 0 else 1
    plain = np.array([chunk, *[1] * (count - 1)], np.int32)
    parents = [rng.integers(-1, node) for size in nodes.tolist() for node in range(size)]
    total = int(nodes.sum())
    samples = np.ones(count, np.int32)
    samples[0] = rng.integers(0, 3) if nodes[0] == 0 else 1
    return SchedulerOutput(
        request_slots=rng.permutation(count).astype(np.int32),
        num_computed_tokens=rng.integers(0, 20, count).astype(np.int32),
        num_scheduled_tokens=plain + nodes,
        token_ids=rng.integers(0, 3, plain.sum()).astype(np.int32),
        num_samples=samples,
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=np.zeros((3, 0), np.int32),
        block_copies=np.zeros((2, 0), np.int32),
        drafts=DraftBatch(
            nodes, rng.integers(0, 3, total).astype(np.int32), np.array(parents, np.int32)
        ),
    )


def test_the_walk_over_sampled_tokens_is_the_walk() -> None:
    rng = np.random.default_rng(0)
    num_moved = 0
    for _ in range(200):
        step = random_step(rng)
        drafts = step.drafts
        assert drafts is not None
        trees = tree_tokens(step, drafts)
        is_tree = drafts.counts > 0
        own = np.where(is_tree, step.num_scheduled_tokens, step.num_samples)
        begins = np.cumsum(own) - own
        sampled = rng.integers(0, 3, own.sum())
        slots = rng.permutation(200)[: step.num_scheduled_tokens.sum()].astype(np.int32)
        paths = verify_trees(
            step, trees,
            lambda reached, begins=begins, sampled=sampled: [
                int(sampled[begins[sequence] + node]) for sequence, node in reached.items()
            ],
        )  # fmt: skip
        wanted = [
            [int(sampled[begin + node]) for node in path] if tree
            else sampled[begin : begin + count].tolist()
            for path, tree, begin, count in zip(paths, is_tree, begins, own, strict=True)
        ]  # fmt: skip
        kv, expected = np.arange(200), np.arange(200)

        def move(sources: np.ndarray, targets: np.ndarray, kv: np.ndarray = expected) -> None:
            kv[targets] = kv[sources].copy()

        compact_kv(step, [path if tree else [] for path, tree in zip(paths, is_tree)], slots, move)
        kept, counts = np.empty(len(sampled), np.int64), np.empty(len(own), np.int64)
        moves = np.empty((2, len(slots)), np.int32)
        num_kept, num_moves = walk_sampled(
            step.num_scheduled_tokens, step.num_samples, drafts.counts, drafts.token_ids,
            drafts.parents, sampled, slots, kept, counts, moves,
        )  # fmt: skip
        parts = np.split(kept[:num_kept], np.cumsum(counts)[:-1])
        assert [part.tolist() for part in parts] == wanted
        kv[moves[1, :num_moves]] = kv[moves[0, :num_moves]].copy()
        np.testing.assert_array_equal(kv, expected)
        num_moved += num_moves
    assert num_moved > 20
