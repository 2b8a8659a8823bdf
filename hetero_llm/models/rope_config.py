"""Reads the rotary embedding's part of config.json, in the old and the new spelling.

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
_SMALLEST, _LARGEST = 1e-30, 1e30
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
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
            "short_mscale",
            "long_mscale",
        }
    ),
}
# Types whose original context is not max_position_embeddings.
_TYPES_WITH_ORIGINAL = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model; every layer uses the same one.

    Attributes:
        theta: Base of the frequencies.
        rotary_dim: Rotated entries of each head, the first ones.
        scaling_type: "default", "linear", "dynamic", "yarn", "llama3", "longrope" ("LongRoPE", Ding
            et al. 2024) or "qwen_ntk" (the first QWen's `use_dynamic_ntk`).
        original_max_position: Context length in tokens before scaling.
        factor: Ratio of the scaled to the original context; 1.0 for "default".
        attention_factor: Multiplies cos and sin ("yarn" and "longrope"; 1.0 otherwise).
        low_freq_factor, high_freq_factor: "llama3" only.
        beta_fast, beta_slow, truncate: "yarn" only.
        short_factors, long_factors: "longrope" only: each frequency's divisor where the served
            context fits the original one, and where it does not.
        long_attention_factor: "longrope" only: as `attention_factor`, with the long factors.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_attention_factor: float = 1.0


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
    if rope_theta is not None and not is_number(rope_theta):
        raise ConfigError("rope_theta", rope_theta, "a number above 0 is needed")
    params = _rope_dict(raw, where)
    theta = params.get("rope_theta", raw.get("rope_theta"))
    if rope_scaling is not None:
        params = dict(rope_scaling)
        theta = params.get("rope_theta", theta)
    elif _type_of(params) in _TYPES_WITH_ORIGINAL:
        # The key beside the dict takes precedence and the other types ignore it, as in transformers
        # (whose Phi3Config always writes it).
        key = "original_max_position_embeddings"
        if raw.get(key) is not None:
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

    `max_position_embeddings` of llama3 and longrope checkpoints already holds the scaled length;
    for linear and dynamic it is the length before scaling; yarn states the original length on its
    own.
    """
    if rope.scaling_type in ("default", "llama3", "longrope"):
        return max_position
    if rope.scaling_type == "yarn":
        return int(rope.original_max_position * rope.factor)
    return int(max_position * rope.factor)


