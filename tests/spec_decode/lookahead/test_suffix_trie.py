"""The suffix trie against a dict twin, and that it gives back what it took."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.spec_decode.lookahead.suffix_trie import (
    CONTINUED,
    SuffixTrie,
    TrieParams,
    find,
    insert,
    insert_all,
    new_active,
    remove,
)
from tests.spec_decode.lookahead.trie_reference import DictTrie, contents, keys_of

WIDTH = 80  # positions of a row of text
ROWS = 3

params_strategy = st.builds(
    lambda key, levels, cell, threshold, decay: TrieParams(
        key, key + levels, cell, threshold, decay
    ),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0.25, 1.0, 2.0, 12.0]),
    st.sampled_from([0.1, 0.5]),
)
seeds = st.integers(0, 2**31)


def repetitive(rng: np.random.Generator, count: int, separators: bool = True) -> np.ndarray:
    """[count] int32 tokens, few of them, with spans that come again."""
    tokens: list[int] = []
    while len(tokens) < count:
        kind = rng.integers(4)
        if kind == 0 and tokens:
            begin = int(rng.integers(len(tokens)))
            tokens += tokens[begin : begin + int(rng.integers(1, 12))]
        elif kind == 1:
            tokens += [int(rng.integers(3))] * int(rng.integers(1, 6))
        elif kind == 2 and separators and rng.integers(4) == 0:
            tokens.append(-1)
        else:
            tokens += rng.integers(0, 5, int(rng.integers(1, 6))).tolist()
    return np.array(tokens[:count], np.int32)


def check(held: SuffixTrie, twin: DictTrie, params: TrieParams) -> None:
    assert contents(held, params, keys_of(twin.nodes, params)) == twin.nodes


@settings(deadline=None, max_examples=120, derandomize=True)
@given(params_strategy, seeds, st.sampled_from([1.0, 10.0]))
def test_holds_what_the_twin_holds(params: TrieParams, seed: int, freq: float) -> None:
    rng = np.random.default_rng(seed)
    held, twin = SuffixTrie(params), DictTrie(params)
    text = np.empty(ROWS * WIDTH, np.int32)
    salts, ends = [0] * ROWS, [0] * ROWS
    actives = [new_active(params)] * ROWS
    for step in range(24):
        row = int(rng.integers(ROWS))
        first = row * WIDTH
        if salts[row] == 0:
            salts[row], ends[row] = step + 1, first
            actives[row] = new_active(params)
            text[first : first + WIDTH] = repetitive(rng, WIDTH)
        elif rng.integers(6) == 0:
            remove(held.arrays, params, text, salts[row], first, ends[row])
            twin.remove(salts[row])
            salts[row] = 0
            check(held, twin, params)
            continue
        begin = ends[row]
        end = min(begin + int(rng.integers(1, 40)), first + WIDTH)
        held.reserve(end - begin)
        insert(held.arrays, params, text, salts[row], begin, end, actives[row], freq)
        twin.insert(text, salts[row], range(begin, end), first, freq)
        ends[row] = end
    check(held, twin, params)
    for row in range(ROWS):
        remove(held.arrays, params, text, salts[row], row * WIDTH, ends[row])
    assert held.num_nodes == held.num_entries == held.num_keys == 0


@settings(deadline=None, max_examples=60, derandomize=True)
@given(params_strategy, seeds)
def test_documents_of_one_salt_and_texts_that_go_on_elsewhere(
    params: TrieParams, seed: int
) -> None:
    """Chunks of several texts in one arena, each behind a separator and what it goes on from."""
    rng = np.random.default_rng(seed)
    held, twin = SuffixTrie(params), DictTrie(params)
    arena = np.full(1200, -1, np.int32)
    overlap = params.max_depth - 1
    texts = [repetitive(rng, 60) for _ in range(4)]
    told = [0] * len(texts)
    end = 0
    for _ in range(12):
        which = int(rng.integers(len(texts)))
        salt = which % 2
        upto = min(told[which] + int(rng.integers(1, 20)), 60)
        repeated = min(overlap, told[which])
        chunk = texts[which][told[which] - repeated : upto]
        first = end + 1
        end = first + len(chunk)
        arena[first:end] = chunk
        active = new_active(params)
        if repeated:
            active[0] = CONTINUED
        span = range(first + repeated, end)
        held.reserve(len(span))
        insert(held.arrays, params, arena, salt, span.start, span.stop, active, 1.0)
        twin.insert(arena, salt, span, first, 1.0)
        told[which] = upto
    check(held, twin, params)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(params_strategy, seeds)
def test_finds_what_the_twin_finds(params: TrieParams, seed: int) -> None:
    rng = np.random.default_rng(seed)
    held, twin = SuffixTrie(params), DictTrie(params)
    arena = repetitive(rng, 70)
    held.reserve(70)
    insert(held.arrays, params, arena, 3, 0, 70, new_active(params), 1.0)
    twin.insert(arena, 3, range(70), 0, 1.0)
    text = np.concatenate([arena[20:50], repetitive(rng, 30)])
    for end in range(params.key_length, len(text)):
        for length in range(params.key_length, min(end, params.max_depth + 2) + 1):
            context = tuple(text[end - length : end].tolist())
            node, beyond = find(held.arrays, params.key_length, arena, text, 3, end, length)
            expected = twin.find(3, context, arena)
            if node < 0:
                assert expected is None or len(context) >= params.max_depth
            elif beyond:
                assert held.arrays.nodes[node].tolist() == [expected - beyond, 0]
            else:
                assert expected == (3, context)
            assert find(held.arrays, params.key_length, arena, text, 4, end, length)[0] < 0


@settings(deadline=None, max_examples=40, derandomize=True)
@given(params_strategy, seeds)
def test_texts_of_one_salt_may_take_turns(params: TrieParams, seed: int) -> None:
    """Small cells give up contexts that another text is in the middle of."""
    rng = np.random.default_rng(seed)
    held = SuffixTrie(params)
    text = np.concatenate([np.append(repetitive(rng, WIDTH - 1), -1) for _ in range(ROWS)])
    ends = [row * WIDTH for row in range(ROWS)]
    actives = np.stack([new_active(params)] * ROWS)
    text = text.astype(np.int32)
    for _ in range(30):
        row = int(rng.integers(ROWS))
        end = min(ends[row] + int(rng.integers(1, 9)), (row + 1) * WIDTH - 1)
        held.reserve(end - ends[row])
        insert(held.arrays, params, text, 9, ends[row], end, actives[row], 1.0)
        ends[row] = end
    found = {
        (9, tuple(text[p - params.key_length : p].tolist()))
        for row in range(ROWS)
        for p in range(row * WIDTH + params.key_length, ends[row] + 1)
    }
    contents(held, params, [key for key in sorted(found) if min(key[1]) >= 0])
    remove(held.arrays, params, text, 9, 0, len(text))
    assert held.num_nodes == held.num_entries == held.num_keys == 0


def test_several_texts_at_once() -> None:
    params = TrieParams(2, 9, 4, 2.0, 0.5)
    rng = np.random.default_rng(5)
    text = repetitive(rng, 200)
    one, other = SuffixTrie(params), SuffixTrie(params)
    begins, ends = np.array([0, 60, 130]), np.array([55, 130, 200])
    one.reserve(200)
    other.reserve(200)
    actives = np.stack([new_active(params)] * 3)
    insert_all(one.arrays, params, text, np.arange(3), begins, ends, actives, 10.0)
    for salt in range(3):
        begin, end = int(begins[salt]), int(ends[salt])
        insert(other.arrays, params, text, salt, begin, end, new_active(params), 10.0)
    assert (one.arrays.entries == other.arrays.entries).all()
    assert (one.arrays.nodes == other.arrays.nodes).all()
    assert (one.arrays.slots == other.arrays.slots).all()


@pytest.mark.parametrize("period", [1, 2, 5, 40])
def test_reserve_is_enough_and_bounded(period: int) -> None:
    """What repeats costs most; the kernel asserts that it has room."""
    params = TrieParams(2, 14, 16, 2.0, 0.5)
    held = SuffixTrie(params)
    text = np.tile(np.arange(period, dtype=np.int32), 4000 // period)
    active = new_active(params)
    for begin in range(0, 4000, 100):
        held.reserve(100)
        insert(held.arrays, params, text, 1, begin, begin + 100, active, 1.0)
    assert held.num_nodes <= period * 13 + 13
    assert held.num_bytes < 1_000_000
    held.clear()
    assert held.num_nodes == held.num_entries == held.num_keys == 0


def test_needs_room() -> None:
    params = TrieParams(2, 6, 4, 2.0, 0.5)
    held = SuffixTrie(params)
    text = np.arange(1000, dtype=np.int32)
    with pytest.raises(AssertionError):
        insert(held.arrays, params, text, 1, 0, 1000, new_active(params), 1.0)


def test_cells_of_the_configuration() -> None:
    """TACO's defaults: 10 falls to 5, 2.5 and 1.25, and only then can an entry be evicted."""
    params = TrieParams(1, 2, 2, 2.0, 0.5)
    held = SuffixTrie(params)
    held.reserve(100)
    pairs = [0, 1, -1, 0, 2, -1] + [0, 2, -1] * 3 + [0, 3, -1]
    text = np.array(pairs, np.int32)
    insert(held.arrays, params, text, 0, 0, len(text), new_active(params), 10.0)
    # 1 at 10, 2 at 13: full, none below 2, so all are halved and the least one goes.
    cell = contents(held, params, [(0, (token,)) for token in range(4)])[0, (0,)]
    assert {token: float(freq) for token, (freq, _) in cell.items()} == {2: 6.5, 3: 10.0}


def test_namespaces_are_apart() -> None:
    params = TrieParams(2, 9, 4, 2.0, 0.5)
    held = SuffixTrie(params)
    text = np.arange(20, dtype=np.int32)
    held.reserve(20)
    insert(held.arrays, params, text, 1, 0, 20, new_active(params), 1.0)
    assert find(held.arrays, 2, text, text, 1, 10, 4) == (
        find(held.arrays, 2, text, text, 1, 8, 2)[0],
        2,
    )
    assert find(held.arrays, 2, text, text, 2, 10, 4) == (-1, 0)
