"""A slow reference of `TreeReplica` with plain objects, for test_tree_replica.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetero_llm.spec_decode.draft_model.node_buckets import NUM_BUCKETS, BucketStats
from hetero_llm.spec_decode.draft_model.tree_replica import CAPACITY, TAIL
from tests.cpu.draft_worker.tree_pool_reference import F, Path, rate_of

LEAST_SURVIVAL = F(0.01)
NodeWords = tuple[int, int, int, int]
"""Id, parent, token, bucket."""


@dataclass
class Copy:
    """Of one slot. The anchor stands for text[place - 1]; `nodes` by id: parent (0 for the anchor),
    token and kind."""

    generation: int
    text: list[int]
    place: int
    anchor: int = 0
    last: int = 0
    seen: int = 0
    nodes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def path(self, node: int) -> Path:
        above, token, _ = self.nodes[node]
        return (*(self.path(above) if above else ()), token)


class ReplicaReference:
    """`TreeReplica` with plain objects."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.stats = BucketStats()
        self.copies: dict[int, Copy] = {}
        self.dropped = {"stale": 0, "malformed": 0, "full": 0}

    def open(self, slot: int, generation: int, text: list[int]) -> None:
        self.copies[slot] = Copy(generation, list(text), len(text))

    def add(
        self, slot: int, generation: int, length: int, nodes: list[NodeWords], slots: int
    ) -> None:
        copy = self.copies.get(slot)
        if not 0 <= slot < slots:
            self.dropped["malformed"] += len(nodes)
        elif copy is None or copy.generation != generation:
            self.dropped["stale"] += len(nodes)
        elif not 0 <= length <= len(copy.text):
            self.dropped["malformed"] += len(nodes)
        else:
            for node in nodes:
                reason = self._hang(copy, *node)
                if reason:
                    self.dropped[reason] += 1
            copy.seen = max(copy.seen, length)

    def _hang(self, copy: Copy, number: int, above: int, token: int, kind: int) -> str | None:
        if number <= copy.last:
            return "stale" if number > 0 else "malformed"
        copy.last = number
        if not 0 <= token < self.vocab_size or kind >= NUM_BUCKETS:
            return "malformed"
        if above > 0 and above != copy.anchor and above not in copy.nodes:
            return "stale"
        if above == 0 or -above > len(copy.text):
            return "malformed"
        if above < 0:
            if -above < copy.place:
                return "stale"
            if -above > copy.place:
                copy.place, copy.anchor, copy.nodes = -above, 0, {}
            above = 0
        elif above == copy.anchor:
            above = 0
        if copy.place < len(copy.text):
            if copy.text[copy.place] != token:
                return "stale"
            copy.place, copy.anchor = copy.place + 1, number
            return None
        if len(copy.nodes) == CAPACITY:
            return "full"
        copy.nodes[number] = above, token, kind
        return None

    def commit(self, slot: int, tokens: list[int]) -> None:
        copy = self.copies[slot]
        copy.text += tokens
        root = 0
        for token in tokens:
            below = [number for number, node in copy.nodes.items() if node[0] == root]
            for number in below:
                cell = self.stats.table[copy.nodes[number][2]]
                if cell[1] >= 512:
                    cell *= F(0.5)
                cell += F(copy.nodes[number][1] == token), F(1)
            hits = [number for number in below if copy.nodes[number][1] == token]
            if copy.place + 1 > len(copy.text) or not hits:
                break
            root = hits[-1]
            copy.place, copy.anchor = copy.place + 1, root
        kept: dict[int, tuple[int, int, int]] = {}
        if copy.place == len(copy.text):
            for number, (above, token, kind) in copy.nodes.items():
                if above == root and number > root:
                    kept[number] = 0, token, kind
                elif above in kept:
                    kept[number] = above, token, kind
        copy.nodes = kept
        if copy.place < len(copy.text) - TAIL:
            copy.place, copy.anchor = len(copy.text) - TAIL, 0

    def proposal(self, slot: int, limit: int, depth: int) -> list[tuple[Path, np.float32, int]]:
        """Path, path probability and bucket of each node."""
        copy = self.copies.get(slot)
        if copy is None:
            return []
        left: dict[int, np.float32] = {}
        path_probs: dict[int, np.float32] = {0: F(1)}
        for number, (above, _, kind) in copy.nodes.items():
            rate = min(rate_of(self.stats, kind), left.get(above, F(1)))
            left[above] = F(left.get(above, F(1)) - rate)
            path_probs[number] = F(rate * path_probs[above])
        able = [
            number
            for number in copy.nodes
            if path_probs[number] >= LEAST_SURVIVAL and len(copy.path(number)) <= depth
        ]
        able.sort(key=lambda number: (-path_probs[number], number))
        return [(copy.path(n), path_probs[n], copy.nodes[n][2]) for n in able[:limit]]

    def caught_up(self, slot: int) -> bool:
        copy = self.copies.get(slot)
        return copy is None or bool(copy.nodes) or copy.seen == len(copy.text)
