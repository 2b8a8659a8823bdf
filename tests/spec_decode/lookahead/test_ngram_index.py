from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.spec_decode.lookahead import ngram_index
from hetero_llm.spec_decode.lookahead.ngram_index import NgramIndex, NgramParams

WIDTH = 200
NUM_TEXTS = 3
DEFAULTS = NgramParams(2, True, 7, 1, 16, 2.0, 0.5)


@dataclass
class Phrase:
    position: int
    signature: tuple[int, ...]
    freq: np.float32
    tick: int


@dataclass
class Twin:
    """The index as a dict from (salt, n-gram) to the phrases of its cell."""

    params: NgramParams
    cells: dict[tuple[int, tuple[int, ...]], list[Phrase]] = field(default_factory=dict)

    def sizes(self) -> range:
        longest = self.params.match_length
        return range(1 if self.params.is_hybrid else longest, longest + 1)

    def insert(self, text, salt, first, begin, end, freq, tick) -> None:
        length = min(self.params.copy_length, 4)
        for position in range(first, end - length + 1):
            if position + length <= begin:
                continue  # was complete before
            signature = tuple(text[position : position + length])
            for size in self.sizes():
                gram = tuple(text[max(position - size, first) : position])
                if len(gram) == size and -1 not in gram + signature:
                    cell = self.cells.setdefault((salt, gram), [])
                    self.enter(cell, position, signature, freq, tick)

    def enter(self, cell, position, signature, freq, tick) -> None:
        for phrase in cell:
            if phrase.signature == signature:
                phrase.freq += np.float32(1)
                phrase.position, phrase.tick = position, tick
                return
        if len(cell) == self.params.cell_max_size:
            seldom = [p for p in cell if p.freq <= self.params.threshold]
            if seldom:
                cell.remove(min(seldom, key=lambda p: (p.tick, p.position)))
            else:
                for phrase in cell:
                    phrase.freq = np.float32(float(phrase.freq) * self.params.decay)
                cell.remove(min(cell, key=lambda p: (p.freq, p.tick, p.position)))
        cell.append(Phrase(position, signature, np.float32(freq), tick))

    def remove(self, salt) -> None:
        self.cells = {key: cell for key, cell in self.cells.items() if key[0] != salt}

    def draft(self, salt, gram, text, limit, goes_on) -> list[tuple[int, int, float]]:
        """(token, parent, survival) of each node; `text` ends where it is known."""
        cell = sorted(
            self.cells.get((salt, gram), []), key=lambda p: (-p.freq, -p.tick, -p.position)
        )
        depth = min(self.params.copy_length, 2 if len(gram) == 1 else 63)
        level = min(len(gram), 4)
        nodes: list[tuple[int, int, float]] = []
        for rank, phrase in enumerate(cell[: self.params.top_k]):
            parent = -1
            tokens = text[phrase.position : phrase.position + depth]
            while goes_on and -1 not in tokens and len(tokens) < depth:
                tokens = (tokens + tokens)[:depth]
            for step, token in enumerate(tokens):
                if token == -1:
                    break
                same = [i for i, node in enumerate(nodes) if node[:2] == (token, parent)]
                if not same and len(nodes) == limit:
                    break
                if not same:
                    steps = [min(i, ngram_index.NUM_DEPTHS - 1) for i in range(step + 1)]
                    chance = np.prod([RATES[level, i] for i in steps])
                    nodes.append((token, parent, 0.5**rank * float(chance)))
                parent = same[0] if same else len(nodes) - 1
        return nodes

    def grams(self, text) -> list[tuple[int, ...]]:
        """The n-grams that end a text, longest first."""
        found = [tuple(text[len(text) - n :]) for n in self.sizes() if n <= len(text)]
        return [gram for gram in reversed(found) if -1 not in gram]


def cell_of(index: NgramIndex, salt: int, gram: tuple[int, ...]) -> list[tuple]:
    arrays = index.arrays
    key = ngram_index.hash_tokens(np.array(gram, np.int32), 0, len(gram), salt)
    slot = ngram_index.find_slot(arrays.slots, key)
    assert arrays.slots[slot, 0] == key
    block, count = divmod(int(arrays.slots[slot, 1]), 1 << 16)
    return sorted(
        (int(arrays.entries[row, 0]), float(arrays.freqs[row, 2]), int(arrays.entries[row, 3]))
        for row in range(block, block + count)
    )


