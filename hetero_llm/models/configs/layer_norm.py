"""config.json of families with layer norms; Falcon's is in a file of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import ConfigSource, Reader, heads_of
from hetero_llm.models.configs.common import (
    alibi_slopes,
    base_fields,
    kv_heads_of,
    position_fields,
    same_window,
    whole_heads_of,
    with_rope_theta,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig(ModelConfig):
    """How the layers of families with layer norms are arranged.

    Attributes:
        parallel: Attention and MLP both read the layer's input, and their outputs are added to it
            together ("GPT-J-6B", Wang and Komatsuzaki 2021).
        shared_norm: In parallel layers: one norm serves both.
        qk_layer_norm: Layer norm of every query and key head before the rotary embedding.
    """

    parallel: bool = False
    shared_norm: bool = False
    qk_layer_norm: bool = False


def shape_fields(
    source: ConfigSource,
    *,
    hidden: Iterable[str] = ("hidden_size",),
    heads: Iterable[str] = ("num_attention_heads",),
    layers: Iterable[str] = ("num_hidden_layers",),
    free_head_dim: bool = False,
) -> dict[str, Any]:
    """Fields of `ModelConfig` that these families read alike; as many KV heads as heads.

    Args:
        source: Both files.
        hidden, heads, layers: Keys of the hidden size, the number of heads and of layers, in all
            spellings; the first one present counts.
        free_head_dim: Whether the class reads `head_dim`; else it is the hidden size by the heads.
    """
    reader = source.config
    heads_key = first_key(reader, heads)
    size, count, quotient = heads_of(reader, heads_key, first_key(reader, hidden))
    free = free_head_dim and reader.raw.get("head_dim") is not None
    if not free and not quotient:
        raise reader.bad(heads_key, f"does not divide the hidden size {size}")
    head_dim = reader.integer("head_dim", quotient)
    if not free_head_dim and head_dim != quotient:
        raise reader.bad("head_dim", f"{source.architecture} has heads of {quotient}")
    num_layers = reader.layers(first_key(reader, layers))
    fields = base_fields(
        source, hidden_size=size, num_heads=count, head_dim=head_dim, num_layers=num_layers
    )
    return {**fields, "num_kv_heads": count}


def gpt_shape_fields(source: ConfigSource) -> dict[str, Any]:
    """`shape_fields` with GPT-2's keys and their newer spellings."""
    return shape_fields(
        source,
        hidden=("n_embd", "hidden_size"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
    )


def first_key(reader: Reader, keys: Iterable[str]) -> str:
    """The first of several spellings that is present, or else the first one."""
    spellings = tuple(keys)
    present = (key for key in spellings if reader.raw.get(key) is not None)
    return next(present, spellings[0])


def all_biases(bias: bool) -> dict[str, Any]:
    """The biases of a layer, all of them or none."""
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias)


def _rotary_share(reader: Reader, *keys: str) -> float | None:
    """The rotated share of a head under an older name, which `partial_rotary_factor` replaced."""
    found = None
    for key in keys:
        if reader.raw.get(key) is None:
            continue
        share = reader.number(key, 1.0)
        if found is None:
            found = share
        stated = reader.raw.get("partial_rotary_factor")
        if share != found or stated not in (None, share):
            raise reader.bad(key, "differs from another key with the same meaning")
    return found


def read_gpt2(source: ConfigSource) -> ModelConfig:
    reader = source.config
    for key in (
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
    ):
        if reader.flag(key, False):
            raise reader.bad(key, "not supported with GPT2LMHeadModel")
    hidden, heads, head_dim = whole_heads_of(reader, "n_head", "n_embd")
    num_layers = reader.layers("n_layer")
    fields = base_fields(
        source, hidden_size=hidden, num_heads=heads, head_dim=head_dim, num_layers=num_layers
    )
    return _gpt(source, {**fields, "num_kv_heads": heads}, hidden_act="gelu_new")


def read_gpt_bigcode(source: ConfigSource) -> ModelConfig:
    source.refuse("add_cross_attention")
    shape = gpt_shape_fields(source)
    if source.config.flag("multi_query", True):
        shape["num_kv_heads"] = 1
    return _gpt(source, shape, hidden_act="gelu_pytorch_tanh")


