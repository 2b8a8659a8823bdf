"""Which kernels a product with adapters takes, and that all ways give the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hetero_llm.gpu.kernels import lora_product as op
from hetero_llm.gpu.kernels.activation import gated_activation, gated_activation_reference
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots, lora_reference
from hetero_llm.gpu.kernels.quantized_product import QuantizedProduct
from hetero_llm.gpu.kernels.skinny_gemm import linear
from hetero_llm.models.layers import Product
from hetero_llm.quantization.matrix import dequantize
from tests.gpu.kernels.test_lora import filled
from tests.quantization.matrices import random_matrix

K, FEATURES = 512, (64, 64)


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of the products that had their adapters outside."""
    rows: list[int] = []
    shrink = op.lora_shrink

    def counted(x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        rows.append(len(x))
        return shrink(x, *others, **options)

    monkeypatch.setattr(op, "lora_shrink", counted)
    yield rows


def step_rows(weights: LoraSlots, slots: torch.Tensor, words: int) -> op.StepRows:
    device, m = slots.device, len(slots)
    requests = torch.arange(m, dtype=torch.int32, device=device)
    return op.StepRows(requests, slots, num_slots=len(weights.a), words=words)


def check(product: Product, weight: torch.Tensor, weights: LoraSlots, m: int) -> int:
    """Two products of one step, each with the sums of its own; returns words for sums of one."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, K, generator=generator).to(weight)
    slots = torch.randint(NO_SLOT, len(weights.a), (m,), generator=generator).int()
    slots[0] = 0
    slots = slots.to(weight.device)
    words = op.sums_of_product(product, m, weights)
    rows = step_rows(weights, slots, 2 * words)
    expected = lora_reference(x.float() @ weight.float().t(), x, slots, weights)
    for inputs, wanted in ((x, expected), (-x, -expected)):
        y = op.product_with_adapters(product, inputs, weight, None, rows=rows, weights=weights)
        assert (y.float() - wanted).abs().max() < 1.5e-2 * wanted.abs().max()
    return words


def layer(device: torch.device, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, LoraSlots]:
    weights = filled(device, 3, rank, K, FEATURES, dtype)
    weight = torch.randn(sum(FEATURES), K, generator=torch.Generator().manual_seed(0)) / K**0.5
    return weight.to(device, dtype), weights


@pytest.mark.parametrize("m", [1, 7])
def test_few_rows_have_them_inside(device: torch.device, shrunk: list[int], m: int) -> None:
    weight, weights = layer(device, 8, torch.bfloat16)
    assert check(linear, weight, weights, m) % (m * 2 * weights.rank) == 0
    assert shrunk == []


@pytest.mark.parametrize(
    ("m", "rank", "dtype"),
    [(65, 8, torch.bfloat16), (3, 100, torch.bfloat16), (3, 8, torch.float32)],
)
def test_all_others_have_them_outside(
    device: torch.device, shrunk: list[int], m: int, rank: int, dtype: torch.dtype
) -> None:
    weight, weights = layer(device, rank, dtype)
    assert check(linear, weight, weights, m) == 0
    assert shrunk == [m, m]


def test_products_that_are_not_ours_have_them_outside(
    device: torch.device, shrunk: list[int]
) -> None:
    weight, weights = layer(device, 8, torch.bfloat16)
    assert check(F.linear, weight, weights, 2) == 0
    assert shrunk == [2, 2]


def test_inputs_that_the_kernel_does_not_take(device: torch.device, shrunk: list[int]) -> None:
    """A row that begins where no load of 16 bytes may begin."""
    weight, weights = layer(device, 8, torch.bfloat16)
    x = torch.randn(2, K + 1, generator=torch.Generator().manual_seed(0)).to(weight)[:, 1:]
    slots = torch.tensor([1, NO_SLOT], dtype=torch.int32, device=device)
    rows = step_rows(weights, slots, op.sums_of_product(linear, 2, weights))
    y = op.product_with_adapters(linear, x, weight, None, rows=rows, weights=weights)
    expected = lora_reference(x.float() @ weight.float().t(), x, slots, weights)
    assert (y.float() - expected).abs().max() < 1e-2 * expected.abs().max()
    assert shrunk == [2]


def test_a_layer_that_runs_more_often_than_planned(device: torch.device, shrunk: list[int]) -> None:
    """Its sums would be those of the run before."""
    weight, weights = layer(device, 8, torch.bfloat16)
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    rows = step_rows(weights, slots, op.sums_of_product(linear, 2, weights))
    results = []
    for x in (torch.ones(2, K), torch.full((2, K), -1.0)):
        args = (linear, x.to(weight), weight, None)
        results.append(op.product_with_adapters(*args, rows=rows, weights=weights))
    torch.testing.assert_close(results[0], -results[1], rtol=2e-2, atol=2e-2)
    assert shrunk == [2]


@pytest.mark.parametrize(("m", "few_rows", "outside"), [(1, 64, 0), (4, 64, 0), (4, 2, 2)])
def test_quantized_products(
    device: torch.device, shrunk: list[int], m: int, few_rows: int, outside: int
) -> None:
    """Only where the weights are multiplied as they are stored."""
    matrix = random_matrix("int8", sum(FEATURES), K, group=128)
    product = QuantizedProduct(op.quantized_gemm.prepare(matrix.to(device)), few_rows=few_rows)
    weights = filled(device, 3, 8, K, FEATURES)
    dense = dequantize(matrix, torch.bfloat16).to(device)
    assert (check(product, dense, weights, m) == 0) == bool(outside)
    assert shrunk == [m] * outside


@pytest.mark.parametrize(("m", "deferred"), [(0, False), (2, False), (66, True)])
def test_gate_and_up_get_theirs_in_the_activation(
    device: torch.device, shrunk: list[int], m: int, deferred: bool
) -> None:
    weight, weights = layer(device, 8, torch.bfloat16)
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(weight)
    slots = (torch.arange(m, dtype=torch.int32, device=device) % 4 - 1).contiguous()
    args = (linear, x, weight, None)
    words = op.sums_of_product(linear, m, weights)
    y, missing = op.product_before_gate(
        *args, rows=step_rows(weights, slots, words), weights=weights
    )
    assert (missing is not None) == deferred == (shrunk == [m])
    found = gated_activation(y, "silu") if missing is None else missing.gate(y, "silu")
    expected = lora_reference(x.float() @ weight.float().t(), x, slots, weights)
    expected = gated_activation_reference(expected, "silu")
    assert found.shape == expected.shape
    if m > 0:
        assert (found.float() - expected).abs().max() < 4e-2 * expected.abs().max()
