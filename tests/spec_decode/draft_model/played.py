"""Sequences with random trees and commits, run in a draft model and in its reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.cpu.draft_worker.draft_model import DraftModel
from hetero_llm.cpu.draft_worker.tree_ops import WINDOW, Moves, TreeNodes
from tests.cpu.draft_worker.draft_reference import SequenceReference, check


def numbers(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def keep(
    model: DraftModel, slot: int, sources: list[int], targets: list[int], num_path: int
) -> None:
    """The moves of one commit."""
    moves = (sources, targets, [len(sources)], [num_path])
    model.kv_layout.keep(numbers([slot]), Moves(*map(numbers, moves), np.ones(1, np.bool_)))


@dataclass
class Node:
    token: int
    depth: int
    parent: int  # its place, -1: the root
    bits: int


class Played:
    """A sequence with a random tree and random commits, in the model and in the reference."""

    def __init__(self, model: DraftModel, slot: int, reference: SequenceReference) -> None:
        self.model, self.slot, self.reference = model, slot, reference
        self.nodes: list[Node] = []  # by place
        self.num_kept = 0  # of all commits
        self.most = 12  # new nodes at a time
        self.until = 0  # nodes without which its text does not go on
        model.kv_layout.open(
            slot, numbers(reference.text), temperature=reference.temperature, seed=reference.seed,
            sample_index=reference.sample_index,
        )  # fmt: skip

    def expand(self, rng: random.Random) -> list[Node]:
        """New nodes; parents among those that were run before."""
        old = len(self.nodes)
        new = []
        for _ in range(min(rng.randint(0, self.most), WINDOW - old)):
            parent = rng.randrange(-1, old)
            above = self.nodes[parent] if parent >= 0 else Node(0, 0, -1, 0)
            bits = above.bits | 1 << (old + len(new))
            new.append(Node(rng.randrange(self.model.vocab_size), above.depth + 1, parent, bits))
        self.nodes += new
        return new

    def go_on(self, tokens: list[int]) -> None:
        """Append tokens."""
        self.model.kv_layout.append(self.slot, numbers(tokens))
        self.reference.text += tokens

    def commit(self, rng: random.Random) -> None:
        """Commit a path to one of the first nodes or none, then maybe tokens off the tree."""
        path: list[int] = []
        at = rng.randint(-1, min(4, len(self.nodes) - 1))
        while at >= 0:
            path.insert(0, at)
            at = self.nodes[at].parent
        off = rng.choice((0, 0, 0, 1, 3) if path else (1, 1, 2, 7, 40))
        if path and off == 0:  # the subtree stays
            staying = [p for p in range(len(self.nodes)) if self._is_below(p, path[-1])]
        else:
            staying = []
        tokens = [self.nodes[p].token for p in path] + [
            rng.randrange(self.model.vocab_size) for _ in range(off)
        ]
        self.go_on(tokens)
        sources = path + staying
        targets = list(range(len(sources)))
        keep(self.model, self.slot, sources, targets, len(path))
        self.reference.keep(sources, targets, len(path))
        place_of = {p: i for i, p in enumerate(staying)}
        kept = []
        for p in staying:
            node = self.nodes[p]
            parent = place_of.get(node.parent, -1)
            bits = (kept[parent].bits if parent >= 0 else 0) | 1 << place_of[p]
            kept.append(Node(node.token, node.depth - len(path), parent, bits))
        self.nodes = kept
        self.num_kept += len(kept)

    def _is_below(self, place: int, top: int) -> bool:
        while place > top:
            place = self.nodes[place].parent
            if place == top:
                return True
        return False


def play(model: DraftModel, played: list[Played], rng: random.Random) -> None:
    """Run and check one step of all sequences, then commit to some."""
    prefix = model.kv_layout.plan_prefix(rng.choice((7, 20, 48)))
    waiting = set(prefix.slots.tolist())
    rows: list[tuple[Played, list[Node]]] = []
    for one in played:
        if (
            one.slot not in waiting
            and model.kv_layout.pending(one.slot) == 0
            and (new := one.expand(rng))
        ):
            rows.append((one, new))
    flat = [(one, node, len(one.nodes) - len(new) + i) for one, new in rows
            for i, node in enumerate(new)]  # fmt: skip
    nodes = TreeNodes(
        numbers([one.slot for one, _ in rows]),
        numbers([len(new) for _, new in rows]),
        numbers([node.token for _, node, _ in flat]),
        numbers([node.depth for _, node, _ in flat]),
        numbers([place for _, _, place in flat]),
        np.array([node.bits for _, node, _ in flat], np.uint64),
    )
    counts = prefix.counts.tolist()
    slots = prefix.slots.tolist()
    found = model.step(prefix, nodes)
    by_slot = {one.slot: one for one in played}
    expected: list[torch.Tensor] = []
    ready = []
    for slot, count in zip(slots, counts, strict=True):
        scores = by_slot[slot].reference.run_trunk(count)
        if scores is not None:
            ready.append(slot)
            expected.append(scores)
    assert found.ready.tolist() == ready
    for one, new in rows:
        places = list(range(len(one.nodes) - len(new), len(one.nodes)))
        expected += one.reference.run_nodes(
            [n.token for n in new], [n.depth for n in new], places, [n.bits for n in new]
        )
    assert len(found.tokens) == len(found.log_probs) == len(expected)
    for tokens, log_probs, scores in zip(found.tokens, found.log_probs, expected, strict=True):
        check(tokens, log_probs, scores, 1e-4)
    for one in played:  # texts go on while their prompts are still being run, too
        path_prob = 0.4 if model.kv_layout.pending(one.slot) == 0 else 0.05
        grown = len(one.nodes) >= one.until
        if grown and rng.random() < path_prob and model.kv_layout.room(one.slot) > 80:
            one.commit(rng)
