"""Models that several ranks run together, against the same model in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu.executor import unsupported_reason
from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.collectives import Rank
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers import load_transformers_config
from hetero_llm.models.headless import HeadlessLM
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.sharding import Cut, check_ranks, rank_parts, runs_inside, sharded_config
from tests.helpers.rank_models import Ranks, check_same_tokens, families, load_rank
from tests.helpers.rank_threads import ThreadCollectives, ThreadRanks
from tests.models import renamed
from tests.models.mxfp4_checkpoints import make_both
from tests.models.test_loader_online import FAMILIES, MIXTURES
from tests.models.test_quantized_weights import FORMATS, both
from tests.models.tiny import VARIANTS, make_tiny_checkpoint

SPECIAL = [
    ("llama", "mqa"), ("llama", "tied"), ("llama", "biases"), ("qwen3", "tied_biases"),
    ("opt", "projections"), ("opt", "post_norm"), ("gpt_neox", "sequential_heads_of_16"),
    ("gptj", "tied_share"), ("falcon", "grouped"), ("falcon", "alibi"), ("falcon", "alibi_6_heads"),
    ("falcon", "multi_head"), ("gpt_bigcode", "multi_head"), ("phi", "head_norms"),
    ("stablelm", "head_norms"), ("glm", "all_rotated_tied"), ("gemma2", "layer_types"),
    ("mixtral", "three_of_seven"), ("qwen2_moe", "dense_first"), ("glm4_moe", "groups"),
    ("minimax_m2", "tied"), ("phimoe", "bare"), ("gpt_oss", "full"),
]  # fmt: skip
"""Variants of families with parts of their own."""


def check_parts(whole: CausalLM, ranks: Ranks) -> None:
    """What the ranks have makes up the whole model's parameters."""
    own = [dict(model.named_parameters()) for model in ranks.models]
    parts = []
    for model in ranks.models:
        assert isinstance(model, DecoderLM)
        parts.append(rank_parts(model, whole.config))
    for name, parameter in whole.named_parameters():
        if name not in parts[0].cuts:
            for index, mine in enumerate(own):
                zeros = name in parts[0].added and index
                assert torch.equal(mine[name], parameter * 0 if zeros else parameter), name
            continue
        seen = torch.zeros(parameter.shape[parts[0].cuts[name].dim], dtype=torch.bool)
        for mine, part in zip(own, parts, strict=True):
            cut = part.cuts[name]
            assert torch.equal(parameter.index_select(cut.dim, cut.index()), mine[name]), name
            seen[cut.index()] = True
        assert seen.all(), name


def check(folder: Path, size: int, **options: Any) -> Ranks:
    whole, ranks = load_rank(folder, **options), Ranks(folder, size, **options)
    check_same_tokens(whole, ranks)
    return ranks


@pytest.mark.parametrize(("family", "variant"), families(VARIANTS))
def test_every_family(tmp_path: Path, family: str, variant: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, variant)
    whole = load_rank(folder)
    for size in (2, 4):
        ranks = Ranks(folder, size)
        check_parts(whole, ranks)
        check_same_tokens(whole, ranks)


@pytest.mark.parametrize(("family", "variant"), SPECIAL)
def test_other_variants(tmp_path: Path, family: str, variant: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, variant)
    whole, ranks = load_rank(folder), Ranks(folder, 2)
    check_parts(whole, ranks)
    check_same_tokens(whole, ranks)


@pytest.mark.parametrize(
    "make",
    [
        renamed.internlm,
        renamed.internlm2,
        renamed.xverse,
        renamed.baichuan,
        lambda folder: renamed.baichuan(folder, alibi=True),
        renamed.chatglm,
        lambda folder: renamed.chatglm(folder, multi_query=False),
        renamed.qwen,
    ],
)
def test_families_of_remote_code(tmp_path: Path, make: Callable[[Path], tuple[Path, Any]]) -> None:
    folder, _ = make(tmp_path)
    whole, ranks = load_rank(folder), Ranks(folder, 4)
    check_parts(whole, ranks)
    check_same_tokens(whole, ranks)


@pytest.mark.parametrize(
    ("family", "variant"), [("llama", "gqa"), ("llama", "tied"), ("phi", ""), ("gemma2", "")]
)
def test_a_vocabulary_with_a_rest(tmp_path: Path, family: str, variant: str) -> None:
    """Four ranks have 25, 25, 25 and 22 of 97 tokens."""
    check(make_tiny_checkpoint(tmp_path, family, variant, vocab_size=97), 4)


def test_queries_scaled_by_log_n(tmp_path: Path) -> None:
    folder, _ = renamed.qwen(
        tmp_path, seq_length=4, max_position_embeddings=64, use_logn_attn=True, use_dynamic_ntk=True
    )
    check(folder, 2)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_bfloat16_gives_all_ranks_the_same_bits(tmp_path: Path, family: str) -> None:
    ranks = Ranks(make_tiny_checkpoint(tmp_path, family), 4, dtype=torch.bfloat16)
    ranks.greedy(8)


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
def test_shared_experts_take_no_sum_of_their_own(tmp_path: Path, family: str) -> None:
    ranks = Ranks(make_tiny_checkpoint(tmp_path, family), 2)
    ranks.greedy(1)
    assert ranks.threads.num_sums == 2 * ranks.models[0].config.num_layers


