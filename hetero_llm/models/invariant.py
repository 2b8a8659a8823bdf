"""Batch invariance: a token's results (a row of every matrix) do not depend on the other tokens.

A library matrix product chooses its kernel, and with it the order of additions, by the shape of the
call: the same row in another batch may differ in the last bits. The remedy is call-shape identity,
as in "Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025): if every call has one
shape, one kernel computes all rows. So the rows are multiplied in tiles of a fixed height, padded
with zeros. No library promises that a row's result does not depend on its index or its neighbours
in the tile, so this is checked on the real weights; where it does not hold, rows are multiplied one
by one.

Elementwise functions with an exponential (silu, gelu) have the same problem on the CPU: the vector
body and the scalar tail of a loop round differently, and batch size and thread count move the
tail. They are computed row by row. Norms, embeddings, sums and products of tensors are
row-independent without changes (tested in tests/models/test_invariant.py).

Experts are matrix products too: the router decides which rows share a tile, but a row's bits do not
depend on that. Outputs are added up in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_llm.models.experts import Experts, expert_weight
from hetero_llm.models.layers import Activation, CausalLM, Linear, Product
from hetero_llm.quantization.matrix import QuantizedWeight, dequantize

TILE_ROWS = 16
_CHECKED_ORDERS = 3


@torch.no_grad()
def make_batch_invariant(model: CausalLM) -> None:
    """Replaces every product and activation of `model` by a row-independent one, in place.

    Call it once, after loading and before serving; the number of torch threads must not change
    afterwards. The caller's `Attend` must be row-independent too.
    """
    dtype = next(model.parameters()).dtype
    for module in model.modules():
        if isinstance(module, Linear) and module.quantized is not None:
            tiled = _rows_are_independent(dequantize(module.quantized, dtype), module.bias)
            module.product = _of_dequantized(product_of_tiles if tiled else product_of_rows)
        elif isinstance(module, Linear):
            tiled = _rows_are_independent(module.weight, module.bias)
            module.product = product_of_tiles if tiled else product_of_rows
        elif isinstance(module, Experts):
            product = _product_of_experts(module, dtype)
            module.function = partial(module.plain, product=product)
        elif isinstance(module, Activation) and _device_of(model).type == "cpu":
            module.function = _by_row(module.function)


def _of_dequantized(product: Product) -> Product:
    """`product` on the plain weight that a `QuantizedWeight` stands for, made in each call."""

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = cast(QuantizedWeight, weight).matrix
        return product(x, dequantize(matrix, x.dtype), bias)

    return multiply


def product_of_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, in] @ [out, in].T + bias, in calls of TILE_ROWS rows."""
    return _in_tiles(x, weight, bias, TILE_ROWS)


def product_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, in] @ [out, in].T + bias, in calls of one row."""
    return _in_tiles(x, weight, bias, 1)


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[0], rows):
        part = x[start : start + rows]
        # A new tile each time: the allocator aligns it, where a slice of x may start anywhere,
        # and kernels may pick their path by alignment.
        tile = x.new_zeros(rows, x.shape[1])
        tile[: part.shape[0]] = part
        out[start : start + rows] = F.linear(tile, weight, bias)[: part.shape[0]]
    return out


def _product_of_experts(experts: Experts, dtype: torch.dtype) -> Product:
    """One product for all experts: they have the same shapes."""
    matrices = (
        expert_weight(weights, expert, dtype)
        for weights in (experts.gate_up, experts.down)
        for expert in range(weights.shape[0])
    )
    tiled = all(_rows_are_independent(matrix, None) for matrix in matrices)
    return product_of_tiles if tiled else product_of_rows


def _by_row(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def by_row(x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for i in range(x.shape[0]):
            out[i] = function(x[i])
        return out

    return by_row


def _rows_are_independent(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a row keeps its bits at every index of a tile, among other rows and among zeros."""
    generator = torch.Generator(weight.device).manual_seed(0)

    def random_rows(count: int) -> Tensor:
        return torch.randn(
            count,
            weight.shape[1],
            generator=generator,
            device=weight.device,
            dtype=torch.float32,
        ).to(weight.dtype)

    tile = random_rows(TILE_ROWS)
    expected = F.linear(tile, weight, bias)
    for step in range(_CHECKED_ORDERS):
        # Steps 0, 1, 2 shift by 5, 10, 15: each row comes to even, odd and distant indices.
        order = torch.arange(TILE_ROWS, device=weight.device).roll(5 * (step + 1))
        if not torch.equal(F.linear(tile[order], weight, bias), expected[order]):
            return False
    first = tile[:1]
    for index in range(TILE_ROWS):
        others = torch.zeros_like(tile) if index % 2 else random_rows(TILE_ROWS)
        others[index] = first[0]
        if not torch.equal(F.linear(others, weight, bias)[index], expected[0]):
            return False
    return True


def _device_of(model: CausalLM) -> torch.device:
    return next(model.parameters()).device
