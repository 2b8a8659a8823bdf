"""The worker's trees: against plain objects, and with the KV that a draft model would hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.cpu.draft_worker import tree_ops
from hetero_llm.cpu.draft_worker.tree_ops import Chosen, Moves
from hetero_llm.cpu.draft_worker.tree_pool import CAPACITY, WINDOW, TreePool
from hetero_llm.spec_decode.draft_model.node_buckets import (
    FIRST_EXTERNAL,
    BucketStats,
    external_bucket,
)
from hetero_llm.spec_decode.draft_model.tree_arrays import BUCKET, ID, PARENT, TOKEN
from tests.cpu.draft_worker.tree_pool_reference import Oracle, Path, PoolReference

NOBODY = np.zeros(0, np.int32)


class Rig:
    """A tree pool beside its reference and a draft model's KV: the text that each place was
    computed from.

    Every method does the same to all of them and compares what they say.
    """

    def __init__(self, seed: int, *, slots: int, candidates: int, max_positions: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.oracle = Oracle(seed, 24, candidates)
        self.stats = BucketStats()
        self.pool = TreePool(
            slots, max_depth=9, max_positions=max_positions, vocab_size=24, stats=self.stats
        )
        self.reference = PoolReference(9, max_positions, 24)
        self.slots = slots
        self.prefix: dict[int, list[Path]] = {}
        self.window: dict[int, list[Path]] = {}
        self.sent: dict[int, int] = {}

    def text(self, slot: int) -> Path:
        return tuple(self.reference.trees[slot].text)

    def open(self, slot: int) -> None:
        text = self.rng.integers(0, 24, int(self.rng.integers(1, 5))).tolist()
        noisy, depth = bool(self.rng.random() < 0.5), int(self.rng.integers(2, 12))
        self.pool.open(slot, len(text), noisy=noisy, max_depth=depth)
        self.reference.open(slot, text, noisy, depth)
        self.prefix[slot], self.window[slot], self.sent[slot] = [], [], 0

    def close(self, slot: int) -> None:
        self.pool.close(slot)
        del self.reference.trees[slot]

    def run_trunks(self, slots: list[int]) -> None:
        for slot in slots:
            text = self.text(slot)
            self.prefix[slot] += [
                text[:end] for end in range(len(self.prefix[slot]) + 1, len(text))
            ]
            self.prefix[slot].append(text)

    def pending(self) -> list[int]:
        return [
            slot for slot in self.reference.trees if len(self.prefix[slot]) < len(self.text(slot))
        ]

    def step(self, most: int, ready: list[int], **kwargs: np.ndarray | float) -> Chosen:
        seconds = 1.0 + np.cumsum(self.rng.random(most + 1)) * self.rng.choice([0.02, 0.2, 1.0])
        rows = self.pool.choose(seconds, **kwargs)  # type: ignore[arg-type]
        nodes = rows.nodes
        reference = self.reference.choose(seconds, **kwargs)  # type: ignore[arg-type]
        assert rows.owners.tolist() == [slot for slot, *_ in reference]
        assert rows.owners.tolist() == np.repeat(nodes.slots, nodes.counts).tolist()
        assert rows.ids.tolist() == [node.id for _, node, _, _ in reference]
        assert nodes.tokens.tolist() == [node.token for _, node, _, _ in reference]
        assert nodes.places.tolist() == [place for _, _, place, _ in reference]
        assert nodes.ancestors.tolist() == [bits for *_, bits in reference]
        depths = [node.position - len(self.text(slot)) + 1 for slot, node, _, _ in reference]
        assert nodes.depths.tolist() == depths
        self.run_trunks(ready)
        for slot, node, place, bits in reference:
            window, text, path = self.window[slot], self.text(slot), node.path()
            assert place == len(window) < WINDOW and len(self.prefix[slot]) == len(text)
            window.append((*text, *path))
            seen = [window[other] for other in range(WINDOW) if bits >> other & 1]
            assert sorted(seen) == [(*text, *path[:end]) for end in range(1, len(path) + 1)]
        texts = [self.text(slot) for slot in ready]
        texts += [(*self.text(slot), *node.path()) for slot, node, _, _ in reference]
        found = self.oracle.step(texts)
        self.pool.expand(np.array(ready, np.int32), rows, *found)
        self.reference.expand(ready, reference, *found)
        return rows

    def commit(self, news: list[tuple[int, list[int]]]) -> Moves:
        bases = [len(self.text(slot)) for slot, _ in news]
        moves = self.pool.commit(
            np.array([slot for slot, _ in news]), np.array(bases),
            np.array([token for _, tokens in news for token in tokens]),
            np.array([len(tokens) for _, tokens in news]),
        )  # fmt: skip
        at = 0
        for i, (slot, tokens) in enumerate(news):
            expected = self.reference.commit(slot, tokens)
            end = at + int(moves.counts[i])
            pairs = list(
                zip(moves.sources[at:end].tolist(), moves.targets[at:end].tolist(), strict=True)
            )
            assert (pairs, int(moves.paths[i]), bool(moves.ready[i])) == expected
            self._move(slot, pairs, int(moves.paths[i]))
            at = end
        assert at == len(moves.sources) == len(moves.targets)
        return moves

    def _move(self, slot: int, pairs: list[tuple[int, int]], num_path: int) -> None:
        """As a cache does it: in place, one after the other."""
        window = self.window[slot]
        for source, target in pairs:
            assert target <= source
            window[target] = window[source]
        self.prefix[slot] += window[:num_path]
        self.window[slot] = window[num_path : len(pairs)]
        text, run = self.text(slot), self.reference.trees[slot].run
        assert self.prefix[slot] == [text[:end] for end in range(1, len(self.prefix[slot]) + 1)]
        assert self.window[slot] == [(*text, *node.path()) for node in run]

    def add_external_nodes(self, slot: int) -> None:
        count = int(self.rng.integers(1, 12))
        nodes: list[tuple[int, int, np.float32]] = []
        known = [*self.oracle.after(self.text(slot))[0][:2].tolist(), *range(-1, 26)]
        for i in range(count):
            parent = int(self.rng.integers(-1, i))
            above = nodes[parent][2] if parent >= 0 else 1.0
            path_prob = np.float32(above * self.rng.random())
            nodes.append((parent, int(self.rng.choice(known[: 2 + 10 * (i % 3)])), path_prob))
        length = len(self.text(slot)) - int(self.rng.random() < 0.1)
        columns = [np.array(column) for column in zip(*nodes, strict=True)]
        taken = self.pool.add_external_nodes(slot, length, *columns)
        assert taken == self.reference.add_external_nodes(slot, length, nodes)

    def unsent(self) -> None:
        sent, reference, at = self.pool.unsent(), self.reference.unsent(), 0
        assert sent.slots.tolist() == [slot for slot, _, _ in reference]
        assert sent.lengths.tolist() == [length for _, length, _ in reference]
        for i, (slot, _, nodes) in enumerate(reference):
            end = at + int(sent.counts[i])
            assert [*map(tuple, sent.nodes[at:end].tolist())] == nodes
            for number, parent, _, _ in nodes:
                assert parent < number and number > self.sent[slot]
                self.sent[slot] = number
            at = end
        assert at == len(sent.nodes)

    def likely(self, slot: int, most: int) -> list[int]:
        """Some tokens to come, mostly down the tree."""
        tree, node, tokens = self.reference.trees[slot], None, []
        for _ in range(int(self.rng.integers(0, most + 1))):
            below = tree.children(node)
            if not below or self.rng.random() < 0.15:
                tokens.append(int(self.rng.integers(0, 24)))
                node = next((n for n in below if n.token == tokens[-1]), None)
                if node is None:
                    break
                continue
            shares = np.array([n.path_prob for n in below], np.float64) + 1e-6
            node = below[int(self.rng.choice(len(below), p=shares / shares.sum()))]
            tokens.append(node.token)
        return tokens

    def compare(self) -> None:
        trees = self.pool.arrays
        assert np.array_equal(self.stats.table, self.reference.stats.table)
        assert self.pool.any_ready() == any(tree.ready for tree in self.reference.trees.values())
        for slot in range(self.slots):
            tree = self.reference.trees.get(slot)
            if tree is None:
                assert self.pool.lengths[slot] == self.pool.num_nodes(slot) == 0
                continue
            count = self.pool.num_nodes(slot)
            nodes = trees.nodes[slot, :count]
            assert self.pool.lengths[slot] == len(tree.text)
            assert self.pool.is_ready(slot) == tree.ready
            assert self.pool.num_run(slot) == len(tree.run)
            assert nodes[:, ID].tolist() == [node.id for node in tree.nodes]
            assert nodes[:, TOKEN].tolist() == [node.token for node in tree.nodes]
            assert nodes[:, BUCKET].tolist() == [node.kind for node in tree.nodes]
            parents = [tree.nodes.index(n.parent) if n.parent else -1 for n in tree.nodes]
            assert nodes[:, PARENT].tolist() == parents
            assert trees.path_probs[slot, :count].tolist() == [n.path_prob for n in tree.nodes]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from([1, 3, 8, 16]), st.booleans())
def test_tree_pool_does_what_its_reference_does(
    seed: int, slots: int, candidates: int, external: bool
) -> None:
    rig = Rig(seed, slots=slots, candidates=candidates, max_positions=60)
    rng = rig.rng
    for _ in range(30):
        for slot in range(slots):
            if slot not in rig.reference.trees:
                if rng.random() < 0.6:
                    rig.open(slot)
            elif rng.random() < 0.02 or len(rig.text(slot)) > 64:
                rig.close(slot)
            elif external and rng.random() < 0.2:
                rig.add_external_nodes(slot)
        ready = [slot for slot in rig.pending() if rng.random() < 0.9]
        kwargs: dict[str, np.ndarray | float] = {}
        if rng.random() < 0.3:
            kwargs["weights"] = rng.choice([0.0, 0.5, 1.0, 2.0], slots).astype(np.float32)
        if rng.random() < 0.3:
            kwargs["urgent"] = rng.random(slots) < 0.5
        if rng.random() < 0.3:
            kwargs["gained"] = float(len(ready))
        rig.step(int(rng.choice([0, 1, 4, 32])), ready, **kwargs)
        rig.compare()
        if rng.random() < 0.7:
            rig.unsent()
        if rng.random() < 0.4:
            open_slots = list(rig.reference.trees)
            rig.commit([(slot, rig.likely(slot, 5)) for slot in open_slots if rng.random() < 0.7])
            rig.compare()


def test_a_full_tree_loses_what_is_unlikeliest() -> None:
    rig = Rig(3, slots=1, candidates=16, max_positions=60)
    rig.open(0)
    rig.step(0, [0])
    most = 0
    while rig.step(8, []).ids.size and rig.pool.num_run(0) < WINDOW:
        rig.compare()
        rig.unsent()
        most = max(most, rig.pool.num_nodes(0))
    assert CAPACITY - 64 < most <= CAPACITY
    assert rig.reference.trees[0].next_id > CAPACITY + 64, "nodes have been evicted"
    assert rig.pool.num_run(0) == WINDOW and not len(rig.step(8, []).ids)


def test_external_nodes_find_room_in_a_full_tree() -> None:
    rig = Rig(3, slots=1, candidates=16, max_positions=60)
    rig.open(0)
    rig.step(0, [0])
    while rig.pool.num_nodes(0) < CAPACITY - 12:
        rig.step(1, [])
    for _ in range(8):
        rig.add_external_nodes(0)
        rig.compare()
    assert any(n.kind >= FIRST_EXTERNAL for n in rig.reference.trees[0].nodes)
    assert rig.reference.trees[0].next_id > CAPACITY + 1 > rig.pool.num_nodes(0)


def test_a_path_of_run_nodes_keeps_its_subtree_and_needs_no_step() -> None:
    rig = Rig(1, slots=1, candidates=4, max_positions=60)
    rig.open(0)
    rig.step(0, [0])
    for _ in range(12):
        rig.step(4, [])
    tree = rig.reference.trees[0]
    node = max(tree.run, key=lambda n: (bool(tree.children(n)), len(n.path())))
    path, below = list(node.path()), [n.path()[len(node.path()) :] for n in tree.nodes]
    expected = {p for n, p in zip(tree.nodes, below) if node in n.above() and n is not node}
    assert len(path) > 1 and expected
    moves = rig.commit([(0, path)])
    assert moves.ready.tolist() == [True] and moves.paths.tolist() == [len(path)]
    assert {n.path() for n in tree.nodes} == expected
    assert len(rig.step(4, []).ids) > 0
    rig.compare()


def test_a_leaf_or_a_miss_waits_for_its_row() -> None:
    rig = Rig(2, slots=2, candidates=4, max_positions=60)
    for slot in (0, 1):
        rig.open(slot)
    rig.step(0, [0, 1])
    rig.step(2, [])
    leaf = next(node for node in rig.reference.trees[0].nodes if node.place < 0)
    names = {node.token for node in rig.reference.trees[1].nodes}
    miss = next(token for token in range(24) if token not in names)
    moves = rig.commit([(0, list(leaf.path())), (1, [miss])])
    assert moves.ready.tolist() == [False, False]
    assert not len(rig.step(8, []).ids), "nothing can be run before the roots are"
    assert len(rig.step(8, [0, 1], gained=2.0).ids) == 0
    assert len(rig.step(8, []).ids) > 0
    rig.compare()


def grown(slots: int, log_probs: list[list[float]]) -> TreePool:
    """Trees with the root's children only."""
    pool = TreePool(slots, max_depth=4, max_positions=99, vocab_size=50, stats=BucketStats())
    for slot in range(slots):
        pool.open(slot, 3, noisy=False)
    tokens = np.tile(np.arange(len(log_probs[0])), (slots, 1))
    ready = np.arange(slots)
    pool.expand(ready, pool.choose(np.ones(1)), tokens, np.array(log_probs))
    return pool


