"""The engine's replica of the worker's trees, also when messages are lost, late or damaged."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import event

from hetero_llm.bridge.ipc.messages import (
    HEADER,
    HEADER_WORDS,
    NODE_WORDS,
    WORDS,
    MessageKind,
    Messages,
    Outbox,
)
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.cpu.draft_worker.tree_pool import TreePool
from hetero_llm.spec_decode.draft_model.node_buckets import NUM_BUCKETS, BucketStats
from hetero_llm.spec_decode.draft_model.tree_replica import CAPACITY, TAIL, TreeReplica
from hetero_llm.spec_decode.proposals import Proposals
from tests.cpu.draft_worker.tree_pool_reference import Oracle, Path
from tests.spec_decode.draft_model.tree_replica_reference import NodeWords, ReplicaReference

VOCAB = 24
NOBODY = np.zeros(0, np.int32)
Sent = tuple[int, int, int, list[NodeWords]]
"""Slot, generation, length, nodes."""


def add(replica: TreeReplica, *messages: Sent) -> None:
    assert replica.add(messages_of(*messages))


def messages_of(*sent: Sent) -> Messages:
    nodes = [node for *_, nodes in sent for node in nodes]
    heads = [
        (MessageKind.NODES, slot, generation, length, NODE_WORDS * len(nodes), 0, 0)
        for slot, generation, length, nodes in sent
    ]
    headers = np.array(heads, np.int32).reshape(-1, HEADER_WORDS).view(HEADER).reshape(-1)
    return Messages(headers, np.array(nodes, np.int32).reshape(-1))


def drafts(found: Proposals, row: int) -> list[tuple[Path, np.float32, int]]:
    """Path, survival and kind of each node."""
    paths: list[Path] = []
    for node in range(int(found.counts[row])):
        parent = int(found.parents[row, node])
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), int(found.tokens[row, node])))
    columns = found.path_probs[row].tolist(), found.buckets[row].tolist()
    return list(zip(paths, *columns))


class Worker:
    """A tree pool and a model, with a queue of messages to it."""

    def __init__(self, slots: int, oracle: Oracle) -> None:
        self.oracle = oracle
        self.pool = TreePool(
            slots, max_depth=9, max_positions=10_000, vocab_size=VOCAB, stats=BucketStats()
        )
        self.inbox: deque[tuple[str, int, int, list[int]]] = deque()
        self.texts: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.made: dict[tuple[int, int], set[Path]] = {}

    def read(self) -> None:
        what, slot, generation, tokens = self.inbox.popleft()
        if what == "open":
            self.texts[slot], self.generations[slot] = list(tokens), generation
            self.made[slot, generation] = set()
            self.pool.open(slot, len(tokens), noisy=False)
        elif what == "commit":
            base = len(self.texts[slot])
            self.pool.commit(
                np.array([slot]), np.array([base]), np.array(tokens), np.array([len(tokens)])
            )
            self.texts[slot] += tokens
        else:
            self.pool.close(slot)
            del self.texts[slot]

    def step(self, most: int) -> None:
        """Runs what waits and `most` nodes."""
        trees = self.pool.arrays
        ready = [slot for slot in self.texts if not self.pool.is_ready(slot)]
        rows = self.pool.choose(np.linspace(1, 1.01, most + 1))
        texts = [tuple(self.texts[slot]) for slot in ready]
        for slot, number in zip(rows.owners.tolist(), rows.ids.tolist()):
            nodes, path = trees.nodes[slot].tolist(), []
            node = next(i for i, columns in enumerate(nodes) if columns[0] == number)
            while node >= 0:
                path.append(nodes[node][2])
                node = nodes[node][1]
            texts.append((*self.texts[slot], *reversed(path)))
        found = self.oracle.step(texts)
        for slot, text, tokens in zip([*ready, *rows.owners.tolist()], texts, found[0].tolist()):
            made = self.made[slot, self.generations[slot]]
            made.update((*text, token) for token in tokens)
        self.pool.expand(np.array(ready, np.int32), rows, *found)

    def add_external_nodes(self, slot: int, rng: np.random.Generator) -> None:
        tokens = rng.integers(0, VOCAB, 3)
        text = tuple(self.texts[slot])
        self.pool.add_external_nodes(
            slot, len(text), np.array([-1, 0, 1]), tokens, np.array([0.5, 0.4, 0.1])
        )
        made = self.made[slot, self.generations[slot]]
        made.update((*text, *tokens[:end].tolist()) for end in (1, 2, 3))

    def sent(self) -> list[Sent]:
        out, at = self.pool.unsent(), 0
        messages: list[Sent] = []
        for slot, count, length in zip(
            out.slots.tolist(), out.counts.tolist(), out.lengths.tolist()
        ):
            nodes = [*map(tuple, out.nodes[at : at + count].tolist())]
            messages.append((slot, self.generations[slot], length, nodes))
            at += count
        return messages


class Engine:
    """A replica beside its reference: both get the same messages and must give the same drafts."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.stats = BucketStats()
        self.replica = TreeReplica(slots, vocab_size=VOCAB, stats=self.stats)
        self.reference = ReplicaReference(VOCAB)
        self.generation = 0

    def open(self, slot: int, text: list[int]) -> int:
        self.generation += 1
        self.replica.open(slot, self.generation, len(text))
        self.reference.open(slot, self.generation, text)
        return self.generation

    def close(self, slot: int) -> None:
        self.replica.close(slot)
        del self.reference.copies[slot]

    def add(self, *messages: Sent) -> None:
        add(self.replica, *messages)
        for message in messages:
            self.reference.add(*message, self.slots)

    def commit(self, news: list[tuple[int, list[int]]]) -> None:
        bases = [len(self.reference.copies[slot].text) for slot, _ in news]
        self.replica.commit(
            np.array([slot for slot, _ in news]), np.array(bases),
            np.array([token for _, tokens in news for token in tokens]),
            np.array([len(tokens) for _, tokens in news]),
        )  # fmt: skip
        for slot, tokens in news:
            self.reference.commit(slot, tokens)

    def compare(self, rng: np.random.Generator) -> dict[int, list[Path]]:
        """Paths of the drafts of each slot."""
        slots = np.array([*rng.permutation(self.slots), -1])
        limits = rng.choice([0, 3, MAX_NODES, 500], len(slots))
        depths = rng.choice([0, 2, 99], len(slots)) if rng.random() < 0.5 else None
        found = Proposals.empty(len(slots))
        found.counts[:] = 7
        self.replica.proposals(slots, limits, found, depths)
        caught_up, paths = self.replica.caught_up(slots), {}
        for row, slot in enumerate(slots.tolist()):
            most = min(int(limits[row]), MAX_NODES)
            depth = 99 if depths is None else int(depths[row])
            expected = self.reference.proposal(slot, most, depth)
            assert drafts(found, row) == expected
            assert caught_up[row] == self.reference.caught_up(slot)
            paths[slot] = [path for path, _, _ in expected]
            if slot in self.reference.copies:
                assert self.replica.num_nodes(slot) == len(self.reference.copies[slot].nodes)
        assert self.replica.dropped == self.reference.dropped
        assert np.array_equal(self.stats.table, self.reference.stats.table)
        return paths


