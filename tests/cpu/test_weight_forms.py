"""Which quantized matrices the executor keeps, and that it keeps their values exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.cpu.weight_forms import (
    Form,
    KeptMatrix,
    describe_others,
    form_of,
    keep,
    rounded_form,
)
from hetero_llm.quantization.matrix import QuantizedWeight, dequantize, unpack_codes
from tests.quantization.matrices import random_matrix

INT8, INT4, INT8_GROUPS = 2, 3, 4
NONE, POINTS, OFFSETS = range(3)


def values_of(kept: KeptMatrix, height: int, width: int) -> Tensor:
    """[N, K] float32 as csrc/step/matmul.h defines them."""
    size = kept.form.group or width

    def spread(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(size, 1)[:, :width]

    integers = (kept.data if kept.form.format != INT4 else unpack_codes(kept.data)).float()
    if kept.points is not None:
        integers = integers - spread(kept.points)
    elif kept.form == Form(INT4, size, kept.form.half_scales, NONE):
        integers = integers - 8
    values = integers * spread(kept.scales)
    return values if kept.offsets is None else values + spread(kept.offsets)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"group": 32}, (INT4, 32, NONE)),
        ({"group": 128, "zeros": "zero", "scale_dtype": torch.float16}, (INT4, 128, POINTS)),
        ({"group": 64, "zeros": "offset", "scale_dtype": torch.bfloat16}, (INT4, 64, OFFSETS)),
        ({"group": 96}, (INT4, 96, NONE)),
        ({"group": 192, "zeros": "zero"}, (INT4, 96, POINTS)),  # is cut
        ({}, (INT4, 128, NONE)),  # a scale for each row
        ({"group": 64, "rows": 128}, (INT4, 64, NONE)),
        ({"kind": "int8"}, (INT8, 0, NONE)),
        ({"kind": "int8", "group": 16}, (INT8_GROUPS, 16, NONE)),
        ({"kind": "int8", "group": 128, "rows": 128}, (INT8_GROUPS, 128, NONE)),
    ],
    ids=str,
)
def test_kept_matrices_have_exactly_their_values(given: dict[str, Any], form: Any) -> None:
    matrix = random_matrix(given.pop("kind", "int4"), 150, 416, **given)
    kept = keep(matrix)
    assert kept is not None
    assert (kept.form.format, kept.form.group, kept.form.zeros) == form
    assert torch.equal(values_of(kept, 150, 416), dequantize(matrix, torch.float32))
    assert form_of(QuantizedWeight(matrix), "bf16") == kept.form


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_scales_of_rows_are_multiplied_in(kind: Any) -> None:
    zeros = "offset" if kind == "int4" else "none"
    matrix = random_matrix(kind, 40, 256, group=64, row_scale=True, zeros=zeros)
    kept = keep(matrix)
    assert kept is not None and not kept.form.half_scales
    torch.testing.assert_close(
        values_of(kept, 40, 256), dequantize(matrix, torch.float32), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("dtype", "half"), [(torch.float16, True), (torch.bfloat16, True), (torch.float32, False)]
)
def test_scales_are_halves_where_that_is_exact(dtype: torch.dtype, half: bool) -> None:
    kept = keep(random_matrix("int4", 40, 256, group=32, scale_dtype=dtype))
    assert kept is not None and kept.form.half_scales is half


def test_others_are_rounded_and_described() -> None:
    others = [
        random_matrix("fp8", 130, 256, group=128, rows=128),
        random_matrix("nf4", 32, 64, group=64),
        random_matrix("int4", 32, 64, group=32, order=True),
        random_matrix("int4", 32, 64, group=16),
        random_matrix("int8", 32, 64, group=8),
        random_matrix("nf4", 32, 64, group=64),
    ]
    for matrix in others:
        assert keep(matrix) is None
        assert form_of(QuantizedWeight(matrix), "bf16") == Form(0)
        assert form_of(QuantizedWeight(matrix), "int4") == rounded_form("int4")
    kept = random_matrix("int4", 32, 64, group=32)
    weights = [QuantizedWeight(matrix) for matrix in (kept, *others)]
    assert describe_others(weights) == (
        "1 x fp8, 2 x nf4, 1 x int4 with reordered columns, 1 x int4 in groups of 16, "
        "1 x int8 in groups of 8"
    )
    assert describe_others([QuantizedWeight(kept), torch.nn.Parameter(torch.zeros(2, 2))]) is None
