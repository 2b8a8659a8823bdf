"""The internal form of quantized matrices, against its definition element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.quantization.matrix import (
    FP4_VALUES,
    KINDS,
    NF4_VALUES,
    QuantizedMatrix,
    QuantizedStack,
    QuantizedWeight,
    arrange_rows,
    columns_of,
    concatenate,
    dequantize,
    pack_codes,
    quantized_product,
    rows_of,
    stack,
    unpack_codes,
)
from tests.quantization.matrices import random_matrix

CASES: list[dict[str, Any]] = [
    *({"kind": kind} for kind in KINDS),
    {"kind": "fp8", "group": 128, "rows": 128},
    {"kind": "fp8", "scale_dtype": torch.bfloat16, "row_scale": True},
    {"kind": "int8", "group": 32, "scale_dtype": torch.float16},
    {"kind": "int4", "group": 32, "zeros": "zero", "scale_dtype": torch.float16},
    {"kind": "int4", "group": 64, "zeros": "offset", "order": True},
    {"kind": "int4", "group": 64, "order": True},
    {"kind": "fp4", "group": 16, "scale_dtype": torch.float8_e4m3fn, "row_scale": True},
    {"kind": "nf4", "group": 64},
]


def ids(case: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())


def by_definition(matrix: QuantizedMatrix) -> Tensor:
    """[N, K] float64 by the formula of `QuantizedMatrix`, one element at a time."""
    height, width = matrix.shape
    out = torch.zeros(height, width, dtype=torch.float64)
    for n in range(height):
        for k in range(width):
            group = k // matrix.group
            if matrix.kind in ("fp8", "int8"):
                element = float(matrix.data[n, k])
            else:
                byte = int(matrix.data[n, k // 2])
                code = byte >> 4 if k % 2 else byte & 15
                element = {"int4": float(code), "fp4": FP4_VALUES[code], "nf4": NF4_VALUES[code]}[
                    matrix.kind
                ]
            if matrix.zero is not None:
                element -= int(matrix.zero[n, group])
            elif matrix.kind == "int4" and matrix.offset is None:
                element -= 8
            value = float(matrix.scale[n // matrix.rows, group]) * element
            if matrix.offset is not None:
                value += float(matrix.offset[n, group])
            if matrix.row_scale is not None:
                value *= float(matrix.row_scale[n])
            out[n, k if matrix.order is None else int(matrix.order[k])] = value
    return out


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_dequantize_is_the_definition(case: dict[str, Any]) -> None:
    matrix = random_matrix(**case, height=130, width=192)
    found = dequantize(matrix, torch.float32)
    torch.testing.assert_close(found.double(), by_definition(matrix), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_products_rows_and_parts(case: dict[str, Any]) -> None:
    """Products, rows in another order, and parts that become one matrix."""
    parts = [random_matrix(**case, height=h, width=192, seed=h) for h in (128, 7, 130)]
    if case.get("order"):
        parts = [replace(part, order=parts[0].order) for part in parts]
    dense = [dequantize(part, torch.float32) for part in parts]
    joined = concatenate(parts)
    assert torch.equal(dequantize(joined, torch.float32), torch.cat(dense))
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(265, generator=torch.Generator().manual_seed(2))
    expected = x @ torch.cat(dense).t() + bias
    torch.testing.assert_close(quantized_product(x, joined, bias), expected)
    turned = arrange_rows(joined, lambda rows: rows.flip(0))
    assert torch.equal(dequantize(turned, torch.float32), torch.cat(dense).flip(0))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_rows_and_columns_of_a_rank(case: dict[str, Any]) -> None:
    matrix = random_matrix(**case, height=300, width=256)
    dense = dequantize(matrix, torch.float32)
    for runs in ([(0, 128)], [(128, 128), (256, 44)], [(3, 10), (130, 170)]):
        rows = torch.cat([dense[first : first + count] for first, count in runs])
        assert torch.equal(dequantize(rows_of(matrix, runs), torch.float32), rows)
    if matrix.order is not None:
        with pytest.raises(ValueError, match="an order of their own"):
            columns_of(matrix, 0, 128)
        return
    for first in (0, 128):
        found = dequantize(columns_of(matrix, first, 128), torch.float32)
        assert torch.equal(found, dense[:, first : first + 128])
    if matrix.group < 256:
        with pytest.raises(ValueError, match=f"columns 0 to 8 of 256 .* group of {matrix.group}"):
            columns_of(matrix, 0, 8)


def test_rows_keep_the_scales_of_whole_blocks() -> None:
    matrix = random_matrix("fp8", group=128, rows=128, height=300, width=256)
    assert rows_of(matrix, [(128, 128)]).rows == rows_of(matrix, [(0, 128), (256, 44)]).rows == 128
    assert rows_of(matrix, [(64, 128)]).rows == 1


def test_two_columns_share_a_byte() -> None:
    with pytest.raises(ValueError, match="columns 0 to 3: two share a byte"):
        columns_of(random_matrix("int4", height=4, width=64), 0, 3)


def test_blocks_stay_blocks_where_parts_end_with_one() -> None:
    whole, tail = (random_matrix("fp8", h, 256, group=128, rows=128, seed=h) for h in (256, 100))
    assert concatenate([whole, tail]).rows == 128
    assert concatenate([tail, whole]).rows == 1


def test_parts_may_differ_in_zero_points_and_scale_types() -> None:
    parts = [
        random_matrix("int4", 4, 64, group=32, zeros=zeros, scale_dtype=dtype, seed=seed)
        for seed, (zeros, dtype) in enumerate(
            [("none", torch.float16), ("zero", torch.float16), ("offset", torch.float32)]
        )
    ]
    for some in (parts[:2], parts):
        expected = torch.cat([dequantize(part, torch.float32) for part in some])
        found = dequantize(concatenate(some), torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def test_parts_of_different_kinds_are_refused() -> None:
    parts = [random_matrix("int8", 4, 64), random_matrix("fp8", 4, 64)]
    with pytest.raises(ValueError, match="kinds"):
        concatenate(parts)
    ordered = [random_matrix("int8", 4, 64, order=True, seed=seed) for seed in (1, 2)]
    with pytest.raises(ValueError, match="order"):
        concatenate(ordered)


def test_codes_round_trip() -> None:
    codes = torch.arange(32).view(2, 16) % 16
    assert torch.equal(unpack_codes(pack_codes(codes)).long(), codes)


def test_a_weight_moves_and_counts_with_its_module() -> None:
    weight = QuantizedWeight(random_matrix("int4", 8, 64, group=32, zeros="zero"))
    assert weight.shape == (8, 64)
    held = sum(buffer.nbytes for buffer in weight.buffers())
    assert held == weight.matrix.nbytes == 8 * 32 + 8 * 2 * 4 + 8 * 2


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("height", [96, 128])
def test_a_stack_has_the_matrices_that_it_is_made_of(case: dict[str, Any], height: int) -> None:
    """Each with an order of its own, and blocks of rows that end with it, or do not."""
    matrices = [random_matrix(height=height, width=256, seed=i, **case) for i in range(3)]
    whole = stack(matrices)
    assert whole.rows == (matrices[0].rows if height == 128 else 1)
    weights = QuantizedStack(whole, 3)
    assert weights.shape == (3, height, 256)
    expected = torch.stack([dequantize(matrix, torch.float32) for matrix in matrices])
    assert torch.equal(dequantize(whole, torch.float32).view_as(expected), expected)
    for place in range(3):
        assert torch.equal(dequantize(weights[place], torch.float32), expected[place])


def test_what_a_stack_equalizes_and_what_not() -> None:
    """A matrix in order beside one in another order; kinds, groups and widths have to be equal."""
    ordered = random_matrix("int4", 8, 64, group=32, order=True)
    others = random_matrix("int4", 8, 64, group=32), random_matrix("int4", 8, 64, group=16)
    whole = stack([ordered, others[0]])
    assert torch.equal(
        dequantize(whole, torch.float32),
        torch.cat([dequantize(m, torch.float32) for m in (ordered, others[0])]),
    )
    for other in (others[1], random_matrix("nf4", 8, 64, group=32)):
        with pytest.raises(ValueError, match="several kinds, groups or widths"):
            stack([ordered, other])