def check_same(index: NgramIndex, twin: Twin) -> None:
    for (salt, gram), cell in twin.cells.items():
        expected = sorted((p.position, float(p.freq), p.tick) for p in cell)
        assert cell_of(index, salt, gram) == expected
    check_memory(index, {key: len(cell) for key, cell in twin.cells.items()})


def check_memory(index: NgramIndex, sizes: dict) -> None:
    """No key but these, and each entry ever handed out in one block, free or in use."""
    index.check_integrity()
    assert index.num_keys == len(sizes)
    num_blocks = [0] * len(index.num_blocks)
    for count in sizes.values():
        num_blocks[(count - 1).bit_length()] += 1
    assert index.num_blocks == num_blocks


RATES = np.linspace(
    0.3, 0.95, ngram_index.NUM_LEVELS * ngram_index.NUM_DEPTHS, dtype=np.float32
).reshape(ngram_index.NUM_LEVELS, ngram_index.NUM_DEPTHS)


def propose(local, texts, rows, globals_, params, limits) -> list[list[tuple[int, int, float]]]:
    """rows: (salt, first, end, space) of each sequence."""
    count = len(rows)
    tokens, parents, kind = np.full((3, count, 63), -7, np.int32)
    survival = np.full((count, 63), -7, np.float32)
    counts = np.full(count, -7, np.int32)
    caches = tuple((index.arrays, arena) for index, arena in globals_)
    path = np.empty(63, np.int32)
    for i, (salt, first, end, space) in enumerate(rows):
        counts[i] = ngram_index.propose_one(
            local.arrays, texts, first, end, salt, space, caches, params, path, limits[i], RATES,
            (tokens[i], parents[i], survival[i], kind[i]),
        )  # fmt: skip
    for i, n in enumerate(counts.tolist()):
        assert 0 <= n <= max(limits[i], 0)
        assert (tokens[i, n:] == -7).all()
        for node in range(n):
            step, above = 0, parents[i, node]
            while above >= 0:
                step, above = step + 1, parents[i, above]
            assert kind[i, node] % ngram_index.NUM_DEPTHS == min(step, ngram_index.NUM_DEPTHS - 1)
            assert 1 <= kind[i, node] // ngram_index.NUM_DEPTHS < ngram_index.NUM_LEVELS
    return [
        list(zip(tokens[i, :n].tolist(), parents[i, :n].tolist(), survival[i, :n].tolist()))
        for i, n in enumerate(counts.tolist())
    ]


def check_tree(nodes: list[tuple[int, int, float]]) -> None:
    assert len({node[:2] for node in nodes}) == len(nodes), "siblings differ"
    for i, (token, parent, survival) in enumerate(nodes):
        assert token >= 0 and -1 <= parent < i
        assert 0 < survival <= (1.0 if parent < 0 else nodes[parent][2])


def filled(params: NgramParams, text: np.ndarray, salt: int = 1, freq: float = 1.0) -> NgramIndex:
    index = NgramIndex(params, len(text))
    ngram_index.insert(index.arrays, params, text, salt, 0, 0, len(text), freq, 0)
    return index


def empty_globals(params: NgramParams) -> list[tuple[NgramIndex, np.ndarray]]:
    return [(NgramIndex(params), np.zeros(0, np.int32)) for _ in range(3)]


PARAMS = st.builds(
    NgramParams,
    match_length=st.integers(1, 4),
    is_hybrid=st.booleans(),
    copy_length=st.integers(1, 8),
    top_k=st.integers(1, 3),
    cell_max_size=st.integers(1, 6),
    threshold=st.sampled_from([1.0, 2.0, 3.5]),
    decay=st.sampled_from([0.1, 0.5, 0.9]),
)


def some_tokens(seed: int, count: int, separators: bool) -> list[int]:
    """Few kinds, so that n-grams recur and cells overflow: many more than one would list."""
    kinds = [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, -1 if separators else 3]
    return np.random.default_rng(seed).choice(kinds, count).tolist()


