"""In which form the native executor packs each weight matrix of a model.

A quantized matrix of a checkpoint stays as it is where csrc/step/matmul.h has its form: int4 in
groups of columns, int8 with a scale for each row or for groups. Others are dequantized and packed
like unquantized ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetero_llm.quantization.matrix import (
    QuantizedMatrix,
    QuantizedWeight,
    with_scale_of_each_row,
)

WEIGHT_FORMATS = {"bf16": 0, "float": 1, "int8": 2, "int4": 3}
"""Formats that weights are rounded to: numbers of `Format` in csrc/step/matmul.h."""
HEAD_FORMATS = {"int4": "int8"}
"""Formats of a head where they differ: 4 bits cost its scores more than they save."""

_INT8, _INT4, _INT8_GROUPS = 2, 3, 4
_NO_ZEROS, _POINTS, _OFFSETS = range(3)
_LARGEST_GROUP = 128
_MULTIPLES = {"int4": 32, "int8": 16}  # groups are multiples of
_ONLINE_GROUP = 32


@dataclass(frozen=True, slots=True)
class Form:
    """`Form` of csrc/step/matmul.h."""

    format: int
    group: int = 0
    half_scales: bool = False
    zeros: int = _NO_ZEROS


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """A quantized matrix [N, K] whose integers are packed as they are. Contiguous tensors.

    Attributes:
        data: as `QuantizedMatrix.data`.
        scales: [N, groups] float32; one group for `Format` int8.
        points: [N, groups] uint8 or None.
        offsets: [N, groups] float32 or None.
    """

    form: Form
    data: Tensor
    scales: Tensor
    points: Tensor | None
    offsets: Tensor | None


def rounded_form(weight_format: str) -> Form:
    """The form of a matrix that the library rounds itself.

    Args:
        weight_format: of `WEIGHT_FORMATS`.
    """
    if weight_format == "int4":
        return Form(_INT4, _ONLINE_GROUP, half_scales=True, zeros=_POINTS)
    return Form(WEIGHT_FORMATS[weight_format])


def keep(matrix: QuantizedMatrix) -> KeptMatrix | None:
    """The matrix in a form of the library with exactly its values; None if there is none."""
    if matrix.kind not in _MULTIPLES or matrix.order is not None:
        return None
    width = matrix.shape[1]
    size = _group_size(matrix.kind, matrix.group, width)
    if size is None:
        return None
    matrix = with_scale_of_each_row(matrix)
    points, scales, offsets = matrix.zero, matrix.scale.float(), matrix.offset
    offsets = None if offsets is None else offsets.float()
    if matrix.row_scale is not None:
        scales = scales * matrix.row_scale.unsqueeze(1)
        offsets = None if offsets is None else offsets * matrix.row_scale.unsqueeze(1)
    if matrix.kind == "int8" and matrix.group >= width:
        return KeptMatrix(Form(_INT8), matrix.data, scales.contiguous(), None, None)

    def spread(values: Tensor) -> Tensor:
        """One for each group of `size` columns."""
        return values.repeat_interleave(-(-min(matrix.group, width) // size), 1)[
            :, : -(-width // size)
        ].contiguous()

    form = Form(
        _INT4 if matrix.kind == "int4" else _INT8_GROUPS,
        size,
        _are_halves(scales) and (offsets is None or _are_halves(offsets)),
        _OFFSETS if offsets is not None else _POINTS if points is not None else _NO_ZEROS,
    )
    return KeptMatrix(
        form,
        matrix.data,
        spread(scales),
        None if points is None else spread(points),
        None if offsets is None else spread(offsets),
    )


def form_of(weight: nn.Parameter | QuantizedWeight, weight_format: str) -> Form:
    """The form of a `Linear`'s weight.

    Args:
        weight_format: of what is not kept, of `WEIGHT_FORMATS`.
    """
    kept = keep(weight.matrix) if isinstance(weight, QuantizedWeight) else None
    return rounded_form(weight_format) if kept is None else kept.form


def describe_others(weights: Iterable[nn.Parameter | QuantizedWeight]) -> str | None:
    """The quantized matrices that cannot be kept, in a few words; None if there are none."""
    matrices = (weight.matrix for weight in weights if isinstance(weight, QuantizedWeight))
    others = Counter(_describe(matrix) for matrix in matrices if keep(matrix) is None)
    return ", ".join(f"{count} x {kind}" for kind, count in others.items()) or None


def _describe(matrix: QuantizedMatrix) -> str:
    if matrix.order is not None:
        return f"{matrix.kind} with reordered columns"
    if matrix.kind in _MULTIPLES:
        return f"{matrix.kind} in groups of {matrix.group}"
    return matrix.kind


def _group_size(kind: str, group: int, width: int) -> int | None:
    """The largest group of the library into which those of a matrix can be cut."""
    multiple = _MULTIPLES[kind]
    if group >= width:
        return _LARGEST_GROUP
    if group % multiple:
        return None
    sizes = range(_LARGEST_GROUP, 0, -multiple)
    return next(size for size in sizes if group % size == 0)


def _are_halves(values: Tensor) -> bool:
    """Whether half floats hold the values exactly."""
    return bool(torch.equal(values.half().float(), values))
