"""Steps that ranks share: every token has one rank, ranks have as much to do, and a rank's part is
a step like any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.models.collectives import Rank
from hetero_llm.runner.split_step import (
    RowPlaces,
    SplitStep,
    cut,
    even_shares,
    ranges,
    split,
    zigzag,
)
from hetero_llm.spec_decode.verify import tree_tokens

SIZES = st.integers(2, 8)


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def step_of(
    counts: list[int], nodes: list[int] | None = None, *, seed: int = 0, samples: bool = True
) -> SchedulerOutput:
    """Sequences of random tokens behind random numbers of others; `nodes`: of chains of drafts, the
    sequences with any having one token besides."""
    rng = np.random.default_rng(seed)
    count = len(counts)
    drafts = None
    if nodes is not None:
        parents = [place - 1 for number in nodes for place in range(number)]
        drafts = DraftBatch(int32(nodes), rng.integers(3, 90, sum(nodes), np.int32), int32(parents))
    num_samples = rng.integers(0, 3, count, np.int32) if samples else np.zeros(count, np.int32)
    if nodes is not None:
        num_samples[int32(nodes) > 0] = 1
    return SchedulerOutput(
        request_slots=rng.permutation(count).astype(np.int32),
        num_computed_tokens=rng.integers(0, 50, count, np.int32),
        num_scheduled_tokens=int32(counts),
        token_ids=rng.integers(3, 90, sum(counts) - sum(nodes or []), np.int32),
        num_samples=num_samples,
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=np.zeros((3, 0), np.int32),
        block_copies=np.zeros((2, 0), np.int32),
        drafts=drafts,
    )


def parts_of(step: SchedulerOutput, size: int, least_tokens: int = 16) -> list[SplitStep]:
    found = [split(step, Rank(rank, size), least_tokens=least_tokens) for rank in range(size)]
    assert all(part is not None for part in found)
    return [part for part in found if part is not None]


def test_zigzag() -> None:
    lengths, owners = zigzag(np.array([4, 4, 3]))
    assert lengths.tolist() == [2, 2, 2, 1, 2, 2] and owners.tolist() == [0, 1, 2, 2, 1, 0]


def test_ranges() -> None:
    found = ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert found.tolist() == [5, 6, 9, 10, 11]


@given(st.lists(st.integers(0, 300), min_size=2, max_size=8), st.integers(0, 2000))
def test_shares_are_those_of_dealing_one_by_one(totals: list[int], count: int) -> None:
    shares = even_shares(np.array(totals), count)
    dealt = np.array(totals)
    for _ in range(count):
        dealt[dealt.argmin()] += 1
    assert (np.array(totals) + shares == dealt).all()


@given(
    st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=12),
    SIZES,
    st.integers(8, 64),
)
def test_pieces(sequences: list[tuple[int, bool]], size: int, least: int) -> None:
    counts, trees = np.array([c for c, _ in sequences]), np.array([t for _, t in sequences])
    pieces = cut(counts, trees, size, least=least)
    ends = np.cumsum(pieces.lengths)
    begins = (np.cumsum(counts) - counts)[pieces.sequences] + pieces.firsts
    assert (begins == ends - pieces.lengths).all() and ends[-1] == counts.sum()
    assert (pieces.lengths > 0).all()
    totals = np.bincount(pieces.owners, pieces.lengths, size)
    whole = trees | (counts < least)
    for sequence in np.flatnonzero(whole):
        assert (pieces.sequences == sequence).sum() == 1
    largest = counts[whole].max(initial=1)
    assert totals.max() - totals.min() <= largest
    if not whole.any():
        assert totals.max() - totals.min() <= 1


@given(st.integers(64, 5000), SIZES)
def test_causal_work_is_even(count: int, size: int) -> None:
    """The keys that tokens of a prompt see, by rank: they differ by less than two tokens a piece
    that see all keys."""
    pieces = cut(np.array([count]), np.zeros(1, bool), size, least=size)
    positions = np.arange(count)
    owners = np.repeat(pieces.owners, pieces.lengths)
    work = np.bincount(owners, positions + 1, size)
    assert work.max() - work.min() <= 4 * count


@given(st.lists(st.integers(0, 7), max_size=200), st.integers(8, 9))
def test_places_of_rows(owners: list[int], size: int) -> None:
    rows = RowPlaces.of(np.array(owners, np.int64), size)
    assert rows.width % rows.group == 0
    gathered = np.full((rows.width // rows.group, size, rows.group), -1)
    for rank in range(size):  # as `gather_columns` brings together what each rank gives
        own = np.flatnonzero(np.array(owners) == rank)
        assert len(own) <= rows.width
        given_rows = np.full(rows.width, -1)
        given_rows[: len(own)] = own
        gathered[:, rank] = given_rows.reshape(-1, rows.group)
    assert gathered.ravel()[rows.places].tolist() == list(range(len(owners)))


@given(
    st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 90)), st.integers(0, 9)),
        min_size=1, max_size=10,
    ),
    st.integers(2, 5),
    st.integers(0, 2**16),
)  # fmt: skip
def test_parts_have_the_tokens_of_the_step(
    sequences: list[tuple[int, int]], size: int, seed: int
) -> None:
    """A sequence of one token may have drafts. One long prompt makes the step worth sharing."""
    nodes = [n if count == 1 else 0 for count, n in sequences] + [0]
    counts = [count + n for (count, _), n in zip(sequences, nodes, strict=False)] + [70]
    step = step_of(counts, nodes, seed=seed)
    parts = parts_of(step, size)
    trees = tree_tokens(step, step.drafts)
    rows, samples, width = parts[0].tokens, parts[0].samples, parts[0].tokens.width
    slots = np.repeat(step.request_slots, counts)
    found = np.zeros((5, width * size), np.int64)
    sampled = np.zeros((2, samples.width * size), np.int64)
    for rank, part in enumerate(parts):
        own = part.own
        assert (part.tokens.places == rows.places).all()
        assert (part.samples.places == samples.places).all()
        assert own.drafts is not None and own.prompt_logprob_spans == ()
        own_trees = tree_tokens(own, own.drafts)
        own_slots = np.repeat(own.request_slots, own.num_scheduled_tokens)
        for row, place in enumerate(places_of(rank, len(own_slots), rows)):
            found[:, place] = (
                own_slots[row], own_trees.token_ids[row], own_trees.positions[row],
                own_trees.kv_indices[row], own_trees.ancestors[row],
            )  # fmt: skip
        lasts = np.repeat(np.cumsum(own.num_scheduled_tokens) - 1, own.num_samples)
        for row, place in enumerate(places_of(rank, len(lasts), samples)):
            sampled[:, place] = own_slots[lasts[row]], own_trees.kv_indices[lasts[row]]
        num_own = own.num_scheduled_tokens
        assert own.num_computed_tokens.dtype == num_own.dtype == own.num_samples.dtype == np.int32
        assert (num_own > 0).all() and len(own.token_ids) == num_own.sum() - own.drafts.counts.sum()
    expected = (slots, trees.token_ids, trees.positions, trees.kv_indices, trees.ancestors)
    assert (found[:, rows.places] == np.stack(expected).astype(np.int64)).all()
    lasts = np.repeat(np.cumsum(counts) - 1, step.num_samples)
    assert (sampled[:, samples.places] == (slots[lasts], trees.kv_indices[lasts])).all()


def places_of(rank: int, count: int, rows: RowPlaces) -> list[int]:
    """Where the first rows that a rank gives lie in what is gathered."""
    grid = np.arange(rows.width * rows.size).reshape(-1, rows.size, rows.group)
    return grid[:, rank].ravel()[:count].tolist()


@pytest.mark.parametrize(
    ("counts", "nodes"),
    [([15], None), ([1] * 40, None), ([1, 14, 1], None), ([40], [39]), ([20, 12], [19, 0])],
)
def test_steps_that_are_not_shared(counts: list[int], nodes: list[int] | None) -> None:
    """Too few tokens of chunks, whatever decodes beside them."""
    step = step_of(counts, nodes)
    assert split(step, Rank(0, 2), least_tokens=16) is None


def test_steps_that_wait_for_loads_are_not_shared() -> None:
    step = step_of([100])
    assert len(parts_of(step, 2)) == 2
    assert split(replace(step, kv_loads=(1,)), Rank(0, 2), least_tokens=16) is None


def test_a_step_that_samples_nothing() -> None:
    for part in parts_of(step_of([60], samples=False), 2):
        assert part.samples.width == 0 and part.own.num_samples.sum() == 0
