"""Metadata of a GGUF file -> what config.json would say, for the readers of `models.configs`.

A key that asks for what the family's class does not compute is a `ModelLoadError` that names it.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.gguf.container import GgufHeader, Strings, read_header
from hetero_llm.models.gguf.names import (
    EMBEDDING,
    HEAD,
    ROPE_FACTORS,
    family_of,
    matrices_apart,
)
from hetero_llm.models.rope_config import is_number
from hetero_llm.quantization.gguf.types import MATRIX_TYPES

logger = logging.getLogger(__name__)

_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
"""Readers refuse those that their family does not have."""
_MIXTURE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Sizes that mixtures must state. The weights of a token's experts add up to one in llama.cpp."""
_NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
"""Those above 0; others of `_REQUIRED` are sizes."""
_UNSUPPORTED = (
    "expert_count", "expert_shared_count", "expert_group_count",
    "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias",
    "logit_scale", "embedding_scale", "residual_scale", "use_parallel_residual", "pooling_type",
    "rope.dimension_sections", "swin_norm", "attention.output_scale",
    "attention.temperature_scale", "attention.temperature_length",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
_ONE = (
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "expert_weights_scale",
    "expert_gating_func",
)  # fmt: skip
"""Supported if they are 1, which changes nothing; of gating functions that is a softmax."""
_OTHERS = frozenset({
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.causal", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    # What follows says nothing about the computation, or nothing that tensors do not say, too.
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "expert_used_count",
    "attention.layer_norm_epsilon",
})  # fmt: skip
_SAMPLING = "general.sampling."
_SAMPLING_KEYS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
}  # fmt: skip
"""Keys of generation_config.json that llama.cpp's converter writes into the file."""
_GEMMA2_27B_LAYERS = 46
_LARGEST_SIZE = 2**31 - 1
_KEYS_SHOWN = 5
# Tokens that end a turn, whatever the file names as its end: as llama.cpp looks for them.
_END_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|eom_id|>", "<EOT>",
)  # fmt: skip
_ENDS = ("eos", "eot", "eom")
_CONTROL = 3


