"""Classes of transformers on the GPU, in graphs, judged token by token by transformers in
float32."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero_llm.models.experts import Experts
from hetero_llm.models.transformers_modules import Conversion, FlatExperts
from tests.gpu.scenarios.serving import GREEDY, TIES, generate, regrets, runner_of, start
from tests.gpu.scenarios.test_other_models import make_model
from tests.models.test_transformers_backend import EXPERTS, HEADS, LONG, MIXED, SIZES, save

WIDE = {"head_dim": 16, "max_position_embeddings": 256}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {**HEADS, **MIXED, **WIDE, "query_pre_attn_scalar": 11}),
    "smollm3": ("SmolLM3", {**SIZES, **WIDE, "hidden_size": 64, "no_rope_layer_interval": 2}),
    "cohere": ("Cohere", {**SIZES, "hidden_size": 64, "max_position_embeddings": 256}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, **WIDE, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {**EXPERTS, "hidden_size": 64, "max_position_embeddings": 256}),
}
LENGTHS = [1, 2, 7, 16, 17, 23, 33, 47, 95, 128, 200]


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def assert_judged(folder: Path, vocab: int, **engine_args: Any) -> None:
    asked = prompts(vocab)
    params = [GREEDY] * len(asked)
    args = {"max_model_len": 256, "skip_tokenizer_init": True, "model_impl": "transformers"}
    with start(folder, **args, **engine_args) as llm:
        assert (runner_of(llm).graphs is None) == engine_args.get("enforce_eager", False)
        for _ in range(2):  # the second time with prefix hits
            assert regrets(generate(llm, asked, params), params, folder).max() < TIES


@pytest.mark.parametrize("name", CLASSES)
def test_classes_without_a_native_file(tmp_path: Path, name: str) -> None:
    assert_judged(save(tmp_path, *CLASSES[name]), 96)


class _Asking(FlatExperts):
    """Asks the device how many rows each expert gets."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        assert sum(top_k_index.flatten().bincount().tolist()) == top_k_index.numel()
        return super().forward(hidden_states, top_k_index, top_k_weights)


@pytest.mark.parametrize("way", ["grouped products", "asked for rows"])
def test_what_cannot_be_captured_runs_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """transformers' grouped products, which in float32 wait for the device, and Python's own."""
    made: list[nn.Module | None] = []
    replace = Conversion.mlps_of_experts

    def replacement(self: Conversion, module: nn.Module, path: str) -> FlatExperts | None:
        found = replace(self, module, path) if way == "asked for rows" else None
        if found is not None:
            found.__class__ = _Asking
        made.append(found)
        return found

    monkeypatch.setattr(Conversion, "mlps_of_experts", replacement)
    folder = save(tmp_path, *CLASSES["qwen3_moe"])
    asked = prompts(96)
    params = [GREEDY] * len(asked)
    args = {"max_model_len": 256, "skip_tokenizer_init": True, "model_impl": "transformers"}
    with caplog.at_level(logging.WARNING, "hetero_llm"), start(folder, **args) as llm:
        assert len(made) >= 3
        assert all(isinstance(m, Experts) == (way == "asked for rows") for m in made)
        assert runner_of(llm).graphs is None
        assert regrets(generate(llm, asked, params), params, folder).max() < TIES
    assert "Qwen3MoeForCausalLM of transformers runs without CUDA graphs: " in caplog.text
    monkeypatch.undo()
    assert_judged(folder, 96)  # in graphs: the device is none the worse


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_llama(tmp_path: Path, enforce_eager: bool) -> None:
    folder = make_model(tmp_path, "heads of 80 in threes")
    assert_judged(folder, 512, enforce_eager=enforce_eager)


def test_the_lookahead_cache(tmp_path: Path) -> None:
    assert_judged(make_model(tmp_path, "window of 24"), 512, use_lookahead=True)


def test_batch_invariance(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "head norms")
    args = {"max_model_len": 256, "skip_tokenizer_init": True, "model_impl": "transformers"}
    asked = prompts(512)[3:7]
    with start(folder, batch_invariant=True, **args) as llm:
        together = [o.outputs[0].token_ids for o in generate(llm, asked)]
        alone = [generate(llm, [prompt])[0].outputs[0].token_ids for prompt in asked]
    assert together == alone


def test_long_rotary_factors_are_those_of_the_whole_context(tmp_path: Path) -> None:
    """Captured once, though transformers chooses by the length of each call."""
    settings = {**SIZES, "hidden_size": 64, "rope_parameters": _of_16(LONG), "sliding_window": None}
    settings |= {"max_position_embeddings": 256}
    folder = save(tmp_path, "Phi3", settings)
    args = {"max_model_len": 256, "skip_tokenizer_init": True, "model_impl": "transformers"}
    asked = [prompt for prompt in prompts(96) if len(prompt) > 32]
    params = [GREEDY] * len(asked)
    with start(folder, **args) as llm:
        assert regrets(generate(llm, asked, params), params, folder).max() < TIES


def _of_16(rope: dict[str, Any]) -> dict[str, Any]:
    """The same with factors for heads of 16."""
    doubled = {key: value * 2 for key, value in rope.items() if isinstance(value, list)}
    return {**rope, **doubled}