def _gpt(source: ConfigSource, shape: dict[str, Any], *, hidden_act: str) -> ModelConfig:
    """`hidden_act`: Where the file does not state it."""
    reader = source.config
    if not reader.flag("scale_attn_weights", True):
        shape["attn_scale"] = 1.0
    return LayerNormConfig(
        **shape,
        **position_fields(None, reader.integer("n_positions")),
        **all_biases(True),
        intermediate_size=reader.integer("n_inner", 4 * shape["hidden_size"]),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        hidden_act=reader.activation("activation_function", hidden_act),
    )


def read_gptj(source: ConfigSource) -> ModelConfig:
    reader = source.config
    # transformers' class reads none of them; users may still scale the rotary embedding.
    source.refuse("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    shape = gpt_shape_fields(source)
    max_position = reader.integer("n_positions", 2048)
    head_dim = shape["head_dim"]
    rotary_dim = reader.integer("rotary_dim", 64)
    if "rotary_dim" in reader.raw and reader.raw["rotary_dim"] is None:
        raise reader.bad("rotary_dim", f"not supported with {source.architecture}")
    if rotary_dim % 2 or not 4 <= rotary_dim <= head_dim:
        raise reader.bad("rotary_dim", f"4, 6, ... up to the head size {head_dim} is needed")
    rope = replace(source.rope(head_dim, max_position), rotary_dim=rotary_dim)
    return LayerNormConfig(
        **shape,
        **position_fields(rope, max_position),
        intermediate_size=reader.integer("n_inner", 4 * shape["hidden_size"]),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        mlp_bias=True,
        head_bias=True,
        hidden_act=reader.activation("activation_function", "gelu_new"),
        parallel=True,
        shared_norm=True,
    )


def read_gpt_neox(source: ConfigSource) -> ModelConfig:
    reader = source.config
    shape = shape_fields(source)
    max_position = reader.integer("max_position_embeddings")
    source = with_rope_theta(source, reader.raw.get("rotary_emb_base"))  # its older name
    share = reader.number("rotary_pct", 0.25)
    bias = reader.flag("attention_bias", True)
    return LayerNormConfig(
        **shape,
        **position_fields(
            source.rope(shape["head_dim"], max_position, rotary_factor=share), max_position
        ),
        intermediate_size=reader.integer("intermediate_size"),
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        hidden_act=reader.activation("hidden_act", "gelu"),
        parallel=reader.flag("use_parallel_residual", True),
    )


def read_bloom(source: ConfigSource) -> ModelConfig:
    reader = source.config
    source.refuse("apply_residual_connection_post_layernorm")
    if reader.flag("slow_but_exact", False) and reader.integer("pretraining_tp", 1) > 1:
        raise reader.bad("slow_but_exact", f"not supported with {source.architecture}")
    shape = shape_fields(
        source,
        hidden=("n_embed", "hidden_size"),
        heads=("n_head", "num_attention_heads"),
        layers=("n_layer", "num_hidden_layers"),
    )
    inner = 4 * shape["hidden_size"]
    if reader.integer("n_inner", inner) != inner:
        raise reader.bad("n_inner", f"{source.architecture} has {inner}")
    # ALiBi has no last position; 2048 is the length that every released model was trained with.
    length = first_key(reader, ("max_position_embeddings", "seq_length", "n_positions"))
    return LayerNormConfig(
        **shape,
        **position_fields(None, reader.integer(length, 2048)),
        **all_biases(True),
        intermediate_size=inner,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        hidden_act="gelu_pytorch_tanh",
        alibi_slopes=alibi_slopes(shape["num_heads"]),
    )


def read_opt(source: ConfigSource) -> ModelConfig:
    reader = source.config
    hidden, heads, head_dim = whole_heads_of(reader, "num_attention_heads", "hidden_size")
    num_layers = reader.layers("num_hidden_layers")
    fields = base_fields(
        source, hidden_size=hidden, num_heads=heads, head_dim=head_dim, num_layers=num_layers
    )
    fields["word_embed_size"] = reader.integer("word_embed_proj_dim", hidden)
    pre_norm = reader.flag("do_layer_norm_before", True)
    return ModelConfig(
        **fields,
        **position_fields(None, reader.integer("max_position_embeddings")),
        **all_biases(reader.flag("enable_bias", True)),
        num_kv_heads=heads,
        intermediate_size=reader.integer("ffn_dim"),
        norm_eps=1e-5,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        hidden_act=reader.activation("activation_function", "relu"),
        pre_norm=pre_norm,
        final_norm=pre_norm and not reader.flag("_remove_final_layer_norm", False),
        norm_affine=reader.flag("layer_norm_elementwise_affine", True),
    )


def read_nemotron(source: ConfigSource) -> ModelConfig:
    """Nemotron-3, Nemotron-4 and Minitron."""
    reader = source.config
    share = _rotary_share(reader, "rope_percent", "rope_percentage")
    bias = reader.flag("attention_bias", False)
    return LayerNormConfig(
        **_rotary_fields(source, share or 0.5),
        norm_eps=reader.number("norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.flag("mlp_bias", False),
        hidden_act=reader.activation("hidden_act", "relu2"),
    )


def read_phi(source: ConfigSource) -> ModelConfig:
    """Phi 1, 1.5 and 2."""
    reader = source.config
    return LayerNormConfig(
        **_rotary_fields(source, 0.5),
        **all_biases(True),
        norm_eps=reader.number("layer_norm_eps", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        head_bias=True,
        hidden_act=reader.activation("hidden_act", "gelu_new"),
        parallel=True,
        shared_norm=True,
        qk_layer_norm=reader.flag("qk_layernorm", False),
    )


def read_stablelm(source: ConfigSource) -> ModelConfig:
    """StableLM, and its first releases (StableLMEpochForCausalLM)."""
    reader = source.config
    parallel = reader.flag("use_parallel_residual", False)
    return LayerNormConfig(
        **_rotary_fields(
            source,
            _rotary_share(reader, "rope_pct") or 0.25,
            free_head_dim=False,
            needs_kv_heads=True,
        ),
        norm_eps=reader.number(first_key(reader, ("layer_norm_eps", "norm_eps")), 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=reader.flag("use_qkv_bias", False),
        hidden_act=reader.activation("hidden_act", "silu"),
        parallel=parallel,
        shared_norm=parallel,
        qk_layer_norm=reader.flag("qk_layernorm", False),
    )


def read_starcoder2(source: ConfigSource) -> ModelConfig:
    reader = source.config
    for key, computed in (("mlp_type", "default"), ("norm_type", "layer_norm")):
        if reader.raw.get(key) not in (None, computed):
            raise reader.bad(key, f"not supported with {source.architecture}")
    fields = _rotary_fields(source, 1.0, needs_kv_heads=True)
    if fields["rope"].rotary_dim != fields["head_dim"]:
        raise reader.bad("partial_rotary_factor", f"not supported with {source.architecture}")
    fields["sliding_windows"], fields["max_model_len"] = source.served_windows(
        same_window(reader, fields["num_layers"]), fields["max_model_len"]
    )
    return LayerNormConfig(
        **fields,
        **all_biases(reader.flag("use_bias", True)),
        norm_eps=reader.number("norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        hidden_act=reader.activation("hidden_act", "gelu_pytorch_tanh"),
    )


def _rotary_fields(
    source: ConfigSource,
    rotary_share: float,
    *,
    free_head_dim: bool = True,
    needs_kv_heads: bool = False,
) -> dict[str, Any]:
    """Fields of the families with Llama's keys.

    Args:
        rotary_share: Share of each head that is rotated, where the file does not state it.
        free_head_dim: See `shape_fields`.
        needs_kv_heads: Whether the file must state the number of KV heads: transformers' default
            is the number of one particular model.
    """
    reader = source.config
    shape = shape_fields(source, free_head_dim=free_head_dim)
    heads = shape["num_heads"]
    max_position = reader.integer("max_position_embeddings")
    rope = source.rope(shape["head_dim"], max_position, rotary_factor=rotary_share)
    return {
        **shape,
        **position_fields(rope, max_position),
        "num_kv_heads": kv_heads_of(reader, heads, None if needs_kv_heads else heads),
        "intermediate_size": reader.integer("intermediate_size"),
    }
