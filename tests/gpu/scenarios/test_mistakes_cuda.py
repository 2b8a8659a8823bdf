"""What the GPU engine refuses, and that a refused or failing request leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, ConfigError, PromptError, RequestError, SamplingError, SamplingParams
from tests.gpu.scenarios.serving import GREEDY, equal, generate, start, tokens_of
from tests.models.tiny import make_tiny_checkpoint


@pytest.mark.parametrize(
    ("family", "variant", "size"),
    [("llama", "gqa", 8), ("llama", "wide_heads", 12), ("gpt2", "tied", 8)],
)
def test_a_head_size_without_kernels(tmp_path: Path, family: str, variant: str, size: int) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, variant)
    given: dict[str, Any] = {"max_model_len": 64, "skip_tokenizer_init": True}
    with pytest.raises(
        ConfigError, match=f"^model='?head size {size}'?: .*batch_invariant=True or device='cpu'"
    ):
        start(folder, **given)
    prompt = [[5, 6, 7, 8]]
    with start(folder, batch_invariant=True, **given) as llm:  # the way out that it names
        ours = tokens_of(generate(llm, prompt))
    with start(folder, batch_invariant=True, **{**given, "device": "cpu"}) as cpu:
        assert tokens_of(generate(cpu, prompt)) == ours


def test_an_fp8_cache_with_batch_invariance() -> None:
    with pytest.raises(ConfigError, match="^kv_cache_dtype='fp8': .*batch_invariant"):
        start(kv_cache_dtype="fp8", batch_invariant=True)


def test_fewer_blocks_than_one_sequence_needs() -> None:
    with pytest.raises(ConfigError, match="^num_gpu_blocks_override=31: .* needs 32"):
        start(num_gpu_blocks_override=31)


# -- requests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with start() as llm:
        assert llm.engine.asynchronous
        yield llm


def fails(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_ids) == 3:
        raise ValueError("no more")
    return logits


def shortens(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits[:7]


def test_a_processor_that_raises_fails_its_own_call(engine: LLM) -> None:
    prompts = equal(4, 40)
    expected = tokens_of(generate(engine, prompts))
    bad = replace(GREEDY, logits_processors=[fails])
    with pytest.raises(RequestError, match="^prompt 2: .*no more"):
        generate(engine, prompts, [GREEDY, GREEDY, bad, GREEDY])
    metrics = engine.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage_perc"] == 0.0
    assert tokens_of(generate(engine, prompts)) == expected


@pytest.mark.parametrize("processor", [fails, shortens])
def test_a_stream_survives_the_failure_of_another(engine: LLM, processor: Any) -> None:
    prompts = equal(2, 40)
    expected = tokens_of(generate(engine, prompts))
    good = engine.stream({"prompt_token_ids": prompts[0]}, GREEDY)
    for _ in range(3):
        next(good)
    bad = engine.stream(
        {"prompt_token_ids": prompts[1]}, replace(GREEDY, logits_processors=[processor])
    )
    with pytest.raises(RequestError, match="logits_processors"):
        for _ in bad:
            next(good)
    *_, last = good
    assert last.outputs[0].token_ids == expected[0]
    assert tokens_of(generate(engine, prompts)) == expected


@pytest.mark.parametrize(
    ("prompt", "params", "kind"),
    [
        ([7] * 512, GREEDY, PromptError),
        ([5, 4096], GREEDY, PromptError),
        ([], GREEDY, PromptError),
        ([5], SamplingParams(n=17), SamplingError),
    ],
)
def test_a_refused_request_costs_nothing(
    engine: LLM, prompt: list[int], params: SamplingParams, kind: type[Exception]
) -> None:
    good = engine.stream({"prompt_token_ids": equal(1, 40)[0]}, GREEDY)
    next(good)
    before = engine.metrics()
    with pytest.raises(kind):
        generate(engine, [equal(1, 9)[0], prompt], [GREEDY, params])
    assert engine.metrics() == before
    *_, last = good
    assert len(last.outputs[0].token_ids) == GREEDY.max_tokens


def test_a_raising_processor_stops_no_later_step_ahead(engine: LLM) -> None:
    with pytest.raises(RequestError):
        generate(engine, equal(1, 40), replace(GREEDY, logits_processors=[fails]))
    engine.engine.scheduler.check_integrity()  # counts the requests that allow no step ahead
