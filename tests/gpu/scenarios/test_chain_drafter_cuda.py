"""A draft model beside its target on the GPU: tokens are those of plain decoding, steps of both
replay graphs, and memory that does not do for both is an error that says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.errors import ConfigError
from hetero_llm.demo_models import demo_folder
from tests.gpu.scenarios.serving import TIES, equal, generate, ragged, regrets, start, tokens_of
from tests.helpers.draft_traffic import EVERYTHING, differing, make_model, make_traffic, serve
from tests.helpers.draft_traffic import build as build_tiny

DRAFT: dict[str, Any] = {
    "speculative_model": str(demo_folder("demo-draft")),
    "num_speculative_tokens": 5,
    "max_num_batched_tokens": 1024,  # prompts leave no rows to drafts while they are read
}
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
MIXED = [LONG if i % 2 else replace(LONG, temperature=0.7, seed=1000 + i) for i in range(16)]


def chains_of(llm: LLM) -> Any:
    return llm.engine.scheduler.drafter


def accepted_of(llm: LLM) -> float:
    return llm.metrics()["spec_decode_num_accepted_tokens"]


def test_batch_invariant_tokens_are_those_without_drafts() -> None:
    prompts = ragged(6)
    params = [replace(p, max_tokens=32) for p in MIXED[:6]]
    with start(batch_invariant=True) as llm:
        expected = tokens_of(generate(llm, prompts, params))
    with start(batch_invariant=True, **DRAFT) as llm:
        assert tokens_of(generate(llm, prompts, params)) == expected
        assert accepted_of(llm) > 50


def test_every_kind_of_request(tmp_path: Path) -> None:
    """The draft model is the target itself; there is memory for a part of the sequences."""
    folder = make_model(tmp_path / "model", "llama", "heads_of_16")
    given = {"device": "cuda", "batch_invariant": True}
    plain = serve(
        build_tiny(folder, 7, None, **given), make_traffic(0, 7, EVERYTHING), aborting=False
    )
    engine = build_tiny(
        folder, 7, None, **given, speculative_model=str(folder), num_speculative_tokens=4
    )
    assert differing(plain, serve(engine, make_traffic(0, 7, EVERYTHING))) == []
    metrics = engine.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["spec_decode_num_accepted_tokens"] > 0.1 * metrics["generation_tokens"]


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"max_num_seqs": 5}])
def test_float32_tokens_are_right(settings: dict[str, Any]) -> None:
    """Each is the best one on the tokens before it, noise included, as transformers sees it. With
    five sequences at once the others' prompts come while some are drafted for."""
    with start(**DRAFT, **settings) as llm:
        outputs = generate(llm, ragged(), MIXED)
        assert float(regrets(outputs, MIXED).max()) <= TIES
        assert accepted_of(llm) > 300


@pytest.mark.parametrize("num_tokens", [1, 3, 12])
def test_graphs_in_bfloat16(num_tokens: int) -> None:
    """Long chains, with more steps running than there are input buffers; a prompt in several
    chunks."""
    prompts = equal(9, 400)
    with start(
        dtype="bfloat16", **{**DRAFT, "num_speculative_tokens": num_tokens}, max_num_seqs=12
    ) as llm:
        drafter = chains_of(llm)
        graphs = drafter.runner.graphs.captured
        assert ("decode", 1) in graphs and ("verify", 1) not in graphs
        replayed: list[Any] = []
        replay = graphs.replay
        graphs.replay = lambda key: (replayed.append(key), replay(key))
        outputs = generate(llm, prompts, LONG)
        metrics = llm.metrics()
    kinds = {kind for kind, _ in replayed}
    assert kinds >= {"model", "head"}
    assert num_tokens == 1 or kinds & {"decode", "short decode"}
    assert metrics["spec_decode_num_drafts"] > 60
    share = metrics["spec_decode_num_accepted_tokens_per_pos_0"] / metrics["spec_decode_num_drafts"]
    assert share > 0.35
    found = regrets(outputs, [LONG] * len(prompts))
    assert (found < TIES).float().mean() > 0.95 and found.max() < 0.3


def test_a_draft_model_like_the_target_draws_alike() -> None:
    """Captured steps of both, greedy and sampled: only ties may part them."""
    folder = demo_folder("demo-draft")
    given = {**DRAFT, "speculative_model": str(folder), "num_speculative_tokens": 4}
    with start(folder, **given) as llm:
        outputs = generate(llm, ragged(), MIXED)
        metrics = llm.metrics()
    assert float(regrets(outputs, MIXED, folder).max()) <= TIES
    drafted = metrics["spec_decode_num_draft_tokens"]
    assert drafted > 400 and metrics["spec_decode_num_accepted_tokens"] > 0.98 * drafted


def test_no_room_for_both() -> None:
    with pytest.raises(
        ConfigError, match="^gpu_memory_utilization=.*KV blocks for the draft model"
    ):
        start(num_gpu_blocks_override=None, gpu_memory_utilization=0.0001, **DRAFT)


def test_typical_acceptance() -> None:
    """Lossy at temperature 0.7, exact for greedy requests of the same batch."""
    typical = {"spec_decoding_acceptance_method": "typical_acceptance_sampler"}
    params = [replace(p, temperature=1.0) if not p.greedy else p for p in MIXED]
    with start(**DRAFT) as llm:
        generate(llm, ragged(), params)
        lossless = accepted_of(llm)
    with start(**DRAFT, **typical) as llm:
        outputs = generate(llm, ragged(), params)
        assert accepted_of(llm) > lossless
    greedy = [output for output, p in zip(outputs, params, strict=True) if p.greedy]
    assert float(regrets(greedy, [LONG] * len(greedy)).max()) <= TIES