TOKENS = st.one_of(
    st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, -1]), max_size=40),
    st.builds(some_tokens, st.integers(0, 10**6), st.integers(0, 80), st.booleans()),
)
FREQS = st.sampled_from([1.0, 10.0])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(PARAMS, st.lists(st.tuples(st.integers(0, 2), TOKENS, st.booleans(), FREQS), max_size=14))
def test_live_texts_come_grow_and_go_as_in_the_twin(params, steps):
    text = np.full(NUM_TEXTS * WIDTH, 1, np.int32)  # what is not of a sequence must not matter
    index, twin = NgramIndex(params), Twin(params)
    salts = list(range(NUM_TEXTS))
    ends = [number * WIDTH for number in range(NUM_TEXTS)]
    for tick, (number, tokens, goes, freq) in enumerate(steps):
        first, begin = number * WIDTH, ends[number]
        end = min(begin + len(tokens), first + WIDTH)
        text[begin:end] = tokens[: end - begin]
        index.reserve(end - begin)
        ngram_index.insert(index.arrays, params, text, salts[number], first, begin, end, freq, tick)
        twin.insert(text.tolist(), salts[number], first, begin, end, freq, tick)
        ends[number] = end
        if goes:
            ngram_index.remove(index.arrays, params, text, salts[number], first, end)
            twin.remove(salts[number])
            text[first:end] = 2
            salts[number] += NUM_TEXTS
            ends[number] = first
        check_same(index, twin)
    for number, end in enumerate(ends):
        ngram_index.remove(index.arrays, params, text, salts[number], number * WIDTH, end)
    check_memory(index, {})
    assert not index.arrays.slots[:, 0].any()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    PARAMS,
    st.lists(TOKENS, min_size=NUM_TEXTS, max_size=NUM_TEXTS),
    st.lists(st.tuples(TOKENS, st.integers(0, 1)), min_size=3, max_size=6),
    st.lists(st.tuples(st.integers(-1, 20), st.integers(0, 1)), min_size=3, max_size=3),
)
def test_proposals_are_the_twins(params, live, documents, asked):
    texts = np.full(NUM_TEXTS * WIDTH, 1, np.int32)
    local, local_twin = NgramIndex(params, NUM_TEXTS * WIDTH), Twin(params)
    rows, limits = [], []
    for number, (tokens, (limit, space)) in enumerate(zip(live, asked)):
        first, end = number * WIDTH, number * WIDTH + len(tokens)
        texts[first:end] = tokens
        ngram_index.insert(local.arrays, params, texts, number, first, first, end, 10.0, number)
        local_twin.insert(texts.tolist(), number, first, first, end, 10.0, number)
        rows.append((number, first, end, space))
        limits.append(limit)
    globals_, twins = [], []
    for generation in range(3):
        arena: list[int] = []
        index, twin = NgramIndex(params), Twin(params)
        for tick, (tokens, space) in enumerate(documents[generation::3]):
            arena.append(-1)
            begin = len(arena)
            arena += tokens
            place = (space, begin, begin, len(arena), 1.0, tick)
            index.reserve(len(tokens))
            ngram_index.insert(index.arrays, params, np.array(arena, np.int32), *place)
            twin.insert(arena, *place)
        globals_.append((index, np.array(arena, np.int32)))
        twins.append((twin, arena))
    drafts = propose(local, texts, rows, globals_, params, limits)
    for nodes, (salt, first, end, space), limit in zip(drafts, rows, limits):
        known = texts[:end].tolist()
        places = [(local_twin, salt, known)] + [(twin, space, arena) for twin, arena in twins]
        found = [
            twin.draft(place_salt, gram, tokens, limit, tokens is known)
            for gram in local_twin.grams(known[first:])
            for twin, place_salt, tokens in places
        ]
        expected = next((nodes for nodes in found if nodes), []) if limit > 0 else []
        assert [node[:2] for node in nodes] == [node[:2] for node in expected]
        np.testing.assert_allclose(
            [node[2] for node in nodes], [node[2] for node in expected], rtol=1e-5
        )
        check_tree(nodes)
    half = propose(local, texts, rows[1:], globals_, params, limits[1:])
    assert half == drafts[1:], "rows do not depend on each other"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(PARAMS, TOKENS, st.lists(st.integers(0, 40), max_size=6))
