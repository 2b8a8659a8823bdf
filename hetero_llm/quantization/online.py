"""Plain weights become quantized ones while they are loaded: `quantization="fp8"` and the others.

Nothing is calibrated: each matrix is rounded by itself, on the device where it will serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from hetero_llm.quantization.formats.scheme import FLOATS, Scheme, StoredPart
from hetero_llm.quantization.matrix import (
    BLOCK_ROWS,
    INT4_ZERO,
    NF4_VALUES,
    QuantizedMatrix,
    pack_codes,
)
from hetero_llm.quantization.names import OnlineName

_FP8_MOST = 448.0
_INT8_MOST = 127.0
_NF4_GROUP = 64
_INT4_GROUPS = (128, 64, 32)
_INT4_SHARES = tuple(1.0 - 0.025 * step for step in range(15))
"""Shares of a group's range that a scale may span: values beyond are cut, those inside finer."""
_NF4_SHARES = tuple(1.0 - 0.025 * step for step in range(-2, 13))
_ROWS_AT_ONCE = 1 << 12


def quantize_fp8(weight: Tensor, importance: Tensor | None = None) -> QuantizedMatrix:
    """One scale for each row, of its largest value: another one changes the error of numbers with
    exponents little.

    Args:
        weight: [N, K] floats, as of all of these functions.
        importance: [K] float32, what squared errors of a column count where a scale is searched
            for, which here it is not; None: all the same.
    """
    scale = _scale_of(weight.float().abs().amax(1, keepdim=True), _FP8_MOST)
    return QuantizedMatrix("fp8", _to_fp8(weight.float() / scale), scale, weight.shape[1])