def garbled(rng: np.random.Generator, sent: Sent) -> Sent:
    slot, generation, length, nodes = sent
    what = int(rng.integers(0, 4))
    if what == 0:
        return int(rng.integers(-2, 9)), generation, length, nodes
    if what == 1:
        return slot, generation, int(rng.integers(-3, 60)), nodes
    changed = [list(node) for node in nodes]
    for node in changed:
        if rng.random() < 0.3:
            node[int(rng.integers(0, 3))] = int(rng.integers(-40, 60))
        if rng.random() < 0.05:
            node[3] = int(rng.integers(0, 256))
    return slot, generation, length, [tuple(node) for node in changed]  # type: ignore[misc]


class Pair:
    """Worker and engine with a channel that may be slow, lose messages or repeat them."""

    def __init__(self, seed: int, slots: int, faults: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.slots, self.faults = slots, faults
        self.oracle = Oracle(seed, VOCAB, 5)
        self.worker, self.engine = Worker(slots, self.oracle), Engine(slots)
        self.channel: deque[Sent] = deque()
        self.hits = 0

    def change(self, slot: int) -> None:
        """Opens or closes a slot, or commits tokens: as a rule those that the model likes."""
        rng, inbox = self.rng, self.worker.inbox
        copy = self.engine.reference.copies.get(slot)
        if copy is None:
            text = rng.integers(0, VOCAB, int(rng.integers(1, 4))).tolist()
            inbox.append(("open", slot, self.engine.open(slot, text), text))
        elif rng.random() < 0.04:
            inbox.append(("close", slot, copy.generation, []))
            self.engine.close(slot)
        else:
            tokens: list[int] = []
            for _ in range(int(rng.choice([0, 1, 1, 2, 4]) if rng.random() < 0.99 else TAIL + 9)):
                likely = self.oracle.after((*copy.text, *tokens))[0]
                rank = int(rng.choice([0, 0, 0, 0, 1, 2]))
                tokens.append(int(likely[rank]) if rng.random() < 0.95 else int(rng.integers(24)))
            inbox.append(("commit", slot, copy.generation, tokens))
            self.engine.commit([(slot, tokens)])

    def work(self) -> None:
        worker = self.worker
        while worker.inbox and self.rng.random() < 0.8:
            worker.read()
        worker.step(int(self.rng.choice([0, 2, 8])))
        if worker.texts and self.rng.random() < 0.1:
            worker.add_external_nodes(int(self.rng.choice(list(worker.texts))), self.rng)
        self.channel += worker.sent()

    def deliver(self) -> None:
        messages: list[Sent] = []
        while self.channel and self.rng.random() < 0.8:
            sent, luck = self.channel.popleft(), self.rng.random()
            if self.faults == "none" or luck > 0.2:
                messages.append(sent)
            elif luck > 0.1:
                messages += [sent, sent]
            elif luck > 0.05 and self.faults == "garbled":
                messages.append(garbled(self.rng, sent))
        self.engine.add(*messages)

    def check(self) -> None:
        for slot, paths in self.engine.compare(self.rng).items():
            if self.faults == "garbled" or not paths:
                continue
            copy = self.engine.reference.copies[slot]
            made = self.worker.made[slot, copy.generation]
            assert all((*copy.text, *path) in made for path in paths)
            self.hits += len(paths)

    def drain(self) -> None:
        """The channel comes to its senses, and the worker to the end of its queue."""
        while self.worker.inbox:
            self.worker.read()
        self.worker.step(0)
        self.engine.add(*self.channel, *self.worker.sent())
        self.channel.clear()


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 3), st.sampled_from(["none", "lost", "garbled"]))
def test_drafts_are_what_the_worker_made_for_this_text(seed: int, slots: int, faults: str) -> None:
    pair = Pair(seed, slots, faults)
    for _ in range(60):
        if pair.rng.random() < 0.5:
            pair.change(int(pair.rng.integers(slots)))
        if pair.rng.random() < 0.6:
            pair.work()
        if pair.rng.random() < 0.7:
            pair.deliver()
        pair.check()
    assert pair.hits > 0 or faults == "garbled"
    pair.drain()
    pair.check()
    if faults != "none":
        return
    for slot, copy in pair.engine.reference.copies.items():
        count = pair.worker.pool.num_nodes(slot)
        nodes = pair.worker.pool.arrays.nodes[slot, :count]
        assert set(copy.nodes) >= set(nodes[:, 0].tolist()), "nothing is missing at the end"
    assert pair.engine.replica.caught_up(np.arange(slots)).all()


