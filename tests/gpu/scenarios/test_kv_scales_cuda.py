"""Scales of an fp8 KV cache on a GPU: captured graphs, library attention, drafts, offload.

The demo target gets keys and values that e4m3 cannot hold, times powers of two that queries and
output projections take off again. With scales that say so its cache has the codes of the plain
demo target's, so that both choose alike; without them nothing sensible comes out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_llm.gpu.kernels.paged_attention import RowMasks, paged_attention_reference
from hetero_llm.gpu.library_attention import ChunkKeys, RaggedKeys, attend_chunk, attend_ragged
from tests.gpu.scenarios.serving import DEMO, DEVICE, GREEDY, equal, generate, runner_of, start
from tests.gpu.scenarios.test_lookahead_cuda import DRAFTERS
from tests.gpu.scenarios.test_precision import likeliest

KEYS, VALUES = 2.0**13, 2.0**12
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FACTORS = {"q_proj": 1 / KEYS, "k_proj": KEYS, "v_proj": VALUES, "o_proj": 1 / VALUES}
ASKS = replace(GREEDY, prompt_logprobs=1, max_tokens=24)


@pytest.fixture(scope="module")
def amplified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("kv") / "amplified"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in list(tensors.items()):
        module = name.split(".")[-2]
        if module in FACTORS:
            tensors[name] = tensor * FACTORS[module]
        if module == "k_proj":
            prefix = name.removesuffix("k_proj.weight")
            tensors[prefix + "k_scale"] = torch.tensor([KEYS])
            tensors[prefix + "v_scale"] = torch.tensor([VALUES])
    save_file(tensors, file, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return folder


def choices(model: Path, cache: torch.dtype = torch.float8_e4m3fn, **arguments: Any) -> np.ndarray:
    """The likeliest token at each position of prompts, then the first one that is generated."""
    with start(model, dtype="bfloat16", max_num_seqs=8, **arguments) as llm:
        assert runner_of(llm).cache.data.dtype == cache
        outputs = generate(llm, equal(12, 300), ASKS)
    found = [token for o in outputs for token in likeliest(o.prompt_logprobs)]
    return np.array(found + [o.outputs[0].token_ids[0] for o in outputs])


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 64},  # captured
        {"max_num_batched_tokens": 2048},  # chunks go through libraries
        {"speculative_config": DRAFTERS["hybrid"]},
        {
            "num_gpu_blocks_override": 100,
            "enable_prefix_cache_offload": True,
            "cpu_prefill_memory_utilization": 0.02,
            "apc_offload_background_pin": False,
            "apc_offload_gpu_evictor_limit": 0,
        },
    ],
    ids=["graphs", "libraries", "drafts", "offload"],
)
def test_the_checkpoints_scales(amplified: Path, engine: dict[str, Any]) -> None:
    expected = choices(DEMO, kv_cache_dtype="fp8", **engine)
    ours = choices(amplified, **engine)  # "auto" is what the checkpoint says
    assert (ours == expected).mean() > 0.99


def test_a_file_of_scales(amplified: Path, tmp_path: Path) -> None:
    """Its scale is one for keys and values, and replaces those of the checkpoint: this one of the
    keys is wrong for values by a factor of two, which e4m3 does not mind."""
    layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
    path = tmp_path / "scales.json"
    factors = {"0": {str(layer): KEYS for layer in range(layers)}}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    expected = choices(DEMO, kv_cache_dtype="fp8")
    ours = choices(amplified, kv_cache_dtype="fp8", quantization_param_path=str(path))
    assert (ours == expected).mean() > 0.95


def test_e5m2() -> None:
    plain = choices(DEMO, torch.bfloat16)
    ours = choices(DEMO, torch.float8_e5m2, kv_cache_dtype="fp8_e5m2")
    assert 0.85 < (ours == plain).mean() < 1.0


def test_library_attention_reads_scales() -> None:
    """One chunk of 48 tokens behind 80, and two of 40 and 33, against the plain reference."""
    torch.manual_seed(0)
    heads, kv_heads, dim, size = 8, 2, 64, 16
    cache = torch.randn(32, 2, size, kv_heads, dim, device=DEVICE).to(torch.float8_e4m3fn)
    keys, values = cache[:, 0], cache[:, 1]
    scales = 0.25 + torch.rand(2, kv_heads, device=DEVICE)
    tables = torch.randperm(32, device=DEVICE).view(4, 8).int()

    def expected(q: torch.Tensor, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans]).to(DEVICE).int()
        slots = torch.cat([torch.full((b - a,), slot) for slot, a, b in spans])
        ends = torch.cat([torch.full((b - a,), b) for _, a, b in spans])
        rows = RowMasks(positions + 1, positions)
        return paged_attention_reference(
            q, keys, values, tables, slots, ends, rows, scale=dim**-0.5, kv_scales=scales
        )

    q = torch.randn(48, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    chunk = ChunkKeys(tables[0].long(), 80, 48)
    ours = attend_chunk(q, keys, values, chunk, scale=dim**-0.5, kv_scales=scales)
    torch.testing.assert_close(ours, expected(q, [(0, 80, 128)]), rtol=0.02, atol=0.02)

    def numbers(*given: int) -> torch.Tensor:
        return torch.tensor(given, dtype=torch.int32, device=DEVICE)

    q = torch.randn(73, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    blocks = torch.cat((tables[1, :3], tables[2, :5])).long()
    ragged = RaggedKeys(blocks, numbers(0, 48, 128), numbers(40, 70), numbers(0, 40, 73), 40, 80)
    ours = attend_ragged(q, keys, values, ragged, scale=dim**-0.5, window=None, kv_scales=scales)
    wanted = expected(q, [(1, 0, 40), (2, 37, 70)])
    torch.testing.assert_close(ours, wanted, rtol=0.02, atol=0.02)