def test_a_text_may_come_in_pieces(params, tokens, cuts):
    text = np.array(tokens, np.int32)
    whole, pieces = filled(params, text), NgramIndex(params, len(text))
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for begin, end in pairwise(bounds):
        ngram_index.insert(pieces.arrays, params, text, 1, 0, begin, end, 1.0, 0)
    np.testing.assert_array_equal(whole.arrays.slots, pieces.arrays.slots)
    np.testing.assert_array_equal(whole.arrays.entries, pieces.arrays.entries)


def test_a_document_in_overlapping_chunks_loses_and_counts_nothing_twice():
    rng = np.random.default_rng(5)
    document = rng.integers(0, 4, 200).astype(np.int32)
    overlap = DEFAULTS.match_length + 3
    params = DEFAULTS._replace(cell_max_size=1000)
    whole = filled(params, document)
    arena, index = np.zeros(0, np.int32), NgramIndex(params, 200)
    for begin in range(0, 200, 50):
        known = min(begin, overlap)
        chunk = document[begin - known : begin + 50]
        first = len(arena) + 1
        arena = np.concatenate([arena, np.array([-1], np.int32), chunk])
        ngram_index.insert(
            index.arrays, params, arena, 1, first, first + known, first + len(chunk), 1.0, 0
        )
    for gram in {tuple(document[i : i + n].tolist()) for n in (1, 2) for i in range(195)}:
        freqs = sorted(freq for _, freq, _ in cell_of(whole, 1, gram))
        assert freqs == sorted(freq for _, freq, _ in cell_of(index, 1, gram))


def test_the_longest_match_is_drafted_up_to_copy_length():
    text = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 2, 40, 41, 42, 43, 1, 2], np.int32)
    index = filled(DEFAULTS, text)
    (nodes,) = propose(index, text, [(1, 0, 17, 0)], empty_globals(DEFAULTS), DEFAULTS, [63])
    assert [node[:2] for node in nodes] == [(token, token - 4) for token in range(3, 9)] + [(9, 5)]


def test_a_draft_goes_round_at_its_own_end_and_ends_at_a_separator_or_anothers_end():
    row = [(1, 0, 8, 0)]
    for text, expected in (
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6, 1, 2, 3]),
        ([1, 2, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2, 1]),
    ):
        tokens = np.array([*text, 77], np.int32)
        index = filled(DEFAULTS, tokens[:8])
        (nodes,) = propose(index, tokens, row, empty_globals(DEFAULTS), DEFAULTS, [63])
        assert [node[0] for node in nodes] == expected
    arena = np.array([1, 2, 3, 4, 5, 6, -1, 7, 8], np.int32)
    globals_ = [(filled(DEFAULTS, arena, salt=0), arena), *empty_globals(DEFAULTS)[1:]]
    text = np.array([1, 2], np.int32)
    (nodes,) = propose(NgramIndex(DEFAULTS), text, [(1, 0, 2, 0)], globals_, DEFAULTS, [63])
    assert [node[0] for node in nodes] == [3, 4, 5, 6]


def test_a_match_of_one_token_drafts_two():
    text = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 2], np.int32)
    index = filled(DEFAULTS, text)
    row = [(1, 0, 10, 0)]
    (nodes,) = propose(index, text, row, empty_globals(DEFAULTS), DEFAULTS, [63])
    assert [node[:2] for node in nodes] == [(3, -1), (4, 0)]
    strict = DEFAULTS._replace(is_hybrid=False)
    (nodes,) = propose(filled(strict, text), text, row, empty_globals(strict), strict, [63])
    assert nodes == []


def test_a_namespace_sees_its_own_history_only():
    arena = np.array([-1, 1, 2, 3, 4, 5, 6], np.int32)
    index = filled(DEFAULTS, arena, salt=5)
    text = np.array([1, 2, 1, 2], np.int32)
    globals_ = [*empty_globals(DEFAULTS)[1:], (index, arena)]
    rows = [(1, 0, 2, 5), (2, 2, 4, 6)]
    mine, other = propose(NgramIndex(DEFAULTS), text, rows, globals_, DEFAULTS, [3, 3])
    assert [node[0] for node in mine] == [3, 4, 5]
    assert other == []


