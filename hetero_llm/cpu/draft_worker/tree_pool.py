"""The worker's trees: for each sequence, what may come next, best first.

A tree's root is the last token of a text. Its nodes are candidates that the draft model named, each
with the chance that the text goes through it. The likeliest nodes of all trees that have not been
run are run next, which names their children. Tokens that are committed move the root down its tree:
what lies below stays, and so does its KV; off the tree it starts anew. So while some nodes are
verified, what may follow them grows already, and nothing else is needed for synchronous trees,
chains or enumerated outcomes.

One step of the worker:

    moves = forest.commit(slots, bases, tokens, sizes)    # what the engine told
    rows = forest.choose(seconds)
    found = model.step(trunk, Branches(*rows[:6]))
    forest.grow(found.ready, rows, found.tokens, found.log_probs)
    records = forest.unsent()

KV of nodes lies in `WINDOW` places of each slot behind the text's KV (the trunk), filled in order.
What the methods return are views that the next call of the same method overwrites. Arguments that
are arrays are int32 unless said otherwise. One thread at a time.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.bridge.ipc.messages import NODE_WORDS
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.cpu.draft_worker import tree_ops
from hetero_llm.cpu.draft_worker.tree_ops import (
    CAPACITY,
    MOST_CANDIDATES,
    WINDOW,
    Chosen,
    Moves,
    Unsent,
)
from hetero_llm.spec_decode.draft_model.node_buckets import Record
from hetero_llm.spec_decode.draft_model.tree_arrays import BOOL, FLOAT32, FLOAT64, INT32, fit


class Forest:
    """See the module.

    Args:
        slots: places for sequences.
        max_depth: levels below the root: more than one draft has, or there is nothing below what is
            being verified.
        max_positions: tokens of the longest text that the draft model can run.
        vocab_size: of the draft model.
        record: what came of earlier nodes; commits enter what came of these.

    Attributes:
        lengths: [slots] int64 tokens of each text, 0 for a closed slot. Read only.
    """

    def __init__(
        self, slots: int, *, max_depth: int, max_positions: int, vocab_size: int, record: Record
    ) -> None:
        assert slots > 0 and max_depth > 0
        self._max_depth = max_depth
        self._max_positions = max_positions
        self._vocab_size = vocab_size
        shape = slots, CAPACITY
        self._trees = tree_ops.Trees(
            np.zeros((*shape, tree_ops.NUM_COLUMNS), np.int32), np.zeros(shape, np.float32),
            np.zeros(shape, np.float32), np.zeros(shape, np.uint64),
            np.zeros((slots, tree_ops.NUM_NUMBERS), np.int64), record.table,
        )  # fmt: skip
        self.lengths = self._trees.state[:, tree_ops.LENGTH]
        most = slots * WINDOW
        self._scratch = tree_ops.Scratch(
            np.zeros(max(most, CAPACITY), np.uint64), np.zeros(CAPACITY, np.uint64),
            np.zeros(most, np.uint64), np.zeros(CAPACITY + 1, np.float32),
            np.zeros(CAPACITY, np.int64), np.zeros(WINDOW, np.int64),
        )  # fmt: skip
        self._moves = _new_moves(slots)
        self._chosen = Chosen(
            _ints(slots), _ints(slots), _ints(most), _ints(most), _ints(most),
            np.zeros(most, np.uint64), _ints(most), _ints(most),
        )  # fmt: skip
        nodes = slots * CAPACITY
        self._unsent = Unsent(
            _ints(slots), _ints(slots), _ints(slots), np.zeros((nodes, NODE_WORDS), np.int32)
        )
        self._same_weights = np.ones(slots, np.float32)
        self._nobody = np.zeros(slots, np.bool_)

    def open(self, slot: int, length: int, *, noisy: bool, max_depth: int | None = None) -> None:
        """A new text of `length` > 0 tokens, none of which has been run.

        Args:
            noisy: scores of candidates hold the noise of the draw.
            max_depth: of this tree, if less than that of all.
        """
        assert length > 0
        depth = self._max_depth if max_depth is None else min(max_depth, self._max_depth)
        self._trees.state[slot] = (length, 0, 0, 0, 1, 0, 0, noisy, depth, 0)

    def close(self, slot: int) -> None:
        """The slot is free for another text."""
        self._trees.state[slot] = 0

    def num_nodes(self, slot: int) -> int:
        """Nodes of a tree."""
        return int(self._trees.state[slot, tree_ops.COUNT])

    def num_run(self, slot: int) -> int:
        """Places of a slot's window that are in use."""
        return int(self._trees.state[slot, tree_ops.USED])

    def is_ready(self, slot: int) -> bool:
        """Whether the root's children are known."""
        return bool(self._trees.state[slot, tree_ops.READY])

    def any_ready(self) -> bool:
        """Whether any tree can grow."""
        return bool(self._trees.state[:, tree_ops.READY].any())

    def commit(
        self, slots: np.ndarray, bases: np.ndarray, tokens: np.ndarray, sizes: np.ndarray
    ) -> Moves:
        """Moves roots down their trees, or away from them, and judges the nodes on the way.

        Args:
            slots: [R]; one that is there twice has its moves twice, one after the other.
            bases: [R] lengths of the texts so far. tokens: what comes behind them, one text after
                the other. sizes: [R] of each.
        """
        if len(slots) > len(self._moves.counts):
            self._moves = _new_moves(len(slots))
        moves = self._moves
        total = tree_ops.commit(
            self._trees, self._scratch, fit(slots, INT32), fit(bases, INT32),
            fit(tokens, INT32), fit(sizes, INT32), moves,
        )  # fmt: skip
        assert total >= 0, "a text does not go on where it ended"
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
        """The nodes to run next: the likeliest, as many as make (gained + sum of chances) / seconds
        largest. Nothing is noted before `grow`.

        Args:
            seconds: [M + 1] float64 that a step with 0 .. M nodes takes, rows that run anyway
                included; larger than 0, or all are 0 and M nodes are wanted.
            weights: [slots] float32: what a slot's tokens are worth; 0 leaves it alone.
            urgent: [slots] bool: somebody waits for these. Where they have nodes to run, their
                number makes their own share largest, and others run only in the step's shadow.
            gained: what the rows that run anyway are worth; 1 for each root among them.
        """
        most = min(len(seconds) - 1, len(self._scratch.picked))
        assert most >= 0
        groups, rows = tree_ops.choose(
            self._trees, self._scratch, self._max_positions,
            self._same_weights if weights is None else fit(weights, FLOAT32),
            self._nobody if urgent is None else fit(urgent, BOOL),
            fit(seconds, FLOAT64), most, float(gained), self._chosen,
        )  # fmt: skip
        out = self._chosen
        return Chosen(
            out.slots[:groups], out.counts[:groups], out.tokens[:rows], out.depths[:rows],
            out.places[:rows], out.ancestors[:rows], out.ids[:rows], out.owners[:rows],
        )  # fmt: skip

    def grow(
        self, ready: np.ndarray, rows: Chosen, tokens: np.ndarray, log_probs: np.ndarray
    ) -> None:
        """Takes in what a step found.

        Args:
            ready: [r] slots of which the last token of the text was run.
            rows: what `choose` returned and the step ran: all of it, nothing committed since.
            tokens: [r + N, K] candidates after each text and each row, the likeliest first; no
                token twice in a row; K at most `MOST_CANDIDATES`.
            log_probs: [r + N, K] float32; -inf for none.
        """
        assert tokens.shape == log_probs.shape == (len(ready) + len(rows.ids), tokens.shape[1])
        assert tokens.shape[1] <= MOST_CANDIDATES
        fine = tree_ops.grow(
            self._trees, self._scratch, fit(ready, INT32), rows.owners, rows.ids, rows.places,
            fit(tokens, INT32), fit(log_probs, FLOAT32),
        )  # fmt: skip
        assert fine, "rows that were not to be run"

    def graft(
        self,
        slot: int,
        length: int,
        parents: np.ndarray,
        tokens: np.ndarray,
        chances: np.ndarray,
    ) -> int:
        """Nodes that somebody else knows, for the tree of a text of `length` tokens.

        They are run when their turn comes, like candidates of the draft model, and are told like
        these. A node that is there becomes as likely as is said here. What does not fit the tree,
        a token beyond the vocabulary for one, is left out, with all below it.

        Args:
            parents, tokens: [n] as in `DraftTree`.
            chances: [n] float32 that the text goes through a node, as in `Proposals.path_probs`.

        Returns:
            how many of them are in the tree now.
        """
        assert len(parents) <= MAX_NODES
        return int(
            tree_ops.graft(
                self._trees, self._scratch, int(slot), int(length), self._vocab_size,
                fit(parents, INT32), fit(tokens, INT32), fit(chances, FLOAT32),
            )
        )  # fmt: skip

    def unsent(self) -> Unsent:
        """Nodes that have not been told yet; they are then."""
        out = self._unsent
        groups, rows = tree_ops.unsent(self._trees, out)
        return Unsent(
            out.slots[:groups], out.counts[:groups], out.lengths[:groups], out.nodes[:rows]
        )

    @staticmethod
    def compile() -> None:
        """Goes once through everything that is compiled at its first use: seconds, the first time
        on a machine."""
        forest = Forest(1, max_depth=4, max_positions=16, vocab_size=4, record=Record())
        forest.open(0, 1, noisy=False)
        found = np.array([[1, 2]], np.int32), np.log(np.array([[0.6, 0.3]], np.float32))
        seconds = np.ones(2)
        forest.grow(np.zeros(1, np.int32), forest.choose(seconds), *found)
        forest.graft(0, 1, np.array([-1]), np.array([3]), np.array([0.1]))
        forest.grow(np.zeros(0, np.int32), forest.choose(seconds), *found)
        forest.unsent()
        forest.commit(np.zeros(1), np.ones(1), np.ones(1), np.ones(1))


def _ints(size: int) -> np.ndarray:
    return np.zeros(size, np.int32)


def _new_moves(rows: int) -> Moves:
    most = rows * WINDOW
    return Moves(_ints(most), _ints(most), _ints(rows), _ints(rows), np.zeros(rows, np.bool_))
