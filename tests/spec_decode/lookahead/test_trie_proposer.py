"""The Turbo cache's trees against a twin on dicts and sorted lists, and what every tree must be."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.spec_decode.lookahead.suffix_trie import (
    SuffixTrie,
    TrieArrays,
    TrieParams,
    insert,
    new_active,
)
from hetero_llm.spec_decode.lookahead.trie_buckets import (
    LENGTHS,
    NUM_BUCKETS,
    NUM_LENGTHS,
    ONCE,
    SECOND,
    SHARES,
    initial_acceptance,
)
from hetero_llm.spec_decode.lookahead.trie_proposer import (
    TrieProposalParams,
    new_work,
    propose_all,
)
from tests.spec_decode.lookahead.test_suffix_trie import repetitive
from tests.spec_decode.lookahead.trie_reference import DictTrie, Place, no_trie

WIDTH = 70
ROWS = 3
Node = tuple[int, int, np.float32, int]
"""Token, parent, survival, kind."""

turbo_params = st.builds(
    lambda key, longer, copy, in_cell, paths, start, p_min: TrieProposalParams(
        key, key + longer, copy, 2 * copy, in_cell, paths, start, p_min
    ),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([1.0, 10.0]),
    st.sampled_from([0.0, 0.02, 0.2]),
)
seeds = st.integers(0, 2**31)


@dataclass
class Source:
    """One trie with its twin, and its text."""

    held: SuffixTrie
    twin: DictTrie
    text: np.ndarray

    def learn(self, salt: int, begin: int, end: int, freq: float) -> None:
        params = self.twin.params
        self.held.reserve(end - begin)
        insert(self.held.arrays, params, self.text, salt, begin, end, new_active(params), freq)
        self.twin.insert(self.text, salt, range(begin, end), begin, freq)


@dataclass
class World:
    """Three live sequences, and three generations with documents of two namespaces."""

    params: TrieProposalParams
    rng: np.random.Generator
    local: Source = field(init=False)
    generations: list[Source] = field(init=False)
    documents: list[tuple[int, list[int]]] = field(default_factory=list)
    ends: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        params, rng = self.params, self.rng
        shape = TrieParams(
            params.key_length,
            params.match_length + params.copy_length,
            int(rng.integers(1, 6)),
            2.0,
            0.5,
        )
        tokens = repetitive(rng, ROWS * WIDTH)
        self.local = Source(SuffixTrie(shape), DictTrie(shape), tokens)
        self.ends = np.arange(ROWS) * WIDTH + rng.integers(1, WIDTH + 1, ROWS)
        for row in range(ROWS):
            self.local.learn(row + 1, row * WIDTH, int(self.ends[row]), params.start_freq)
        self.generations = []
        for number in range(3):
            # Positions that no other text has: ties are broken by them.
            arena = np.full(400 * (number + 1), -1, np.int32)
            source = Source(SuffixTrie(shape), DictTrie(shape), arena)
            end = len(arena) - 200
            for document in range(int(rng.integers(4))):
                begin = end + 1
                end = begin + int(rng.integers(1, 50))
                arena[begin:end] = self._document(end - begin)
                source.learn(document % 2, begin, end, 1.0)
                self.documents.append((document % 2, arena[begin:end].tolist()))
            source.text = arena[:end]
            self.generations.append(source)

    def _document(self, count: int) -> np.ndarray:
        """Some of it stands in a live sequence too."""
        begin = int(self.rng.integers(ROWS * WIDTH - count))
        copied = self.local.text[begin : begin + count]
        fresh = repetitive(self.rng, count)
        return np.where(np.arange(count) < self.rng.integers(count + 1), copied, fresh)

    def draft(
        self, limits: list[int], calibration: np.ndarray, rows: slice = slice(None)
    ) -> list[list[Node]]:
        """What `propose_all` says to the sequences of these rows."""
        size = len(limits[rows])
        tokens, parents, kind = (np.full((size, 63), -7, np.int32) for _ in range(3))
        survival, counts = np.full((size, 63), np.nan, np.float32), np.full(size, -7, np.int32)
        propose_all(
            self.local.held.arrays,
            self.local.text,
            (np.arange(ROWS) + 1)[rows],
            (np.arange(ROWS) * WIDTH)[rows],
            self.ends[rows],
            np.array([0, 1, 2])[rows],
            _three([(g.held.arrays, g.text) for g in self.generations]),
            self.params,
            new_work(self.params, calibration.reshape(-1, 2), 63),
            np.array(limits[rows], np.int32),
            tokens,
            parents,
            survival,
            kind,
            counts,
        )
        columns = tokens.tolist(), parents.tolist(), survival, kind.tolist()
        return [
            list(zip(*(column[i] for column in columns), strict=True))[: counts[i]]
            for i in range(size)
        ]


def _three(
    pairs: list[tuple[TrieArrays, np.ndarray]],
) -> tuple[tuple[TrieArrays, np.ndarray], ...]:
    return pairs[0], pairs[1], pairs[2]


class TwinDraft:
    """One tree, grown as `propose_all` documents it."""

    def __init__(self, world: World, row: int, calibration: np.ndarray) -> None:
        self.params = world.params
        end = int(world.ends[row])
        context = self.whole = world.local.text[row * WIDTH : end].tolist()
        while -1 in context:
            context = context[context.index(-1) + 1 :]
        self.context = tuple(context[-self.params.match_length :])
        self.first, self.end = row * WIDTH, end
        self.tries = [(world.local.twin, world.local.text[:end], row + 1)]
        self.tries += [(g.twin, g.text, row) for g in world.generations]
        counts = calibration.reshape(-1, 2)
        self.rates = (counts[:, 0] + np.float32(1)) / (counts[:, 1] + np.float32(2))
        self.nodes: list[Node] = []
        self.depths: list[int] = []
        self.waiting: list[dict] = []
        self.made = 0

    def grow(self, asked: set[int], limit: int) -> list[Node]:
        if limit <= 0:
            return []
        anchors = 0
        for length in range(len(self.context), self.params.key_length - 1, -1):
            context = self.context[len(self.context) - length :]
            places = [
                twin.find(salt, context, text) if k in asked else None
                for k, (twin, text, salt) in enumerate(self.tries)
            ]
            if length == self.params.match_length and places[0] is not None:
                length = self.true_length(places[0], length)
            before = self.made
            self.expand(places, length, -1, np.float32(1))
            anchors += self.made > before
            if anchors == 2:
                break
        while self.waiting and len(self.nodes) < limit:
            best = max(self.waiting, key=lambda c: (c["chance"], -c["age"]))
            self.waiting.remove(best)
            self.place(best)
        return self.nodes

    def true_length(self, place: Place, length: int) -> int:
        node = place if isinstance(place, int) else self.tries[0][0].nodes[place]
        newest = node if isinstance(node, int) else max(last for _, last in node.values())
        before, whole = self.whole[: newest - self.first], self.whole
        while length < LENGTHS[-1] and length < len(before) and before[-1 - length] >= 0:
            if before[-1 - length] != whole[-1 - length]:
                break
            length += 1
        return length

    def place(self, best: dict) -> None:
        parent, token, cell = best["parent"], best["token"], best["cell"]
        siblings = [i for i, node in enumerate(self.nodes) if node[1] == parent]
        if len(siblings) == self.params.token_paths_top_k:
            return
        if token in [self.nodes[i][0] for i in siblings]:
            return
        if siblings:
            left = above = self.nodes[parent][2] if parent >= 0 else np.float32(1)
            for i in siblings:
                left -= self.nodes[i][2]
            cell += SECOND
            lower = min(above * self.rates[cell], left)
            if lower < best["chance"]:
                if lower >= self.params.p_min:
                    self.waiting.append({**best, "chance": lower})
                return
        index, depth = len(self.nodes), 1 if parent < 0 else self.depths[parent] + 1
        self.nodes.append((token, parent, best["chance"], cell))
        self.depths.append(depth)
        sure = best["chance"] > 0.5
        if depth < (self.params.sure_length if sure else self.params.copy_length):
            places = best["places"]
            own = places[0]
            if self.end in (own, self.tries[0][0].nodes.get(own)):
                places = [self.end - depth, *places[1:]]
            self.expand(places, best["context"] + 1, index, best["chance"])

    def expand(
        self, places: list[Place | None], context: int, parent: int, survival: np.float32
    ) -> None:
        found: dict[int, dict] = {}
        for k, place in enumerate(places):
            twin, text, _ = self.tries[k]
            start = self.params.start_freq if k == 0 else 1.0
            for token, freq, last, below in [] if place is None else twin.after(place, text):
                one = found.setdefault(
                    token, {"times": [0.0, 0.0], "sum": 0.0, "last": last, "places": [None] * 4}
                )
                freq = freq or start
                one["times"][min(k, 1)] += freq - start + 1 if freq >= start else freq / start
                one["sum"] += freq
                one["places"][k] = below
        for token, one in found.items():
            one |= {"token": token, "parent": parent, "context": context, "chance": -1.0}
            for source in (0, 1):
                total = sum(other["times"][source] for other in found.values())
                if one["times"][source]:
                    self.rate(one, source, total)
        considered = sorted(found.values(), key=lambda c: (-c["sum"], -c["last"]))
        considered = considered[: self.params.top_k_in_cell]
        considered.sort(key=lambda c: (-c["chance"], -c["sum"], -c["last"]))
        for one in considered[: self.params.token_paths_top_k]:
            chance = one["chance"] * survival
            if chance < self.params.p_min:
                break
            self.waiting.append({**one, "chance": chance, "age": self.made})
            self.made += 1

    def rate(self, one: dict, source: int, total: float) -> None:
        times = one["times"][source]
        bucket = ONCE if times == total <= 1 else sum(times >= share * total for share in SHARES)
        length = sum(one["context"] >= LENGTHS) - 1
        cell = (source * NUM_LENGTHS + length) * NUM_BUCKETS + bucket
        if self.rates[cell] > one["chance"]:
            one |= {"chance": self.rates[cell], "cell": cell}


def twin_draft(world: World, row: int, calibration: np.ndarray, limit: int) -> list[Node]:
    if world.params.token_paths_top_k > 1:
        return TwinDraft(world, row, calibration).grow({0, 1, 2, 3}, limit)
    own = TwinDraft(world, row, calibration).grow({0}, limit)
    return own or TwinDraft(world, row, calibration).grow({1, 2, 3}, limit)


def random_calibration(rng: np.random.Generator) -> np.ndarray:
    table = initial_acceptance()
    if rng.integers(2):
        table[..., 0] = rng.random(table.shape[:-1], np.float32) * table[..., 1]
    return table


@settings(deadline=None, max_examples=150, derandomize=True)
@given(turbo_params, seeds)
def test_trees_are_those_of_the_twin(params: TrieProposalParams, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(params, rng)
    calibration = random_calibration(rng)
    limits = rng.choice([0, 1, 3, 16, 63], ROWS).tolist()
    drafts = world.draft(limits, calibration)
    for row, nodes in enumerate(drafts):
        expected = twin_draft(world, row, calibration, limits[row])
        shape = [(token, parent, kind) for token, parent, _, kind in nodes]
        assert shape == [(token, parent, kind) for token, parent, _, kind in expected]
        survival = [node[2] for node in nodes]
        assert survival == pytest.approx([node[2] for node in expected], rel=1e-5)
    assert world.draft(limits, calibration, slice(1, 3)) == drafts[1:]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(turbo_params, seeds)
def test_trees_are_valid(params: TrieProposalParams, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(params, rng)
    limits = rng.integers(0, 64, ROWS).tolist()
    for row, nodes in enumerate(world.draft(limits, random_calibration(rng))):
        assert len(nodes) <= limits[row]
        known = _followers(world, row)
        paths: list[list[int]] = []
        text = world.local.text[row * WIDTH : world.ends[row]].tolist()
        for index, (token, parent, survival, kind) in enumerate(nodes):
            assert -1 <= parent < index
            above = nodes[parent][2] if parent >= 0 else 1.0
            assert params.p_min <= survival <= above
            siblings = [node for node in nodes[:index] if node[1] == parent]
            assert token not in [node[0] for node in siblings]
            assert len(siblings) < params.token_paths_top_k
            assert survival + sum(node[2] for node in siblings) <= above * (1 + 1e-5)
            assert (kind % NUM_BUCKETS >= SECOND) == bool(siblings)
            path = [*(paths[parent] if parent >= 0 else []), token]
            assert len(path) <= (params.sure_length if above > 0.5 else params.copy_length)
            paths.append(path)
            # It has followed the tokens before it: here, or in the namespace's documents.
            context = (text + path)[-params.key_length - 1 : -1]
            assert (tuple(context), token) in known


def _followers(world: World, row: int) -> set[tuple[tuple[int, ...], int]]:
    """Contexts of key_length tokens and what follows them in all that this sequence may see."""
    size = world.params.key_length
    texts = [world.local.text[row * WIDTH : world.ends[row]].tolist()]
    texts += [document for space, document in world.documents if space == row]
    found = set()
    for text in texts:
        for i in range(size, len(text)):
            window = text[i - size : i + 1]
            if min(window) >= 0:
                found.add((tuple(window[:-1]), window[-1]))
    return found


def draft_one(
    params: TrieProposalParams, text: list[int], documents: list[list[int]]
) -> list[Node]:
    """One sequence, without its own text in any trie, after these documents."""
    shape = TrieParams(params.key_length, params.match_length + params.copy_length, 16, 2.0, 0.5)
    arena = np.array([token for document in documents for token in [-1, *document]], np.int32)
    held = SuffixTrie(shape)
    held.reserve(len(arena))
    insert(held.arrays, shape, arena, 0, 0, len(arena), new_active(shape), 1.0)
    tokens, parents, kind = (np.zeros((1, 63), np.int32) for _ in range(3))
    survival, counts = np.zeros((1, 63), np.float32), np.zeros(1, np.int32)
    zero = np.zeros(1, np.int64)
    local, _ = no_trie(shape)
    propose_all(
        local,
        np.array(text, np.int32),
        zero,
        zero,
        np.array([len(text)]),
        zero,
        _three([(held.arrays, arena), no_trie(shape), no_trie(shape)]),
        params,
        new_work(params, initial_acceptance().reshape(-1, 2), 63),
        np.full(1, 63, np.int32),
        tokens,
        parents,
        survival,
        kind,
        counts,
    )
    columns = tokens[0].tolist(), parents[0].tolist(), survival[0], kind[0].tolist()
    return list(zip(*columns, strict=True))[: counts[0]]


PLAIN = TrieProposalParams(2, 7, 7, 7, 16, 2, 10.0, 0.02)


def test_a_copy_ends_at_the_depth_the_document_or_a_separator() -> None:
    long = list(range(30))
    assert [n[0] for n in draft_one(PLAIN, [4, 5, 6], [long])] == list(range(7, 14))
    assert [n[0] for n in draft_one(PLAIN, [26, 27], [long])] == [28, 29]
    assert [n[0] for n in draft_one(PLAIN, [4, 5], [[*long[:8], -1, 1, 2]])] == [6, 7]
    assert draft_one(PLAIN, [28, 29], [long, long]) == []
    assert draft_one(PLAIN, [5, -1, 6], [[5, 6, 7], [-1, 6, 7]]) == []
    assert draft_one(PLAIN, [6], [long]) == []


def test_the_likelier_child_comes_first_and_the_other_gets_what_is_left() -> None:
    documents = [[1, 2, 3]] * 8 + [[1, 2, 4]] * 2 + [[1, 2, 5]]
    nodes = draft_one(PLAIN, [1, 2], documents)
    assert [(n[0], n[1]) for n in nodes] == [(3, -1), (4, -1)]
    assert nodes[0][2] + nodes[1][2] <= 1.0
    assert [n[3] % NUM_BUCKETS for n in nodes] == [4, SECOND + 1]


def test_initial_acceptance_gives_the_rates_of_its_table() -> None:
    table = initial_acceptance()
    assert table.shape == (2, NUM_LENGTHS, NUM_BUCKETS, 2)
    rates = (table[..., 0] + 1) / (table[..., 1] + 2)
    assert rates[0, 1, ONCE] == pytest.approx(0.6)
    assert rates[1, -1, 6] == pytest.approx(0.95)
    assert rates[0, 2, ONCE] == pytest.approx((0.6 + 0.78) / 2)
    assert rates[1, 5, SECOND + 2] == pytest.approx(0.05)
    assert (rates > 0).all() and (rates < 1).all()


@pytest.mark.parametrize("own", [[5, 6, 6], [6, 6], [5, 6, 7, 6, 7], [6, 6, 6, 6]])
def test_a_loop_that_is_repeated_stays_within_its_text(own: list[int]) -> None:
    """A draft longer than the sequence goes round its loop more often than the text has room."""
    params = TrieProposalParams(1, 7, 15, 15, 16, 2, 10.0, 0.0)
    shape = TrieParams(params.key_length, params.match_length + params.copy_length, 16, 2.0, 0.5)
    before = [99, 98, 97, 96]
    text = np.array([*before, *own, -1], np.int32)
    begin, end = len(before), len(before) + len(own)
    local = SuffixTrie(shape)
    local.reserve(len(own))
    insert(local.arrays, shape, text, 7, begin, end, new_active(shape), 10.0)
    tokens, parents, kind = (np.zeros((1, 63), np.int32) for _ in range(3))
    survival, counts = np.zeros((1, 63), np.float32), np.zeros(1, np.int32)
    work = new_work(params, initial_acceptance().reshape(-1, 2), 63)
    propose_all(
        local.arrays, text, np.array([7]), np.array([begin]), np.array([end]), np.zeros(1, int),
        _three([no_trie(shape)] * 3), params, work, np.full(1, 63, np.int32), tokens, parents,
        survival, kind, counts,
    )  # fmt: skip
    assert counts[0] > 0 and set(tokens[0, : counts[0]].tolist()) <= set(own)
