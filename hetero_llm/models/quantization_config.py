"""How a checkpoint's weights are quantized, and how the user wants them to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import Reader, read_json
from hetero_llm.quantization.formats.scheme import CheckpointFormat
from hetero_llm.quantization.names import (
    CHECKPOINT_NAMES,
    NOT_BUILT,
    OLDER_FILES,
    ONLINE_ALIASES,
    ONLINE_NAMES,
    OnlineName,
    older_method,
)


def stored_quantization(folder: Path, config: Reader) -> Mapping[str, Any] | None:
    """`quantization_config` of config.json, or the content of a file beside it that stands for it;
    None: the weights are plain.

    Raises:
        ModelLoadError: it is not an object.
    """
    raw = config.raw.get("quantization_config")
    if raw:
        if not isinstance(raw, Mapping):
            raise config.bad("quantization_config", "an object is needed")
        return raw
    for name in OLDER_FILES:
        path = folder / name
        if path.exists():
            found = read_json(path)
            return {**found, "quant_method": older_method(name, found)}
    return None


def online_quantization(wanted: str | None, stored: Mapping[str, Any] | None) -> OnlineName | None:
    """What the argument `quantization` asks for beyond what the checkpoint says.

    Raises:
        ConfigError: the checkpoint cannot be served so.
    """
    if wanted is None:
        return None
    if stored is not None:
        method = str(stored.get("quant_method"))
        if CHECKPOINT_NAMES.get(wanted) != CHECKPOINT_NAMES.get(method, method):
            reason = f"the checkpoint's weights are quantized already, by {method!r}; leave it out"
            raise ConfigError("quantization", wanted, reason)
        return None
    name = ONLINE_ALIASES.get(wanted, wanted)
    for known in ONLINE_NAMES:
        if name == known:
            return known
    if wanted in NOT_BUILT:
        instead = NOT_BUILT[wanted]
        reason = "this format is not built" + (f"; {instead!r} is" if instead else "")
        raise ConfigError("quantization", wanted, reason)
    if wanted in CHECKPOINT_NAMES:
        reason = "the checkpoint's weights are plain; of these are made: " + ", ".join(ONLINE_NAMES)
        raise ConfigError("quantization", wanted, reason)
    known_names = dict.fromkeys((*ONLINE_NAMES, *CHECKPOINT_NAMES))
    raise ConfigError("quantization", wanted, "one of " + ", ".join(known_names))


def has_fp8_weights(config: ModelConfig) -> bool:
    """Whether weights or their scales are e4m3 in memory, by what the configuration says: NVFP4 has
    scales of e4m3, and fp4 of bitsandbytes becomes e4m3."""
    if config.online_quantization is not None:
        return config.online_quantization in ("fp8", "fp8_block")
    stored = config.quantization or {}
    method = str(stored.get("quant_method"))
    if method.startswith("modelopt"):
        inner = _mapping(stored.get("quantization")) or stored
        layers = [_mapping(one) for one in _mapping(inner.get("quantized_layers")).values()]
        algorithms = (str(one.get("quant_algo")).upper() for one in (inner, *layers))
        return any(one.startswith("FP8") or one.endswith("NVFP4") for one in algorithms)
    if method == "bitsandbytes":
        four_bits = bool(stored.get("load_in_4bit"))
        return four_bits and (stored.get("bnb_4bit_quant_type") or "fp4") == "fp4"
    return method in ("fp8", "fbgemm_fp8") or any(
        _has_e4m3(_mapping(one), stored) for one in _mapping(stored.get("config_groups")).values()
    )


def _has_e4m3(group: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Of a group of compressed-tensors."""
    weights = _mapping(group.get("weights"))
    form = str(group.get("format") or stored.get("format"))
    of_floats = weights.get("type") == "float"
    return of_floats and (weights.get("num_bits") == 8 or form.startswith("nvfp4"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def with_plain_weights(config: ModelConfig) -> ModelConfig:
    """A model of a GGUF file whose blocks become plain weights when they are loaded; others as
    they are."""
    if config.quantization is None or config.quantization.get("quant_method") != "gguf":
        return config
    return replace(config, quantization=None)


def kv_cache_of(config: ModelConfig) -> Literal["default", "scales"] | None:
    """What a checkpoint says of an e4m3 KV cache: "default" if the cache shall be one where the
    user leaves it open, "scales" if it has the scales alone (`wants_fp8_kv`).

    Raises:
        ModelLoadError: its KV cache is quantized otherwise.
    """
    from hetero_llm.quantization.formats.kv_cache import has_kv_scales, wants_fp8_kv

    if config.quantization is None:
        return None
    try:
        if wants_fp8_kv(config.quantization):
            return "default"
        return "scales" if has_kv_scales(config.quantization) else None
    except ValueError as error:
        reason = f"{error}; kv_cache_dtype=bfloat16 or float16, the model's type, does without"
        raise ModelLoadError(f"quantization_config: {reason}") from error


def checkpoint_format(config: ModelConfig, folder: Path) -> CheckpointFormat | None:
    """The format of the weights that are read; None: they are plain and stay so.

    Raises:
        ModelLoadError: the checkpoint's format, or an option of it, is not supported.
    """
    from hetero_llm.quantization.formats.read import read_format
    from hetero_llm.quantization.online import OnlineFormat

    if config.online_quantization is not None:
        return OnlineFormat(config.online_quantization)
    if config.quantization is None:
        return None
    try:
        return read_format(config.quantization)
    except ValueError as error:
        raise ModelLoadError(f"{folder}: quantization_config: {error}") from error
