"""config.json and generation_config.json of a model folder, read by us, as one frozen object.

Defaults of absent keys are those of the family's transformers class. A feature we do not compute
is a `ModelLoadError` that names it, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.registry import supported_architectures
from hetero_llm.models.rope_config import RopeConfig, parse_rope, scaled_max_position

__all__ = ["ModelConfig", "RopeConfig", "load_model_config"]

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
# Read by other architectures; a checkpoint that sets one computes something that we do not.
_REFUSED_KEYS = (
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "num_local_experts",
    "no_rope_layers",
)
_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of one decoder-only model.

    Attributes:
        architecture: Name from `architectures`, a key of the registry.
        max_model_len: Context length in tokens that the checkpoint allows, rope scaling included,
            as vLLM derives it. The rotary table has this many rows; to serve a shorter limit,
            `dataclasses.replace` it before the model is built.
        max_position_embeddings: As in the file: rows of a learned position table.
        torch_dtype: "float32", "bfloat16" or "float16", as stored.
        rope: None for learned positions (OPT, GPT-2).
        qkv_bias, out_bias: Biases of the attention's input and output projections.
        qk_norm: RMS norm of each query and key head before the rotary embedding (Qwen3).
        sliding_windows: Per layer, the window in tokens or None for full attention.
        attn_scale: Multiplies the attention scores.
        eos_token_ids: Of config.json, then of generation_config.json, without repeats.
        word_embed_size: Width of the embedding table; differs from hidden_size in OPT-350m.
        pre_norm, final_norm, norm_affine: Where OPT norms, and with weights or without.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    max_position_embeddings: int
    torch_dtype: str
    norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str
    sliding_windows: tuple[int | None, ...]
    attn_scale: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    word_embed_size: int
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True


def load_model_config(
    folder: Path,
    *,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    disable_sliding_window: bool = False,
) -> ModelConfig:
    """Reads the configuration of a model folder.

    Args:
        folder: Holds config.json and maybe generation_config.json.
        rope_scaling: Replaces the file's rope scaling; a mistake in it is a `ConfigError`.
        rope_theta: Replaces the file's rotary base.
        disable_sliding_window: Full attention everywhere, with the context capped to the window,
            inside which both are the same.

    Raises:
        ModelLoadError: A file cannot be read, or names something that is not supported.
        ConfigError: `rope_scaling` or `rope_theta` is wrong.
    """
    path = Path(folder) / "config.json"
    reader = _Reader(_read_json(path), str(path))
    architecture = _architecture(reader)
    for key in _REFUSED_KEYS:
        if reader.raw.get(key) not in (None, False, [], {}):
            raise reader.bad(key, f"not supported with {architecture}")
    generation_path = Path(folder) / "generation_config.json"
    generation = _Reader({}, str(generation_path))
    if generation_path.exists():
        generation = _Reader(_read_json(generation_path), str(generation_path))
    if architecture == "GPT2LMHeadModel":
        return _gpt2(reader, generation)
    if architecture == "OPTForCausalLM":
        return _opt(reader, generation)
    return _llama_like(
        reader,
        generation,
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
        disable_sliding_window=disable_sliding_window,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to one JSON object; `where` names the file in messages."""

    raw: Mapping[str, Any]
    where: str

    def bad(self, key: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {key}={shown(self.raw.get(key))}: {reason}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; required without a default, null counts as absent."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{self.where}: the key {key!r} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad(key, "a positive integer is needed")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise self.bad(key, "a number above 0 is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad(key, "true or false is needed")
        return value

    def activation(self, key: str, default: str) -> str:
        value = self.raw.get(key) or default
        if value not in _ACTIVATIONS:
            raise self.bad(key, "supported are " + ", ".join(_ACTIVATIONS))
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids or null."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise self.bad(key, "a token id or a list of token ids is needed")
        return tuple(ids)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: a JSON object is needed, not {shown(value)}")
    return value


def _architecture(reader: _Reader) -> str:
    names = reader.raw.get("architectures")
    if isinstance(names, list):
        for name in names:
            if name in supported_architectures():
                return name
    raise reader.bad("architectures", "supported are " + ", ".join(supported_architectures()))


def _torch_dtype(reader: _Reader) -> str:
    """transformers 5 writes `dtype`, older versions `torch_dtype`; absent means float32."""
    key = "dtype" if reader.raw.get("dtype") is not None else "torch_dtype"
    value = reader.raw.get(key)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise reader.bad(key, "supported are " + ", ".join(_DTYPES))
    return name


def _eos_and_bos(reader: _Reader, generation: _Reader) -> tuple[tuple[int, ...], int | None]:
    eos = reader.token_ids("eos_token_id") + generation.token_ids("eos_token_id")
    bos = reader.token_ids("bos_token_id") + generation.token_ids("bos_token_id")
    return tuple(dict.fromkeys(eos)), bos[0] if bos else None


def _heads(reader: _Reader, heads_key: str, hidden_key: str) -> tuple[int, int, int]:
    """hidden_size, number of heads and their quotient (0 if it is none)."""
    hidden, heads = reader.integer(hidden_key), reader.integer(heads_key)
    return hidden, heads, 0 if hidden % heads else hidden // heads


def _llama_like(
    reader: _Reader,
    generation: _Reader,
    *,
    rope_scaling: Mapping[str, Any] | None,
    rope_theta: float | None,
    disable_sliding_window: bool,
) -> ModelConfig:
    """Llama, Mistral, Qwen2, Qwen3."""
    raw, architecture = reader.raw, _architecture(reader)
    hidden, heads, quotient = _heads(reader, "num_attention_heads", "hidden_size")
    if architecture == "Qwen3ForCausalLM" and "head_dim" not in raw:
        quotient = 128  # the default of transformers' class, whatever the hidden size
    if raw.get("head_dim") is None and not quotient:
        raise reader.bad("num_attention_heads", f"does not divide hidden_size={hidden}")
    head_dim = reader.integer("head_dim", quotient)
    # Only Llama's class defaults to as many KV heads as heads; the others' defaults are sizes of
    # one particular model, so an absent key there is taken for a damaged file.
    if architecture != "LlamaForCausalLM" and "num_key_value_heads" not in raw:
        raise ModelLoadError(f"{reader.where}: the key 'num_key_value_heads' is missing")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.bad("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    num_layers = reader.integer("num_hidden_layers")
    max_position = reader.integer("max_position_embeddings")
    rope = parse_rope(
        raw,
        where=reader.where,
        head_dim=head_dim,
        max_position=max_position,
        rope_scaling=rope_scaling,
        rope_theta=rope_theta,
    )
    max_model_len = scaled_max_position(rope, max_position)
    windows = _sliding_windows(reader, architecture, num_layers)
    if disable_sliding_window:
        max_model_len = min([max_model_len, *(w for w in windows if w is not None)])
        windows = (None,) * num_layers
    qkv_bias = architecture == "Qwen2ForCausalLM" or reader.flag("attention_bias", False)
    eos, bos = _eos_and_bos(reader, generation)
    return ModelConfig(
        architecture=architecture,
        model_type=str(raw.get("model_type", "")),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        max_model_len=max_model_len,
        max_position_embeddings=max_position,
        torch_dtype=_torch_dtype(reader),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=qkv_bias,
        out_bias=reader.flag("attention_bias", False) and architecture != "Qwen2ForCausalLM",
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        hidden_act=reader.activation("hidden_act", "silu"),
        sliding_windows=windows,
        attn_scale=head_dim**-0.5,
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=hidden,
    )


def _sliding_windows(reader: _Reader, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, from the several ways the families state it."""
    raw = reader.raw
    null = "sliding_window" in raw and raw["sliding_window"] is None
    first_sliding = 0
    if architecture == "LlamaForCausalLM":
        if raw.get("sliding_window") is not None:
            raise reader.bad("sliding_window", f"not supported with {architecture}")
        window = None
    elif architecture == "MistralForCausalLM":
        window = None if null else reader.integer("sliding_window", 4096)
    else:
        off = null or not reader.flag("use_sliding_window", False)
        window = None if off else reader.integer("sliding_window", 4096)
        first_sliding = raw.get("max_window_layers", 28)
        if not isinstance(first_sliding, int) or first_sliding < 0:
            raise reader.bad("max_window_layers", "a number of layers is needed")
    windows = tuple(window if layer >= first_sliding else None for layer in range(num_layers))
    if raw.get("layer_types") is None:
        return windows
    stated = _windows_of_layer_types(reader, num_layers, window)
    if stated != windows and architecture not in _QWEN:
        # transformers' Llama and Mistral have one kind of layer and never look at this key.
        raise reader.bad("layer_types", f"mixed layers are not supported with {architecture}")
    return stated


def _windows_of_layer_types(
    reader: _Reader, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    types = reader.raw["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.bad("layer_types", f"a list of {num_layers} entries is needed")
    for entry in types:
        if entry not in ("full_attention", "sliding_attention"):
            raise reader.bad("layer_types", f"{shown(entry)} is not supported")
        if entry == "sliding_attention" and window is None:
            raise reader.bad("layer_types", "sliding_attention needs a sliding_window")
    return tuple(window if entry == "sliding_attention" else None for entry in types)


def _opt(reader: _Reader, generation: _Reader) -> ModelConfig:
    hidden, heads, head_dim = _heads(reader, "num_attention_heads", "hidden_size")
    if not head_dim:
        raise reader.bad("num_attention_heads", f"does not divide hidden_size={hidden}")
    num_layers = reader.integer("num_hidden_layers")
    max_position = reader.integer("max_position_embeddings")
    bias = reader.flag("enable_bias", True)
    pre_norm = reader.flag("do_layer_norm_before", True)
    eos, bos = _eos_and_bos(reader, generation)
    return ModelConfig(
        architecture="OPTForCausalLM",
        model_type=str(reader.raw.get("model_type", "")),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("ffn_dim"),
        max_model_len=max_position,
        max_position_embeddings=max_position,
        torch_dtype=_torch_dtype(reader),
        norm_eps=1e-5,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        hidden_act=reader.activation("activation_function", "relu"),
        sliding_windows=(None,) * num_layers,
        attn_scale=head_dim**-0.5,
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=reader.integer("word_embed_proj_dim", hidden),
        pre_norm=pre_norm,
        final_norm=pre_norm and not reader.flag("_remove_final_layer_norm", False),
        norm_affine=reader.flag("layer_norm_elementwise_affine", True),
    )


def _gpt2(reader: _Reader, generation: _Reader) -> ModelConfig:
    for key in (
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
    ):
        if reader.flag(key, False):
            raise reader.bad(key, "not supported with GPT2LMHeadModel")
    hidden, heads, head_dim = _heads(reader, "n_head", "n_embd")
    if not head_dim:
        raise reader.bad("n_head", f"does not divide n_embd={hidden}")
    num_layers = reader.integer("n_layer")
    max_position = reader.integer("n_positions")
    eos, bos = _eos_and_bos(reader, generation)
    return ModelConfig(
        architecture="GPT2LMHeadModel",
        model_type=str(reader.raw.get("model_type", "")),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("n_inner", 4 * hidden),
        max_model_len=max_position,
        max_position_embeddings=max_position,
        torch_dtype=_torch_dtype(reader),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        hidden_act=reader.activation("activation_function", "gelu_new"),
        sliding_windows=(None,) * num_layers,
        attn_scale=head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0,
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=hidden,
    )
