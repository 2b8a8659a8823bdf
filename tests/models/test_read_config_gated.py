"""config.json of the gated families beyond Llama: the keys of real files, defaults, mistakes; and
what of them the native CPU executor runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.cpu.executor import unsupported_reason
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.gemma import Gemma2Config
from hetero_llm.models.configs.qwen import QWenConfig
from tests.models.test_read_config import load

_BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "transformers_version": "4.40.0",
}


def of(architecture: str, **keys: Any) -> dict[str, Any]:
    return {**_BASE, "architectures": [architecture], **keys}


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
GEMMA = of("GemmaForCausalLM", num_key_value_heads=1, head_dim=16, hidden_act="gelu")
GEMMA2 = of(
    "Gemma2ForCausalLM",
    num_key_value_heads=2,
    head_dim=16,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    query_pre_attn_scalar=224,
    sliding_window=16,
    cache_implementation="hybrid",
    attention_dropout=0.0,
)
PHI3 = of("Phi3ForCausalLM", rope_scaling=None, resid_pdrop=0.0, embd_pdrop=0.0)
LONG_PHI3 = of(
    "Phi3ForCausalLM",
    num_key_value_heads=2,
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    rope_scaling={"type": "su", **FACTORS},
    sliding_window=262144,
    attention_bias=False,
)
INTERNLM = of("InternLMForCausalLM", bias=True)
INTERNLM2 = of(
    "InternLM2ForCausalLM",
    num_key_value_heads=2,
    bias=False,
    rope_theta=1000000,
    rope_scaling={"type": "dynamic", "factor": 2.0},
    attn_implementation="eager",
    pretraining_tp=1,
)
XVERSE = of("XverseForCausalLM", max_tokenizer_truncation=6144)
BAICHUAN = of("BaichuanForCausalLM", model_max_length=2048, z_loss_weight=0)
CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "classifier_dropout": None,
    "ffn_hidden_size": 96,
    "fp32_residual_connection": False,
    "hidden_size": 64,
    "kv_channels": 16,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 3,
    "original_rope": True,
    "padded_vocab_size": 104,
    "post_layer_norm": True,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100,
    "eos_token_id": [97, 98],
}
QWEN: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "attn_dropout_prob": 0.0,
    "bf16": False,
    "fp16": False,
    "fp32": False,
    "kv_channels": 16,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 32768,
    "no_bias": True,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 8192,
    "use_cache_quantization": False,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
}
YI = of(
    "LlamaForCausalLM",
    num_key_value_heads=2,
    pretraining_tp=1,
    attention_bias=False,
    attention_dropout=0.0,
    mlp_bias=False,
    rope_scaling=None,
    rope_theta=5000000.0,
    tie_word_embeddings=False,
)
EVERY = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "phi3": PHI3,
    "long_phi3": LONG_PHI3,
    "internlm": INTERNLM,
    "internlm2": INTERNLM2,
    "xverse": XVERSE,
    "baichuan": BAICHUAN,
    "chatglm": CHATGLM,
    "qwen": QWEN,
    "yi": YI,
}


@pytest.mark.parametrize("raw", EVERY.values(), ids=EVERY)
def test_real_files_load(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = load(tmp_path, raw)
    assert (config.hidden_size, config.head_dim, config.intermediate_size) == (64, 16, 96)
    assert config.torch_dtype == "bfloat16"
    assert config.architecture == raw["architectures"][0]


def test_gemma(tmp_path: Path) -> None:
    config = load(tmp_path, GEMMA)
    assert (config.hidden_act, config.tie_word_embeddings) == ("gelu_pytorch_tanh", True)
    missing = {k: v for k, v in GEMMA.items() if k not in ("head_dim", "hidden_act")}
    config = load(tmp_path, missing)
    assert (config.head_dim, config.hidden_act) == (256, "gelu_pytorch_tanh")
    for keys in ({"hidden_activation": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}):
        assert load(tmp_path, {**GEMMA, **keys}).hidden_act == "gelu_pytorch_tanh"
    assert load(tmp_path, {**GEMMA, "hidden_act": "silu"}).hidden_act == "silu"


def test_gemma2(tmp_path: Path) -> None:
    config = load(tmp_path, GEMMA2)
    assert isinstance(config, Gemma2Config)
    assert config.sliding_windows == (16, None, 16, None)
    assert (config.attn_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.attn_scale == 224**-0.5
    wanted = ["full_attention"] * 3 + ["sliding_attention"]
    assert load(tmp_path, {**GEMMA2, "layer_types": wanted}).sliding_windows == (None,) * 3 + (16,)
    assert load(tmp_path, {**GEMMA2, "sliding_window": None}).sliding_windows == (None,) * 4
    full = load(tmp_path, GEMMA2, disable_sliding_window=True)
    assert (full.sliding_windows, full.max_model_len) == ((None,) * 4, 16)
    keys = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    bare = load(tmp_path, {k: v for k, v in GEMMA2.items() if k not in keys})
    assert isinstance(bare, Gemma2Config)
    assert (bare.attn_softcap, bare.final_softcap, bare.attn_scale) == (50.0, 30.0, 1 / 16)


def test_phi3(tmp_path: Path) -> None:
    config = load(tmp_path, PHI3)
    assert (config.num_kv_heads, config.norm_eps) == (4, 1e-5)
    assert config.sliding_windows == (None,) * 4
    assert load(tmp_path, {**PHI3, "sliding_window": 32}).sliding_windows == (32,) * 4
    # Its class writes this key always, and looks at it for longrope only.
    ignored = load(tmp_path, {**PHI3, "original_max_position_embeddings": 64})
    assert ignored.rope == config.rope
    partial = load(tmp_path, {**PHI3, "partial_rotary_factor": 0.75})
    assert partial.rope is not None and partial.rope.rotary_dim == 12


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_of_phi3(tmp_path: Path, name: str) -> None:
    raw = {**LONG_PHI3, "rope_scaling": {"type": name, **FACTORS}}
    config = load(tmp_path, raw)
    assert config.max_model_len == 131072
    rope = config.rope
    assert rope is not None
    assert (rope.scaling_type, rope.original_max_position) == ("longrope", 4096)
    assert (rope.short_factors, rope.long_factors) == ((1.0,) * 8, (4.0,) * 8)
    assert rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)  # 2^5 times 2^12
    user = load(tmp_path, PHI3, rope_scaling={"type": name, **FACTORS})
    assert user.rope is not None and user.rope.scaling_type == "longrope"


def test_internlm(tmp_path: Path) -> None:
    config = load(tmp_path, INTERNLM)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, False)
    assert not load(tmp_path, {**INTERNLM, "bias": False}).qkv_bias
    rotary = {"base": 50000, "type": "dynamic", "scaling_factor": 2.0}
    config = load(tmp_path, {**INTERNLM, "rotary": rotary})
    assert config.rope is not None
    assert (config.rope.theta, config.rope.scaling_type, config.rope.factor) == (
        *(50000.0, "dynamic", 2.0),
    )
    assert config.max_model_len == 8192
    assert load(tmp_path, INTERNLM2).max_model_len == 8192
    assert load(tmp_path, INTERNLM2).num_kv_heads == 2


def test_baichuan_rotates_by_name_and_size(tmp_path: Path) -> None:
    alibi = load(tmp_path, BAICHUAN)
    assert alibi.rope is None and alibi.alibi_slopes == (1 / 4, 1 / 16, 1 / 64, 1 / 256)
    large = load(tmp_path, {**BAICHUAN, "hidden_size": 4096, "num_attention_heads": 32})
    assert large.rope is not None and large.alibi_slopes is None
    first = load(tmp_path, {**BAICHUAN, "architectures": ["BaiChuanForCausalLM"]})
    assert first.rope is not None and first.alibi_slopes is None
    length = {k: v for k, v in BAICHUAN.items() if k != "max_position_embeddings"}
    assert (alibi.max_model_len, load(tmp_path, length).max_model_len) == (4096, 2048)
    # 40 heads, as the models of 13B have: 32 of one series, 8 of the next.
    slopes = load(tmp_path, {**BAICHUAN, "hidden_size": 640, "num_attention_heads": 40})
    assert slopes.alibi_slopes is not None
    assert slopes.alibi_slopes[:2] == (2**-0.25, 2**-0.5)
    assert slopes.alibi_slopes[32:34] == (2**-0.125, 2**-0.375)
    with pytest.raises(ConfigError, match="no rotary embedding"):
        load(tmp_path, BAICHUAN, rope_theta=500.0)


def test_chatglm(tmp_path: Path) -> None:
    config = load(tmp_path, CHATGLM)
    assert (config.num_layers, config.num_kv_heads, config.vocab_size) == (3, 2, 104)
    assert (config.max_model_len, config.eos_token_ids) == (8192, (97, 98))
    assert config.rope is not None
    assert (config.rope.theta, config.rope.rotary_dim) == (5e6, 8)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, False)
    config = load(tmp_path, {**CHATGLM, "multi_query_attention": False, "add_bias_linear": True})
    assert (config.num_kv_heads, config.out_bias, config.mlp_bias) == (4, True, True)
    # What ChatGLM2-32k means by its rope_ratio can be asked for.
    linear = {"rope_type": "linear", "factor": 4.0}
    config = load(tmp_path, CHATGLM, rope_scaling=linear, rope_theta=10000.0)
    assert config.rope is not None
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.factor) == (10000.0, 8, 4.0)


def test_qwen(tmp_path: Path) -> None:
    config = load(tmp_path, QWEN)
    assert isinstance(config, QWenConfig) and config.rope is not None
    assert (config.max_model_len, config.max_position_embeddings) == (32768, 8192)
    assert (config.rope.scaling_type, config.rope.original_max_position) == ("qwen_ntk", 8192)
    assert (config.logn_length, config.torch_dtype) == (8192, "bfloat16")
    plain = {**QWEN, "use_dynamic_ntk": False, "use_logn_attn": False, "fp16": True}
    config = load(tmp_path, plain)
    assert isinstance(config, QWenConfig) and config.rope is not None
    assert (config.max_model_len, config.logn_length) == (8192, None)
    assert (config.rope.scaling_type, config.torch_dtype) == ("default", "float16")
    scaled = load(tmp_path, QWEN, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert scaled.rope is not None
    assert (scaled.rope.scaling_type, scaled.max_model_len) == ("linear", 16384)


MISTAKES = [
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA, {"num_key_value_heads": None}, "num_key_value_heads"),
    (GEMMA, {"hidden_activation": "relu"}, "hidden_activation"),
    (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (GEMMA, {"sliding_window": 16}, "sliding_window"),
    (GEMMA2, {"final_logit_softcapping": -1}, "final_logit_softcapping"),
    (GEMMA2, {"layer_types": ["full_attention"]}, "layer_types"),
    (PHI3, {"attention_bias": True}, "attention_bias"),
    (PHI3, {"rope_scaling": {"type": "su"}}, "short_factor"),
    (LONG_PHI3, {"rope_scaling": {"type": "su", **FACTORS, "long_factor": [1.0]}}, "long_factor"),
    (LONG_PHI3, {"rope_scaling": {"type": "su", **FACTORS, "beta_fast": 1}}, "beta_fast"),
    (INTERNLM, {"rotary": {"type": "static"}}, "rotary"),
    (INTERNLM, {"rotary": {"type": "origin", "bass": 1}}, "rotary"),
    (INTERNLM, {"rotary": {"type": "origin"}, "rope_theta": 5.0}, "rope_theta"),
    (INTERNLM2, {"sliding_window": 16}, "sliding_window"),
    (INTERNLM2, {"bias": "no"}, "bias"),
    (XVERSE, {"bias": True}, "bias"),
    (BAICHUAN, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    (BAICHUAN, {"num_key_value_heads": 2}, "num_key_value_heads"),
    (BAICHUAN, {"model_max_length": "2048"}, "model_max_length"),
    (CHATGLM, {"position_encoding_2d": True}, "position_encoding_2d"),
    (CHATGLM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
    (CHATGLM, {"fp32_residual_connection": True}, "fp32_residual_connection"),
    (CHATGLM, {"quantization_bit": 4}, "quantization_bit"),
    (CHATGLM, {"pre_seq_len": 128}, "pre_seq_len"),
    (CHATGLM, {"rmsnorm": False}, "rmsnorm"),
    (CHATGLM, {"post_layer_norm": False}, "post_layer_norm"),
    (CHATGLM, {"multi_query_group_num": 3}, "multi_query_group_num"),
    (CHATGLM, {"vision_config": {"hidden_size": 8}}, "vision_config"),
    (QWEN, {"visual": {"width": 8}}, "visual"),
    (QWEN, {"use_cache_quantization": True}, "use_cache_quantization"),
    (QWEN, {"scale_attn_weights": False}, "scale_attn_weights"),
    (QWEN, {"kv_channels": 8}, "kv_channels"),
    (QWEN, {"intermediate_size": 191}, "intermediate_size"),
    (of("Phi3SmallForCausalLM"), {}, "block-sparse attention and muP"),
]


@pytest.mark.parametrize(("raw", "changes", "named"), MISTAKES)
def test_mistakes_are_named(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        load(tmp_path, {**raw, **changes})


# -- the native CPU executor -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma", "GemmaForCausalLM has norms of its own"),
        ("gemma2", "it has no soft cap of attention scores"),
        ("phi3", None),
        ("long_phi3", None),
        ("internlm", None),
        ("internlm2", None),
        ("xverse", None),
        ("baichuan", "it has no ALiBi"),
        ("chatglm", None),
        ("qwen", "QWenLMHeadModel has attention of its own"),
        ("yi", None),
    ],
)
def test_what_the_executor_runs(tmp_path: Path, name: str, reason: str | None) -> None:
    assert unsupported_reason(load(tmp_path, EVERY[name]), torch.bfloat16) == reason


def test_the_executor_looks_at_what_is_computed(tmp_path: Path) -> None:
    def reason(config: ModelConfig) -> str | None:
        return unsupported_reason(config, torch.bfloat16)

    within = dataclasses.replace(load(tmp_path, QWEN), max_model_len=8192)  # log n is never above 1
    assert reason(within) is None
    first = {**BAICHUAN, "architectures": ["BaiChuanForCausalLM"]}
    assert reason(load(tmp_path, first)) is None
    uncapped = load(tmp_path, {**GEMMA2, "attn_logit_softcapping": None})
    assert reason(uncapped) == "Gemma2ForCausalLM has norms of its own"
