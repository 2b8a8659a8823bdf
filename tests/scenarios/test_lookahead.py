"""Speculation through `LLM` on a CPU: the same tokens as without, and figures that add up.

In float32 the native executor's results for a row do not depend on the rows beside it, so the
tokens have to be equal, not just alike.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.step_times import StepTimes
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.engine.speculation_log import SpeculationLog, speculation_metrics
from hetero_llm.scheduler.stats import SchedulerStats
from hetero_llm.spec_decode.proposal_account import ProposalAccount

GREEDY = SamplingParams(temperature=0, max_tokens=60)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95, seed=3)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
RAW = {"method": "lookahead", "cache_mode": 0}
TURBO = {"method": "lookahead", "cache_mode": 1, "token_paths_top_k": 3}
HYBRID = {"method": "lookahead"}
MERGED = {"method": "lookahead", "cache_mode": 3}


def start(**engine_args: Any) -> LLM:
    return LLM("demo", device="cpu", dtype="float32", max_model_len=512, **engine_args)


def prompts(count: int = 7) -> list[list[int]]:
    rows = heldout_prompts().prompts
    return [rows[3 * i, : 20 + 40 * i].tolist() for i in range(count)]


def requests() -> list[SamplingParams]:
    """Of every kind that drafts have to get along with, and some that get none."""
    return [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, n=3, max_tokens=20),
        replace(GREEDY, stop=["\n\n"], min_tokens=4),
        replace(GREEDY, repetition_penalty=1.2, max_tokens=30),
        replace(GREEDY, num_speculative_tokens=0),
        replace(GREEDY, num_speculative_tokens=2, ignore_eos=True),
    ]


def served(llm: LLM) -> list[list[tuple[list[int], str, Any, Any]]]:
    outputs = llm.generate(prompt_token_ids=prompts(), sampling_params=requests(), use_tqdm=False)
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps cost nothing that the budget knows of, so that all drafts are verified: otherwise what
    is drafted would depend on how loaded the machine is."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    monkeypatch.setattr(ProposalAccount, "set_step_times", lambda *_: None)


@pytest.fixture(scope="module")
def plain() -> Iterator[list[Any]]:
    with start() as llm:
        yield served(llm)


@pytest.mark.parametrize(
    "engine_args",
    [
        {"speculative_config": NGRAM},
        {"speculative_config": RAW},
        {"speculative_config": TURBO},
        {"speculative_config": MERGED},
        {"speculative_config": HYBRID, "num_gpu_blocks_override": 48},
        {"use_lookahead": True, "max_num_batched_tokens": 40, "max_num_seqs": 4},
    ],
    ids=["ngram", "raw", "turbo", "merged", "few blocks", "chunks"],
)
def test_drafts_do_not_change_tokens(plain: list[Any], engine_args: dict[str, Any]) -> None:
    with start(**engine_args) as llm:
        assert served(llm) == plain
        assert served(llm) == plain, "with what was learned the first time"
        metrics = llm.metrics()
    assert metrics["spec_decode_num_accepted_tokens"] > 20
    assert metrics["hit_rate"] > 0.01
    if "num_gpu_blocks_override" in engine_args:
        assert metrics["num_preemptions"] > 0


def test_a_budget_does_not_change_tokens(plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that jump about: drafts are cut, left out for some steps, and tried again."""
    monkeypatch.undo()
    observe, rng = StepTimes.observe, random.Random(0)

    def jump(times: StepTimes, rows: int, _: float) -> None:
        observe(times, rows, rng.choice((0.001, 0.003)) * (1 + rng.choice((0.0, 0.5)) * rows))

    monkeypatch.setattr(StepTimes, "observe", jump)
    with start(speculative_config=HYBRID) as llm:
        for _ in range(3):
            assert served(llm) == plain
        metrics = llm.metrics()
    assert 0 < metrics["spec_decode_num_drafts"] < metrics["generation_tokens"]


def test_a_warm_cache_takes_fewer_steps() -> None:
    steps = []
    with start(speculative_config=RAW, enable_prefix_caching=False) as llm:
        for _ in range(2):
            before = llm.metrics()["num_steps"]
            params = replace(GREEDY, ignore_eos=True)
            llm.generate(prompt_token_ids=prompts(4), sampling_params=params, use_tqdm=False)
            steps.append(llm.metrics()["num_steps"] - before)
    assert steps[1] < 0.5 * steps[0]


def test_metrics_are_tacos() -> None:
    stats = SchedulerStats(
        num_requests_begun=2, num_first_tokens=2, generation_tokens=102, num_drafts=30,
        num_draft_tokens=100, num_accepted_tokens=60, num_hit_drafts=20,
    )  # fmt: skip
    assert speculation_metrics(stats) == {
        "num_iters": 20,
        "hit_iters": 10,
        "hit_len": 30,
        "invalid_len": 20,
        "hit_rate": 0.5,
        "global_average_hit_len": 1.5,
        "valid_average_hit_len": 3,
        "hit_valid_rate": 0.6,
    }
    assert speculation_metrics(SchedulerStats())["hit_rate"] == 0


def test_accepted_tokens_behind_an_end_are_not_counted() -> None:
    params = replace(GREEDY, stop_token_ids=[int(t) for t in range(100, 400)])
    with start(speculative_config=RAW) as llm:
        outputs = llm.generate(prompt_token_ids=prompts(), sampling_params=params, use_tqdm=False)
        metrics = llm.metrics()
    emitted = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert metrics["generation_tokens"] == emitted
    assert metrics["spec_decode_num_accepted_tokens"] <= emitted - len(outputs)


def test_the_log_line_comes_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    log, stats = SpeculationLog(10), SchedulerStats(num_accepted_tokens=3, generation_tokens=9)
    with caplog.at_level(logging.INFO, logger="hetero_llm"):
        for step in range(35):
            stats.num_steps = step
            log.note(stats)
    lines = [r.message for r in caplog.records if r.message.startswith("num_iters: ")]
    assert len(lines) == 3
    assert lines[0] == (  # the order and the form of TACO's own line
        "num_iters: 6.0000, hit_iters: 0.0000, hit_len: 3.0000, invalid_len: -3.0000, "
        "hit_rate: 0.0000, global_average_hit_len: 0.5000, valid_average_hit_len: 3.0000, "
        "hit_valid_rate: 3.0000"
    )
