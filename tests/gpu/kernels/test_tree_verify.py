"""The node walk against its reference and against trees walked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hetero_llm.gpu.kernels.tree_verify import (
    MAX_ROWS,
    VerifiedTrees,
    make_verified_trees,
    verify_trees,
    verify_trees_reference,
)

SLOTS = 40


@dataclass(frozen=True)
class Work:
    """Inputs of a walk; lists, made tensors at the last moment."""

    sampled: list[int]
    drafts: list[int]
    parents: list[int]
    slot_mapping: list[int]
    groups: list[tuple[int, int, int]]

    def run(self, walk, device: torch.device) -> tuple[VerifiedTrees, torch.Tensor]:
        """The result and the last tokens of all slots, on the CPU; what is not written is -7."""
        rows = [
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (self.drafts, self.parents, self.slot_mapping)
        ]
        groups = torch.tensor(self.groups, dtype=torch.int32).reshape(-1, 3).T.contiguous()
        num_groups, num_rows = len(self.groups), len(self.sampled)
        out = make_verified_trees(num_groups + 2, num_rows + 5, device).part(num_groups, num_rows)
        for tensor in (out.packed, out.sources, out.destinations, out.counts):
            tensor.fill_(-7)
        last = torch.full((SLOTS,), -7, dtype=torch.int64, device=device)
        walk(
            torch.tensor(self.sampled, dtype=torch.int64, device=device),
            rows[0],
            rows[1],
            slot_mapping=rows[2],
            groups=groups.to(device),
            last_tokens=last,
            out=out,
        )
        parts = (out.packed, out.sources, out.destinations, out.counts)
        return VerifiedTrees(*(part.cpu() for part in parts)), last.cpu()

    def tokens(self, result: VerifiedTrees) -> list[list[int]]:
        """Those of each group."""
        tokens = result.packed[len(self.groups) :].tolist()
        counts = result.packed[: len(self.groups)].tolist()
        return [tokens[first : first + n] for (first, _, _), n in zip(self.groups, counts)]


def random_work(rng: np.random.Generator, num_groups: int, right: float) -> Work:
    """Groups of all sizes in random order of slots, padding between them; rows of nobody, too."""
    work = Work([], [], [], [], [])
    slots = rng.permutation(SLOTS)
    for slot in slots[:num_groups].tolist():
        kind = rng.integers(5)
        if kind == 0:
            work.groups.append((0, 0, -1))
            continue
        for _ in range(int(rng.integers(3))):  # rows that no group has
            work.sampled.append(int(rng.integers(9)))
            work.drafts.append(int(rng.integers(9)))
            work.parents.append(0)
        count = {1: 1, 2: MAX_ROWS}.get(int(kind), int(rng.integers(2, 20)))
        work.groups.append((len(work.sampled), count, slot))
        sampled = rng.integers(0, 2**31, count) if kind == 3 else rng.integers(0, 4, count)
        for row in range(count):
            parent = row - 1 if rng.random() < 0.6 else int(rng.integers(row)) if row else -1
            fits = row and rng.random() < right
            work.sampled.append(int(sampled[row]))
            work.parents.append(parent)
            work.drafts.append(int(sampled[parent] if fits else rng.integers(4)))
    work.slot_mapping.extend(
        rng.permutation(10 * len(work.sampled) + 1)[: len(work.sampled)].tolist()
    )
    return work


@pytest.mark.parametrize("seed", range(6))
def test_matches_twin(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    work = random_work(rng, 12, [0.5, 0.9, 1.0][seed % 3])
    ours, last = work.run(verify_trees, device)
    reference, twin_last = work.run(verify_trees_reference, torch.device("cpu"))
    assert work.tokens(ours) == work.tokens(reference)
    assert torch.equal(last, twin_last)
    assert torch.equal(ours.counts, reference.counts)
    for group, count in enumerate(reference.counts.tolist()):
        assert torch.equal(ours.sources[group, :count], reference.sources[group, :count])
        assert torch.equal(ours.destinations[group, :count], reference.destinations[group, :count])
    unread = torch.ones(len(work.sampled), dtype=torch.bool)
    for first, count, _ in work.groups:
        unread[first : first + count] = False
    assert (ours.packed[len(work.groups) :][unread] == -7).all(), "a row of no group was written"


def one_tree(sampled: list[int], drafts: list[int], parents: list[int]) -> Work:
    """A tree in slot 3 behind two rows that are not its own; cache rows 100, 101, ..."""
    count = len(sampled)
    return Work(
        [50, 51, *sampled],
        [50, 51, *drafts],
        [-1, -1, *parents],
        [7, 8, *range(100, 100 + count)],
        [(2, count, 3)],
    )


#      0 - 1:A - 3:B - 5:D
#       \      \ 4:C
#        \ 2:B
TREE = {"drafts": [99, 10, 11, 11, 12, 13], "parents": [-1, 0, 0, 1, 1, 3]}


@pytest.mark.parametrize(
    ("sampled", "path"),
    [
        ([10, 12, 0, 0, 21, 0], [0, 1, 4]),
        ([10, 11, 0, 13, 0, 22], [0, 1, 3, 5]),
        ([11, 0, 23, 0, 0, 0], [0, 2]),
        ([10, 24, 0, 0, 0, 0], [0, 1]),
        ([13, 11, 0, 0, 0, 0], [0]),
    ],
)
def test_a_tree_by_hand(sampled: list[int], path: list[int], device: torch.device) -> None:
    for walk, where in ((verify_trees, device), (verify_trees_reference, torch.device("cpu"))):
        work = one_tree(sampled, **TREE)
        result, last = work.run(walk, where)
        tokens = [sampled[row] for row in path]
        assert work.tokens(result) == [tokens]
        assert last[3] == tokens[-1] and (last[torch.arange(SLOTS) != 3] == -7).all()
        moves = [] if path == list(range(len(path))) else list(enumerate(path))[1:]
        assert result.counts.tolist() == [len(moves)]
        assert result.sources[0, : len(moves)].tolist() == [100 + row for _, row in moves]
        assert result.destinations[0, : len(moves)].tolist() == [100 + k for k, _ in moves]


def test_of_children_with_the_same_token_the_first_counts(device: torch.device) -> None:
    work = one_tree([5, 6, 7, 8], [0, 5, 5, 7], [-1, 0, 0, 2])
    result, _ = work.run(verify_trees, device)
    assert work.tokens(result) == [[5, 6]]


def test_the_longest_chain_is_accepted_whole_and_stays_in_place(device: torch.device) -> None:
    sampled = list(range(1000, 1000 + MAX_ROWS))
    work = one_tree(sampled, [0, *sampled[:-1]], list(range(-1, MAX_ROWS - 1)))
    result, last = work.run(verify_trees, device)
    assert work.tokens(result) == [sampled]
    assert last[3] == sampled[-1] and result.counts.tolist() == [0]


def test_plain_draws_are_passed_on(device: torch.device) -> None:
    sampled = [3, 128255, 2**31 - 1, 0]
    slots = [7, 0, SLOTS - 1, 2]
    groups = [(row, 1, slot) for row, slot in enumerate(slots)] + [(0, 0, -1)]
    work = Work(sampled, [9] * 4, [-1] * 4, [1, 2, 3, 4], groups)
    result, last = work.run(verify_trees, device)
    assert work.tokens(result) == [[token] for token in sampled] + [[]]
    assert last[slots].tolist() == sampled
    assert result.counts.tolist() == [0] * 5


def test_nothing_to_walk(device: torch.device) -> None:
    result, last = Work([], [], [], [], []).run(verify_trees, device)
    assert result.packed.numel() == 0 and (last == -7).all()


def test_shapes_are_checked(device: torch.device) -> None:
    rows = torch.zeros(3, dtype=torch.int32, device=device)
    sampled = torch.zeros(3, dtype=torch.int64, device=device)
    groups = torch.zeros(3, 2, dtype=torch.int32, device=device)
    for out in (make_verified_trees(2, 4, device), make_verified_trees(3, 2, device)):
        with pytest.raises(AssertionError):
            verify_trees(
                sampled, rows, rows, slot_mapping=rows, groups=groups, last_tokens=sampled, out=out
            )
