"""Kinds of draft candidates, and the record of what came of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero_llm.spec_decode.acceptance_stats import MEMORY
from hetero_llm.spec_decode.draft_model.node_buckets import (
    GRAFTED,
    NUM_BUCKETS,
    NUM_KINDS,
    Record,
    bucket_of,
    grafted_kind,
    kind_of,
    prior_rates,
)
from hetero_llm.spec_decode.draft_model.tree_arrays import follow

EDGES = -5.0 + 0.75 * np.arange(NUM_BUCKETS - 1)


def test_buckets_are_cut_by_log_odds() -> None:
    chances = 1.0 - np.random.default_rng(0).random(400) ** 4
    chances = np.concatenate([chances, 1.0 - chances])
    odds = np.log(chances) - np.log1p(-chances)
    expected = np.digitize(odds, EDGES)
    assert [bucket_of(math.log(chance)) for chance in chances] == expected.tolist()
    assert set(expected.tolist()) >= {0, 8, NUM_BUCKETS - 1}


@pytest.mark.parametrize("log_chance", [0.0, 1e-6, -1e-12])
def test_a_sure_token_is_in_the_last_bucket(log_chance: float) -> None:
    assert bucket_of(log_chance) == NUM_BUCKETS - 1


@pytest.mark.parametrize("log_chance", [-math.inf, math.nan])
def test_what_has_no_chance_is_no_candidate(log_chance: float) -> None:
    assert bucket_of(log_chance) == -1
    assert kind_of(log_chance, 0, False) == -1


@pytest.mark.parametrize("chance", [0.0, -1.0, math.nan])
def test_a_graft_without_a_chance_is_none(chance: float) -> None:
    assert grafted_kind(chance) == -1


def test_kinds_tell_bucket_rank_noise_and_source_apart() -> None:
    chances = 1.0 / (1.0 + np.exp(-(EDGES[0] + 0.75 * (np.arange(NUM_BUCKETS) - 0.5))))
    kinds = [
        kind_of(math.log(chance), rank, noisy)
        for noisy in (False, True)
        for rank in range(3)
        for chance in chances
    ]
    kinds += [grafted_kind(chance) for chance in chances]
    assert kinds == list(range(NUM_KINDS)) and NUM_KINDS <= 256
    assert kind_of(-1.0, 9, True) == kind_of(-1.0, 2, True)
    assert grafted_kind(1.0) == NUM_KINDS - 1 >= GRAFTED
    assert prior_rates()[kinds] == pytest.approx(np.tile(chances, NUM_KINDS // NUM_BUCKETS))


def test_the_record_begins_with_the_prior_in_the_table_it_is_given() -> None:
    table = np.full((NUM_KINDS + 3, 2), 7.0, np.float32)
    record = Record(table[3:])
    assert record.table.base is table and (table[:3] == 7.0).all()
    assert record.rates().dtype == np.float32
    assert record.rates() == pytest.approx(prior_rates(), abs=1e-6)


def tree(*nodes: tuple[int, int, int]) -> np.ndarray:
    """Of parents, tokens and kinds."""
    return np.array([(row + 1, *node) for row, node in enumerate(nodes)], np.int32)


def test_what_came_is_entered_for_all_children_of_what_was_reached() -> None:
    nodes = tree((-1, 5, 0), (-1, 6, 1), (0, 7, 2), (1, 7, 3), (1, 8, 4), (4, 9, 0))
    table = np.zeros((NUM_KINDS, 2), np.float32)
    node, followed = follow(nodes, len(nodes), np.array([0, 6, 8, 1], np.int32), 1, 4, table)
    assert (node, followed) == (4, 2)
    assert table[:6].tolist() == [[0, 2], [1, 1], [0, 0], [0, 1], [1, 1], [0, 0]]


def test_kinds_beyond_the_table_are_left_out() -> None:
    table = np.zeros((1, 2), np.float32)
    assert follow(tree((-1, 5, 0), (-1, 6, 1)), 2, np.array([6], np.int32), 0, 1, table) == (1, 1)
    assert table.tolist() == [[0, 1]]


def test_old_trials_fade() -> None:
    record = Record()
    hit, miss = np.array([5], np.int32), np.array([6], np.int32)
    for token in [hit] * int(2 * MEMORY):
        follow(tree((-1, 5, 0)), 1, token, 0, 1, record.table)
    assert record.rates()[0] > 0.98
    for token in [miss] * int(2 * MEMORY):
        follow(tree((-1, 5, 0)), 1, token, 0, 1, record.table)
    assert record.rates()[0] < 0.3 and record.table[0, 1] <= MEMORY
    assert record.rates()[1:] == pytest.approx(prior_rates()[1:], abs=1e-6)
