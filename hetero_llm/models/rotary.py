"""Rotary position embedding: frequencies of each scaling type, the table, its application."""

from __future__ import annotations

import functools
import logging
import math

import torch
from torch import Tensor, nn

from hetero_llm.models.rope_config import RopeConfig

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1 << 17
_BY_LENGTH = ("dynamic", "longrope", "qwen_ntk")
"""Scaling types whose frequencies depend on the context length, see `inverse_frequencies`."""


class RotaryEmbedding(nn.Module):
    """Table of cos and sin, indexed by positions once per forward.

    The table is [max_model_len, rotary_dim] fp32, cos in the first half of a row and sin in the
    second; it is computed in fp32 for every default dtype. Without a `rope` it is empty.
    """

    def __init__(self, rope: RopeConfig | None, max_model_len: int) -> None:
        super().__init__()
        table = torch.empty(0, 0) if rope is None else _table(rope, max_model_len)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def factors(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Factors for `apply_rotary`.

        Args:
            positions: [T] int64.
            dtype: Of the queries and keys; transformers rounds the factors to it too.

        Returns:
            cos and signed sin, [T, 1, rotary_dim]; the first half of sin is negated.
        """
        cos, sin = self.table[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class StepRotary:
    """The rotary embedding of one step's tokens: the table and, for torch, the factors, which the
    first layer computes and all layers share. Fused kernels read the table only."""

    def __init__(self, embedding: RotaryEmbedding, positions: Tensor, dtype: torch.dtype) -> None:
        self.table = embedding.table
        self.positions = positions  # [T] int64
        self._embedding = embedding
        self._dtype = dtype

    @functools.cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """See `RotaryEmbedding.factors`."""
        return self._embedding.factors(self.positions, self._dtype)


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates [T, heads, rotary_dim]; queries and keys go through it together.

    Multiply and add stay apart: a fused multiply-add rounds differently in vector bodies and
    tails, which would make a token depend on its neighbours.
    """
    low, high = x.chunk(2, dim=-1)
    swapped = torch.cat((high, low), dim=-1)
    return (x * cos).add_(swapped.mul_(signed_sin))


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> Tensor:
    """[rotary_dim / 2] fp32, scaled as transformers' `modeling_rope_utils` does.

    For types of `_BY_LENGTH` the models' authors use the plain (or short) frequencies up to the
    original context and change them with the length of longer sequences, so that cached keys would
    have to be rotated again. Here they are fixed, as in vLLM: plain if `max_model_len` fits the
    original context, else those for `max_model_len`.
    """
    theta = rope.theta
    if rope.scaling_type == "dynamic":
        theta = _ntk_theta(rope, max_model_len)
    if rope.scaling_type == "qwen_ntk":
        theta = _qwen_theta(rope, max_model_len)
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    periods = theta**exponents
    if rope.scaling_type == "linear":
        return 1.0 / periods / rope.factor
    if rope.scaling_type == "llama3":
        return _llama3(rope, 1.0 / periods)
    if rope.scaling_type == "yarn":
        return _yarn(rope, periods)
    if rope.scaling_type == "longrope":
        factors = rope.long_factors if _is_long(rope, max_model_len) else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
    return 1.0 / periods


def half_split_order(head_dim: int, rotary_dim: int) -> Tensor:
    """[head_dim] int64: the stored entry for each entry of a head, for families that rotate
    neighbours (GPT-J, ChatGLM), where `apply_rotary` rotates halves."""
    rotated = torch.arange(rotary_dim, device="cpu")
    rest = torch.arange(rotary_dim, head_dim, device="cpu")
    return torch.cat((rotated[0::2], rotated[1::2], rest))


def _table(rope: RopeConfig, max_model_len: int) -> Tensor:
    table = torch.empty(max_model_len, rope.rotary_dim, dtype=torch.float32)
    if table.is_meta:  # a model whose sizes alone matter
        return table
    if rope.scaling_type in _BY_LENGTH and _is_long(rope, max_model_len):
        logger.info(
            "rotary frequencies for contexts of %d tokens (%s); max_model_len up to %d keeps those "
            "of the original context",
            *(max_model_len, rope.scaling_type, rope.original_max_position),
        )
    frequencies = inverse_frequencies(rope, max_model_len)
    scale = rope.attention_factor
    if rope.scaling_type == "longrope" and _is_long(rope, max_model_len):
        scale = rope.long_attention_factor
    half = rope.rotary_dim // 2
    for first in range(0, max_model_len, _ROWS_AT_ONCE):  # temporaries stay small
        rows = table[first : first + _ROWS_AT_ONCE]
        positions = torch.arange(first, first + len(rows), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        rows[:, :half] = angles.cos() * scale
        rows[:, half:] = angles.sin() * scale
    return table


def _is_long(rope: RopeConfig, max_model_len: int) -> bool:
    return max_model_len > rope.original_max_position


def _ntk_theta(rope: RopeConfig, max_model_len: int) -> float:
    ratio = max(max_model_len, rope.original_max_position) / rope.original_max_position
    stretch = rope.factor * ratio - (rope.factor - 1)
    return rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _qwen_theta(rope: RopeConfig, max_model_len: int) -> float:
    """The base as NTK scaling changes it; the context is stretched 1, 3, 7, ... times for served
    contexts of up to 1, 2, 4, ... times the original one."""
    doublings = math.ceil(math.log2(max(1.0, max_model_len / rope.original_max_position)))
    stretch = 2 ** (doublings + 1) - 1
    return rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend in between."""
    wavelengths = 2 * math.pi / inv_freq
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelengths > low_wavelength, inv_freq / rope.factor, blend)
    return torch.where(wavelengths < high_wavelength, inv_freq, scaled)


def _yarn(rope: RopeConfig, periods: Tensor) -> Tensor:
    """Blends interpolated and unchanged frequencies by how often each rotates within the original
    context ("YaRN", Peng et al. 2023)."""

    def dim_of_rotations(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dim_of_rotations(rope.beta_fast), dim_of_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers: avoids a division by zero
    ramp = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    keep = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * periods)) * (1 - keep) + (1.0 / periods) * keep