def test_several_phrases_share_their_first_nodes():
    params = DEFAULTS._replace(top_k=2, copy_length=5)
    text = np.array([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 8, 9, 1, 2], np.int32)
    (nodes,) = propose(
        filled(params, text), text, [(1, 0, 15, 0)], empty_globals(params), params, [63]
    )
    assert [node[:2] for node in nodes] == [
        *[(3, -1), (4, 0), (8, 1), (9, 2), (1, 3)],
        *[(5, 1), (6, 5), (7, 6)],
    ]
    check_tree(nodes)


def test_drafts_hold_at_most_63_nodes():
    params = DEFAULTS._replace(top_k=2, copy_length=40)
    phrases = np.arange(10, 90).reshape(2, 40)
    text = np.concatenate([[1, 2], phrases[0], [1, 2], phrases[1], [1, 2]]).astype(np.int32)
    (nodes,) = propose(
        filled(params, text), text, [(1, 0, 86, 0)], empty_globals(params), params, [1000]
    )
    assert [node[0] for node in nodes] == [*range(50, 90), *range(10, 33)]
    assert [node[1] for node in nodes] == [*range(-1, 39), -1, *range(40, 62)]


def test_clear_forgets_and_growing_keeps():
    text = np.random.default_rng(3).integers(0, 50, 3000).astype(np.int32)
    index = filled(DEFAULTS, text)
    before = index.num_bytes
    held = index.arrays
    grams = {tuple(text[i : i + 2].tolist()) for i in range(2990)}
    cells = {gram: cell_of(index, 1, gram) for gram in grams}
    index.reserve(100_000)
    assert index.num_bytes > before
    assert cells == {gram: cell_of(index, 1, gram) for gram in grams}
    room = index.num_bytes
    index.clear()
    check_memory(index, {})
    assert index.num_bytes == room
    assert np.count_nonzero(held.slots[:, 0]) > 0, "readers keep what they hold"
    index.reserve(100_000)
    assert index.num_bytes == room


def test_reserved_room_is_enough_for_a_cell_that_doubles():
    params = DEFAULTS._replace(match_length=1, copy_length=1)
    text = np.array([token for phrase in range(9) for token in (1, 10 + phrase, -1)], np.int32)
    index = NgramIndex(params, 30)
    ngram_index.insert(index.arrays, params, text, 1, 0, 0, 24, 1.0, 0)
    used = index.num_entries
    assert used == 1 + 2 + 4 + 8
    entries = index.arrays.entries[:used].copy()
    index.arrays = index.arrays._replace(entries=entries, freqs=entries.view(np.float32))
    index.reserve(3)
    ngram_index.insert(index.arrays, params, text, 1, 0, 24, 27, 1.0, 0)
    assert len(cell_of(index, 1, (1,))) == 9


def evicted(params: NgramParams, rounds: list[tuple[int, int]]) -> list[tuple]:
    """The cell of token 1 as (token that followed, frequency) after rounds of (token, times)."""
    text, index = np.zeros(0, np.int32), NgramIndex(params, 300)
    for tick, (token, times) in enumerate(rounds):
        begin = len(text)
        text = np.concatenate([text, np.array([1, token, -1] * times, np.int32)])
        ngram_index.insert(index.arrays, params, text, 1, 0, begin, len(text), 1.0, tick)
    return sorted((int(text[position]), freq) for position, freq, _ in cell_of(index, 1, (1,)))


def test_a_full_cell_gives_up_its_oldest_rare_phrase_else_decays():
    params = DEFAULTS._replace(match_length=1, copy_length=1, cell_max_size=3)
    # 12 is rarer than 11, but both are at the threshold and 11 is older.
    assert evicted(params, [(10, 3), (11, 2), (12, 1), (13, 1)]) == [(10, 3), (12, 1), (13, 1)]
    # None at the threshold: everything fades and the rarest goes, the older of equal ones.
    assert evicted(params, [(10, 5), (11, 3), (12, 3), (13, 1)]) == [(10, 2.5), (12, 1.5), (13, 1)]
    assert evicted(params, [(10, 3), (10, 1), (11, 1)]) == [(10, 4), (11, 1)]


def test_too_much_to_reserve_leaves_the_index_as_it_was():
    index = NgramIndex(DEFAULTS, 10)
    arrays = index.arrays
    with pytest.raises(MemoryError, match="lookahead cache"):
        index.reserve(2**31)
    assert index.arrays is arrays