def test_urgent_slots_come_first_and_others_only_in_their_shadow() -> None:
    pool = grown(2, [np.log([0.6, 0.3]).tolist(), np.log([0.9, 0.05]).tolist()])
    urgent = np.array([True, False])
    flat = np.array([1.0, 1.0, 1.04, 2.0, 2.0])
    rows = pool.choose(flat, urgent=urgent)
    assert rows.owners.tolist() == [0, 0], "a third row would cost the urgent ones time"
    rows = pool.choose(np.array([1.0, 1.0, 1.04, 1.05, 2.0]), urgent=urgent)
    assert rows.owners.tolist() == [0, 0, 1]
    assert pool.choose(flat, urgent=~urgent).owners.tolist()[-1] == 1
    assert pool.choose(flat, weights=np.array([0.0, 1.0])).owners.tolist() == [1, 1]


def test_a_node_is_run_where_its_probability_is_worth_its_time() -> None:
    pool = grown(1, [np.log([0.6, 0.3]).tolist()])
    dear, cheap = np.array([1.0, 1.2, 2.4]), np.array([1.0, 1.2, 1.3])
    assert len(pool.choose(dear).ids) == 1 and len(pool.choose(cheap).ids) == 2
    assert len(pool.choose(dear, gained=5.0).ids) == 0, "roots that run anyway would wait"
    assert len(pool.choose(np.zeros(3)).ids) == 2, "where times are not known"


