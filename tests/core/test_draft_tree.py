"""Draft trees: what is one, and its parts."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_llm.core.draft_tree import MAX_NODES, DraftTree, accepted_nodes, chain, join_trees


def tree(token_ids: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(np.array(token_ids, np.int32), np.array(parents, np.int32))


def test_a_chain_is_a_tree_of_width_one() -> None:
    tokens = np.array([4, 4, 9], np.int32)
    line = chain(tokens)
    assert line.token_ids.tolist() == [4, 4, 9] and line.parents.tolist() == [-1, 0, 1]
    assert len(line) == 3 and len(chain(tokens[:0])) == 0
    with pytest.raises(ValueError, match="read-only"):
        line.parents[0] = 5  # shared by all chains of this length


def test_the_largest_draft_fits_a_mask_with_its_root() -> None:
    tokens = np.zeros(MAX_NODES + 1, np.int32)
    assert len(chain(tokens[:-1])) + 1 == 64
    with pytest.raises(AssertionError):
        chain(tokens)
    with pytest.raises(AssertionError):
        DraftTree(tokens, tokens - 1)


@pytest.mark.parametrize(
    ("token_ids", "parents"),
    [
        ([1, 2], [-1, 1]),  # its own parent
        ([1, 2, 3], [-1, 2, 0]),  # a child before its parent
        ([1], [-2]),
        ([1, 2], [-1]),
    ],
)
def test_a_wrong_tree_is_a_bug(token_ids: list[int], parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        tree(token_ids, parents)


def test_arrays_are_int32() -> None:
    with pytest.raises(AssertionError):
        DraftTree(np.array([1]), np.array([-1], np.int32))
    with pytest.raises(AssertionError):
        DraftTree(np.array([1], np.int32), np.array([-1]))


def test_trees_as_one_batch() -> None:
    batch = join_trees([tree([7, 5], [-1, -1]), None, chain(np.array([1, 2, 3], np.int32))])
    assert batch.counts.tolist() == [2, 0, 3]
    assert batch.token_ids.tolist() == [7, 5, 1, 2, 3]
    assert batch.parents.tolist() == [-1, -1, -1, 0, 1]
    none = join_trees([])
    for batch in (join_trees([None]), none):
        assert len(batch.token_ids) == len(batch.parents) == 0
        assert batch.counts.dtype == batch.token_ids.dtype == batch.parents.dtype == np.int32


def test_accepted_nodes() -> None:
    """Of siblings with one token the first; a sequence without a draft, one that accepts nothing,
    and one that failed at its root."""
    tree = DraftTree(np.array([5, 6, 6, 7, 8], np.int32), np.array([-1, -1, -1, 1, 2], np.int32))
    batch = join_trees([tree, None, tree, tree])
    assert accepted_nodes(batch, [6, 7, 9, 1, 2, 7], [3, 2, 1, 0]) == [[1, 3], [], [], []]
    assert accepted_nodes(batch, [5, 6, 6, 8, 3, 7], [2, 0, 0, 1]) == [[0], [], [], []]
    assert accepted_nodes(join_trees([tree, tree]), [6, 7, 9], [0, 3]) == [[], [1, 3]]