def block_types(header: GgufHeader) -> dict[str, str]:
    """The matrices that stay quantized: names of their tensors -> type. Others become plain
    numbers: those of other types, or fused with one of another kind.

    Args:
        header: of `matrices_apart`.
    """
    family = family_of(header)

    def form(name: str) -> tuple[str, int] | None:
        tensor = header.tensors.get(name)
        return None if tensor is None else MATRIX_TYPES.get(tensor.type.name)

    return {
        name: tensor.type.name
        for name, tensor in header.tensors.items()
        if (parts := family.fused_with(name))
        and form(name) is not None
        and all(form(part) == form(name) for part in parts)
    }


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The keys of config.json for a GGUF file.

    Raises:
        ModelLoadError: the file cannot be read, a key is missing, or the architecture or something
            that it asks for is not supported.
    """
    header = matrices_apart(read_header(path))
    family = family_of(header)
    prefix = header.text("general.architecture")
    values = {
        key.removeprefix(f"{prefix}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{prefix}.")
    }
    required = {**_REQUIRED, **(_MIXTURE if family.has_experts else {})}
    asked = [key for key in _UNSUPPORTED if values.get(key) and key not in required]
    if values.get("attention.causal") is False:
        asked.append("attention.causal")
    for key in asked:
        raise header.bad(f"{prefix}.{key}", f"not supported with {family.model_class}")
    for key in _ONE:
        if values.get(key, 1) != 1:
            raise header.bad(f"{prefix}.{key}", "only 1 is supported")
    known = {*required, *_OPTIONAL, *_UNSUPPORTED, *_ONE, *_OTHERS}
    unknown = [f"{prefix}.{key}" for key in values if key not in known]
    if unknown:
        logger.warning("%s: keys that are not known here have no effect: %s", path, _names(unknown))
    raw: dict[str, Any] = {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(header),
        "torch_dtype": _dtype(header),
        "tie_word_embeddings": HEAD not in header.tensors,
        "bos_token_id": header.token_id("bos"),
        "eos_token_id": end_tokens(header),
    }
    if family.has_experts:
        raw["norm_topk_prob"] = True
    for key, name in required.items():
        if key not in values:
            raise ModelLoadError(f"{path}: the key '{prefix}.{key}' is missing")
        read = _number if key in _NUMBERS else _size
        raw[name] = read(header, f"{prefix}.{key}")
    for key, name in _OPTIONAL.items():
        if key in values:
            read = _number if key in _NUMBERS else _of_each_layer
            raw[name] = read(header, f"{prefix}.{key}")
    kv_heads = f"{prefix}.attention.head_count_kv"
    raw["num_key_value_heads"] = (
        _size(header, kv_heads) if kv_heads in header.metadata else raw["num_attention_heads"]
    )
    types = {family.module(name): kind for name, kind in block_types(header).items()}
    if types:
        raw["quantization_config"] = {"quant_method": "gguf", "types": types}
    return {**raw, **_heads(header, prefix), **_rope(header, prefix), **_own(header, raw)}


def read_gguf_sampling(path: Path) -> dict[str, Any]:
    """The keys of generation_config.json for the sampling defaults of a GGUF file; a warning names
    those that have no counterpart (mirostat, XTC, penalties of the last tokens).

    Raises:
        ModelLoadError: the file cannot be read, or a value is no number.
    """
    header = read_header(path)
    stated = [key for key in header.metadata if key.startswith(_SAMPLING)]
    found = {}
    for key in stated:
        name = _SAMPLING_KEYS.get(key.removeprefix(_SAMPLING))
        if name is None:
            continue
        value = header.metadata[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise header.bad(key, "a number is needed")
        found[name] = _shortest(value)
    others = [key for key in stated if key.removeprefix(_SAMPLING) not in _SAMPLING_KEYS]
    if others:
        logger.warning("%s: sampling defaults that have no effect: %s", path, _names(others))
    return found


def _names(keys: list[str]) -> str:
    """The first ones, and how many follow."""
    names = ", ".join(map(shown, keys[:_KEYS_SHOWN]))
    more = f" and {len(keys) - _KEYS_SHOWN} more" if len(keys) > _KEYS_SHOWN else ""
    return names + more


def end_tokens(header: GgufHeader) -> list[int]:
    """Ids of the tokens that end a text: those that the file names, and control tokens that are
    known to end a turn."""
    named = [header.token_id(name) for name in _ENDS]
    found = [token for token in named if token is not None]
    tokens = header.metadata.get("tokenizer.ggml.tokens", Strings([]))
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(tokens, Strings):
        raise header.bad("tokenizer.ggml.tokens", "an array of strings is needed")
    if not isinstance(types, list):
        raise header.bad("tokenizer.ggml.token_type", "an array of integers is needed")
    if len(types) == len(tokens):  # else the tokenizer's reader refuses them
        control = [i for i, kind in enumerate(types) if kind == _CONTROL]
        found += [i for i in control if tokens[i] in _END_TOKENS]
    if not found and len(tokens):
        logger.warning(
            "%s: no token is known to end a text; outputs end at their largest length", header.path
        )
    return list(dict.fromkeys(found))


def _vocab_size(header: GgufHeader) -> int:
    if EMBEDDING not in header.tensors:
        raise ModelLoadError(f"{header.path}: the tensor {EMBEDDING} is missing")
    return header.tensors[EMBEDDING].shape[0]


def _dtype(header: GgufHeader) -> str:
    """float16 and float32 of files that hold their matrices so; bfloat16 for all others, whose
    models were mostly trained in it and may exceed float16's range."""
    kinds = {t.type.name for t in header.tensors.values() if len(t.shape) > 1}
    only = kinds.pop() if len(kinds) == 1 else ""
    return {"F16": "float16", "F32": "float32"}.get(only, "bfloat16")


def _of_each_layer(header: GgufHeader, key: str) -> Any:
    """A value, or that of an array that has it for every layer."""
    value = header.metadata.get(key)
    if isinstance(value, list):
        if not value or any(entry != value[0] for entry in value):
            raise header.bad(key, "layers of different sizes are not supported")
        value = value[0]
    return _shortest(value)