def test_no_node_is_run_beyond_the_depth_or_the_longest_text() -> None:
    for depth, positions, levels in ((3, 99, 2), (9, 5, 2), (1, 99, 0), (9, 3, 0)):
        pool = TreePool(
            1, max_depth=depth, max_positions=positions, vocab_size=50, stats=BucketStats()
        )
        pool.open(0, 3, noisy=False)
        ready, deepest = np.zeros(1, np.int32), 0
        for _ in range(6):
            rows = pool.choose(np.ones(2))
            deepest = max([deepest, *rows.nodes.depths.tolist()])
            count = len(ready) + len(rows.ids)
            pool.expand(ready, rows, np.full((count, 1), 7), np.full((count, 1), -0.1))
            ready = NOBODY
        assert deepest == levels, (depth, positions)


def test_external_nodes_get_ids_and_are_sent_and_run() -> None:
    pool = grown(1, [np.log([0.3, 0.01]).tolist()])
    first = pool.unsent().nodes[:, ID].tolist()
    parents, tokens = np.array([-1, 0, -1, 0]), np.array([9, 8, 0, 99])
    path_probs = np.array([0.5, 0.4, 0.45, 0.1], np.float32)
    assert pool.add_external_nodes(0, 4, parents, tokens, path_probs) == 0, "of another text"
    assert pool.add_external_nodes(0, 3, parents, tokens, path_probs) == 3, (
        "one is beyond the vocabulary"
    )
    sent = pool.unsent()
    ids, parents_sent, tokens_sent, kinds = sent.nodes.T.tolist()
    assert ids == [first[-1] + 1, first[-1] + 2]
    assert parents_sent == [-3, first[-1] + 1] and tokens_sent == [9, 8]
    assert kinds == [external_bucket(0.5), external_bucket(0.8)]
    assert min(kinds) >= FIRST_EXTERNAL
    rows = pool.choose(np.ones(4))
    assert sorted(rows.nodes.tokens.tolist()) == [0, 9], "a node below one that was not run waits"