def test_lost_messages_are_no_loss_once_the_root_is_run_anew() -> None:
    pair = Pair(5, 1, "none")
    pair.change(0)
    pair.drain()
    for _ in range(6):
        pair.worker.step(4)
        pair.worker.sent()  # and the message is lost
    pair.engine.commit([(0, [1, 2, 3])])
    pair.worker.inbox.append(("commit", 0, 1, [1, 2, 3]))
    assert not pair.engine.replica.caught_up(np.zeros(1)).any()
    pair.drain()
    assert pair.engine.replica.caught_up(np.zeros(1)).all()
    pair.check()
    assert pair.hits > 0


# -- one rule at a time ---------------------------------------------------------------------


def mirror_of(length: int = 3, **kwargs: Any) -> TreeReplica:
    replica = TreeReplica(2, vocab_size=VOCAB, stats=kwargs.pop("stats", BucketStats()), **kwargs)
    replica.open(0, 1, length)
    return replica


def commit(replica: TreeReplica, base: int, *tokens: int) -> None:
    replica.commit(np.zeros(1), np.array([base]), np.array(tokens), np.array([len(tokens)]))


def paths_of(replica: TreeReplica) -> list[Path]:
    found = Proposals.empty(1)
    replica.proposals(np.zeros(1), np.array([MAX_NODES]), found)
    return sorted(path for path, _, _ in drafts(found, 0))


def test_late_nodes_move_the_anchor_along_the_text() -> None:
    replica = mirror_of()
    commit(replica, 3, 5, 6)
    add(replica, (0, 1, 3, [(1, -3, 5, 8), (2, -3, 7, 8)]))
    assert not replica.caught_up(np.zeros(1)).any() and paths_of(replica) == []
    add(replica, (0, 1, 3, [(3, 1, 6, 8), (4, 2, 6, 8), (5, 3, 9, 8), (6, 5, 10, 8)]))
    assert replica.caught_up(np.zeros(1)).all() and paths_of(replica) == [(9,), (9, 10)]
    assert replica.dropped == {"stale": 2, "malformed": 0, "full": 0}


