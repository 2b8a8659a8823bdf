"""LoRA adapters through captured graphs, drafts, cached prefixes, few blocks, quantized weights.
Tokens are those of transformers with the adapter merged, in float32 on the CPU."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, RequestOutput
from hetero_llm.core.lora import LoRARequest
from hetero_llm.quantization.matrix import dequantize
from hetero_llm.quantization.online import quantize_int8
from tests.gpu.scenarios.serving import DEMO, GREEDY, TIES, ragged, regrets, start
from tests.gpu.scenarios.test_lookahead_cuda import DRAFTERS
from tests.helpers.adapters import TinyAdapter, linear_modules, merge, write_adapter

NUM_SLOTS = 2
SERVED = {"enable_lora": True, "max_loras": NUM_SLOTS, "max_cpu_loras": 3}


@dataclass(frozen=True)
class Adapters:
    """Three adapters of the demo target, and the target with each merged; None: the base."""

    requests: list[LoRARequest | None]
    merged: list[Path]


def save(model: Any, folder: Path) -> Path:
    shutil.copytree(DEMO, folder)
    model.save_pretrained(folder)
    return folder


def make(folder: Path, change: Any = lambda model: None) -> Adapters:
    """`change`: of the base's weights, in place."""
    found = Adapters([], [])
    for number, (modules, rank) in enumerate(
        [("", 0), (".*", 8), (".*[qvk]_proj|.*down_proj", 3), (".*gate_proj|.*o_proj", 16)]
    ):
        model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        change(model)
        request = None
        if rank:
            adapter: TinyAdapter = write_adapter(
                folder / f"a{number}", model, modules=modules, rank=rank, seed=number, strength=0.1
            )
            merge(model, adapter)
            request = LoRARequest(f"a{number}", number, str(adapter.folder))
        found.requests.append(request)
        found.merged.append(save(model, folder / f"merged{number}"))
    return found


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return make(tmp_path_factory.mktemp("adapters"))


def run(llm: LLM, adapters: Adapters, count: int = 12) -> list[RequestOutput]:
    """More adapters than slots, by turns."""
    prompts = ragged(count)
    return llm.generate(
        prompt_token_ids=prompts,
        sampling_params=GREEDY,
        lora_request=[adapters.requests[i % 4] for i in range(count)],
        use_tqdm=False,
    )


def largest_regret(outputs: list[RequestOutput], adapters: Adapters) -> float:
    found = [
        regrets([output], [GREEDY], adapters.merged[i % 4]).max()
        for i, output in enumerate(outputs)
    ]
    return float(torch.stack(found).max())


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 40},
        {"speculative_config": DRAFTERS["hybrid"]},
        {"max_num_batched_tokens": 1024},
    ],
    ids=["graphs", "eager", "few blocks", "drafts", "many rows"],
)
def test_float32_has_the_merged_models_tokens(engine: dict[str, Any], adapters: Adapters) -> None:
    with start(**SERVED, **engine) as llm:
        for _ in range(2):  # the second time over cached prefixes
            assert largest_regret(run(llm, adapters), adapters) < TIES


def test_bfloat16_differs_at_near_ties_only(adapters: Adapters) -> None:
    with start(dtype="bfloat16", **SERVED) as llm:
        assert largest_regret(run(llm, adapters), adapters) < 0.5


def test_adapters_matter(adapters: Adapters) -> None:
    with start(**SERVED) as llm:
        outputs = run(llm, adapters)
    turned = Adapters(adapters.requests, adapters.merged[1:] + adapters.merged[:1])
    assert largest_regret(outputs, turned) > 0.1


def test_quantized_weights(tmp_path: Path) -> None:
    def quantize(model: Any) -> None:
        for module in linear_modules(model).values():
            module.weight.data = dequantize(quantize_int8(module.weight.data), torch.float32)

    adapters = make(tmp_path, quantize)
    with start(quantization="ifq", **SERVED) as llm:
        assert largest_regret(run(llm, adapters), adapters) < TIES


def test_steps_without_an_adapter_have_the_bits_of_an_engine_without(adapters: Adapters) -> None:
    tokens = []
    for served in (SERVED, {}):
        with start(dtype="bfloat16", **served) as llm:
            if served:
                run(llm, adapters)
                llm.reset_prefix_cache()
            found = llm.generate(prompt_token_ids=ragged(8), sampling_params=GREEDY, use_tqdm=False)
            tokens.append([one.outputs[0].token_ids for one in found])
    assert tokens[0] == tokens[1]