@pytest.mark.parametrize("wrong", ["twice", "place", "closed", "root", "parent"])
def test_rows_that_were_not_chosen_are_our_bug(wrong: str) -> None:
    pool = grown(1, [np.log([0.6, 0.3]).tolist()])
    rows = pool.choose(np.ones(3))
    found = np.full((2, 1), 5), np.full((2, 1), -0.1)
    if wrong == "twice":
        pool.expand(NOBODY, rows, *found)
    elif wrong == "place":
        places = rows.nodes.places + np.int32(1)
        rows = rows._replace(nodes=rows.nodes._replace(places=places))
    elif wrong == "parent":
        pool.add_external_nodes(0, 3, np.array([-1, 0]), np.array([8, 9]), np.array([0.5, 0.4]))
        rows = rows._replace(ids=np.array([4, 2], np.int32))
    elif wrong == "closed":
        pool.close(0)
    else:
        rows = pool.choose(np.ones(1))
        found = np.full((1, 1), 5), np.full((1, 1), -0.1)
    with pytest.raises(AssertionError, match="not to be run"):
        pool.expand(np.zeros(1 if wrong == "root" else 0, np.int32), rows, *found)


def test_a_text_that_does_not_go_on_where_it_ended_is_our_bug() -> None:
    pool = grown(1, [[-0.1]])
    with pytest.raises(AssertionError, match="does not go on"):
        pool.commit(np.zeros(1), np.array([4]), np.array([1]), np.array([1]))


