"""Drafts with every kind of request: those whose sampling depends on earlier tokens, that want
log-probabilities, fork or search get the same outputs with drafts as without, and do get drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.core.draft_tree import DraftTree
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.cpu import model_runner, native
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
    prompts_of,
    serve,
    work_of,
)
from tests.models.tiny import make_tiny_checkpoint

needs_native = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")

BACKENDS: dict[str, Any] = {
    "native": {"cpu_backend": "native"},
    "torch": {"cpu_backend": "torch"},
    "invariant": {"batch_invariant": True},
}
POOLS: dict[str, Any] = {
    "roomy": {},
    "few blocks": {"num_gpu_blocks_override": 18},
    "few blocks, no prefix cache": {
        "num_gpu_blocks_override": 18,
        "enable_prefix_caching": False,
    },
    "small steps": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
}


LEFT_OUT = (("torch", "few blocks"), ("torch", "small steps"), ("native", "few blocks"))
"""Covered by the invariant backend, or by the pool without a prefix cache."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "llama"
    return make_tiny_checkpoint(path, "llama", with_tokenizer=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# -- the same outputs ---------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize(
    ("backend", "pool"),
    [(backend, pool) for backend in BACKENDS for pool in POOLS if (backend, pool) not in LEFT_OUT],
)
def test_everything_in_one_batch(folder: Path, backend: str, pool: str) -> None:
    kinds = [*KINDS, "plain", "processor"]
    engine_args = BACKENDS[backend] | POOLS[pool]
    plain = build(folder, **engine_args)
    expected = serve(plain, work_of(kinds))
    drafter = Trees(expected)
    engine = build(folder, drafter, **engine_args)
    work = work_of(kinds)
    outputs = serve(engine, work)
    check_same(outputs, expected)
    check_processors(work, outputs)
    metrics = engine.metrics()
    assert (metrics["num_preemptions"] > 0) == ("few blocks" in pool)
    assert num_accepted(engine) > (20 if "few blocks" in pool else 60)
    assert metrics["num_steps"] < plain.metrics()["num_steps"]
    got = {name.partition(": ")[2] for name, count in drafter.num_nodes.items() if count}
    if "few blocks" not in pool:
        assert got == {*KINDS} - {*NO_DRAFTS}
    again = work_of(kinds)
    check_same(serve(engine, again), expected)  # prefixes are cached now, where they are
    check_processors(again, expected)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_at_a_time(folder: Path, kind: str) -> None:
    kinds = [kind] * 3
    expected = serve(build(folder), work_of(kinds))
    drafter = Trees(expected, right=0.95)
    engine = build(folder, drafter)
    work = work_of(kinds)
    outputs = serve(engine, work)
    check_same(outputs, expected)
    check_processors(work, outputs)
    assert (num_accepted(engine) > 8) == (kind not in NO_DRAFTS)
    emitted = sum(len(c.token_ids) for output in outputs.values() for c in output.outputs)
    if kind not in ("ranked", "beams"):
        assert engine.metrics()["generation_tokens"] == emitted


