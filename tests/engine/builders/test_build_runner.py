"""The type of the KV cache, and what is refused before any weight is read."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.engine.builders.build_runner import cache_shape, check_context, read_kv_scales
from hetero_llm.engine.resolve import limit_steps
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True}
DECLARED = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
OLDER = {"quant_method": "fp8", "kv_cache_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the GPU says of itself; replace its only entry."""
    found = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found[0])
    return found


def configured(folder: Path, **arguments: Any) -> EngineConfig:
    return EngineConfig.from_args(resolve_engine_args({"model": str(folder), **arguments}))


def cache_dtype(
    folder: Path,
    device: torch.device = GPU,
    quantization: dict[str, Any] | None = None,
    **arguments: Any,
) -> torch.dtype:
    model = replace(load_model_config(folder), quantization=quantization)
    return cache_shape(configured(folder, **arguments), model, BF16, device).dtype


@pytest.mark.parametrize(
    ("wanted", "quantization", "expected"),
    [
        ("auto", None, BF16),
        ("auto", {"quant_method": "fp8"}, BF16),
        ("auto", DECLARED, E4M3),
        ("auto", MODELOPT, E4M3),
        ("auto", {**DECLARED, "kv_cache_scheme": {**SCHEME, "dynamic": True}}, BF16),
        ("auto", OLDER, BF16),
        ("bfloat16", DECLARED, BF16),
        ("fp8", OLDER, E4M3),
        ("fp8", None, E4M3),
        ("fp8_e4m3", None, E4M3),
        ("fp8_e5m2", None, E5M2),
        ("fp8_e5m2", {"quant_method": "fp8"}, E5M2),
    ],
)
def test_the_type_of_the_cache(
    tiny_folder: Path, wanted: str, quantization: dict[str, Any] | None, expected: torch.dtype
) -> None:
    found = cache_dtype(tiny_folder, quantization=quantization, kv_cache_dtype=wanted)
    assert found == expected


def test_the_checkpoints_scheme_yields_where_it_cannot_serve(
    tiny_folder: Path, capability: list[tuple[int, int]]
) -> None:
    assert cache_dtype(tiny_folder, CPU, DECLARED) == BF16
    assert cache_dtype(tiny_folder, quantization=DECLARED, batch_invariant=True) == BF16
    capability[0] = (8, 0)
    assert cache_dtype(tiny_folder, quantization=DECLARED) == BF16


def test_a_cpu_serves_such_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", layers=1)
    rewrite_config(folder, quantization_config={**DECLARED, "config_groups": {}})
    start = {"device": "cpu", "skip_tokenizer_init": True}
    with caplog.at_level(logging.INFO), LLM(str(folder), **start) as llm:
        asks = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
        (output,) = llm.generate(prompt_token_ids=[[5, 6]], sampling_params=asks, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert "the KV cache stays bfloat16: that of the checkpoint, fp8, cannot" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "quantization", "gpu", "reason"),
    [
        ({"kv_cache_dtype": "float16"}, None, (9, 0), "'float16': the model runs in bfloat16"),
        ({"kv_cache_dtype": "fp8"}, None, (8, 6), "'fp8': needs .* 8.9 .* use auto or fp8_e5m2"),
        ({"kv_cache_dtype": "fp8"}, None, None, "'fp8': needs a GPU; use auto on a CPU"),
        ({"kv_cache_dtype": "fp8_e5m2"}, None, None, "'fp8_e5m2': needs a GPU"),
        ({"kv_cache_dtype": "fp8_e5m2"}, DECLARED, (9, 0), "'fp8_e5m2': .* e4m3 .*use fp8"),
        (
            {"kv_cache_dtype": "fp8_e5m2", "batch_invariant": True}, None, (9, 0),
            "'fp8_e5m2': cannot be combined with batch_invariant",
        ),
    ],
)  # fmt: skip
def test_types_that_cannot_be(
    tiny_folder: Path,
    arguments: dict[str, Any],
    quantization: dict[str, Any] | None,
    gpu: tuple[int, int] | None,
    reason: str,
    capability: list[tuple[int, int]],
) -> None:
    capability[0] = gpu or (9, 0)
    device = CPU if gpu is None else GPU
    with pytest.raises(ConfigError, match=f"^kv_cache_dtype={reason}"):
        cache_dtype(tiny_folder, device, quantization, **arguments)


def test_fp8_e5m2_needs_no_fp8_unit(tiny_folder: Path, capability: list[tuple[int, int]]) -> None:
    capability[0] = (8, 0)
    assert cache_dtype(tiny_folder, kv_cache_dtype="fp8_e5m2") == E5M2