# Experts in one form of each way to store scales.
@pytest.mark.parametrize(
    ("form", "family"),
    [
        *((form, "llama") for form in FORMATS if not form.startswith("gptq")),
        *((form, "mixtral") for form in ("fp8 blocks", "awq", "nvfp4", "float-quantized")),
    ],
)
def test_quantized_checkpoints(tmp_path: Path, form: str, family: str) -> None:
    quantized, _ = both(tmp_path, FORMATS[form], family)
    check(quantized, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_mxfp4(tmp_path: Path, size: int) -> None:
    quantized, _ = make_both(tmp_path, changes={"intermediate_size": 128})
    check(quantized, size)


# Families differ by what is cut, kinds by where scales lie: a row, a block, a group.
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in ("fp8", "fp8_block", "ifq", "ifq_nf4", "int4")),
        *((family, name) for family in ("glm", "gpt2", "qwen3_moe", "gpt_oss")
          for name in ("fp8_block", "int4")),
    ],
)  # fmt: skip
def test_weights_quantized_while_they_are_loaded(tmp_path: Path, name: str, family: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, changes=(FAMILIES | MIXTURES)[family])
    check(folder, 2, quantization=name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "glm4_moe", "phi", "minimax_m2"])
def test_random_weights_are_one_model(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family)
    whole, ranks = load_rank(folder, load_format="dummy"), Ranks(folder, 2, load_format="dummy")
    check_parts(whole, ranks)
    check_same_tokens(whole, ranks)


def refusal(folder: Path, config: ModelConfig, size: int) -> str:
    """Why ranks cannot run a model: the check says it, and the loader before it reads a weight."""
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, size)
    assert caught.value.field == "tensor_parallel_size" and caught.value.value == size
    if size > 1:
        with pytest.raises(ConfigError) as loading:
            load_model(
                folder, config, dtype=torch.float32, device="cpu", show_progress=False,
                collectives=ThreadCollectives(ThreadRanks(size), 0),
            )  # fmt: skip
        assert str(loading.value) == str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({}, 0, "must be 1 or more"),
        ({"num_heads": 6}, 4, "does not divide the 6 attention heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2,
         "neither divides the 3 KV heads nor is a multiple of them"),
        ({"intermediate_size": 50}, 4, "does not divide intermediate_size=50"),
        ({"vocab_size": 9}, 4, "leaves a rank without a token of the 9 of the vocabulary"),
    ],
)  # fmt: skip
def test_sizes_that_ranks_cannot_share(
    tmp_path: Path, changes: dict[str, int], size: int, reason: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    config = replace(load_model_config(folder), **changes)  # type: ignore[arg-type]
    assert refusal(folder, config, size) == reason


def test_expert_sizes_that_ranks_cannot_share(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen2_moe", changes={"moe_intermediate_size": 30})
    config = load_model_config(folder)
    assert refusal(folder, config, 4) == "does not divide expert_size=30"
    shared = replace(config, expert_size=32, shared_expert_size=30)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="does not divide shared_expert_size=30"):
        check_ranks(shared, 4)


def test_groups_that_ranks_cannot_share(tmp_path: Path) -> None:
    changes = {**FAMILIES["llama"], "intermediate_size": 192}
    folder = make_tiny_checkpoint(tmp_path, "llama", changes=changes)
    config = load_model_config(folder, quantization="int4")
    reason = "each rank has 48 columns of model.layers.0.mlp.down_proj, whose groups are of 64"
    assert refusal(folder, config, 4) == reason


def test_columns_in_an_order_of_their_own(tmp_path: Path) -> None:
    quantized, _ = both(tmp_path, FORMATS["gptq ordered"])
    assert "order of their own (desc_act=True)" in refusal(
        quantized, load_model_config(quantized), 2
    )


def test_models_of_transformers_run_on_one_rank(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    reason = refusal(folder, load_transformers_config(folder), 2)
    assert reason.startswith("LlamaForCausalLM runs by transformers' own code")


def test_models_without_a_head_run_on_one_rank(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="without its language model's head runs on one rank"):
        load_model(
            folder, load_model_config(folder), dtype=torch.float32, device="cpu",
            show_progress=False, build=HeadlessLM, collectives=ThreadCollectives(ThreadRanks(2), 0),
        )  # fmt: skip


def test_the_configuration_of_a_rank(tmp_path: Path) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path, "falcon", "alibi"))
    assert sharded_config(config, Rank(0, 1)) is config
    own = [sharded_config(config, Rank(index, 2)) for index in range(2)]
    assert all(one.num_heads == config.num_heads // 2 for one in own)
    assert own[0].alibi_slopes is not None and own[1].alibi_slopes is not None
    assert own[0].alibi_slopes + own[1].alibi_slopes == config.alibi_slopes
    assert all(one.vocab_size == config.vocab_size for one in own)
    shared = sharded_config(replace(config, num_kv_heads=1), Rank(3, 4))
    assert shared.num_kv_heads == 1 and shared.rank == Rank(3, 4)


def test_the_native_executor_runs_whole_models_alone(tmp_path: Path) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path, "llama", "heads_of_16"))
    assert unsupported_reason(config, torch.float32) is None
    own = sharded_config(config, Rank(0, 2))
    assert unsupported_reason(own, torch.float32) == "it has no sums over ranks"


def test_runs_inside_a_range_of_rows() -> None:
    cut = Cut(0, 10, ((1, 2), (6, 3)))
    assert runs_inside(cut, 0, 10) == [(1, 2), (6, 3)]
    assert runs_inside(cut, 2, 5) == [(0, 1), (4, 1)]
    assert runs_inside(cut, 10, 20) == [(1, 2), (6, 3), (11, 2), (16, 3)]
    assert cut.index().tolist() == [1, 2, 6, 7, 8] and cut.size == 5