def _rope_dict(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of the dict of rotary parameters of a config.json, in either spelling."""
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


@dataclass(frozen=True, slots=True)
class _Params:
    """Typed access to the dict of rotary parameters; `where` names the file in messages."""

    raw: Mapping[str, Any]
    where: str

    def bad(self, key: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: rope {key}={shown(self.raw.get(key))}: {reason}")

    def missing(self, key: str) -> ModelLoadError:
        name = _type_of(self.raw)
        return ModelLoadError(f"{self.where}: rope_type={name!r} needs the key {key!r}")

    def number(self, key: str, default: float | None = None) -> float:
        """Above 0; required without a default, null counts as absent."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.missing(key)
        if not is_number(value):
            raise self.bad(key, "a number above 0 is needed, from 1e-30 to 1e30")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        values = self.raw.get(key)
        if values is None:
            raise self.missing(key)
        if not isinstance(values, list) or len(values) != count or not all(map(is_number, values)):
            raise self.bad(key, f"{count} numbers above 0 are needed")
        return tuple(float(value) for value in values)


def _type_of(params: Mapping[str, Any]) -> Any:
    return params.get("rope_type") or params.get("type") or "default"


def _rope_from_dict(
    raw: Mapping[str, Any], where: str, head_dim: int, max_position: int
) -> RopeConfig:
    params = _Params(raw, where)
    scaling_type = _type_of(raw)
    if not isinstance(scaling_type, str) or scaling_type not in _KEYS_OF_TYPE:
        raise ModelLoadError(
            f"{where}: rope_type={shown(scaling_type)} is not supported; supported are "
            + ", ".join(_KEYS_OF_TYPE)
        )
    allowed = _KEYS_OF_TYPE[scaling_type] | _COMMON_KEYS
    unknown = sorted(k for k, v in raw.items() if k not in allowed and v is not None)
    if unknown:
        raise params.bad(unknown[0], f"not supported with rope_type={scaling_type!r}")
    share = params.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise params.bad("partial_rotary_factor", "at most 1 is needed")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or rotary_dim < 4:
        raise ModelLoadError(
            f"{where}: {rotary_dim} of head_dim={head_dim} entries are rotated: rotary embeddings "
            "need 4, 6, 8, ..."
        )
    original = int(params.number("original_max_position_embeddings", max_position))
    if scaling_type not in _TYPES_WITH_ORIGINAL and original != max_position:
        # transformers uses max_position_embeddings for these types and ignores this key.
        raise params.bad(
            "original_max_position_embeddings",
            f"differs from max_position_embeddings={max_position}, which "
            f"rope_type={scaling_type!r} starts from",
        )
    rope = RopeConfig(
        theta=params.number("rope_theta"),
        rotary_dim=rotary_dim,
        scaling_type=scaling_type,
        original_max_position=original,
    )
    return rope if scaling_type == "default" else _scaled(params, rope, max_position)


def _scaled(params: _Params, rope: RopeConfig, max_position: int) -> RopeConfig:
    """Adds the factors of the scaling type."""
    raw, scaling_type = params.raw, rope.scaling_type
    ratio = max_position / rope.original_max_position
    if scaling_type == "longrope":
        return _longrope(params, rope, ratio)
    factor = params.number("factor", ratio if "factor" in raw and scaling_type == "yarn" else None)
    if factor < 1:
        raise params.bad("factor", "at least 1 is needed")
    if scaling_type == "llama3":
        low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
        if high <= low:
            raise params.bad("high_freq_factor", f"must exceed low_freq_factor={low}")
        return replace(rope, factor=factor, low_freq_factor=low, high_freq_factor=high)
    if scaling_type == "yarn":
        if raw.get("truncate") not in (None, True, False):
            raise params.bad("truncate", "true or false is needed")
        if rope.theta <= 1:
            raise params.bad("rope_theta", "rope_type='yarn' needs more than 1")
        attention_factor = params.number("attention_factor", _yarn_attention_factor(params, factor))
        return replace(
            rope,
            factor=factor,
            attention_factor=attention_factor,
            beta_fast=params.number("beta_fast", 32.0),
            beta_slow=params.number("beta_slow", 1.0),
            truncate=raw.get("truncate") is not False,
        )
    return replace(rope, factor=factor)


def _longrope(params: _Params, rope: RopeConfig, ratio: float) -> RopeConfig:
    """`short_mscale` and `long_mscale` are the attention factors of PhiMoE."""
    factor = params.number("factor", ratio)
    default = 1.0
    if factor > 1 and rope.original_max_position > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(rope.original_max_position))
    attention_factor = params.number("attention_factor", default)
    return replace(
        rope,
        factor=factor,
        attention_factor=params.number("short_mscale", attention_factor),
        long_attention_factor=params.number("long_mscale", attention_factor),
        short_factors=params.numbers("short_factor", rope.rotary_dim // 2),
        long_factors=params.numbers("long_factor", rope.rotary_dim // 2),
    )


def _yarn_attention_factor(params: _Params, factor: float) -> float:
    """YaRN's correction of the softmax temperature, applied to cos and sin."""

    def mscale_of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.raw.get("mscale") and params.raw.get("mscale_all_dim"):
        mscale, all_dim = params.number("mscale"), params.number("mscale_all_dim")
        return mscale_of(mscale) / mscale_of(all_dim)
    return mscale_of(1.0)


def is_number(value: Any) -> bool:
    """Whether a value is a number above 0 that is one in float32, too: neither NaN nor infinite
    there, nor 0."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and _SMALLEST <= value <= _LARGEST