def test_another_scheme_is_named(tiny_folder: Path) -> None:
    scheme = {**DECLARED, "kv_cache_scheme": {**SCHEME, "num_bits": 4}}
    with pytest.raises(ModelLoadError, match="kv_cache_scheme.num_bits=4.*; kv_cache_dtype=bfl"):
        cache_dtype(tiny_folder, quantization=scheme)
    assert cache_dtype(tiny_folder, quantization=scheme, kv_cache_dtype="bfloat16") == BF16


def test_head_sizes_are_checked_before_the_weights(tiny_folder: Path) -> None:
    config = configured(tiny_folder)
    model: ModelConfig = replace(load_model_config(tiny_folder), head_dim=12)
    steps = limit_steps(config, 64, "cuda", serving=False)
    with pytest.raises(ConfigError, match="^model='head size 12': .*multiples of 8 from 16"):
        check_context(config, steps, model, BF16, GPU)


@pytest.mark.parametrize(
    ("arguments", "quantization", "reason"),
    [
        ({"quantization": "fp8"}, None, "'fp8': weights .* e4m3 .* 8.9 or later; use ifq or int4"),
        ({}, {"quant_method": "fp8"}, "'fp8': weights .* e4m3 .*; batch_invariant=True serves"),
        ({"quantization": "int4"}, None, None),
        ({"batch_invariant": True}, {"quant_method": "fp8"}, None),
    ],
)
def test_fp8_weights_need_a_gpu_with_fp8(
    tiny_folder: Path,
    arguments: dict[str, Any],
    quantization: dict[str, Any] | None,
    reason: str | None,
    capability: list[tuple[int, int]],
) -> None:
    config = configured(tiny_folder, num_gpu_blocks_override=64, **arguments)
    online = arguments.get("quantization")
    model = replace(
        load_model_config(tiny_folder),
        head_dim=16, quantization=quantization, online_quantization=online,
    )  # fmt: skip
    steps = limit_steps(config, 64, "cuda", serving=False)
    check_context(config, steps, model, BF16, GPU)
    capability[0] = (8, 6)
    if reason is None:
        check_context(config, steps, model, BF16, GPU)
        return
    with pytest.raises(ConfigError, match=f"^quantization={reason}"):
        check_context(config, steps, model, BF16, GPU)


class TestScalesFile:
    @staticmethod
    def path(folder: Path, layers: int) -> str:
        path = folder / "scales.json"
        factors = {"0": {str(layer): 0.5 for layer in range(layers)}}
        cache = {"dtype": "float8_e4m3fn", "scaling_factor": factors}
        path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
        return str(path)

    def test_it_is_read(self, tiny_folder: Path, tmp_path: Path) -> None:
        model = load_model_config(tiny_folder)
        path = self.path(tmp_path, model.num_layers)
        config = configured(tiny_folder, kv_cache_dtype="fp8", quantization_param_path=path)
        scales = read_kv_scales(config, model, E4M3)
        assert scales is not None and (scales == 0.5).all()
        assert read_kv_scales(configured(tiny_folder), model, E4M3) is None

    @pytest.mark.parametrize("wanted", ["auto", "fp8_e5m2", "bfloat16"])
    def test_it_needs_an_e4m3_cache(self, tiny_folder: Path, tmp_path: Path, wanted: str) -> None:
        model = load_model_config(tiny_folder)
        config = configured(
            tiny_folder, kv_cache_dtype=wanted, quantization_param_path=self.path(tmp_path, 3)
        )
        with pytest.raises(ConfigError, match=r"^quantization_param_path=.*kv_cache_dtype=fp8"):
            read_kv_scales(config, model, cache_shape(config, model, BF16, GPU).dtype)

    def test_a_bad_one_is_refused_before_the_weights(
        self, tiny_folder: Path, tmp_path: Path
    ) -> None:
        model = load_model_config(tiny_folder)
        path = self.path(tmp_path, model.num_layers + 1)
        config = configured(tiny_folder, kv_cache_dtype="fp8", quantization_param_path=path)
        steps = limit_steps(config, 64, "cuda", serving=False)
        with pytest.raises(ConfigError, match=r"^quantization_param_path=.*factor.0="):
            check_context(config, steps, model, BF16, GPU)

    def test_on_a_cpu(self, tiny_folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^quantization_param_path=.*e4m3 KV cache"):
            LLM(str(tiny_folder), device="cpu", quantization_param_path=self.path(tmp_path, 3))
