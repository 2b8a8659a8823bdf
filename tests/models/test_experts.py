"""Mixtures of experts: routers, experts, and what their config.json may say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig as TheirConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.gpu.weight_offload import GIB, plan_offload
from hetero_llm.models import experts as experts_module
from hetero_llm.models.configs.glm import Glm4MoeConfig
from hetero_llm.models.configs.mixture import (
    MixtralConfig,
    PhiMoEConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from hetero_llm.models.experts import (
    Experts,
    SigmoidRouter,
    sigmoid_top_k,
    softmax_top_k,
    sparse_mixer,
)
from hetero_llm.models.invariant import make_batch_invariant, product_of_rows, product_of_tiles
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.registry import model_class
from tests.models.test_registry import log_probs, random_sequences, reference_log_probs
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

HIDDEN, INNER, EXPERTS = 24, 20, 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The first variant of a family, written once; tests that change it take a copy."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = make_tiny_checkpoint(path, family, dtype=torch.bfloat16)
        return made[family]

    return folder


def copied(folder: Path, to: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """A folder with a changed config.json and the same weights."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return rewrite_config(to, remove=remove, **changes)


# -- Routers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_top_k(renormalize: bool) -> None:
    logits = torch.randn(7, EXPERTS) * 2
    ids, weights = softmax_top_k(logits, 3, renormalize=renormalize, rounded=False)
    for row, chosen, shares in zip(logits, ids.tolist(), weights, strict=True):
        powers = row.double().exp()
        order = sorted(range(EXPERTS), key=lambda e, row=row: -row[e].item())[:3]
        assert chosen == order
        total = powers[order].sum() if renormalize else powers.sum()
        torch.testing.assert_close(shares.double(), powers[order] / total, rtol=1e-6, atol=0)


def test_weights_are_rounded_only_where_asked() -> None:
    logits = torch.randn(50, EXPERTS).bfloat16()
    rounded = softmax_top_k(logits, 2, renormalize=True, rounded=True)[1]
    exact = softmax_top_k(logits, 2, renormalize=True, rounded=False)[1]
    assert rounded.dtype == exact.dtype == torch.float32
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_sparse_mixer_is_that_of_transformers(dtype: torch.dtype, jitter: float) -> None:
    logits = torch.randn(300, EXPERTS).to(dtype)
    logits[:20] -= 10  # all below zero
    ids, weights = sparse_mixer(logits, jitter)
    expected, expected_ids = sparsemixer(logits, jitter, False)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected.float())
    # Somebody near, and nobody near: both are there, unless nobody can be.
    assert (weights == 1).any() and (jitter == 0 or (weights < 1).any())


@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_top_k(renormalize: bool) -> None:
    """The correction chooses and is no part of the weights."""
    logits, correction = torch.randn(60, EXPERTS) * 2, torch.randn(EXPERTS)
    ids, weights = sigmoid_top_k(logits, correction, 3, renormalize=renormalize, scale=2.5)
    moved = 0
    for row, chosen, shares in zip(logits, ids.tolist(), weights, strict=True):
        scores = row.double().sigmoid()
        order = (scores + correction.double()).argsort(descending=True)[:3]
        assert chosen == order.tolist()
        moved += set(chosen) != set(scores.argsort(descending=True)[:3].tolist())
        total = scores[order].sum() if renormalize else 1.0
        torch.testing.assert_close(shares.double(), 2.5 * scores[order] / total, rtol=1e-6, atol=0)
    assert 0 < moved < len(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (4, 4), (3, 1)])
