"""Scales of a quantized KV cache that a checkpoint stores beside its weights."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_llm.quantization.formats.options import Config, choice, refused, table

KV_SCALES = ("k_scale", "v_scale")
"""Last parts of the names of their tensors, behind an attention module (compressed-tensors) or its
"k_proj" and "v_proj" (ModelOpt): one number, or one of each head."""


def has_kv_scales(config: Config) -> bool:
    """Whether a checkpoint stores scales of an e4m3 KV cache, by the value of `quantization_config`
    or the content of hf_quant_config.json.

    Raises:
        ValueError: its KV cache is quantized otherwise.
    """
    algorithm = table(config, "quantization").get("kv_cache_quant_algo")
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