def quantize_fp8_block(weight: Tensor, importance: Tensor | None = None) -> QuantizedMatrix:
    """One scale for each block of 128 x 128, as DeepSeek-V3's weights have them: of its largest
    value. `importance` changes nothing."""
    height, width = weight.shape
    blocks = (-(-height // BLOCK_ROWS), -(-width // BLOCK_ROWS))
    padded = weight.new_zeros(blocks[0] * BLOCK_ROWS, blocks[1] * BLOCK_ROWS, dtype=torch.float32)
    padded[:height, :width] = weight
    tiles = padded.view(blocks[0], BLOCK_ROWS, blocks[1], BLOCK_ROWS)
    scale = _scale_of(tiles.abs().amax((1, 3)), _FP8_MOST)
    tiles /= scale[:, None, :, None]
    data = _to_fp8(padded[:height, :width])
    return QuantizedMatrix("fp8", data, scale, BLOCK_ROWS, BLOCK_ROWS)


def quantize_int8(weight: Tensor, importance: Tensor | None = None) -> QuantizedMatrix:
    """One scale for each row, symmetric, of its largest value. `importance` changes nothing."""
    weight = weight.float()
    scale = _scale_of(weight.abs().amax(1, keepdim=True), _INT8_MOST)
    data = (weight / scale).round_().clamp_(-_INT8_MOST, _INT8_MOST).to(torch.int8)
    return QuantizedMatrix("int8", data, scale, weight.shape[1])


def quantize_nf4(weight: Tensor, importance: Tensor | None = None) -> QuantizedMatrix:
    """One scale for each 64 columns of a row, of which there must be no rest: that of the least
    squared error. The scales are rounded to bfloat16 before the codes are chosen.

    Args:
        importance: see `quantize_fp8`.
    """
    parts = [_nf4_rows(rows, importance) for rows in weight.split(_ROWS_AT_ONCE)]
    codes, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedMatrix("nf4", codes, scales, _NF4_GROUP)


def _nf4_rows(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Packed codes [N, K / 2], scales [N, K / 64] bfloat16."""
    groups = weight.float().view(len(weight), -1, _NF4_GROUP)
    values = torch.tensor(NF4_VALUES, device=weight.device)
    borders = (values[1:] + values[:-1]) / 2
    whole = _scale_of(groups.abs().amax(2, keepdim=True), 1.0)

    def error(scale: Tensor) -> Tensor:
        return values[torch.bucketize(groups / scale, borders)].mul_(scale).sub_(groups).square_()

    scales = ((whole * share).bfloat16().float() for share in _NF4_SHARES)
    scale = _best(scales, error, _in_groups(importance, _NF4_GROUP))
    codes = torch.bucketize(groups / scale, borders)
    return pack_codes(codes.view(weight.shape)), scale.squeeze(2).bfloat16()


def int4_group(widths: Iterable[int]) -> int:
    """Columns of a group of int4: 128, or 64 or 32 where 128 do not divide all of these widths."""
    common = math.gcd(*widths)
    return next(size for size in _INT4_GROUPS if common % size == 0)


def quantize_int4(
    weight: Tensor,
    group: int | None = None,
    importance: Tensor | None = None,
    *,
    symmetric: bool = False,
) -> QuantizedMatrix:
    """One scale and zero point for each group of columns of a row, which span the share of the
    group's range with the least squared error.

    Args:
        group: None: that of `int4_group`.
        importance: see `quantize_fp8`.
        symmetric: there are no zero points.
    """
    group = group or int4_group([weight.shape[1]])
    parts = [_int4_rows(rows, group, importance, symmetric) for rows in weight.split(_ROWS_AT_ONCE)]
    codes, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedMatrix("int4", codes, scales, group, zero=None if symmetric else zeros)


def _int4_rows(
    weight: Tensor, group: int, importance: Tensor | None, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes [N, K / 2], scales [N, K / group] bfloat16, zero points alike in uint8."""
    height, width = weight.shape
    groups = weight.float().view(height, -1, group)
    low = groups.amin(2, keepdim=True).clamp_(max=0.0)
    high = groups.amax(2, keepdim=True).clamp_(min=0.0)
    if symmetric:  # codes from 0 to 15 are 8 below and 7 above zero
        low = torch.minimum(low, high * (-INT4_ZERO / (15 - INT4_ZERO)))
        high = low * (-(15 - INT4_ZERO) / INT4_ZERO)

    def scale_and_zero(share: Tensor | float) -> tuple[Tensor, Tensor]:
        # The codes are chosen for the scale as it is kept.
        scale = _scale_of((high - low) * share, 15.0).bfloat16().float()
        if symmetric:
            return scale, torch.full_like(scale, INT4_ZERO)
        return scale, (-low * share / scale).round_().clamp_(0.0, 15.0)

    def codes_of(scale: Tensor, zero: Tensor) -> Tensor:
        return (groups / scale).add_(zero).round_().clamp_(0.0, 15.0)

    def error(share: Tensor) -> Tensor:
        scale, zero = scale_and_zero(share)
        return codes_of(scale, zero).sub_(zero).mul_(scale).sub_(groups).square_()

    shares = (torch.full_like(low, share) for share in _INT4_SHARES)
    scale, zero = scale_and_zero(_best(shares, error, _in_groups(importance, group)))
    codes = codes_of(scale, zero)
    return (
        pack_codes(codes.view(height, width)),
        scale.squeeze(2).bfloat16(),
        zero.squeeze(2).to(torch.uint8),
    )


def _best(
    candidates: Iterable[Tensor], error: Callable[[Tensor], Tensor], importance: Tensor | None
) -> Tensor:
    """Of tensors [..., 1] in each place the value with the least sum of errors over the last dim.

    Args:
        error: [..., 1] -> squared errors [..., K].
        importance: what they count, to be broadcast against them; None: all the same.
    """
    best, least = None, None
    for candidate in candidates:
        squares = error(candidate)
        if importance is not None:
            squares *= importance
        # In float64 the order of the sum, which devices choose, does not decide.
        total = squares.sum(-1, keepdim=True, dtype=torch.float64)
        if best is None or least is None:
            best, least = candidate, total
            continue
        better = total < least
        best, least = torch.where(better, candidate, best), torch.where(better, total, least)
    assert best is not None
    return best


def _in_groups(importance: Tensor | None, group: int) -> Tensor | None:
    """[K] -> [K / group, group]."""
    return None if importance is None else importance.view(-1, group)


def _scale_of(largest: Tensor, most: float) -> Tensor:
    """What makes `largest` `most`; 1 where it is 0."""
    # A division by a number is a product with its inverse on a GPU, and another bit than on a CPU.
    return torch.where(largest > 0.0, largest * (1.0 / most), 1.0)


def _to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn)


_QUANTIZERS: dict[OnlineName, Callable[[Tensor, Tensor | None], QuantizedMatrix]] = {
    "fp8": quantize_fp8,
    "fp8_block": quantize_fp8_block,
    "ifq": quantize_int8,
    "ifq_nf4": quantize_nf4,
    "int4": lambda weight, importance: quantize_int4(weight, None, importance),
}
assert tuple(_QUANTIZERS) == get_args(OnlineName)
_COLUMNS: dict[OnlineName, int] = {
    "fp8": 1,
    "fp8_block": 1,
    "ifq": 1,
    "ifq_nf4": _NF4_GROUP,
    "int4": _INT4_GROUPS[-1],
}
"""What the number of columns must be a multiple of."""


@dataclass(frozen=True, slots=True)
class OnlineFormat:
    """A `CheckpointFormat` of plain weights that are quantized when they have been read."""

    name: OnlineName

    def scheme(self, module: str) -> OnlineScheme:
        return OnlineScheme(self.name)


@dataclass(frozen=True, slots=True)
class OnlineScheme(Scheme):
    """See `formats.scheme.Scheme`. `group`, `symmetric`: of int4, see `quantize_int4`."""

    name: OnlineName
    group: int | None = None
    symmetric: bool = False

    def parts(self, rows: int, columns: int) -> tuple[StoredPart, ...]:
        step = _COLUMNS[self.name]
        if columns % step:
            others = ", ".join(name for name, other in _COLUMNS.items() if columns % other == 0)
            raise ValueError(
                f"{columns} columns: quantization={self.name!r} needs a multiple of {step}; "
                f"possible are {others}"
            )
        return (StoredPart("weight", FLOATS, ((rows, columns),)),)

    def convert(self, stored: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedMatrix:
        return self.quantize(stored["weight"])

    def column_step(self, columns: int) -> int:
        if self.name == "int4":
            return self.group or int4_group([columns])
        return BLOCK_ROWS if self.name == "fp8_block" else _COLUMNS[self.name]

    def slice_steps(self, columns: int) -> tuple[int, int]:
        """A row has one scale, computed over the columns of all ranks."""
        rows = BLOCK_ROWS if self.name == "fp8_block" else 1
        return rows, 0 if self.name in ("fp8", "ifq") else self.column_step(columns)

    def quantize(self, weight: Tensor, importance: Tensor | None = None) -> QuantizedMatrix:
        """See `quantize_fp8`."""
        if self.name == "int4":
            return quantize_int4(weight, self.group, importance, symmetric=self.symmetric)
        return _QUANTIZERS[self.name](weight, importance)