def test_sigmoid_router_is_that_of_transformers(dtype: torch.dtype, groups: int, kept: int) -> None:
    settings: dict[str, Any] = {"n_group": groups, "topk_group": kept, "norm_topk_prob": kept != 2}
    config = TheirConfig(
        hidden_size=HIDDEN, n_routed_experts=12, num_experts_per_tok=4,
        routed_scaling_factor=1.5, **settings,
    )  # fmt: skip
    theirs = Glm4MoeTopkRouter(config).to(dtype)
    ours = SigmoidRouter(
        HIDDEN, 12, 4, groups=groups, kept_groups=kept, renormalize=kept != 2, scale=1.5
    )
    with torch.no_grad():
        theirs.weight.normal_(std=0.3)
        theirs.e_score_correction_bias = torch.randn(12) * 0.3
        ours.gate.weight.copy_(theirs.weight)
        ours.correction.copy_(theirs.e_score_correction_bias)
        x = torch.randn(200, HIDDEN).to(dtype)
        ids, weights = ours(x)
        _, expected, expected_ids = theirs(x)
    order, expected_order = ids.argsort(1), expected_ids.argsort(1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order), expected.gather(1, expected_order), rtol=1e-5, atol=0
    )
    used = torch.zeros(200, groups).scatter_(1, ids // (12 // groups), 1.0).sum(1)
    assert used.max() == min(kept, 4)


def test_sigmoid_routers_stay_in_float32(folders: Callable[[str], Path]) -> None:
    for family in ("glm4_moe", "minimax_m2"):
        folder = folders(family)
        model = load_model(
            folder, load_model_config(folder), dtype=torch.bfloat16, device="cpu",
            show_progress=False,
        )  # fmt: skip
        routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
        assert routers
        for router in routers:
            assert router.gate.weight.dtype == router.correction.dtype == torch.float32
            ids, weights = router(torch.randn(4, 32).bfloat16())
            assert weights.dtype == torch.float32 and ids.shape == (4, 3)


# -- Experts ------------------------------------------------------------------------------------


def random_experts(dtype: torch.dtype = torch.float32) -> Experts:
    experts = Experts(EXPERTS, HIDDEN, INNER, "silu")
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    return experts.to(dtype).requires_grad_(False)


def by_definition(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            gate, up = (experts.gate_up[expert].double() @ x[row].double()).chunk(2)
            total[row] += weight * (experts.down[expert].double() @ (F.silu(gate) * up))
    return total


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_both_ways_over_experts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    experts, x = random_experts(), torch.randn(rows, HIDDEN)
    ids, weights = softmax_top_k(torch.randn(rows, EXPERTS), 2, renormalize=True, rounded=False)
    expected = by_definition(experts, x, ids, weights).float()
    own = experts(x, ids, weights)
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)

    def all_rows(*args: Any) -> Tensor:
        return experts_module.sum_by_all_tokens(*args, num_experts=EXPERTS)

    monkeypatch.setattr(experts_module, "sum_by_own_tokens", all_rows)
    torch.testing.assert_close(experts(x, ids, weights), expected, atol=1e-5, rtol=0)


def test_an_expert_that_overflows_reaches_its_own_rows_only() -> None:
    experts, x = random_experts(), torch.randn(4, HIDDEN)
    experts.down[2] = float("inf")
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [5, 4]])

    def mlp(which: Tensor | slice, expert: int) -> Tensor:
        return F.linear(experts.activation(F.linear(x[which], experts.gate_up[expert])),
                        experts.down[expert])  # fmt: skip

    weights = torch.full((4, 2), 0.5)
    total = experts_module.sum_by_all_tokens(mlp, x, ids, weights, num_experts=EXPERTS)
    assert total.isfinite().all(1).tolist() == [True, False, True, True]


def test_batch_invariance_uses_fixed_shapes(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(folders("mixtral"))

    def product() -> object:
        model = load_model(
            folders("mixtral"), config, dtype=torch.float32, device="cpu", show_progress=False
        )
        make_batch_invariant(model)
        found = {m.function.keywords["product"] for m in model.modules() if isinstance(m, Experts)}
        assert len(found) == 1
        return found.pop()

    assert product() is product_of_tiles
    plain = F.linear

    def dependent(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # A library whose last row of a call rounds differently, in the experts' shapes alone.
        out = plain(x, weight, bias)
        if x.shape[0] > 1 and config.intermediate_size in weight.shape:
            out[-1] = out[-1] * (1 + 1e-6)
        return out

    monkeypatch.setattr(F, "linear", dependent)
    assert product() is product_of_rows


# -- Files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "phimoe"]
)
def test_bfloat16_stays_close_to_transformers(folders: Callable[[str], Path], family: str) -> None:
    folder = folders(family)
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.bfloat16, device="cpu", show_progress=False)
    sequences = random_sequences(*[4] * 24)
    exact = torch.cat(reference_log_probs(folder, sequences, torch.float32))
    half = torch.cat(reference_log_probs(folder, sequences, torch.bfloat16))
    ours = torch.cat(log_probs(model, sequences))
    # Rounding sends a few rows to other experts, and who these are is chance: hence medians.
    error, theirs = ((logits - exact).abs().mean(-1).median() for logits in (ours, half))
    assert 0 < error <= 1.25 * theirs


