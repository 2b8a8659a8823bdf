"""config.json and generation_config.json of a model folder, read by us, as one frozen object.

Each architecture has a reader in `models.configs`. Defaults of absent keys are those of the
family's transformers class. A feature we do not compute is a `ModelLoadError` that names it, never
ignored.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.config_reader import ConfigSource, Reader, read_json
from hetero_llm.models.registry import FAMILIES, REFUSED, supported_architectures
from hetero_llm.models.rope_config import RopeConfig

__all__ = ["ModelConfig", "RopeConfig", "load_model_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of one decoder-only model. Families with arithmetic of their own
    subclass it (in their reader's file); engine and kernels look at these fields only.

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
        attn_softcap: Then the scores become cap * tanh(score / cap) (Gemma2); None: they stay.
        alibi_slopes: Per query head; then slope * (position of the key - position of the query) is
            added ("Train Short, Test Long", Press et al. 2022). None: nothing is.
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
    attn_softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


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
        ConfigError: `rope_scaling` or `rope_theta` is wrong, or the model has no rotary embedding.
    """
    path = Path(folder) / "config.json"
    reader = Reader(read_json(path), str(path))
    generation_path = Path(folder) / "generation_config.json"
    generation = Reader({}, str(generation_path))
    if generation_path.exists():
        generation = Reader(read_json(generation_path), str(generation_path))
    architecture = _architecture(reader)
    source = ConfigSource(
        reader, generation, architecture, rope_scaling, rope_theta, disable_sliding_window
    )
    source.refuse("quantization_config")
    module = importlib.import_module(f"hetero_llm.models.configs.{FAMILIES[architecture].reader}")
    config: ModelConfig = module.read(source)
    if config.rope is None:
        for field, value in (("rope_scaling", rope_scaling), ("rope_theta", rope_theta)):
            if value is not None:
                raise ConfigError(field, value, f"{architecture} has no rotary embedding")
    return config


def _architecture(reader: Reader) -> str:
    names = reader.raw.get("architectures")
    if isinstance(names, list):
        for name in names:
            if name in FAMILIES:
                return name
            if name in REFUSED:
                raise reader.bad("architectures", f"not supported, {REFUSED[name]}")
    raise reader.bad("architectures", "supported are " + ", ".join(supported_architectures()))