@needs_native
def test_prompt_logprobs_in_pieces_beside_trees(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native runner holds logits of few prompt rows at once: it cuts steps, but no tree."""
    monkeypatch.setattr(model_runner, "PROMPT_LOGPROB_TOKENS", 3)
    kinds = ["plain", "presence", *["prompt logprobs"] * 5, "samples", "prompt logprobs"]
    limits = {"max_num_batched_tokens": 30, "max_num_seqs": 6}
    expected = serve(build(folder, **limits), work_of(kinds))
    engine = build(folder, Trees(expected), **limits)
    launch, cut = engine.runner.launch, []

    def recording(step: SchedulerOutput) -> Any:
        if step.drafts is not None and sum(span.count for span in step.prompt_logprob_spans) > 3:
            cut.append(int(step.drafts.counts.sum()))
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", recording)
    check_same(serve(engine, work_of(kinds)), expected)
    assert len(cut) >= 2 and sum(cut) > 10


@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("backend", ["torch", "invariant"])
def test_the_torch_runner_serves_what_the_configuration_asks_for(
    folder: Path, backend: str
) -> None:
    """Prompt lookup finds what one request repeats, and guesses for the others."""
    circle = replace(GREEDY, allowed_token_ids=[8, 9], max_tokens=50, logprobs=1)
    work = work_of(["plain", "frequency", "logprobs", "samples"])
    work += [(f"circle {start}", [start, 6, 7], circle) for start in (5, 8, 9)]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
    expected = serve(build(folder, **BACKENDS[backend]), work)
    engine = build(folder, speculative_config=config, **BACKENDS[backend])
    check_same(serve(engine, work), expected)
    assert num_accepted(engine) > 0


def test_one_token_prompts_are_drafted_for_from_the_start(folder: Path) -> None:
    """The first token's time is recorded even if it comes from a draft."""
    work = [("a", [5], replace(GREEDY, presence_penalty=1.0))]
    args = BACKENDS["torch"]
    expected = serve(build(folder, **args), work)
    engine = build(folder, Trees(expected, right=1.0), **args)
    outputs = serve(engine, work)
    check_same(outputs, expected)
    metrics = outputs["a"].metrics
    assert metrics.first_token_time is not None and engine.metrics()["num_iters"] > 0


# -- ends inside a path -------------------------------------------------------------------------


class Chain(Trees):
    """Drafts the whole recorded continuation as one chain."""

    def _tree(self, sequence: Sequence, limit: int) -> DraftTree:
        coming = self._record[sequence.request.request_id, sequence.index]
        coming = coming[len(sequence.token_ids) - sequence.num_prompt_tokens :][:limit]
        parents = np.arange(-1, len(coming) - 1, dtype=np.int32)
        return DraftTree(np.array(coming, np.int32), parents)


def long_record(folder: Path, work: Work, **engine_args: Any) -> Outputs:
    """Outputs of the same sampling if only the length ends them, without failing processors."""
    endless = [
        (n, p, replace(q, stop=None, stop_token_ids=None, min_tokens=0, logits_processors=None))
        for n, p, q in work
    ]
    return serve(build(folder, **engine_args), endless)


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_a_processor_is_not_asked_beyond_a_stop_token(folder: Path, backend: str) -> None:
    args = BACKENDS[backend]
    prompt = prompts_of(3)[2]
    (free,) = long_record(folder, [("a", prompt, GREEDY)], **args)["a"].outputs
    stop = next(t for t in free.token_ids[6:] if t not in free.token_ids[:6])
    asked: list[list[int]] = []

    def listening(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        asked.append(list(output_ids))
        return logits

    params = replace(GREEDY, stop_token_ids=[stop], logits_processors=[listening], logprobs=1)
    drafter = Chain(long_record(folder, [("a", prompt, GREEDY)], **args))
    engine = build(folder, drafter, **args)
    (output,) = serve(engine, [("a", prompt, params)])["a"].outputs
    length = free.token_ids.index(stop) + 1
    assert output.token_ids == free.token_ids[:length]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert asked == [free.token_ids[:i] for i in range(length)]
    assert len(output.logprobs) == length
    assert engine.metrics()["num_steps"] == 2 and num_accepted(engine) > 3


class Failing:
    """Raises when `at` tokens are there; notes how often."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.raised = 0

    def __call__(
        self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        if len(output_ids) == self._at:
            self.raised += 1
            raise ValueError(f"{self._at} tokens are enough")
        logits[prompt_ids] = -torch.inf
        return logits


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("ending", ["error", "stop token", "stop string", "length"])
def test_a_failing_processor_ends_its_request_alone(
    folder: Path, backend: str, ending: str
) -> None:
    """It raises in the middle of an accepted path; what ends the sequence before it comes first."""
    args = BACKENDS[backend]

    def work(record: Outputs | None = None) -> Work:
        first, second, third = prompts_of(3)
        params = replace(GREEDY, logits_processors=[Failing(9)], logprobs=2, n=1)
        if record is not None and ending != "error":
            (free,) = record["bad"].outputs
            assert free.finish_reason == "error" and len(free.token_ids) == 9
            token = next(t for t in free.token_ids[4:] if t not in free.token_ids[:4])
            changes: dict[str, dict[str, Any]] = {
                "stop token": {"stop_token_ids": [token]},
                "stop string": {"stop": [free.text[-2:]]},
                "length": {"max_tokens": 9},
            }
            params = replace(params, **changes[ending])
        return [
            ("plain", first, SAMPLED),
            ("bad", second, params),
            ("penalized", third, replace(SAMPLED, frequency_penalty=1.0, n=2)),
        ]

    failed = serve(build(folder, **args), work())
    assert failed["bad"].error is not None and "9 tokens are enough" in failed["bad"].error
    expected = serve(build(folder, **args), work(failed))
    drafted = work(failed)
    failed["bad"].outputs[0].token_ids.append(7)  # a node behind the last token there is
    engine = build(folder, Chain({**expected, "bad": failed["bad"]}), **args)
    check_same(serve(engine, drafted), expected)
    (processor,) = drafted[1][2].logits_processors or ()
    assert isinstance(processor, Failing)
    # A stop string is found in the text after the step, the other ends while tokens are sampled.
    assert processor.raised == (ending in ("error", "stop string"))
    assert (expected["bad"].error is None) == (ending != "error")
    reasons = {"error": "error", "length": "length"}
    assert expected["bad"].outputs[0].finish_reason == reasons.get(ending, "stop")
    assert num_accepted(engine) > 20
