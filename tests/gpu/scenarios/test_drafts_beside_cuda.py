"""Drafts beside requests that look back, want log-probabilities, fork or search, on the device: the
same outputs as without drafts, from captured steps, from uncaptured ones and batch-invariant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.engine.engine import Engine
from tests.gpu.scenarios.serving import equal
from tests.helpers.beside import (
    GREEDY,
    KINDS,
    NO_DRAFTS,
    SAMPLED,
    Outputs,
    Trees,
    Work,
    build,
    check_processors,
    check_same,
    num_accepted,
    serve,
    work_of,
)
from tests.models.tiny import make_tiny_checkpoint

ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"enforce_eager": True},
    "batch invariant": {"batch_invariant": True},
    "few blocks": {"num_gpu_blocks_override": 18},
    "few blocks, no prefix cache": {"num_gpu_blocks_override": 18, "enable_prefix_caching": False},
    "small steps": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "llama"
    return make_tiny_checkpoint(path, "llama", "heads_of_16", with_tokenizer=True)


def compare(
    model: Path | str, work: list[Work], drafter: Any = Trees, **engine_args: Any
) -> tuple[Engine, Outputs]:
    """Serves the first work without drafts and all of it with them."""
    expected = serve(build(model, device="cuda", **engine_args), work[0])
    engine = build(model, drafter(expected), device="cuda", **engine_args)
    for one in work[1:]:
        outputs = serve(engine, one)
        check_same(outputs, expected)
        check_processors(one, outputs)
    return engine, expected


@pytest.mark.parametrize("case", ENGINES)
def test_everything_in_one_batch(folder: Path, case: str) -> None:
    kinds = [*KINDS, "plain", "processor"]
    engine, _ = compare(folder, [work_of(kinds) for _ in range(3)], **ENGINES[case])
    metrics = engine.metrics()
    assert (metrics["num_preemptions"] > 0) == ("few blocks" in case)
    assert num_accepted(engine) > 150


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_at_a_time(folder: Path, kind: str) -> None:
    engine, _ = compare(folder, [work_of([kind] * 3) for _ in range(2)])
    assert (num_accepted(engine) > 8) == (kind not in NO_DRAFTS)


def test_long_contexts_and_steps_that_are_plain_in_between() -> None:
    """On the demo model: attention is cut into pieces. Requests that look back come and go, so one
    engine walks on the device and by depth in turn, and steps ahead while the drafter is idle."""

    class Resting(Trees):
        """Idle for some steps in ten."""

        turn = 0

        @property
        def idle(self) -> bool:  # type: ignore[override]
            self.turn += 1
            return self.turn % 10 > 6

    params = [
        replace(SAMPLED, max_tokens=60, seed=1),
        replace(GREEDY, max_tokens=12, repetition_penalty=1.2),
        replace(GREEDY, max_tokens=60),
        replace(SAMPLED, max_tokens=25, logprobs=2, n=2, seed=3),
        replace(SAMPLED, max_tokens=40, top_p=0.9, top_k=50, seed=4),
    ]
    prompts = equal(len(params), 400)
    prompts[2] = prompts[2][:30]
    names = [str(i) for i in range(len(params))]
    work: Work = list(zip(names, prompts, params, strict=True))
    limits = {"max_model_len": 512, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 640}
    engine, _ = compare("demo", [work] * 3, Resting, **limits)
    assert num_accepted(engine) > 100
    assert engine.metrics()["prefix_cache_hits"] > 400