def test_a_tree_that_begins_anew_moves_the_anchor_at_once() -> None:
    replica = mirror_of()
    commit(replica, 3, 5, 6, 7)
    add(replica, (0, 1, 0, [(4, -5, 8, 8), (5, -5, 7, 8), (6, 5, 2, 8)]))
    assert paths_of(replica) == [(2,)]
    add(replica, (0, 1, 0, [(7, -6, 3, 8), (8, -5, 3, 8)]))
    assert paths_of(replica) == [(2,), (3,)], "children of -6 are those of the anchor"
    assert replica.dropped["stale"] == 2


def test_a_tree_that_begins_anew_forgets_the_old_anchor() -> None:
    replica = mirror_of()
    add(replica, (0, 1, 3, [(1, -3, 5, 8)]))
    commit(replica, 3, 5)
    commit(replica, 4, 6)
    add(replica, (0, 1, 5, [(2, -5, 7, 8), (3, 1, 8, 8)]))
    assert paths_of(replica) == [(7,)] and replica.dropped["stale"] == 1


def test_an_anchor_far_behind_lets_go_of_its_node() -> None:
    replica = mirror_of()
    add(replica, (0, 1, 3, [(1, -3, 5, 8)]))
    commit(replica, 3, 5)
    commit(replica, 4, *[6] * TAIL, 7)
    add(replica, (0, 1, 3, [(2, 1, 6, 8), (3, -4, 6, 8)]))
    assert replica.dropped["stale"] == 2
    add(replica, (0, 1, 0, [(4, -5, 6, 8), (5, -4 - TAIL, 7, 8), (6, 5, 9, 8)]))
    assert paths_of(replica) == [(9,)]


def test_the_worker_may_have_nothing_to_say() -> None:
    replica = mirror_of()
    add(replica, (0, 1, 0, []))
    assert not replica.caught_up(np.zeros(1)).any()
    add(replica, (0, 1, 3, []))
    assert replica.caught_up(np.zeros(1)).all() and paths_of(replica) == []
    add(replica, (0, 1, 0, []))
    assert replica.caught_up(np.zeros(1)).all(), "what was sent stays known"
    commit(replica, 3, 5)
    assert replica.caught_up(np.array([0, 1, -1])).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ((0, 1, 3, [(0, -3, 5, 8)]), "malformed"),
        ((0, 1, 3, [(9, -3, VOCAB, 8)]), "malformed"),
        ((0, 1, 3, [(9, -3, -1, 8)]), "malformed"),
        ((0, 1, 3, [(9, -3, 5, NUM_BUCKETS)]), "malformed"),
        ((0, 1, 3, [(9, -4, 5, 8)]), "malformed"),
        ((0, 1, 3, [(9, 0, 5, 8)]), "malformed"),
        ((0, 1, 4, [(9, -3, 5, 8)]), "malformed"),
        ((0, 1, -1, [(9, -3, 5, 8)]), "malformed"),
        ((2, 1, 3, [(9, -3, 5, 8)]), "malformed"),
        ((-1, 1, 3, [(9, -3, 5, 8)]), "malformed"),
        ((0, 1, 3, [(2, -3, 5, 8)]), "stale"),
        ((0, 1, 3, [(9, -2, 5, 8)]), "stale"),
        ((0, 1, 3, [(9, 7, 5, 8)]), "stale"),
        ((0, 2, 3, [(9, -3, 5, 8)]), "stale"),
        ((1, -1, 3, [(9, -3, 5, 8)]), "stale"),
        ((1, 0, 3, [(9, -3, 5, 8)]), "stale"),
    ],
)
def test_what_does_not_belong_is_dropped_and_counted(sent: Sent, reason: str) -> None:
    replica = mirror_of()
    add(replica, (0, 1, 3, [(2, -3, 1, 8)]))
    add(replica, sent)
    dropped = replica.dropped
    assert dropped.pop(reason) == 1 and set(dropped.values()) == {0}
    assert paths_of(replica) == [(1,)]
    add(replica, (0, 1, 3, [(20, 2, 4, 8)]))
    assert paths_of(replica) == [(1,), (1, 4)], "and what comes then is taken"


def test_a_full_tree_takes_no_more() -> None:
    replica = mirror_of()
    add(replica, (0, 1, 3, [(i + 1, -3, i % VOCAB, 8) for i in range(CAPACITY + 2)]))
    assert replica.num_nodes(0) == CAPACITY and replica.dropped["full"] == 2
    commit(replica, 3, 5)
    assert replica.num_nodes(0) == 0


