"""The engine's copy of the worker's trees, whatever becomes of the records between the two."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge.ipc.messages import (
    HEADER,
    HEADER_WORDS,
    NODE_WORDS,
    WORDS,
    Kind,
    Outbox,
    Records,
)
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.cpu.draft_worker.tree_pool import Forest
from hetero_llm.spec_decode.draft_model import tree_replica as mirror_module
from hetero_llm.spec_decode.draft_model.node_buckets import NUM_KINDS, Record
from hetero_llm.spec_decode.draft_model.tree_replica import CAPACITY, TAIL, Mirror
from hetero_llm.spec_decode.proposals import Proposals
from tests.cpu.draft_worker.tree_pool_reference import Oracle, Path
from tests.spec_decode.draft_model.tree_replica_reference import MirrorTwin, Record4

VOCAB = 24
NOBODY = np.zeros(0, np.int32)
Told = tuple[int, int, int, list[Record4]]
"""Slot, generation, length, nodes."""


def add(mirror: Mirror, *records: Told) -> None:
    assert mirror.add(records_of(*records))


def records_of(*told: Told) -> Records:
    nodes = [node for *_, nodes in told for node in nodes]
    heads = [
        (Kind.NODES, slot, generation, length, NODE_WORDS * len(nodes), 0, 0)
        for slot, generation, length, nodes in told
    ]
    headers = np.array(heads, np.int32).reshape(-1, HEADER_WORDS).view(HEADER).reshape(-1)
    return Records(headers, np.array(nodes, np.int32).reshape(-1))


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
    """A forest and a model, with a queue of what it is told."""

    def __init__(self, slots: int, oracle: Oracle) -> None:
        self.oracle = oracle
        self.forest = Forest(
            slots, max_depth=9, max_positions=10_000, vocab_size=VOCAB, record=Record()
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
            self.forest.open(slot, len(tokens), noisy=False)
        elif what == "commit":
            base = len(self.texts[slot])
            self.forest.commit(
                np.array([slot]), np.array([base]), np.array(tokens), np.array([len(tokens)])
            )
            self.texts[slot] += tokens
        else:
            self.forest.close(slot)
            del self.texts[slot]

    def step(self, most: int) -> None:
        """Runs what waits and `most` nodes."""
        trees = self.forest._trees
        ready = [slot for slot in self.texts if not self.forest.is_ready(slot)]
        rows = self.forest.choose(np.linspace(1, 1.01, most + 1))
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
        self.forest.grow(np.array(ready, np.int32), rows, *found)

    def graft(self, slot: int, rng: np.random.Generator) -> None:
        tokens = rng.integers(0, VOCAB, 3)
        text = tuple(self.texts[slot])
        self.forest.graft(slot, len(text), np.array([-1, 0, 1]), tokens, np.array([0.5, 0.4, 0.1]))
        made = self.made[slot, self.generations[slot]]
        made.update((*text, *tokens[:end].tolist()) for end in (1, 2, 3))

    def told(self) -> list[Told]:
        out, at = self.forest.unsent(), 0
        records: list[Told] = []
        for slot, count, length in zip(
            out.slots.tolist(), out.counts.tolist(), out.lengths.tolist()
        ):
            nodes = [*map(tuple, out.nodes[at : at + count].tolist())]
            records.append((slot, self.generations[slot], length, nodes))
            at += count
        return records


class Engine:
    """A mirror beside its twin; both are told the same and say the same."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.record = Record()
        self.mirror = Mirror(slots, vocab_size=VOCAB, record=self.record)
        self.twin = MirrorTwin(VOCAB)
        self.generation = 0

    def open(self, slot: int, text: list[int]) -> int:
        self.generation += 1
        self.mirror.open(slot, self.generation, len(text))
        self.twin.open(slot, self.generation, text)
        return self.generation

    def close(self, slot: int) -> None:
        self.mirror.close(slot)
        del self.twin.copies[slot]

    def add(self, *records: Told) -> None:
        add(self.mirror, *records)
        for record in records:
            self.twin.add(*record, self.slots)

    def commit(self, news: list[tuple[int, list[int]]]) -> None:
        bases = [len(self.twin.copies[slot].text) for slot, _ in news]
        self.mirror.commit(
            np.array([slot for slot, _ in news]), np.array(bases),
            np.array([token for _, tokens in news for token in tokens]),
            np.array([len(tokens) for _, tokens in news]),
        )  # fmt: skip
        for slot, tokens in news:
            self.twin.commit(slot, tokens)

    def compare(self, rng: np.random.Generator) -> dict[int, list[Path]]:
        """Paths of the drafts of each slot."""
        slots = np.array([*rng.permutation(self.slots), -1])
        limits = rng.choice([0, 3, MAX_NODES, 500], len(slots))
        depths = rng.choice([0, 2, 99], len(slots)) if rng.random() < 0.5 else None
        found = Proposals.empty(len(slots))
        found.counts[:] = 7
        self.mirror.proposals(slots, limits, found, depths)
        caught_up, paths = self.mirror.caught_up(slots), {}
        for row, slot in enumerate(slots.tolist()):
            most = min(int(limits[row]), MAX_NODES)
            depth = 99 if depths is None else int(depths[row])
            expected = self.twin.proposal(slot, most, depth)
            assert drafts(found, row) == expected
            assert caught_up[row] == self.twin.caught_up(slot)
            paths[slot] = [path for path, _, _ in expected]
            if slot in self.twin.copies:
                assert self.mirror.num_nodes(slot) == len(self.twin.copies[slot].nodes)
        assert self.mirror.dropped == self.twin.dropped
        assert np.array_equal(self.record.table, self.twin.record.table)
        return paths


