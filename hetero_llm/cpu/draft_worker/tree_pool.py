"""The worker's draft trees: for each sequence, candidates for its next tokens.

A tree's root is the last committed token of a sequence. Its nodes are candidates of the draft
model, each with the probability that the sequence goes through it. Each step runs the most likely
nodes of all trees that have no KV yet; the draft model then names their children. Committed tokens
move the root down its tree: the subtree stays with its KV. If they leave the tree, it starts anew.
So trees grow beyond the nodes that the engine currently verifies, and the same code serves
synchronous trees, chains and enumerated outcomes.

One step of the worker:

    moves = pool.commit(slots, bases, tokens, sizes)    # tokens that the engine sent
    rows = pool.choose(seconds)
    found = model.step(prefix, rows.nodes)
    pool.expand(found.ready, rows, found.tokens, found.log_probs)
    nodes = pool.unsent()

`slot` is a request slot. KV of nodes lies in the `WINDOW` KV places of each slot behind its
committed prefix, filled in order. The arrays that a method returns are views; its next call
overwrites them. Array arguments are int32 unless said otherwise. One thread at a time.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.bridge.ipc.messages import NODE_WORDS
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.cpu.draft_worker import tree_ops
from hetero_llm.cpu.draft_worker.tree_ops import (
    CAPACITY,
    WINDOW,
    Chosen,
    Moves,
    TreeNodes,
    Unsent,
)
from hetero_llm.cpu.executor import MOST_CANDIDATES
from hetero_llm.spec_decode.draft_model.node_buckets import BucketStats
from hetero_llm.spec_decode.draft_model.tree_arrays import BOOL, FLOAT32, FLOAT64, INT32, fit


class TreePool:
    """See the module.

    Args:
        slots: number of request slots.
        max_depth: maximum depth below the root; more than a draft's, so that trees can grow below
            the nodes being verified.
        max_positions: longest sequence, in tokens, that the draft model can run.
        vocab_size: vocabulary size of the draft model.
        stats: acceptance statistics; read for path probabilities, updated by commits.

    Attributes:
        arrays: the trees. Read only.
        lengths: [slots] int64 length of each sequence, 0 for a closed slot. Read only.
    """

    def __init__(
        self, slots: int, *, max_depth: int, max_positions: int, vocab_size: int, stats: BucketStats
    ) -> None:
        assert slots > 0 and max_depth > 0
        self._max_depth = max_depth
        self._max_positions = max_positions
        self._vocab_size = vocab_size
        shape = slots, CAPACITY
        self.arrays = tree_ops.TreeArrays(
            np.zeros((*shape, tree_ops.NUM_COLUMNS), np.int32), np.zeros(shape, np.float32),
            np.zeros(shape, np.float32), np.zeros(shape, np.uint64),
            np.zeros((slots, tree_ops.NUM_NUMBERS), np.int64), stats.table,
        )  # fmt: skip
        self.lengths = self.arrays.state[:, tree_ops.LENGTH]
        most = slots * WINDOW
        self._scratch = tree_ops.Scratch(
            np.zeros(max(most, CAPACITY), np.uint64), np.zeros(CAPACITY, np.uint64),
            np.zeros(most, np.uint64), np.zeros(CAPACITY + 1, np.float32),
            np.zeros(CAPACITY, np.int64), np.zeros(WINDOW, np.int64),
        )  # fmt: skip
        self._moves = _new_moves(slots)
        nodes = TreeNodes(
            *(_ints(slots), _ints(slots), _ints(most), _ints(most), _ints(most)),
            np.zeros(most, np.uint64),
        )
        self._chosen = Chosen(nodes, _ints(most), _ints(most))
        unsent = np.zeros((slots * CAPACITY, NODE_WORDS), np.int32)
        self._unsent = Unsent(_ints(slots), _ints(slots), _ints(slots), unsent)
        self._same_weights = np.ones(slots, np.float32)
        self._none_urgent = np.zeros(slots, np.bool_)

    def open(self, slot: int, length: int, *, noisy: bool, max_depth: int | None = None) -> None:
        """Open a slot for a sequence of `length` > 0 tokens, none of which has been run.

        Args:
            noisy: whether the scores of candidates contain sampling noise.
            max_depth: maximum depth of this tree, if less than the pool's.
        """
        assert length > 0
        depth = self._max_depth if max_depth is None else min(max_depth, self._max_depth)
        self.arrays.state[slot] = (length, 0, 0, 0, 1, 0, 0, noisy, depth, 0)

    def close(self, slot: int) -> None:
        """Free the slot."""
        self.arrays.state[slot] = 0

    def num_nodes(self, slot: int) -> int:
        """Number of nodes of a tree."""
        return int(self.arrays.state[slot, tree_ops.COUNT])

    def num_run(self, slot: int) -> int:
        """Number of nodes of a tree that have KV."""
        return int(self.arrays.state[slot, tree_ops.USED])

    def is_ready(self, slot: int) -> bool:
        """Whether the root's children are known."""
        return bool(self.arrays.state[slot, tree_ops.READY])

    def any_ready(self) -> bool:
        """Whether any tree can grow."""
        return bool(self.arrays.state[:, tree_ops.READY].any())

    def commit(
        self, slots: np.ndarray, bases: np.ndarray, tokens: np.ndarray, sizes: np.ndarray
    ) -> Moves:
        """Append tokens to sequences: move the roots down their trees and update the acceptance
        statistics of the nodes passed.

        Args:
            slots: [R]; a slot may occur several times.
            bases: [R] lengths of the sequences before.
            tokens: new tokens, concatenated.
            sizes: [R] new tokens of each.
        """
        if len(slots) > len(self._moves.counts):
            self._moves = _new_moves(len(slots))
        moves = self._moves
        total = tree_ops.commit(
            self.arrays, self._scratch, fit(slots, INT32), fit(bases, INT32),
            fit(tokens, INT32), fit(sizes, INT32), moves,
        )  # fmt: skip
        assert total >= 0, "a sequence does not go on where it ended"
        rows = len(slots)
        return Moves(
            moves.sources[:total], moves.targets[:total], moves.counts[:rows], moves.paths[:rows],
            moves.ready[:rows],
        )  # fmt: skip

    def choose(
        self,
        seconds: np.ndarray,
        *,
        weights: np.ndarray | None = None,
        urgent: np.ndarray | None = None,
        gained: float = 0.0,
    ) -> Chosen:
        """Choose the nodes to run next: the most likely ones, as many as maximize
        (gained + sum of path probabilities) / seconds. Changes no state; `expand` does.

        Args:
            seconds: [M + 1] float64 duration of a step with 0 .. M nodes, tokens that run anyway
                included. All zeros: M nodes are wanted.
            weights: [slots] float32 factor on a slot's path probabilities; 0 excludes the slot.
            urgent: [slots] bool: slots whose drafts the engine is waiting for. If they have nodes
                to run, these alone determine the number of nodes, and others are added only while
                they hardly lengthen the step.
            gained: gain of the tokens that run anyway: 1 for each root among them.
        """
        most = min(len(seconds) - 1, len(self._scratch.picked))
        assert most >= 0
        groups, rows = tree_ops.choose(
            self.arrays, self._scratch, self._max_positions,
            self._same_weights if weights is None else fit(weights, FLOAT32),
            self._none_urgent if urgent is None else fit(urgent, BOOL),
            fit(seconds, FLOAT64), most, float(gained), self._chosen,
        )  # fmt: skip
        (slots, counts, *of_nodes), ids, owners = self._chosen
        nodes = TreeNodes(slots[:groups], counts[:groups], *(each[:rows] for each in of_nodes))
        return Chosen(nodes, ids[:rows], owners[:rows])

    def expand(
        self, ready: np.ndarray, rows: Chosen, tokens: np.ndarray, log_probs: np.ndarray
    ) -> None:
        """Add the candidates that a step found as children of the nodes it ran.

        Args:
            ready: [r] slots whose last committed token was run.
            rows: the result of `choose`, all of which was run; no commit came since.
            tokens: [r + N, K] candidates after each sequence and each node, the most likely first,
                distinct within a row; K at most `MOST_CANDIDATES`.
            log_probs: [r + N, K] float32; -inf: no candidate.
        """
        assert tokens.shape == log_probs.shape == (len(ready) + len(rows.ids), tokens.shape[1])
        assert tokens.shape[1] <= MOST_CANDIDATES
        fine = tree_ops.expand(
            self.arrays, self._scratch, fit(ready, INT32), rows.owners, rows.ids, rows.nodes.places,
            fit(tokens, INT32), fit(log_probs, FLOAT32),
        )  # fmt: skip
        assert fine, "nodes that were not to be run"

    def add_external_nodes(
        self,
        slot: int,
        length: int,
        parents: np.ndarray,
        tokens: np.ndarray,
        path_probs: np.ndarray,
    ) -> int:
        """Add nodes of other proposers to the tree of a sequence of `length` tokens.

        They are run and sent like candidates of the draft model. A node that exists already gets at
        least the probability given here. A node that does not fit the tree, such as a token outside
        the vocabulary, is skipped with its descendants.

        Args:
            parents, tokens: [n] as in `DraftTree`.
            path_probs: [n] float32 probability that the sequence goes through a node.

        Returns:
            Number of these nodes that are in the tree now.
        """
        assert len(parents) <= MAX_NODES
        return int(
            tree_ops.add_external_nodes(
                self.arrays, self._scratch, int(slot), int(length), self._vocab_size,
                fit(parents, INT32), fit(tokens, INT32), fit(path_probs, FLOAT32),
            )
        )  # fmt: skip

    def unsent(self) -> Unsent:
        """Return the nodes not sent to the engine yet and mark them as sent."""
        out = self._unsent
        groups, rows = tree_ops.unsent(self.arrays, out)
        return Unsent(
            out.slots[:groups], out.counts[:groups], out.lengths[:groups], out.nodes[:rows]
        )

    @staticmethod
    def compile() -> None:
        """Call every compiled function once, so that no step waits for the compiler: seconds, the
        first time on a machine."""
        pool = TreePool(1, max_depth=4, max_positions=16, vocab_size=4, stats=BucketStats())
        pool.open(0, 1, noisy=False)
        found = np.array([[1, 2]], np.int32), np.log(np.array([[0.6, 0.3]], np.float32))
        seconds = np.ones(2)
        pool.expand(np.zeros(1, np.int32), pool.choose(seconds), *found)
        pool.add_external_nodes(0, 1, np.array([-1]), np.array([3]), np.array([0.1]))
        pool.expand(np.zeros(0, np.int32), pool.choose(seconds), *found)
        pool.unsent()
        pool.commit(np.zeros(1), np.ones(1), np.ones(1), np.ones(1))


def _ints(size: int) -> np.ndarray:
    return np.zeros(size, np.int32)


def _new_moves(rows: int) -> Moves:
    most = rows * WINDOW
    return Moves(_ints(most), _ints(most), _ints(rows), _ints(rows), np.zeros(rows, np.bool_))
