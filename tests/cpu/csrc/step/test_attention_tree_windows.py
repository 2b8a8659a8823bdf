"""Trees that grow over several steps: a row sees nodes that earlier steps left in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_llm.cpu.executor import TREE_WINDOW, StepInput
from tests.cpu.csrc.step.test_executor import (
    BEST,
    BLOCK,
    LEVELS,
    VOCAB,
    Part,
    Served,
    checkpoint,  # noqa: F401 (a fixture)
    text,
)

SCRATCH = 7  # the slot where paths are run as plain chunks
TOLERANCE = {"float": 1e-5, "bf16": 0.03, "int8": 0.2}


@dataclass
class Tree:
    """Behind `base` known tokens of a sequence. Nodes in the order of their KV places: of each its
    token and its parent, -1 where that is the last known token; `run` have been run."""

    slot: int
    base: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    run: int = 0

    def grow(self, rng: np.random.Generator, count: int) -> None:
        """New nodes below any node that has been run, or below none."""
        for _ in range(count):
            self.parents.append(int(rng.integers(-1, self.run)))
            self.tokens.append(int(rng.integers(VOCAB)))

    def path(self, node: int) -> list[int]:
        """From the first node below the known tokens down to `node`."""
        above = [] if self.parents[node] < 0 else self.path(self.parents[node])
        return [*above, node]


def step_rows(served: Served, trees: Sequence[Tree], parts: Sequence[Part]) -> StepInput:
    """The trees' nodes that have not been run, then the parts. Trees end up run."""
    of_parts = served.rows(parts)
    tokens: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    bits: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    for tree in trees:
        starts.append(tree.base + tree.run)
        counts.append(len(tree.tokens) - tree.run)
        for node in range(tree.run, len(tree.tokens)):
            at, path = tree.base + node, tree.path(node)
            tokens.append(tree.tokens[node])
            positions.append(tree.base + len(path) - 1)
            places.append(int(served.tables[tree.slot, at // BLOCK]) * BLOCK + at % BLOCK)
            bits.append(sum(1 << place for place in path))
        tree.run = len(tree.tokens)

    def joined(own: Sequence[int], others: np.ndarray) -> np.ndarray:
        return np.concatenate((np.array(own, others.dtype), others))

    return replace(
        of_parts,
        token_ids=joined(tokens, of_parts.token_ids),
        positions=joined(positions, of_parts.positions),
        slot_mapping=joined(places, of_parts.slot_mapping),
        request_slots=joined([tree.slot for tree in trees], of_parts.request_slots),
        num_computed_tokens=joined(starts, of_parts.num_computed_tokens),
        num_scheduled_tokens=joined(counts, of_parts.num_scheduled_tokens),
        bases=joined([tree.base for tree in trees], of_parts.bases),
        is_tree=joined([1] * len(trees), of_parts.is_tree),
        ancestors=joined(bits, of_parts.ancestors),
    )


def run(served: Served, trees: Sequence[Tree], parts: Sequence[Part] = ()) -> list[torch.Tensor]:
    """Of each tree and of each part the logits of its rows."""
    counts = [len(tree.tokens) - tree.run for tree in trees] + [len(p.tokens) for p in parts]
    rows = step_rows(served, trees, parts)
    return list(served.executor.logits(rows, np.arange(sum(counts))).split(counts))


def along_paths(served: Served, known: list[int], tree: Tree) -> torch.Tensor:
    """[nodes, vocab] the logits of every node when its path is a plain chunk."""
    served.logits([Part(SCRATCH, 0, known)])
    found: dict[int, torch.Tensor] = {}
    for node in reversed(range(len(tree.tokens))):
        if node in found:
            continue
        path = tree.path(node)
        chunk = [tree.tokens[at] for at in path]
        found.update(zip(path, served.logits([Part(SCRATCH, len(known), chunk)]), strict=True))
    return torch.stack([found[node] for node in range(len(tree.tokens))])


def check_growing(folder: Path, served: Served, tolerance: float, sizes: list[list[int]]) -> None:
    """Trees that grow in every step, each beside decoded rows, a chunk and a plain tree.

    Args:
        sizes: of each tree, nodes of each step; 0 leaves it out of the step.
    """
    rng = np.random.default_rng(len(sizes))
    known = [text(40 + i, length) for i, length in enumerate((130, 61, 16))][: len(sizes)]
    trees = [Tree(slot, len(tokens)) for slot, tokens in enumerate(known)]
    decoded, chunk = text(50, 40), text(51, 200)
    served.logits([Part(t.slot, 0, tokens) for t, tokens in zip(trees, known, strict=True)])
    served.logits([Part(4, 0, decoded[:20]), Part(5, 0, chunk[:9]), Part(6, 0, known[0][:50])])
    plain = Part(6, 50, text(9, 9), [0, 0, 1, 2, 2, 3, 0, 7])
    ours: list[list[torch.Tensor]] = [[] for _ in trees]
    others = []
    for step in range(len(sizes[0])):
        growing = [tree for tree, size in zip(trees, sizes, strict=True) if size[step]]
        for tree in growing:
            tree.grow(rng, sizes[tree.slot][step])
        first = 9 + 20 * step
        parts = [
            Part(4, 20 + step, [decoded[20 + step]]),
            plain,
            Part(5, first, chunk[first : first + 20]),
        ]
        results = run(served, growing, parts)
        for tree, logits in zip(growing, results, strict=False):
            ours[tree.slot].append(logits)
        others.append(results[len(growing) :])
    for tree, tokens in zip(trees, known, strict=True):
        expected = along_paths(served, tokens, tree)
        error = (torch.cat(ours[tree.slot]) - expected).abs().amax(1)
        assert error.max() < tolerance, (tree.slot, error)
    for before, after in zip(others, others[1:], strict=False):
        assert (before[1] - after[1]).abs().max() < tolerance  # the plain tree does not change
    expected = served.logits([Part(SCRATCH, 0, decoded)])[20 : 20 + len(others)]
    assert (torch.cat([each[0] for each in others]) - expected).abs().max() < tolerance
    expected = served.logits([Part(SCRATCH, 0, chunk)])[9 : 9 + 20 * len(others)]
    assert (torch.cat([each[2] for each in others]) - expected).abs().max() < tolerance


SIZES = [
    [1, 1, 0, 5, 1, 1],  # single rows whose window they do not see all of
    [8, 0, 8, 30, 1, 17],  # 64 in all, from a place within a block
    [1, 4, 8, 0, 1, 2],
]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weight_format", ["float", "bf16", "int8"])
def test_nodes_of_growing_trees_equal_their_paths(
    checkpoint: Path,  # noqa: F811
    weight_format: str,
    isa: int,
) -> None:
    served = Served(checkpoint, weight_format, isa, 2)
    check_growing(checkpoint, served, TOLERANCE[weight_format], SIZES)


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_any_number_of_threads(checkpoint: Path, threads: int) -> None:  # noqa: F811
    check_growing(checkpoint, Served(checkpoint, "float", BEST, threads), 1e-5, SIZES)


def test_a_single_row_does_not_see_its_whole_window(checkpoint: Path) -> None:  # noqa: F811
    """As it would if it were taken for a decoded row."""
    served = Served(checkpoint, "float", BEST, 2)
    known = text(1, 30)
    served.logits([Part(0, 0, known)])
    tree = Tree(0, 30, [5, 6], [-1, -1])
    run(served, [tree])
    tree.tokens.append(7)
    tree.parents.append(0)
    (alone,) = run(served, [tree])
    expected = served.logits([Part(SCRATCH, 0, [*known, 5, 7])])[-1]
    assert (alone[0] - expected).abs().max() < 1e-5
    seeing_all = served.logits([Part(SCRATCH, 0, [*known, 5, 6, 7])])[-1]
    assert (alone[0] - seeing_all).abs().max() > 1e-3


def test_a_known_token_moves_the_base(checkpoint: Path) -> None:  # noqa: F811
    """A committed node's KV becomes the sequence's; its subtree stays where the cache has it."""
    served = Served(checkpoint, "float", BEST, 2)
    known = text(2, 45)
    served.logits([Part(0, 0, known)])
    tree = Tree(0, 45, [5, 6, 7], [-1, 0, 1])
    run(served, [tree])
    below = Tree(0, 46, [6, 7, 8, 9], [-1, 0, 1, 0], run=2)
    (rows,) = run(served, [below])
    expected = along_paths(served, [*known, 5], below)
    assert (rows - expected[2:]).abs().max() < 1e-5


def test_a_window_too_large_is_refused(checkpoint: Path) -> None:  # noqa: F811
    served = Served(checkpoint, "float", BEST, 1)
    rows = step_rows(served, [Tree(0, 80, [1], [-1])], [])
    served.executor.logits(replace(rows, bases=rows.bases - (TREE_WINDOW - 1)), np.arange(1))
    for base in (80 - TREE_WINDOW, 81):
        with pytest.raises(AssertionError):
            served.executor.logits(replace(rows, bases=np.array([base], np.int32)), np.arange(1))
