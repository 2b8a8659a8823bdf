"""Stages of a model: which layers each has, what it reads, and that all of them one behind the
other compute what the whole model computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.collectives import OneRank, Rank
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.rank_config import stage_config, stage_layers
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.sharding import sharded_config
from tests.helpers.rank_models import families, greedy, load_rank
from tests.helpers.stage_models import Stages, held_bytes
from tests.models import renamed
from tests.models.loading import edit_weights
from tests.models.mxfp4_checkpoints import make_both
from tests.models.test_quantized_weights import FORMATS, both
from tests.models.tiny import VARIANTS, make_tiny_checkpoint

SPECIAL = [
    ("llama", "tied"), ("opt", "projections"), ("opt", "post_norm"), ("opt", "untied_gelu"),
    ("gptj", "tied_share"), ("falcon", "alibi"), ("gemma2", "layer_types"),
    ("mixtral", "window_tied"), ("qwen2_moe", "dense_first"), ("minimax_m2", "tied"),
]  # fmt: skip
"""Variants whose first or last stage, or whose layers, differ from others'."""


def check(folder: Path, count: int, **options: Any) -> Stages:
    """To the bit: stages round where the whole model rounds."""
    whole, stages = load_rank(folder, **options), Stages(folder, count, **options)
    expected, tokens = greedy(whole, 6)
    logits, own = greedy(cast(CausalLM, stages), 6)
    assert own == tokens and torch.equal(logits, expected)
    return stages


@pytest.mark.parametrize("num_layers", [1, 2, 7, 32])
def test_stages_have_all_layers_in_order(num_layers: int) -> None:
    for stages in range(1, num_layers + 1):
        ranges = [stage_layers(num_layers, Rank(0, 1, stage, stages)) for stage in range(stages)]
        layers = [layer for first, count in ranges for layer in range(first, first + count)]
        assert layers == list(range(num_layers))
        counts = [count for _, count in ranges]
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_a_stage_has_its_part_of_what_layers_have(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen2_moe", "dense_first", layers=3)
    config: Any = load_model_config(folder)
    config = replace(config, sliding_windows=(4, None, 6))
    first, second = (stage_config(config, Rank(0, 1, stage, 2)) for stage in (0, 1))
    assert (first.first_layer, first.num_layers, first.sliding_windows) == (0, 2, (4, None))
    assert (second.first_layer, second.num_layers, second.sliding_windows) == (2, 1, (6,))
    assert (*first.sparse_layers, *second.sparse_layers) == config.sparse_layers
    cut = sharded_config(config, Rank(1, 2, 1, 2))
    assert (cut.num_layers, cut.num_heads) == (1, config.num_heads // 2)
    assert cut.rank == Rank(1, 2, 1, 2)
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size=4: the model has 3 layers"):
        stage_config(config, Rank(0, 1, 0, 4))


@pytest.mark.parametrize(("family", "variant"), families(VARIANTS))
def test_every_family(tmp_path: Path, family: str, variant: str) -> None:
    check(make_tiny_checkpoint(tmp_path, family, variant, layers=2), 2)


@pytest.mark.parametrize(("family", "variant"), SPECIAL)
def test_other_variants(tmp_path: Path, family: str, variant: str) -> None:
    changes = {"layer_types": None} if variant == "layer_types" else None
    check(make_tiny_checkpoint(tmp_path, family, variant, layers=3, changes=changes), 3)


@pytest.mark.parametrize("make", [renamed.baichuan, renamed.chatglm, renamed.qwen])
def test_families_of_remote_code(tmp_path: Path, make: Callable[[Path], tuple[Path, Any]]) -> None:
    check(make(tmp_path)[0], 2)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gptj", "mixtral"])
def test_bfloat16_has_the_same_bits(tmp_path: Path, family: str) -> None:
    check(make_tiny_checkpoint(tmp_path, family, layers=3), 3, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("form", ["fp8 blocks", "gptq", "awq", "pack-quantized"])
def test_quantized_checkpoints(tmp_path: Path, form: str, family: str) -> None:
    check(both(tmp_path, FORMATS[form], family)[0], 2)


def test_a_quantized_head_is_the_last_stages(tmp_path: Path) -> None:
    config = {**FORMATS["pack-quantized"], "ignore": []}
    check(both(tmp_path, config, left=())[0], 2)


def test_quantized_experts_and_weights_quantized_while_loading(tmp_path: Path) -> None:
    check(make_both(tmp_path)[0], 2)
    check(make_tiny_checkpoint(tmp_path / "llama", "llama", layers=2), 2, quantization="fp8")


def test_random_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", layers=3)
    check(folder, 3, load_format="dummy")


@pytest.fixture
def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns the bytes that were read from weight files since the last call."""
    read: list[int] = []
    plain = os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = plain(descriptor, buffers, offset)
        read.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)

    def taken() -> int:
        total = sum(read)
        read.clear()
        return total

    return taken


@pytest.mark.parametrize("variant", ["gqa", "tied"])
def test_a_stage_reads_what_it_has(
    tmp_path: Path, count_bytes: Callable[[], int], variant: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", variant, layers=4)
    whole = load_rank(folder)
    stored = count_bytes()
    assert stored == held_bytes(whole)
    stages = Stages(folder, 2)
    first, last = (held_bytes(model) for model in stages.models)
    assert count_bytes() == first + last
    twice = whole.embed_tokens.weight.nbytes if variant == "tied" else 0
    assert first + last == stored + twice
    layers = held_bytes(cast(CausalLM, whole.layers))
    assert first == layers // 2 + whole.embed_tokens.weight.nbytes
    (middle,) = Stages(folder, 3).models[1:2]
    assert held_bytes(middle) == layers // 4
    assert not any(parameter.is_meta for parameter in middle.parameters())


def test_a_wrong_folder_fails_in_every_stage(tmp_path: Path) -> None:
    """Though the tensor is another stage's."""
    folder = make_tiny_checkpoint(tmp_path, "llama", layers=2)
    gone = "model.layers.1.mlp.down_proj.weight"
    edit_weights(folder, lambda tensors: {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(ModelLoadError, match=rf"missing: {gone}"):
        load_rank(folder, OneRank(Rank(0, 1, 0, 2)))
