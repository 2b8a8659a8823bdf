"""The rotary embedding's part of config.json, in both the old and the new spelling.

Old: `rope_theta` and `rope_scaling` beside each other. New (transformers 5): `rope_parameters`,
which holds both, or one such dict per layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero_llm.core.errors import ConfigError, ModelLoadError, shown

_DEFAULT_THETA = 10000.0
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# "finetuned" is written by YaRN's own authors and says nothing about the computation.
_KEYS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "default": frozenset({"original_max_position_embeddings"}),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        }
    ),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model; every layer uses the same one.

    Attributes:
        theta: Base of the frequencies.
        rotary_dim: Rotated entries of each head, the first ones.
        scaling_type: "default", "linear", "dynamic", "yarn" or "llama3".
        original_max_position: Context length in tokens before scaling.
        factor: Ratio of the scaled to the original context; 1.0 for "default".
        attention_factor: Multiplies cos and sin ("yarn"; 1.0 otherwise).
        low_freq_factor, high_freq_factor: "llama3" only.
        beta_fast, beta_slow, truncate: "yarn" only.
    """

    theta: float
    rotary_dim: int
    scaling_type: str
    original_max_position: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def parse_rope(
    raw: Mapping[str, Any],
    *,
    where: str,
    head_dim: int,
    max_position: int,
    rope_scaling: Mapping[str, Any] | None,
    rope_theta: float | None,
    rotary_factor: float = 1.0,
) -> RopeConfig:
    """Reads the rotary embedding of a config.json.

    Args:
        raw: The whole config.json.
        where: Its path, for messages.
        head_dim: Width of one attention head.
        max_position: `max_position_embeddings`.
        rope_scaling: The user's replacement for the file's scaling, or None.
        rope_theta: The user's replacement for the file's base, or None.
        rotary_factor: Share of each head that is rotated, unless the file says.
    """
    if rope_theta is not None and not (_is_number(rope_theta) and rope_theta > 0):
        raise ConfigError("rope_theta", rope_theta, "a number above 0 is needed")
    params = _rope_dict(raw, where)
    theta = params.get("rope_theta", raw.get("rope_theta"))
    if rope_scaling is not None:
        params = dict(rope_scaling)
        theta = params.get("rope_theta", theta)
    elif raw.get("original_max_position_embeddings") is not None:
        # Beside the dict it takes precedence, as in transformers.
        key = "original_max_position_embeddings"
        params[key] = raw[key]
    if rope_theta is not None:
        theta = rope_theta
    params["rope_theta"] = _DEFAULT_THETA if theta is None else theta
    if params.get("partial_rotary_factor") is None:
        params["partial_rotary_factor"] = raw.get("partial_rotary_factor", rotary_factor)
    try:
        return _rope_from_dict(params, where, head_dim, max_position)
    except ModelLoadError as error:
        if rope_scaling is None:
            raise
        raise ConfigError("rope_scaling", dict(rope_scaling), str(error)) from error


def scaled_max_position(rope: RopeConfig, max_position: int) -> int:
    """Context length after scaling, as vLLM derives it.

    `max_position_embeddings` of llama3 checkpoints already holds the scaled length; for linear and
    dynamic it is the length before scaling; yarn states the original length on its own.
    """
    if rope.scaling_type in ("default", "llama3"):
        return max_position
    if rope.scaling_type == "yarn":
        return int(rope.original_max_position * rope.factor)
    return int(max_position * rope.factor)


def _rope_dict(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The one dict of rotary parameters of a config.json (a copy), whichever its spelling."""
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{where}: {key}={shown(value)}: a JSON object is needed")
        nested = [name for name, entry in value.items() if isinstance(entry, Mapping)]
        if not nested:
            return dict(value)
        per_layer_type = [value[name] for name in nested]
        if any(entry != per_layer_type[0] for entry in per_layer_type):
            raise ModelLoadError(
                f"{where}: {key}={shown(value)}: a different rotary embedding per layer type is "
                "not supported"
            )
        return {**{k: v for k, v in value.items() if k not in nested}, **per_layer_type[0]}
    return {}


def _rope_from_dict(
    params: Mapping[str, Any], where: str, head_dim: int, max_position: int
) -> RopeConfig:
    def bad(key: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{where}: rope {key}={shown(params.get(key))}: {reason}")

    def number(key: str, default: float | None = None) -> float:
        value = params.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{where}: rope_type={scaling_type!r} needs the key {key!r}")
        if not _is_number(value) or value <= 0:
            raise bad(key, "a number above 0 is needed")
        return float(value)

    scaling_type = params.get("rope_type") or params.get("type") or "default"
    if not isinstance(scaling_type, str) or scaling_type not in _KEYS_OF_TYPE:
        raise ModelLoadError(
            f"{where}: rope_type={shown(scaling_type)} is not supported; supported are "
            + ", ".join(_KEYS_OF_TYPE)
        )
    allowed = _KEYS_OF_TYPE[scaling_type] | _COMMON_KEYS
    unknown = sorted(k for k, v in params.items() if k not in allowed and v is not None)
    if unknown:
        raise bad(unknown[0], f"not supported with rope_type={scaling_type!r}")
    share = number("partial_rotary_factor", 1.0)
    if share > 1:
        raise bad("partial_rotary_factor", "at most 1 is needed")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or rotary_dim < 4:
        raise ModelLoadError(
            f"{where}: {rotary_dim} of head_dim={head_dim} entries are rotated: rotary embeddings "
            "need 4, 6, 8, ..."
        )
    original = int(number("original_max_position_embeddings", max_position))
    if scaling_type in ("default", "linear", "dynamic") and original != max_position:
        # transformers takes max_position_embeddings for these and never looks at this key.
        raise bad(
            "original_max_position_embeddings",
            f"differs from max_position_embeddings={max_position}, which "
            f"rope_type={scaling_type!r} starts from",
        )
    rope = RopeConfig(
        theta=number("rope_theta"),
        rotary_dim=rotary_dim,
        scaling_type=scaling_type,
        original_max_position=original,
    )
    if scaling_type == "default":
        return rope
    from_ratio = max_position / original if "factor" in params and scaling_type == "yarn" else None
    factor = number("factor", from_ratio)
    if factor < 1:
        raise bad("factor", "at least 1 is needed")
    if scaling_type == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise bad("high_freq_factor", f"must exceed low_freq_factor={low}")
        return replace(rope, factor=factor, low_freq_factor=low, high_freq_factor=high)
    if scaling_type == "yarn":
        if params.get("truncate") not in (None, True, False):
            raise bad("truncate", "true or false is needed")
        return replace(
            rope,
            factor=factor,
            attention_factor=number("attention_factor", _yarn_attention_factor(params, factor)),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=params.get("truncate") is not False,
        )
    return replace(rope, factor=factor)


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    """YaRN's correction of the softmax temperature, applied to cos and sin."""

    def mscale_of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and all_dim:
        return mscale_of(mscale) / mscale_of(all_dim)
    return mscale_of(1.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