def test_the_name_of_the_remote_code_is_the_same_model(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(folders("phimoe"), tmp_path, architectures=["PhiMoEForCausalLM"])
    sequences = random_sequences(5)
    found = []
    for path in (folder, folders("phimoe")):
        config = load_model_config(path)
        model = load_model(path, config, dtype=torch.float32, device="cpu", show_progress=False)
        found.append(log_probs(model, sequences)[0])
    assert torch.equal(*found)


def test_a_missing_expert_is_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(folders("mixtral"), tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = load_model_config(folder)
    with pytest.raises(ModelLoadError, match=re.escape(f"tensors missing: {name}")):
        load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("glm4_moe", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("glm4_moe", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("minimax_m2", "model.layers.1.self_attn.k_norm.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.5.gate_proj.weight"),
    ],
)
def test_missing_and_wrong_parts_of_a_mixture_are_named(
    folders: Callable[[str], Path], tmp_path: Path, family: str, name: str
) -> None:
    folder = copied(folders(family), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = load_model_config(folder)
    whole = tensors.pop(name)
    for changed, message in (
        ({}, f"tensors missing: {name}"),
        ({name: torch.cat((whole, whole))}, f"tensors of wrong shape: {name}"),
    ):
        save_file({**tensors, **changed}, file, metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=re.escape(message)):
            load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)


@pytest.mark.parametrize(
    ("family", "key"),
    [("glm4_moe", "num_nextn_predict_layers"), ("minimax_m2", "num_mtp_modules")],
)
def test_layers_that_predict_further_tokens_are_skipped(
    folders: Callable[[str], Path], tmp_path: Path, family: str, key: str
) -> None:
    """As many as config.json says, and no other ones; scales of their KV cache with them."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    folder = copied(
        folders(family), tmp_path, **{key: 1},
        quantization_config={
            "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme,
        },
    )  # fmt: skip
    file = folder / "model.safetensors"
    tensors = load_file(file)

    def load_with(*names: str) -> Any:
        extra = {name: torch.ones(3) for name in names}
        save_file({**tensors, **extra}, file, metadata={"format": "pt"})
        config = load_model_config(folder)
        return load_model(folder, config, dtype=torch.float32, device="cpu", show_progress=False)

    skipped = ("eh_proj.weight", "mlp.experts.0.up_proj.weight", "self_attn.k_scale")
    model = load_with(*(f"model.layers.3.{name}" for name in skipped))
    expected = load_with()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        load_with("model.layers.4.eh_proj.weight")
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.1\.eh_proj\.weight"):
        load_with("model.layers.1.eh_proj.weight")
    rewrite_config(folder, **{key: 0})
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        load_with("model.layers.3.eh_proj.weight")


def test_fields(folders: Callable[[str], Path]) -> None:
    mixtral = load_model_config(folders("mixtral"))
    assert isinstance(mixtral, MixtralConfig)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.expert_size) == (4, 2, 56)
    qwen = load_model_config(folders("qwen2_moe"))
    assert isinstance(qwen, Qwen2MoeConfig)
    assert (qwen.num_experts, qwen.experts_per_token, qwen.expert_size) == (6, 3, 24)
    assert qwen.qkv_bias and not qwen.out_bias and not qwen.renormalize
    qwen3 = load_model_config(folders("qwen3_moe"))
    assert isinstance(qwen3, Qwen3MoeConfig)
    assert (qwen3.num_experts, qwen3.experts_per_token, qwen3.expert_size) == (6, 3, 24)
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.renormalize
    glm = load_model_config(folders("glm4_moe"))
    assert isinstance(glm, Glm4MoeConfig)
    assert (glm.num_experts, glm.experts_per_token, glm.expert_size) == (6, 3, 24)
    assert glm.sparse_layers == (False, True, True) and glm.router_scale == 2.5
    assert glm.qk_norm and glm.qkv_bias and not glm.out_bias
    assert (glm.shared_expert_size, glm.further_layers) == (24, 1)
    minimax = load_model_config(folders("minimax_m2"))
    assert isinstance(minimax, MixtralConfig) and not minimax.qk_norm
    assert (minimax.num_experts, minimax.expert_size, minimax.further_layers) == (6, 24, 0)
    phi = load_model_config(folders("phimoe"))
    assert isinstance(phi, PhiMoEConfig)
    assert phi.qkv_bias and phi.out_bias and phi.head_bias and phi.router_jitter == 0.01


def test_default_base_of_the_rotary_embedding(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    thetas = {
        "mixtral": 1e6, "phimoe": 1e6, "qwen2_moe": 1e4, "qwen3_moe": 1e4, "glm4_moe": 1e4,
        "minimax_m2": 5e6,
    }  # fmt: skip
    for family, theta in thetas.items():
        folder = copied(folders(family), tmp_path, remove=("rope_parameters",))
        config = load_model_config(folder)
        assert config.rope is not None and config.rope.theta == theta
        config = load_model_config(rewrite_config(folder, rope_theta=500.0))
        assert config.rope is not None and config.rope.theta == 500.0


def test_layers_of_qwen2_moe(folders: Callable[[str], Path], tmp_path: Path) -> None:
    def read(remove: tuple[str, ...] = (), **changes: Any) -> Qwen2MoeConfig:
        config = load_model_config(copied(folders("qwen2_moe"), tmp_path, remove=remove, **changes))
        assert isinstance(config, Qwen2MoeConfig)
        return config

    assert read(decoder_sparse_step=2).sparse_layers == (False, True, False)
    assert read(mlp_only_layers=[0, 2]).sparse_layers == (False, True, False)
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}
    assert read(("layer_types",), **window).sliding_windows == (7, None, 7)
    assert read(("layer_types",), **window, max_window_layers=1).sliding_windows[2] is None
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert read(**window, layer_types=types).sliding_windows == (None, 7, None)
    assert read(("layer_types",), sliding_window=7).sliding_windows == (None,) * 3


def test_the_forms_of_config_json(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As the published checkpoints have it, and as transformers writes it."""

    def read(family: str, remove: tuple[str, ...] = (), **changes: Any) -> Any:
        return load_model_config(copied(folders(family), tmp_path, remove=remove, **changes))

    qwen = read("qwen3_moe", ("num_local_experts",), num_experts=6, max_window_layers=3)
    assert (qwen.num_experts, qwen.sliding_windows) == (6, (None,) * 3)
    assert read("qwen3_moe", ("head_dim",)).head_dim == 8
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7}
    assert read("qwen3_moe", **window).sliding_windows == (7,) * 3
    assert read("qwen3_moe", mlp_only_layers=[0]).sparse_layers == (False, True, True)
    spelling = ("rope_parameters",)
    for family in ("glm", "glm4", "glm4_moe"):
        rope = read(family, spelling, rope_theta=500.0).rope
        assert (rope.theta, rope.rotary_dim) == (500.0, 8)
        assert read(family, spelling, partial_rotary_factor=1.0).rope.rotary_dim == 16
    assert read("glm", ("attention_bias", "head_dim")).head_dim == 128
    minimax = read(
        "minimax_m2", spelling, rope_theta=500.0, rotary_dim=4, use_qk_norm=True,
        qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
        shared_intermediate_size=0, attn_type_list=[1, 1, 1],
    )  # fmt: skip
    assert (minimax.rope.theta, minimax.rope.rotary_dim) == (500.0, 4)
    assert read("minimax_m2", (*spelling, "rotary_dim")).rope.rotary_dim == 16


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5: there are 4 experts"),
        ("mixtral", {"num_local_experts": None}, "the key 'num_local_experts' is missing"),
        ("mixtral", {"attention_bias": True}, "attention_bias=True: not supported with Mixtral"),
        ("mixtral", {"logits_scaling": 8.0}, "logits_scaling=8.0: not supported"),
        ("mixtral", {"num_key_value_heads": 3}, "num_key_value_heads=3: does not divide"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: not supported"),
        ("mixtral", {"hidden_size": 30, "head_dim": None}, "does not divide hidden_size=30"),
        ("qwen2_moe", {"num_experts": None}, "the key 'num_experts' is missing"),
        ("qwen2_moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers=[0.5]: a list of layers"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0: a positive integer"),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, "a list of 3 entries is needed"),
        (
            "qwen2_moe",
            {"layer_types": ["linear_attention"] * 3},
            "'linear_attention' is not supported",
        ),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention"] * 3},
            "sliding_attention needs use_sliding_window",
        ),
        ("qwen2_moe", {"layer_types": None, "max_window_layers": -1}, "max_window_layers=-1: a"),
        ("qwen3_moe", {"num_local_experts": None}, "the key 'num_experts' is missing"),
        ("qwen3_moe", {"num_experts": 5}, "num_local_experts=6: differs from num_experts"),
        (
            "qwen3_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            "mixed layers are not supported with Qwen3MoeForCausalLM",
        ),
        ("glm", {"sliding_window": 5}, "sliding_window=5: not supported with GlmForCausalLM"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1: a number of layers"),
        ("glm4_moe", {"num_nextn_predict_layers": 1.5}, "num_nextn_predict_layers=1.5: a number"),
        ("glm4_moe", {"n_group": 4}, "n_group=4: groups of as many of the 6 experts"),
        ("glm4_moe", {"n_group": 6}, "n_group=6: groups of as many of the 6 experts"),
        ("glm4_moe", {"topk_group": 2}, "topk_group=2: 3 experts in at most 1 groups are needed"),
        (
            "glm4_moe",
            {"n_group": 3, "topk_group": 1},
            "topk_group=1: 3 experts in at most 3 groups are needed",
        ),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor=0: a number above 0"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0: a positive integer"),
        ("glm4_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7: there are 6 experts"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax': not supported"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False: not supported"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list=[1, 0, 1]: not supported"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8: not supp"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3: this router chooses 2"),
        ("phimoe", {"router_jitter_noise": -1}, "router_jitter_noise=-1: a number from 0 on"),
    ],
)
def test_what_is_not_computed(
    folders: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load_model_config(copied(folders(family), tmp_path, **changes))


def test_kv_heads_must_be_stated(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(folders("mixtral"), tmp_path, remove=("num_key_value_heads",))
    with pytest.raises(ModelLoadError, match="the key 'num_key_value_heads' is missing"):
        load_model_config(folder)


def test_experts_do_not_wait_on_the_host(folders: Callable[[str], Path]) -> None:
    config = load_model_config(folders("mixtral"))
    with pytest.raises(ConfigError, match="cpu_offload_gb=1.0.*experts stay on the GPU: at most"):
        plan_offload(config, torch.bfloat16, 1.0)
    plan = plan_offload(config, torch.bfloat16, 10_000 / GIB)
    assert plan.chosen and plan.moved_bytes <= 10_000


def test_a_row_meets_the_experts_that_it_visits(tmp_path: Path) -> None:
    config = load_model_config(make_tiny_checkpoint(tmp_path, "mixtral"))
    assert isinstance(config, MixtralConfig)
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    expert = 3 * config.hidden_size * config.intermediate_size
    idle = (config.num_experts - config.experts_per_token) * config.num_layers * expert
    total = sum(p.numel() for p in model.parameters())
    assert idle > 0 and model.parameters_per_token() == total - idle