def _size(header: GgufHeader, key: str) -> int:
    value = _of_each_layer(header, key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_SIZE:
        raise header.bad(key, f"an integer from 1 to {_LARGEST_SIZE} is needed")
    return value


def _number(header: GgufHeader, key: str) -> float:
    value = _of_each_layer(header, key)
    if not is_number(value):
        raise header.bad(key, "a number above 0 is needed, from 1e-30 to 1e30")
    return value


def _shortest(value: Any) -> Any:
    """A float32 as it was written before it was one: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def head_dim_of(header: GgufHeader) -> int:
    """Entries of a head.

    Raises:
        ModelLoadError: the file does not say, or has values of another size.
    """
    prefix = f"{header.text('general.architecture')}.attention"
    key_length = header.integer(f"{prefix}.key_length")
    value_length = header.integer(f"{prefix}.value_length")
    if key_length is None:
        hidden = header.integer(f"{header.text('general.architecture')}.embedding_length")
        heads = _of_each_layer(header, f"{prefix}.head_count")
        if not hidden or not isinstance(heads, int) or heads < 1 or hidden % heads:
            raise header.bad(f"{prefix}.head_count", f"does not divide embedding_length={hidden}")
        key_length = hidden // heads
    if not 1 <= key_length <= _LARGEST_SIZE:
        raise header.bad(f"{prefix}.key_length", f"an integer from 1 to {_LARGEST_SIZE} is needed")
    if value_length is not None and value_length != key_length:
        reason = f"differs from the keys' {key_length}, which is not supported"
        raise header.bad(f"{prefix}.value_length", reason)
    return key_length


def _heads(header: GgufHeader, prefix: str) -> dict[str, Any]:
    """Sizes of heads, and biases, of which only the tensors tell."""
    key_length = head_dim_of(header)
    found: dict[str, Any] = {
        "head_dim": key_length,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
    }
    rotated = header.integer(f"{prefix}.rope.dimension_count")
    if rotated is not None:
        if not 1 <= rotated <= key_length:
            reason = f"an integer from 1 to the size of a head, {key_length}, is needed"
            raise header.bad(f"{prefix}.rope.dimension_count", reason)
        found["partial_rotary_factor"] = rotated / key_length
    return found


def _rope(header: GgufHeader, prefix: str) -> dict[str, Any]:
    """`rope_scaling`; empty without."""
    key = f"{prefix}.rope.scaling"
    kind = header.text(f"{key}.type", "none")
    old = header.metadata.get(f"{prefix}.rope.scale_linear")
    factor = _shortest(header.metadata.get(f"{key}.factor", old))
    if f"{key}.type" not in header.metadata and factor not in (None, 0, 1):
        kind = "linear"
    if ROPE_FACTORS in header.tensors:
        if kind not in ("none", "longrope"):
            raise header.bad(f"{key}.type", f"not supported together with {ROPE_FACTORS}")
        factors = header.floats(ROPE_FACTORS)
        for value in factors:
            if not is_number(value):
                raise ModelLoadError(
                    f"{header.path}: {ROPE_FACTORS} holds {value}: numbers above 0 are needed"
                )
        # Llama 3's scaling as divisors of the frequencies; LongRoPE's with one list for both.
        return {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
            }
        }
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise header.bad(f"{key}.type", "none, linear and yarn are supported")
    if not is_number(factor):
        own = f"{key}.factor" in header.metadata or old is None
        name = f"{key}.factor" if own else f"{prefix}.rope.scale_linear"
        raise header.bad(name, f"a number above 0 is needed with {kind} scaling")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    scaling = {"rope_type": "yarn", "factor": factor}
    original = header.integer(f"{key}.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for name, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f"{key}.{name}" in header.metadata:
            scaling[ours] = _number(header, f"{key}.{name}")
    share = header.metadata.get(f"{key}.attn_factor")
    if share is not None:
        if not is_number(share) or factor < 1:
            reason = f"a number above 0 is needed, with {key}.factor of 1 or more"
            raise header.bad(f"{key}.attn_factor", reason)
        # ggml multiplies its own correction of the softmax's temperature by it (rope_yarn).
        scaling["attention_factor"] = share * (1 + 0.1 * math.log(factor))
    return {"rope_scaling": scaling}


def _own(header: GgufHeader, raw: dict[str, Any]) -> dict[str, Any]:
    """What a family's reader needs beyond Llama's keys."""
    name = raw["model_type"]
    if not name.startswith("gemma"):
        return {}
    found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    if name == "gemma2":
        # Not in the file; llama.cpp knows the one size that differs by its layers.
        heads = raw["num_attention_heads"]
        if raw["num_hidden_layers"] == _GEMMA2_27B_LAYERS and isinstance(heads, int) and heads > 0:
            found["query_pre_attn_scalar"] = raw["hidden_size"] // heads
        else:
            found["query_pre_attn_scalar"] = header.metadata.get("gemma2.attention.key_length", 256)
    return found
