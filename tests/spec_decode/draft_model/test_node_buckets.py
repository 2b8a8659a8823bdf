"""Acceptance buckets of draft nodes, and their statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero_llm.spec_decode.acceptance_stats import MEMORY
from hetero_llm.spec_decode.draft_model.node_buckets import (
    FIRST_CHOICES,
    FIRST_EXTERNAL,
    NUM_BUCKETS,
    NUM_ODDS,
    BucketStats,
    bucket_of,
    external_bucket,
    first_choice_rate,
    odds_interval,
    prior_rates,
)
from hetero_llm.spec_decode.draft_model.tree_arrays import follow

EDGES = -5.0 + 0.75 * np.arange(NUM_ODDS - 1)


def test_buckets_are_cut_by_log_odds() -> None:
    path_probs = 1.0 - np.random.default_rng(0).random(400) ** 4
    path_probs = np.concatenate([path_probs, 1.0 - path_probs])
    odds = np.log(path_probs) - np.log1p(-path_probs)
    expected = np.digitize(odds, EDGES)
    assert [odds_interval(math.log(path_prob)) for path_prob in path_probs] == expected.tolist()
    assert set(expected.tolist()) >= {0, 8, NUM_ODDS - 1}


@pytest.mark.parametrize("log_prob", [0.0, 1e-6, -1e-12])
def test_a_sure_token_is_in_the_last_bucket(log_prob: float) -> None:
    assert odds_interval(log_prob) == NUM_ODDS - 1


@pytest.mark.parametrize("log_prob", [-math.inf, math.nan])
def test_what_has_no_probability_is_no_candidate(log_prob: float) -> None:
    assert odds_interval(log_prob) == -1
    assert bucket_of(log_prob, 0, False) == -1


@pytest.mark.parametrize("path_prob", [0.0, -1.0, math.nan])
def test_a_external_node_without_a_probability_is_none(path_prob: float) -> None:
    assert external_bucket(path_prob) == -1


def test_buckets_depend_on_odds_rank_noise_and_proposer() -> None:
    path_probs = 1.0 / (1.0 + np.exp(-(EDGES[0] + 0.75 * (np.arange(NUM_ODDS) - 0.5))))
    kinds = [
        bucket_of(math.log(path_prob), rank, noisy)
        for noisy in (False, True)
        for rank in range(3)
        for path_prob in path_probs
    ]
    kinds += [external_bucket(path_prob) for path_prob in path_probs]
    assert kinds == list(range(NUM_BUCKETS)) and NUM_BUCKETS <= 256
    assert bucket_of(-1.0, 9, True) == bucket_of(-1.0, 2, True)
    assert external_bucket(1.0) == NUM_BUCKETS - 1 >= FIRST_EXTERNAL
    assert prior_rates()[kinds] == pytest.approx(np.tile(path_probs, NUM_BUCKETS // NUM_ODDS))


def test_statistics_begin_with_the_prior() -> None:
    stats = BucketStats()
    assert stats.table.dtype == np.float32
    assert stats.rates().dtype == np.float32
    assert stats.rates() == pytest.approx(prior_rates(), abs=1e-6)


def tree(*nodes: tuple[int, int, int]) -> np.ndarray:
    """Of parents, tokens and kinds."""
    return np.array([(row + 1, *node) for row, node in enumerate(nodes)], np.int32)


def test_what_came_is_entered_for_all_children_of_what_was_reached() -> None:
    nodes = tree((-1, 5, 0), (-1, 6, 1), (0, 7, 2), (1, 7, 3), (1, 8, 4), (4, 9, 0))
    table = np.zeros((NUM_BUCKETS, 2), np.float32)
    node, followed = follow(nodes, len(nodes), np.array([0, 6, 8, 1], np.int32), 1, 4, table)
    assert (node, followed) == (4, 2)
    assert table[:6].tolist() == [[0, 2], [1, 1], [0, 0], [0, 1], [1, 1], [0, 0]]


def test_buckets_beyond_the_table_are_left_out() -> None:
    table = np.zeros((1, 2), np.float32)
    assert follow(tree((-1, 5, 0), (-1, 6, 1)), 2, np.array([6], np.int32), 0, 1, table) == (1, 1)
    assert table.tolist() == [[0, 1]]


def test_old_trials_fade() -> None:
    stats = BucketStats()
    hit, miss = np.array([5], np.int32), np.array([6], np.int32)
    for token in [hit] * int(2 * MEMORY):
        follow(tree((-1, 5, 0)), 1, token, 0, 1, stats.table)
    assert stats.rates()[0] > 0.98
    for token in [miss] * int(2 * MEMORY):
        follow(tree((-1, 5, 0)), 1, token, 0, 1, stats.table)
    assert stats.rates()[0] < 0.3 and stats.table[0, 1] <= MEMORY
    assert stats.rates()[1:] == pytest.approx(prior_rates()[1:], abs=1e-6)


def test_the_rate_of_first_choices_is_the_measured_one() -> None:
    """Buckets that were never tried do not count: their prior is no measurement."""
    table = BucketStats().table
    assert first_choice_rate(table) == 0.25
    table[FIRST_CHOICES[9]] += 180.0, 200.0
    assert first_choice_rate(table) == pytest.approx(0.9, abs=0.06)
    table[FIRST_CHOICES[9]] += 1800.0, 2000.0
    assert first_choice_rate(table) == pytest.approx(0.9, abs=0.01)
