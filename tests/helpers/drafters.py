"""Drafters for tests: they know the outputs, guess blindly, or mislead on purpose.

`Record` holds the outputs of a run without drafts; these may be longer than what a request will
get, so that right nodes lie behind its end as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch, DraftTree, chain, join_trees
from hetero_llm.core.drafter import Drafter, StepReport
from hetero_llm.core.request import Request, Sequence

Record = Mapping[tuple[str, int], list[int]]
"""Request id and sample index to the tokens that follow the prompt; there may be gaps."""


class Switch:
    """A drafter that can be exchanged between runs of one engine; without one it is idle.

    Attributes:
        most_sequences, most_nodes: largest proposal so far, and largest draft in one.
        num_branches: nodes so far whose parent has an earlier child.
    """

    def __init__(self) -> None:
        self.drafter: Drafter | None = None
        self.reset()

    def reset(self) -> None:
        self.most_sequences = self.most_nodes = self.num_branches = 0

    @property
    def idle(self) -> bool:
        return self.drafter is None or self.drafter.idle

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        assert self.drafter is not None
        batch = self.drafter.propose(sequences, limits, num_rows)
        self.most_sequences = max(self.most_sequences, len(sequences))
        self.most_nodes = max(self.most_nodes, int(batch.counts.max()))
        edges = np.repeat(np.arange(len(batch.counts)), batch.counts) * 100 + batch.parents
        self.num_branches += len(edges) - len(np.unique(edges))
        return batch

    def close(self, request: Request) -> None:
        if self.drafter is not None:
            self.drafter.close(request)

    def observe_step(self, report: StepReport) -> None:
        if self.drafter is not None:
            self.drafter.observe_step(report)

    def run_deferred(self) -> None:
        if self.drafter is not None:
            self.drafter.run_deferred()


class Guesser:
    """Makes trees one by one and learns nothing.

    Args:
        record: of a run without drafts.
        vocab: ids are below this.
        most: nodes of a draft.
    """

    idle = False

    def __init__(self, record: Record, vocab: int, *, seed: int = 0, most: int = MAX_NODES) -> None:
        self._record = record
        self._vocab = vocab
        self._most = most
        self._rng = np.random.default_rng(seed)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        return join_trees(
            self._tree(self._coming(sequence), min(limit, self._most))
            for sequence, limit in zip(sequences, limits, strict=True)
        )

    def close(self, request: Request) -> None:
        pass

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        pass

    def _coming(self, sequence: Sequence) -> list[int]:
        known = self._record.get((sequence.request.request_id, sequence.index), [])
        return known[len(sequence.token_ids) - sequence.num_prompt_tokens :]

    def _tree(self, coming: list[int], limit: int) -> DraftTree | None:
        raise NotImplementedError

    def _random_token(self) -> int:
        return int(self._rng.integers(self._vocab))


class Oracle(Guesser):
    """Chains of the right tokens, of any length."""

    def _tree(self, coming: list[int], limit: int) -> DraftTree:
        length = int(self._rng.integers(0, min(limit, len(coming)) + 1))
        return chain(np.array(coming[:length], np.int32))


class Garbage(Guesser):
    """Random tokens in trees of any shape, wide and deep ones included."""

    def _tree(self, coming: list[int], limit: int) -> DraftTree:
        rng = self._rng
        count = int(rng.integers(0, limit + 1))
        deep = rng.choice((0.0, 0.5, 1.0))
        parents = [n - 1 if rng.random() < deep else int(rng.integers(-1, n)) for n in range(count)]
        return _tree_of([(self._random_token(), parent) for parent in parents])


class Siblings(Guesser):
    """Trees made to mislead, most of them of all the nodes there may be.

    A chain off by one token comes first, or off by one place. Along the right path nodes have wrong
    siblings before them, twice the same one, whose children carry the tokens that would be right
    here or one level below; a sibling with the same token may follow. The rest are random nodes at
    random places.
    """

    def _tree(self, coming: list[int], limit: int) -> DraftTree | None:
        rng = self._rng
        if limit < MAX_NODES and rng.random() < 0.1:
            return None
        nodes: list[tuple[int, int]] = []
        if rng.random() < 0.7:
            self._append_wrong_chain(nodes, coming)
        misled, duplicates = rng.choice((0.0, 0.5, 1.0), 2)
        at = -1
        for depth in range(min(int(rng.integers(0, 9)), len(coming) - 1)):
            true, following = coming[depth : depth + 2]
            if rng.random() < misled:
                wrong = (true + int(rng.integers(1, self._vocab))) % self._vocab
                nodes += [(wrong, at), (wrong, at)]
                nodes += [(following, len(nodes) - 2), (true, len(nodes) - 1)]
            above, at = at, len(nodes)
            nodes.append((true, above))
            if rng.random() < duplicates:
                nodes += [(true, above), (following, len(nodes))]
        while len(nodes) < limit:
            nodes.append((self._random_token(), int(rng.integers(-1, len(nodes)))))
        return _tree_of(nodes[:limit])

    def _append_wrong_chain(self, nodes: list[tuple[int, int]], coming: list[int]) -> None:
        """Of few nodes or many; they have to be the first."""
        length = int(self._rng.choice((1, 2, 11)))
        tokens = [self._random_token(), *coming[1:length]]
        if self._rng.random() < 0.3:
            tokens = coming[1 : length + 1]
        nodes += [(token, index - 1) for index, token in enumerate(tokens)]


def _tree_of(nodes: list[tuple[int, int]]) -> DraftTree:
    """Of tokens and parents."""
    pairs: Any = np.array(nodes, np.int32).reshape(-1, 2)
    return DraftTree(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
