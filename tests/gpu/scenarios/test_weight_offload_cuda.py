"""Offloaded weights on a real GPU: the same results as without, also inside of graphs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.outputs import CompletionOutput
from hetero_llm.demo_models import demo_folder, heldout_prompts
from hetero_llm.gpu.weight_offload import plan_offload, stage_products, weights_on_host
from hetero_llm.models.layers import Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config

CUDA = torch.device("cuda")
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)


@functools.cache
def demo_results(dtype: str, **engine_args: Any) -> list[CompletionOutput]:
    given: dict[str, Any] = {
        "dtype": dtype,
        "device": "cuda",
        "num_gpu_blocks_override": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
    }
    prompts = [row[: 20 + 30 * i].tolist() for i, row in enumerate(heldout_prompts().prompts[:6])]
    with LLM("demo", **given, **engine_args) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS, use_tqdm=False)
        return [o.outputs[0] for o in outputs]


@pytest.mark.parametrize(
    ("dtype", "eager"), [("float32", True), ("float32", False), ("bfloat16", False)]
)
def test_offloaded_weights_give_the_same_results(dtype: str, eager: bool) -> None:
    """In bfloat16 the products of offloaded weights are the library's, so roundings differ."""
    expected = demo_results(dtype)
    found = demo_results(dtype, cpu_offload_gb=1, enforce_eager=eager)
    exact = dtype == "float32"
    if exact:
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    compared = 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs is not None and theirs.logprobs is not None
        tokens = zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True)
        for mine, other, entry, wanted in tokens:
            logprob = wanted[other].logprob
            assert entry[mine].logprob == pytest.approx(logprob, abs=1e-4 if exact else 0.25)
            compared += 1
            if mine != other:
                break  # from here on the sequences are two
    assert compared > 48


def test_a_staged_product_can_be_captured() -> None:
    folder = demo_folder("demo")
    config = load_model_config(folder)
    plan = plan_offload(config, torch.float32, 1)
    with weights_on_host(plan) as moved:
        model = load_model(folder, config, dtype=torch.float32, device=CUDA, show_progress=False)
    assert all(layer.weight.is_pinned() for layer in moved)
    inside = [m for m in model.layers.modules() if isinstance(m, Linear)]
    assert {id(m) for m in inside} == {id(m) for m in moved}
    stage_products(moved, CUDA, plan)
    layers = [m for m in moved if m.weight.shape[1] == config.hidden_size]
    x = torch.randn(3, config.hidden_size, device=CUDA)
    expected = [torch.nn.functional.linear(x, m.weight.to(CUDA), m.bias) for m in layers]
    with torch.inference_mode():
        for layer in layers:
            layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [layer(x) for layer in layers]
        for output in outputs:
            output.zero_()
        graph.replay()
    torch.cuda.synchronize()
    for output, wanted in zip(outputs, expected):
        assert torch.equal(output, wanted)
