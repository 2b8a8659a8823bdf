"""Rounding that knows the inputs of a layer: GPTQ (Frantar et al. 2022, "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers").

Columns are rounded one after the other, and the error of each is made up for by the columns that
are still to be rounded, as far as inputs of the layer are correlated.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hetero_llm.quantization.matrix import (
    INT4_ZERO,
    NF4_VALUES,
    Kind,
    QuantizedMatrix,
    pack_codes,
    with_scale_of_each_row,
)

DAMPING = 0.01
"""What is added to all squares of inputs, as a share of their mean."""
_MOST_DAMPING = 1.0
_COLUMNS_AT_ONCE = 128


def compensate(weight: Tensor, matrix: QuantizedMatrix, hessian: Tensor) -> QuantizedMatrix:
    """`matrix` with its elements chosen anew, its scales and zero points kept.

    Columns are taken in falling order of their inputs' squares ("activation order"); groups stay
    those of neighbouring columns, so no order has to be stored.

    Args:
        weight: [N, K] floats.
        matrix: of this weight, by a function of `online`: fp8, int8, int4 or nf4, with neither
            offsets nor an order.
        hessian: [K, K] float32, the mean of x x^T over inputs x of the layer; on the same device.
    """
    assert matrix.offset is None and matrix.order is None and matrix.row_scale is None
    assert weight.shape == matrix.shape and hessian.shape == (weight.shape[1],) * 2
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = _factor(hessian[order][:, order])
    scale, zero = _of_each_column(matrix, order)
    left = weight.float()[:, order]
    elements = torch.empty_like(left)
    for start in range(0, left.shape[1], _COLUMNS_AT_ONCE):
        stop = min(start + _COLUMNS_AT_ONCE, left.shape[1])
        block = left[:, start:stop].clone()
        errors = torch.empty_like(block)
        for column in range(start, stop):
            at = column - start
            now, row = block[:, at], factor[column, column:stop]
            element = _nearest(matrix.kind, now / scale[:, column] + zero[:, column])
            elements[:, column] = element
            rounded = (_value(matrix.kind, element) - zero[:, column]) * scale[:, column]
            errors[:, at] = (now - rounded) / row[0]
            block[:, at:].addr_(errors[:, at], row, alpha=-1.0)
        left[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1.0)
    ordered = torch.empty_like(elements)
    ordered[:, order] = elements
    return replace(matrix, data=_stored(matrix.kind, ordered))


def _factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped matrix's inverse. Inputs that are always 0 count as
    independent ones. More damping where float32 needs it."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    diagonal[diagonal == 0.0] = torch.where(mean > 0.0, mean, 1.0)
    damping = DAMPING
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * diagonal.mean())
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(factor.isfinite().all()):
            return factor
        assert damping < _MOST_DAMPING, "a mean of x x^T is not positive"
        damping *= 10.0


def _of_each_column(matrix: QuantizedMatrix, order: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points, [N, K] float32 each, columns in this order."""
    groups = order // matrix.group
    scale = with_scale_of_each_row(matrix).scale.float()[:, groups]
    if matrix.zero is not None:
        return scale, matrix.zero.float()[:, groups]
    return scale, torch.full_like(scale, INT4_ZERO if matrix.kind == "int4" else 0.0)


def _nearest(kind: Kind, values: Tensor) -> Tensor:
    """The nearest elements of a kind as float32: values, or codes of a table."""
    if kind == "fp8":
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    if kind == "nf4":
        table = torch.tensor(NF4_VALUES, device=values.device)
        return torch.bucketize(values, (table[1:] + table[:-1]) / 2).float()
    low, high = (-127.0, 127.0) if kind == "int8" else (0.0, 15.0)
    return values.round().clamp_(low, high)


def _value(kind: Kind, elements: Tensor) -> Tensor:
    if kind != "nf4":
        return elements
    return torch.tensor(NF4_VALUES, device=elements.device)[elements.long()]


def _stored(kind: Kind, elements: Tensor) -> Tensor:
    """As in `QuantizedMatrix.data`."""
    if kind == "fp8":
        return elements.to(torch.float8_e4m3fn)
    return elements.to(torch.int8) if kind == "int8" else pack_codes(elements)
