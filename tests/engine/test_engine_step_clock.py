"""What is counted of every step: tokens, places of accepted draft tokens, phases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_llm.core.histogram import Histogram
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.engine import PHASES, StepClock
from hetero_llm.scheduler.stats import SchedulerStats
from tests.helpers.harness import make_request
from tests.helpers.traffic import make_engine, run_all
from tests.scheduler.test_draft_admission import TreeDrafter

LONG = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
PROMPT = list(range(1, 21))


def step_tokens(served: Any) -> Histogram:
    return served.engine.histograms()["iteration_tokens_total"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_in_chunks(asynchronous: bool) -> None:
    """20 tokens under a budget of 8: steps of 8, 8 and 4 + 1 tokens, then 4 of one token."""
    served = make_engine(asynchronous, max_num_batched_tokens=8)
    run_all(served, [make_request("a", PROMPT, LONG)])
    served.engine.step()  # a stray step, maybe
    found = step_tokens(served)
    assert found.total == 20 + 5
    by_bound = dict(zip(found.bounds, found.counts))
    assert (by_bound[1], by_bound[8]) == (4, 3)
    assert found.count == served.engine.metrics()["num_steps"] == 7


def test_cached_tokens_are_not_computed_again() -> None:
    served = make_engine(False)
    run_all(served, [make_request("a", PROMPT, LONG)])
    before = step_tokens(served).total
    run_all(served, [make_request("b", PROMPT, LONG)])
    assert step_tokens(served).total - before == 4 + 5  # two blocks of 8 are known
    assert served.engine.metrics()["prefix_cache_hits"] == 16
    assert served.engine.metrics()["prefix_cache_queries"] == 40


def test_a_prompt_that_forks() -> None:
    served = make_engine(False)
    run_all(served, [make_request("a", PROMPT, replace(LONG, n=2, max_tokens=3))])
    assert step_tokens(served).total == 20 + 2 * 3


def test_places_of_accepted_tokens() -> None:
    stats = SchedulerStats()
    for nodes, accepted in ((5, 3), (4, 0), (2, 1), (7, 2)):
        stats.count_draft(nodes, accepted)
    assert stats.accepted_at == [3, 2, 1]
    assert stats.num_accepted_tokens == sum(stats.accepted_at)
    assert stats.num_hit_drafts == stats.accepted_at[0]


def test_an_engine_tells_the_places() -> None:
    served = make_engine(False, drafter=TreeDrafter(0, 0.9))
    params = replace(LONG, max_tokens=40)
    run_all(served, [make_request(str(k), [k + 1] * 20, params) for k in range(3)])
    metrics = served.engine.metrics()
    name = "spec_decode_num_accepted_tokens_per_pos_"
    places = [metrics[key] for key in metrics if key.startswith(name)]
    assert places == sorted(places, reverse=True) and len(places) > 1
    assert sum(places) == metrics["spec_decode_num_accepted_tokens"] > 20
    assert step_tokens(served).total == 3 * (20 + 40)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_has_every_phase(asynchronous: bool) -> None:
    served = make_engine(asynchronous)
    assert served.engine.metrics()["last_step_timestamp_seconds"] == 0
    run_all(served, [make_request("a", PROMPT, LONG)])
    served.engine.step()
    assert served.engine.step() == []  # nothing to do is no step
    histograms = served.engine.histograms()
    for phase in PHASES:
        assert histograms[f"step_seconds/{phase}"].count == served.engine.metrics()["num_steps"]
    assert served.engine.metrics()["last_step_timestamp_seconds"] > 0


def test_laps_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.25, 100.75, 101.0, 103.0, 200.0, 200.5])
    monkeypatch.setattr("hetero_llm.engine.engine.perf_counter", lambda: next(times))
    clock = StepClock()
    clock.begin()
    for phase in ("schedule", "launch", "schedule", "wait"):
        clock.lap(phase)
    clock.end()
    found = {name: kept.total for name, kept in clock.histograms().items()}
    assert found == {
        "step_seconds/schedule": 0.5, "step_seconds/launch": 0.5, "step_seconds/wait": 2.0,
        "step_seconds/update": 0.0, "step_seconds/output": 0.0,
    }  # fmt: skip
    clock.begin()
    clock.lap("wait")  # a step that failed
    assert clock.histograms()["step_seconds/wait"].count == 1
