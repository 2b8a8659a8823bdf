"""Prompt adapters on the device, where torch serves them: chunks, few blocks, drafts, cached
prefixes. Tokens are those of transformers with the embeddings in front, in float32 on the CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, ConfigError, PromptAdapterRequest, RequestOutput
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.gpu.scenarios.serving import (
    DEMO,
    DEVICE,
    GREEDY,
    TIES,
    ragged,
    runner_of,
    start,
    transformers_model,
)
from tests.gpu.scenarios.test_lookahead_cuda import DRAFTERS
from tests.helpers.prompt_adapters import (
    TinyPromptAdapter,
    reference_logits,
    write_prompt_adapter,
)

SIZE = 320  # of the demo target
LENGTHS = (20, 7)
SERVED: dict[str, Any] = {"enable_prompt_adapter": True, "max_prompt_adapter_token": 20}


@dataclass(frozen=True, eq=False)
class Adapters:
    """None and two prompt adapters of the demo target."""

    requests: list[PromptAdapterRequest | None]
    written: list[TinyPromptAdapter | None]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder: Path = tmp_path_factory.mktemp("prompt_adapters")
    found = Adapters([None], [None])
    for number, length in enumerate(LENGTHS, 1):
        adapter = write_prompt_adapter(
            folder / str(number), length, SIZE, seed=number, strength=0.05
        )
        path = str(adapter.folder)
        found.requests.append(PromptAdapterRequest(f"p{number}", number, path, length))
        found.written.append(adapter)
    return found


def run(llm: LLM, adapters: Adapters, count: int = 12) -> list[RequestOutput]:
    return llm.generate(
        prompt_token_ids=ragged(count),
        sampling_params=GREEDY,
        prompt_adapter_request=[adapters.requests[i % 3] for i in range(count)],
        use_tqdm=False,
    )


def largest_regret(outputs: list[RequestOutput], adapters: Adapters, turn: int = 0) -> float:
    """How far a token's logit is below the best one's, at most. `turn`: of another adapter."""
    return max(
        regret(
            adapters, (index + turn) % 3, tuple(output.prompt_token_ids),
            tuple(output.outputs[0].token_ids),
        )
        for index, output in enumerate(outputs)
    )  # fmt: skip


@functools.cache
def regret(
    adapters: Adapters, which: int, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> float:
    """The largest one of an output. Kept: most engines generate the same tokens."""
    model = transformers_model(DEMO, torch.float32, "cpu")
    logits = reference_logits(model, [*prompt, *tokens], adapters.written[which])
    scores = logits[len(prompt) - 1 : -1]
    own = scores.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    return float((scores.max(dim=-1).values - own).max())


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"num_gpu_blocks_override": 40},
        {"speculative_config": DRAFTERS["hybrid"]},
        {"max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 1024},
    ],
    ids=["chunks", "few blocks", "drafts", "small chunks", "many rows"],
)
def test_float32_has_transformers_tokens(engine: dict[str, Any], adapters: Adapters) -> None:
    with start(**SERVED, **engine) as llm:
        for turn in range(2):  # the second time over cached prefixes
            outputs = run(llm, adapters)
            assert [output.prompt_token_ids for output in outputs] == ragged(12)
            assert largest_regret(outputs, adapters) < TIES
            if turn and "num_gpu_blocks_override" not in engine:
                assert all(output.num_cached_tokens for output in outputs[1:])


def test_bfloat16_differs_at_near_ties_only(adapters: Adapters) -> None:
    with start(dtype="bfloat16", **SERVED) as llm:
        outputs = run(llm, adapters)
    assert largest_regret(outputs, adapters) < 0.5
    assert largest_regret(outputs, adapters, turn=1) > 0.5, "adapters matter"


def test_torch_serves_without_graphs(adapters: Adapters) -> None:
    with start(**SERVED) as llm:
        runner = runner_of(llm)
        assert isinstance(runner, TorchModelRunner)
        assert runner.model.embed_tokens.weight.device.type == DEVICE


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_lora": True}, "enable_lora=True: cannot be combined with enable_prompt_adapter"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': cannot be combined"),
    ],
)
def test_what_cannot_be_combined_yet(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        start(**SERVED, **options)