def test_of_references_the_latest_is_followed() -> None:
    """The worker has dropped the first node, and sent the second when it met the token again."""
    replica = mirror_of()
    add(replica, (0, 1, 3, [(1, -3, 5, 8), (2, -3, 5, 8), (3, 2, 6, 8)]))
    commit(replica, 3, 5)
    assert paths_of(replica) == [(6,)]


def test_commits_update_the_statistics() -> None:
    stats = BucketStats()
    before = stats.table.copy()
    replica = mirror_of(stats=stats)
    add(replica, (0, 1, 3, [(1, -3, 5, 8), (2, -3, 6, 9), (3, 1, 7, 7)]))
    commit(replica, 3, 5, 1)
    changed = {8: [1, 1], 9: [0, 1], 7: [0, 1]}
    difference = (stats.table - before).tolist()
    assert difference == [changed.get(kind, [0, 0]) for kind in range(NUM_BUCKETS)]


def test_closed_and_reopened_slots_begin_empty() -> None:
    replica = mirror_of()
    add(replica, (0, 1, 3, [(1, -3, 5, 8)]))
    replica.close(0)
    assert paths_of(replica) == []
    with pytest.raises(AssertionError, match="does not go on"):
        commit(replica, 3, 5)
    replica.open(0, 2, 3)
    add(replica, (0, 1, 3, [(2, -3, 5, 8)]))
    assert paths_of(replica) == [] and replica.dropped["stale"] == 1
    add(replica, (0, 2, 3, [(1, -3, 6, 8)]))
    assert paths_of(replica) == [(6,)]


@pytest.mark.parametrize("words", [[1], [4, 3], [2, 2], [8, 5, 4], [3, 1, 4]])
def test_parts_of_nodes_are_none(words: list[int]) -> None:
    replica = mirror_of()
    outbox = Outbox()
    for size in words:
        body = np.tile(np.array([1, -3, 5, 8], np.int32), 3)[:size]
        outbox.append(MessageKind.NODES, body, slot=0, generation=1, base_length=3)
    assert not replica.add(outbox.messages())
    assert replica.num_nodes(0) == 0 and not sum(replica.dropped.values())
    assert not replica.caught_up(np.zeros(1))[0]


@pytest.mark.parametrize("words", [[8], [-4, 8], [4, 4]])
def test_bodies_that_are_not_as_long_as_headers_say_are_none(words: list[int]) -> None:
    replica, messages = mirror_of(), messages_of(*[(0, 1, 3, [])] * len(words))
    messages.headers.view(np.int32).reshape(-1, HEADER_WORDS)[:, WORDS] = words
    assert not replica.add(Messages(messages.headers, np.array([1, -3, 5, 8], np.int32)))
    assert replica.num_nodes(0) == 0


def test_numbers_beyond_their_types_are_nothing_good() -> None:
    replica, kinds = mirror_of(), [0, 95, NUM_BUCKETS, 255, 256, 2**31 - 1, -1, -(2**31)]
    add(replica, (0, 1, 3, [(i + 1, -3, i, kind) for i, kind in enumerate(kinds)]))
    assert replica.num_nodes(0) == 2
    assert replica.dropped == {"stale": 0, "malformed": len(kinds) - 2, "full": 0}
    outbox, node = Outbox(), np.array([9, -3, 5, 8], np.int32)
    outbox.append(MessageKind.NODES, node, slot=2**32 - 1, generation=1, base_length=3)
    outbox.append(MessageKind.NODES, node, slot=0, generation=1, base_length=2**32 - 5)
    outbox.append(MessageKind.NODES, node, slot=0, generation=2**31, base_length=3)
    assert replica.add(outbox.messages())
    assert replica.dropped == {"stale": 1, "malformed": len(kinds), "full": 0}
    assert replica.num_nodes(0) == 2


def test_compile_leaves_nothing_to_compile() -> None:
    """No later call needs numba's compiler: the types of all its arguments were met."""
    TreeReplica.compile()
    with event.install_recorder("numba:compiler_lock") as recorder:
        test_more_rows_than_slots_can_be_asked_for()
        replica = mirror_of()
        add(replica, (0, 1, 3, [(1, -3, 5, 8)]))
        replica.commit(np.array([0]), np.array([3]), np.array([5], np.int32), np.array([1]))
    assert recorder.buffer == []


def test_more_rows_than_slots_can_be_asked_for() -> None:
    replica = mirror_of()
    add(replica, (0, 1, 3, [(1, -3, 5, 8)]))
    found = Proposals.empty(5)
    replica.proposals(np.zeros(5), np.full(5, 9), found)
    assert found.counts.tolist() == [1] * 5 and replica.caught_up(np.zeros(5)).all()
