"""Plain weights that are quantized: how far what they become may be from what they were."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.quantization.matrix import NF4_VALUES, dequantize, unpack_codes
from hetero_llm.quantization.names import ONLINE_NAMES, OnlineName
from hetero_llm.quantization.online import OnlineFormat, quantize_int4, quantize_nf4

WIDTH = 384
# Squared error over the squared weights, of normal weights: measured, and a quarter more.
MOST_ERROR = {"fp8": 9e-4, "fp8_block": 9e-4, "ifq": 1.2e-4, "ifq_nf4": 1.1e-2, "int4": 1.5e-2}


def weights(height: int = 130, seed: int = 0) -> torch.Tensor:
    """Normal, rows of different size, one row of zeros and one large value."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(height, WIDTH, generator=generator)
    values *= torch.logspace(-3, 1, height).unsqueeze(1)
    values[5] = 0.0
    return values


@pytest.mark.parametrize("name", ONLINE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_each_row_is_small(name: OnlineName, dtype: torch.dtype) -> None:
    given = weights().to(dtype)
    scheme = OnlineFormat(name).scheme("any")
    (part,) = scheme.parts(*given.shape)
    assert part.suffix == "weight"
    matrix = scheme.convert({"weight": given}, *given.shape)
    assert matrix.shape == given.shape
    assert matrix.nbytes < {4: 0.72, 8: 1.15}[4 if "4" in name else 8] * given.numel()
    found, wanted = dequantize(matrix, torch.float32), given.float()
    assert (found[5] == 0.0).all()
    if name == "fp8_block":  # rows share scales, so the small ones keep few digits
        error = (found - wanted).square().sum() / wanted.square().sum()
        assert error < MOST_ERROR[name]
        return
    errors = (found - wanted).square().sum(1) / wanted.square().sum(1).clamp(min=1e-30)
    assert errors.max() < MOST_ERROR[name], errors.max()


def test_int4_is_no_worse_than_the_whole_range() -> None:
    """The search for a scale lowers the error of rounding over the range from least to most."""
    given = weights()
    found = dequantize(quantize_int4(given), torch.float32)
    groups = given.view(len(given), -1, 128)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-9)
    plain = ((groups - low) / scale).round() * scale + low
    error = (found - given).square().view_as(groups).sum(2)
    assert (error <= (plain - groups).square().sum(2) * 1.35 + 1e-9).all()
    assert error.sum() < 0.95 * (plain - groups).square().sum()


def test_int4_without_zero_points() -> None:
    """Codes 0 and 15 are 8 steps below zero and 7 above it; values beyond are cut."""
    given = torch.tensor([[-8.0, 7.0] * 16 + [0.0] * 32, [3.5] * 32 + [-4.0] * 32])
    matrix = quantize_int4(given, 32, symmetric=True)
    assert matrix.zero is None
    assert torch.equal(dequantize(matrix, torch.float32), given)
    error = dequantize(quantize_int4(weights(), symmetric=True), torch.float32) - weights()
    assert error.square().sum() < MOST_ERROR["int4"] * weights().square().sum()


def test_nf4_takes_the_nearest_value() -> None:
    given = weights()
    matrix = quantize_nf4(given)
    ratios = given.view(len(given), -1, 64) / matrix.scale.float().unsqueeze(2)
    values = torch.tensor(NF4_VALUES)
    nearest = (ratios.unsqueeze(3) - values).abs().argmin(3).view(len(given), WIDTH)
    assert torch.equal(unpack_codes(matrix.data).long(), nearest)


@pytest.mark.parametrize(("name", "columns"), [("int4", 52), ("ifq_nf4", 96)])
def test_columns_that_no_group_divides_are_refused(name: OnlineName, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{columns} columns.*possible are fp8, fp8_block, ifq"):
        OnlineFormat(name).scheme("any").parts(8, columns)
