"""Activations, plain and gated, against the torch path."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.activation import (
    activation,
    activation_reference,
    gated_activation,
    gated_activation_reference,
    silu_mul,
)
from hetero_llm.models.config import ClampedSwish

NAMES = ["silu", "relu", "relu2", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"]
ALL_NAMES = [*NAMES, "sigmoid", "tanh"]
# The last bit of the activation may decide its rounding and then the product's. (The interpreter
# cuts bfloat16 off instead of rounding it, with no larger error.)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
# 1 + erf and 1 + tanh cancel for negative gates, in torch's float32 too.
ABSOLUTE = {torch.float32: 1e-5, torch.float16: 2**-12, torch.bfloat16: 2**-9}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, inner", [(1, 100), (3, 1024), (5, 1500)])
def test_matches_torch(
    device: torch.device, name: str, dtype: torch.dtype, rows: int, inner: int
) -> None:
    torch.manual_seed(inner)
    gate_up = torch.randn(rows, 2 * inner, device=device, dtype=dtype) * 4
    expected = gated_activation_reference(gate_up.clone(), name)
    result = gated_activation(gate_up, name)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=ABSOLUTE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_clamped_gate(device: torch.device, dtype: torch.dtype) -> None:
    """Numbers on both sides of all limits; gates have none below."""
    gate = ClampedSwish(1.3, 2.5)
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * 1500, device=device) * 3).to(dtype)
    result = gated_activation(gate_up, gate)
    expected = gated_activation_reference(gate_up, gate)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=ABSOLUTE[dtype])
    low, high = gate_up.double().chunk(2, 1)
    low, high = low.clamp(max=2.5), high.clamp(-2.5, 2.5)
    exact = (high + 1) * low * (1.3 * low).sigmoid()
    torch.testing.assert_close(
        result.double(), exact, rtol=TOLERANCE[dtype], atol=ABSOLUTE[dtype], check_dtype=False
    )
    assert gated_activation(torch.full((1, 2), torch.nan, device=device), gate).isnan().all()


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, inner", [(3, 1), (1, 100), (5, 1500)])
def test_plain_matches_torch(
    device: torch.device, name: str, dtype: torch.dtype, rows: int, inner: int
) -> None:
    torch.manual_seed(inner)
    x = torch.randn(rows, inner, device=device, dtype=dtype) * 4
    before = x.clone()
    result = activation(x, name)
    assert result.dtype == dtype and torch.equal(x, before)
    expected = activation_reference(x, name)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=ABSOLUTE[dtype])


@pytest.mark.parametrize("name", ALL_NAMES)
def test_plain_rounds_once(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 500, device=device).half()
    exact = activation_reference(x.double(), name).half()
    assert float((activation(x, name) == exact).float().mean()) > 0.99


def test_tanh_keeps_its_digits_near_zero(device: torch.device) -> None:
    x = torch.logspace(-30, 0.5, 400, device=device)
    x = torch.stack((x, -x))
    expected = torch.tanh(x.double()).float()
    torch.testing.assert_close(activation(x, "tanh"), expected, rtol=6e-7, atol=0.0)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_plain_extremes(device: torch.device, name: str) -> None:
    x = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4, float("nan")]], device=device)
    expected = activation_reference(x, name)
    torch.testing.assert_close(activation(x, name), expected, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_extremes(device: torch.device, name: str) -> None:
    """No NaN and no infinity where the exact result is finite; NaN stays NaN."""
    gate = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4, float("nan")]], device=device)
    result = gated_activation(torch.cat((gate, torch.ones_like(gate)), 1), name)
    expected = gated_activation_reference(torch.cat((gate, torch.ones_like(gate)), 1), name)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_strided_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.randn(4, 300, device=device)
    view = wide[:, 20:220]
    expected = gated_activation_reference(view.contiguous(), "silu")
    torch.testing.assert_close(silu_mul(view), expected, rtol=3e-6, atol=3e-7)
    plain = activation(view, "relu2")
    assert plain.is_contiguous() and torch.equal(plain, activation_reference(view, "relu2"))


def test_many_tiles_a_program(device: torch.device) -> None:
    """More tiles than programs: each program takes several."""
    torch.manual_seed(0)
    rows = 5000 if device.type == "cuda" else 150
    gate_up = torch.randn(rows, 32, device=device)
    expected = gated_activation_reference(gate_up.clone(), "silu")
    torch.testing.assert_close(silu_mul(gate_up), expected, rtol=3e-6, atol=3e-7)


def test_empty_and_unknown(device: torch.device) -> None:
    assert silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)
    assert activation(torch.empty(0, 64, device=device), "relu").shape == (0, 64)
    with pytest.raises(AssertionError):
        activation(torch.ones(1, 64, device=device), "swish")
    with pytest.raises(AssertionError):
        activation(torch.ones(64, 4, device=device).t(), "relu")
    with pytest.raises(AssertionError):
        gated_activation(torch.ones(1, 64, device=device), "tanh")
    with pytest.raises(AssertionError):
        gated_activation(torch.ones(1, 64, device=device), "swish")