def garbled(rng: np.random.Generator, told: Told) -> Told:
    slot, generation, length, nodes = told
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
    """Worker and engine with a channel that may be slow, lose records or repeat them."""

    def __init__(self, seed: int, slots: int, faults: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.slots, self.faults = slots, faults
        self.oracle = Oracle(seed, VOCAB, 5)
        self.worker, self.engine = Worker(slots, self.oracle), Engine(slots)
        self.channel: deque[Told] = deque()
        self.hits = 0

    def change(self, slot: int) -> None:
        """Opens or closes a slot, or commits tokens: as a rule those that the model likes."""
        rng, inbox = self.rng, self.worker.inbox
        copy = self.engine.twin.copies.get(slot)
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
            worker.graft(int(self.rng.choice(list(worker.texts))), self.rng)
        self.channel += worker.told()

    def deliver(self) -> None:
        records: list[Told] = []
        while self.channel and self.rng.random() < 0.8:
            told, luck = self.channel.popleft(), self.rng.random()
            if self.faults == "none" or luck > 0.2:
                records.append(told)
            elif luck > 0.1:
                records += [told, told]
            elif luck > 0.05 and self.faults == "garbled":
                records.append(garbled(self.rng, told))
        self.engine.add(*records)

    def check(self) -> None:
        for slot, paths in self.engine.compare(self.rng).items():
            if self.faults == "garbled" or not paths:
                continue
            copy = self.engine.twin.copies[slot]
            made = self.worker.made[slot, copy.generation]
            assert all((*copy.text, *path) in made for path in paths)
            self.hits += len(paths)

    def drain(self) -> None:
        """The channel comes to its senses, and the worker to the end of its queue."""
        while self.worker.inbox:
            self.worker.read()
        self.worker.step(0)
        self.engine.add(*self.channel, *self.worker.told())
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
    for slot, copy in pair.engine.twin.copies.items():
        count = pair.worker.forest.num_nodes(slot)
        nodes = pair.worker.forest._trees.nodes[slot, :count]
        assert set(copy.nodes) >= set(nodes[:, 0].tolist()), "nothing is missing at the end"
    assert pair.engine.mirror.caught_up(np.arange(slots)).all()


def test_lost_records_are_no_loss_once_the_root_is_run_anew() -> None:
    pair = Pair(5, 1, "none")
    pair.change(0)
    pair.drain()
    for _ in range(6):
        pair.worker.step(4)
        pair.worker.told()  # and nobody gets it
    pair.engine.commit([(0, [1, 2, 3])])
    pair.worker.inbox.append(("commit", 0, 1, [1, 2, 3]))
    assert not pair.engine.mirror.caught_up(np.zeros(1)).any()
    pair.drain()
    assert pair.engine.mirror.caught_up(np.zeros(1)).all()
    pair.check()
    assert pair.hits > 0


# -- one rule at a time ---------------------------------------------------------------------


def mirror_of(length: int = 3, **kwargs: Any) -> Mirror:
    mirror = Mirror(2, vocab_size=VOCAB, record=kwargs.pop("record", Record()), **kwargs)
    mirror.open(0, 1, length)
    return mirror


def commit(mirror: Mirror, base: int, *tokens: int) -> None:
    mirror.commit(np.zeros(1), np.array([base]), np.array(tokens), np.array([len(tokens)]))


def paths_of(mirror: Mirror) -> list[Path]:
    found = Proposals.empty(1)
    mirror.proposals(np.zeros(1), np.array([MAX_NODES]), found)
    return sorted(path for path, _, _ in drafts(found, 0))


def test_late_nodes_move_the_anchor_along_the_text() -> None:
    mirror = mirror_of()
    commit(mirror, 3, 5, 6)
    add(mirror, (0, 1, 3, [(1, -3, 5, 8), (2, -3, 7, 8)]))
    assert not mirror.caught_up(np.zeros(1)).any() and paths_of(mirror) == []
    add(mirror, (0, 1, 3, [(3, 1, 6, 8), (4, 2, 6, 8), (5, 3, 9, 8), (6, 5, 10, 8)]))
    assert mirror.caught_up(np.zeros(1)).all() and paths_of(mirror) == [(9,), (9, 10)]
    assert mirror.dropped == {"stale": 2, "malformed": 0, "full": 0}


def test_a_tree_that_begins_anew_moves_the_anchor_at_once() -> None:
    mirror = mirror_of()
    commit(mirror, 3, 5, 6, 7)
    add(mirror, (0, 1, 0, [(4, -5, 8, 8), (5, -5, 7, 8), (6, 5, 2, 8)]))
    assert paths_of(mirror) == [(2,)]
    add(mirror, (0, 1, 0, [(7, -6, 3, 8), (8, -5, 3, 8)]))
    assert paths_of(mirror) == [(2,), (3,)], "children of -6 are those of the anchor"
    assert mirror.dropped["stale"] == 2


def test_a_tree_that_begins_anew_forgets_the_old_anchor() -> None:
    mirror = mirror_of()
    add(mirror, (0, 1, 3, [(1, -3, 5, 8)]))
    commit(mirror, 3, 5)
    commit(mirror, 4, 6)
    add(mirror, (0, 1, 5, [(2, -5, 7, 8), (3, 1, 8, 8)]))
    assert paths_of(mirror) == [(7,)] and mirror.dropped["stale"] == 1


def test_an_anchor_far_behind_lets_go_of_its_node() -> None:
    mirror = mirror_of()
    add(mirror, (0, 1, 3, [(1, -3, 5, 8)]))
    commit(mirror, 3, 5)
    commit(mirror, 4, *[6] * TAIL, 7)
    add(mirror, (0, 1, 3, [(2, 1, 6, 8), (3, -4, 6, 8)]))
    assert mirror.dropped["stale"] == 2
    add(mirror, (0, 1, 0, [(4, -5, 6, 8), (5, -4 - TAIL, 7, 8), (6, 5, 9, 8)]))
    assert paths_of(mirror) == [(9,)]


def test_the_worker_may_have_nothing_to_say() -> None:
    mirror = mirror_of()
    add(mirror, (0, 1, 0, []))
    assert not mirror.caught_up(np.zeros(1)).any()
    add(mirror, (0, 1, 3, []))
    assert mirror.caught_up(np.zeros(1)).all() and paths_of(mirror) == []
    add(mirror, (0, 1, 0, []))
    assert mirror.caught_up(np.zeros(1)).all(), "what was told once stays told"
    commit(mirror, 3, 5)
    assert mirror.caught_up(np.array([0, 1, -1])).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ((0, 1, 3, [(0, -3, 5, 8)]), "malformed"),
        ((0, 1, 3, [(9, -3, VOCAB, 8)]), "malformed"),
        ((0, 1, 3, [(9, -3, -1, 8)]), "malformed"),
        ((0, 1, 3, [(9, -3, 5, NUM_KINDS)]), "malformed"),
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
def test_what_does_not_belong_is_dropped_and_counted(told: Told, reason: str) -> None:
    mirror = mirror_of()
    add(mirror, (0, 1, 3, [(2, -3, 1, 8)]))
    add(mirror, told)
    dropped = mirror.dropped
    assert dropped.pop(reason) == 1 and set(dropped.values()) == {0}
    assert paths_of(mirror) == [(1,)]
    add(mirror, (0, 1, 3, [(20, 2, 4, 8)]))
    assert paths_of(mirror) == [(1,), (1, 4)], "and what comes then is taken"


def test_a_full_tree_takes_no_more() -> None:
    mirror = mirror_of()
    add(mirror, (0, 1, 3, [(i + 1, -3, i % VOCAB, 8) for i in range(CAPACITY + 2)]))
    assert mirror.num_nodes(0) == CAPACITY and mirror.dropped["full"] == 2
    commit(mirror, 3, 5)
    assert mirror.num_nodes(0) == 0


def test_of_twins_the_latest_is_followed() -> None:
    """The worker has forgotten the first one, and told the second when it met the token again."""
    mirror = mirror_of()
    add(mirror, (0, 1, 3, [(1, -3, 5, 8), (2, -3, 5, 8), (3, 2, 6, 8)]))
    commit(mirror, 3, 5)
    assert paths_of(mirror) == [(6,)]


def test_only_who_is_to_learn_learns() -> None:
    for learns in (True, False):
        record = Record()
        before = record.table.copy()
        mirror = mirror_of(record=record, learns=learns)
        add(mirror, (0, 1, 3, [(1, -3, 5, 8), (2, -3, 6, 9), (3, 1, 7, 7)]))
        commit(mirror, 3, 5, 1)
        changed = {8: [1, 1], 9: [0, 1], 7: [0, 1]} if learns else {}
        difference = (record.table - before).tolist()
        assert difference == [changed.get(kind, [0, 0]) for kind in range(NUM_KINDS)]


def test_closed_and_reopened_slots_begin_empty() -> None:
    mirror = mirror_of()
    add(mirror, (0, 1, 3, [(1, -3, 5, 8)]))
    mirror.close(0)
    assert paths_of(mirror) == []
    with pytest.raises(AssertionError, match="does not go on"):
        commit(mirror, 3, 5)
    mirror.open(0, 2, 3)
    add(mirror, (0, 1, 3, [(2, -3, 5, 8)]))
    assert paths_of(mirror) == [] and mirror.dropped["stale"] == 1
    add(mirror, (0, 2, 3, [(1, -3, 6, 8)]))
    assert paths_of(mirror) == [(6,)]


@pytest.mark.parametrize("words", [[1], [4, 3], [2, 2], [8, 5, 4], [3, 1, 4]])
def test_parts_of_nodes_are_none(words: list[int]) -> None:
    mirror = mirror_of()
    outbox = Outbox()
    for size in words:
        body = np.tile(np.array([1, -3, 5, 8], np.int32), 3)[:size]
        outbox.append(Kind.NODES, body, slot=0, generation=1, base_length=3)
    assert not mirror.add(outbox.records())
    assert mirror.num_nodes(0) == 0 and not sum(mirror.dropped.values())
    assert not mirror.caught_up(np.zeros(1))[0]


@pytest.mark.parametrize("words", [[8], [-4, 8], [4, 4]])
def test_bodies_that_are_not_as_long_as_headers_say_are_none(words: list[int]) -> None:
    mirror, records = mirror_of(), records_of(*[(0, 1, 3, [])] * len(words))
    records.headers.view(np.int32).reshape(-1, HEADER_WORDS)[:, WORDS] = words
    assert not mirror.add(Records(records.headers, np.array([1, -3, 5, 8], np.int32)))
    assert mirror.num_nodes(0) == 0


def test_numbers_beyond_their_types_are_nothing_good() -> None:
    mirror, kinds = mirror_of(), [0, 95, NUM_KINDS, 255, 256, 2**31 - 1, -1, -(2**31)]
    add(mirror, (0, 1, 3, [(i + 1, -3, i, kind) for i, kind in enumerate(kinds)]))
    assert mirror.num_nodes(0) == 2
    assert mirror.dropped == {"stale": 0, "malformed": len(kinds) - 2, "full": 0}
    outbox, node = Outbox(), np.array([9, -3, 5, 8], np.int32)
    outbox.append(Kind.NODES, node, slot=2**32 - 1, generation=1, base_length=3)
    outbox.append(Kind.NODES, node, slot=0, generation=1, base_length=2**32 - 5)
    outbox.append(Kind.NODES, node, slot=0, generation=2**31, base_length=3)
    assert mirror.add(outbox.records())
    assert mirror.dropped == {"stale": 1, "malformed": len(kinds), "full": 0}
    assert mirror.num_nodes(0) == 2


def test_compile_has_met_every_type_of_argument() -> None:
    Mirror.compile()
    test_more_rows_than_slots_can_be_asked_for()
    compiled = mirror_module._add_bound, mirror_module.commit_all, mirror_module.propose_all
    assert [len(function.signatures) for function in (*compiled, mirror_module.ask_all)] == [1] * 4


def test_more_rows_than_slots_can_be_asked_for() -> None:
    mirror = mirror_of()
    add(mirror, (0, 1, 3, [(1, -3, 5, 8)]))
    found = Proposals.empty(5)
    mirror.proposals(np.zeros(5), np.full(5, 9), found)
    assert found.counts.tolist() == [1] * 5 and mirror.caught_up(np.zeros(5)).all()
