"""Scales of an e4m3 KV cache that a checkpoint stores beside its weights.

One number for the keys of a layer and one for its values, or one of each KV head, [N] or [N, 1, 1].
Their tensors are named as vLLM's `maybe_remap_kv_scale_name` and `get_cache_scale` read them:

    layers.0.self_attn.k_scale, .v_scale                compressed-tensors
    layers.0.self_attn.k_proj.k_scale, v_proj.v_scale   ModelOpt
    layers.0.self_attn.k_proj.output_scale, v_proj...   compressed-tensors before 0.7
    layers.0.self_attn.kv_scale                         AutoFP8: one for both

A scale of queries may stand beside them; queries are not quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hetero_llm.quantization.formats.options import Config, choice, first_of, refused, table

KVScalePart = Literal["q", "k", "v", "kv"]

_PARTS: dict[str, KVScalePart] = {
    "q_scale": "q", "k_scale": "k", "v_scale": "v", "kv_scale": "kv",
    "q_proj.output_scale": "q", "k_proj.output_scale": "k", "v_proj.output_scale": "v",
}  # fmt: skip
_MOST_DIGITS = 9
_BY_DEFAULT = ("compressed-tensors", "modelopt")


def kv_scale_of(name: str) -> tuple[int, KVScalePart] | None:
    """The layer of a scale and what it is of, by the name of its tensor; None: it is no scale of a
    KV cache."""
    parts = name.split(".")
    part = _PARTS.get(parts[-1]) or _PARTS.get(".".join(parts[-2:]))
    numbers = [one for one in parts if one.isdecimal() and len(one) <= _MOST_DIGITS]
    return (int(numbers[0]), part) if part is not None and numbers else None


def has_kv_scales(config: Config) -> bool:
    """Whether a checkpoint stores scales of an e4m3 KV cache, by the value of `quantization_config`
    or the content of hf_quant_config.json.

    Raises:
        ValueError: its KV cache is quantized otherwise.
    """
    inner = table(config, "quantization")
    algorithm = first_of(inner, ("kv_cache_quant_algo",), config.get("kv_cache_quant_algo"))
    if algorithm is not None:
        if str(algorithm).upper() != "FP8":
            raise refused("kv_cache_quant_algo", algorithm, ("FP8",))
        return True
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        prefixed = {f"kv_cache_scheme.{name}": value for name, value in scheme.items()}
        choice(prefixed, "kv_cache_scheme.num_bits", (8,))
        choice(prefixed, "kv_cache_scheme.type", ("float",))
        choice(prefixed, "kv_cache_scheme.symmetric", (True,), True)
        return not scheme.get("dynamic")
    if scheme not in (None, "static", "FP8"):
        raise refused("kv_cache_scheme", scheme, ("static", "FP8"))
    return scheme is not None


def wants_fp8_kv(config: Config | None) -> bool:
    """Whether `kv_cache_dtype="auto"` is an e4m3 cache for a checkpoint. As in vLLM, it is where
    compressed-tensors or ModelOpt say so, and not for the older `kv_cache_scheme: static` of
    `quant_method: fp8`.

    Raises:
        ValueError: see `has_kv_scales`.
    """
    if config is None or not has_kv_scales(config):
        return False
    return str(config.get("quant_method")).startswith(_BY_DEFAULT)