def test_scores_that_are_no_numbers_give_no_candidates() -> None:
    pool = grown(1, [[np.nan, np.nan, -np.inf]])
    sent = pool.unsent()
    assert sent.counts.tolist() == [0] and sent.lengths.tolist() == [3]
    assert not len(pool.unsent().slots), "that there are none is sent once"


def test_compile_has_met_every_type_of_argument() -> None:
    """Also those of a ring's memory: read-only, of a wider type, or with gaps."""
    TreePool.compile()
    pool = grown(1, [np.log([0.6, 0.3]).tolist()])
    pool.add_external_nodes(0, 3, np.array([-1]), np.array([7]), np.array([0.2]))
    pool.choose(np.ones(3, np.float32), weights=np.ones(1), urgent=np.ones(1), gained=1)
    base, token = np.frombuffer(b"\3\0\0\0", np.int32), np.arange(4, dtype=np.int64)[::2][:1]
    moves = pool.commit([0], base, token, np.ones(1))  # type: ignore[arg-type]
    pool.unsent()
    assert moves.ready.tolist() == [False]
    compiled = (
        tree_ops.commit,
        tree_ops.choose,
        tree_ops.expand,
        tree_ops.add_external_nodes,
        tree_ops.unsent,
    )
    assert [len(function.signatures) for function in compiled] == [1] * 5


def test_external_nodes_below_impossible_nodes_are_left_out() -> None:
    pool = TreePool(1, max_depth=8, max_positions=64, vocab_size=10, stats=BucketStats())
    pool.open(0, 3, noisy=False)
    path_probs = np.array([0.0, 0.5, np.nan, 0.5, 0.9, 0.4], np.float32)
    parents = np.array([-1, 0, -1, 2, -1, 4], np.int32)
    assert pool.add_external_nodes(0, 3, parents, np.arange(6, dtype=np.int32), path_probs) == 2
