"""Drafts: tokens that may follow a sequence, as a tree whose root is the sequence's last token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MAX_NODES = 63
"""Most nodes of a draft: with the root they fit a mask of 64 bits."""

_INT32 = np.dtype(np.int32)
_PARENTS = np.arange(-1, MAX_NODES - 1, dtype=np.int32)
_PARENTS.setflags(write=False)
_CHAINS = tuple(_PARENTS[:count] for count in range(MAX_NODES + 1))
"""[n] the parents of a chain of n nodes. `DraftTree` checks no tree that holds one of these very
arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tokens, parents before their children. Without nodes it stands for plain decoding.

    Of siblings with the same token only the first can be accepted.

    Attributes:
        token_ids: [n] int32, n at most `MAX_NODES`.
        parents: [n] int32 index of each node's parent; -1 is the root, which is not a node.
    """

    token_ids: np.ndarray
    parents: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        assert count <= MAX_NODES, count
        assert self.token_ids.dtype == _INT32 and self.token_ids.ndim == 1
        if self.parents is _CHAINS[count]:
            return
        assert self.parents.dtype == _INT32 and self.parents.shape == (count,)
        assert (self.parents >= -1).all() and (self.parents <= _CHAINS[count]).all(), self.parents

    def __len__(self) -> int:
        return len(self.token_ids)


def chain(token_ids: np.ndarray) -> DraftTree:
    """The tree in which every node is the only child of the one before.

    Args:
        token_ids: [n] int32, n at most `MAX_NODES`.
    """
    assert len(token_ids) <= MAX_NODES, len(token_ids)
    return DraftTree(token_ids, _CHAINS[len(token_ids)])


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Drafts of several sequences, concatenated; each as in `DraftTree`.

    Attributes:
        counts: [S] int32 nodes of each sequence's draft, at most `MAX_NODES`; 0 for no draft.
        token_ids: [N] int32; N is the sum of `counts`.
        parents: [N] int32 index of each node's parent within its own draft; -1 is the root.
    """

    counts: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray


def join_trees(trees: Iterable[DraftTree | None]) -> DraftBatch:
    """Concatenates trees, one per sequence; None stands for no draft."""
    held = [_EMPTY if tree is None else tree for tree in trees]
    return DraftBatch(
        np.array([len(tree) for tree in held], np.int32),
        np.concatenate([tree.token_ids for tree in held] or [_EMPTY.token_ids]),
        np.concatenate([tree.parents for tree in held] or [_EMPTY.parents]),
    )


def accepted_nodes(
    drafts: DraftBatch, token_ids: list[int], num_tokens: list[int]
) -> list[list[int]]:
    """The nodes of each sequence's draft whose tokens it got, in order of their depth.

    Args:
        drafts: of S sequences.
        token_ids: that the sequences got, one after the other. The last one of each is no node's,
            or ends its sequence, so that no KV of it is needed: it is left out.
        num_tokens: [S] of each sequence; 0: it failed at its root.
    """
    found: list[list[int]] = []
    counts, ids, parents = (
        drafts.counts.tolist(),
        drafts.token_ids.tolist(),
        drafts.parents.tolist(),
    )
    first_node = first_token = 0
    for count, size in zip(counts, num_tokens, strict=True):
        path: list[int] = []
        reached = -1
        last_token = first_token + max(size - 1, 0)
        for token in token_ids[first_token:last_token] if count else ():
            reached = next(
                node
                for node in range(reached + 1, count)
                if parents[first_node + node] == reached and ids[first_node + node] == token
            )
            path.append(reached)
        found.append(path)
        first_node, first_token = first_node + count, first_token + size
    return found


_EMPTY = chain(np.zeros(0, np.int32))
