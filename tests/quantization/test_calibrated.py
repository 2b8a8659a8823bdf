"""Rounding that knows the inputs: less error of a layer's outputs than rounding to nearest, and the
elements that the definition gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.quantization.calibrated import compensate
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize, unpack_codes
from hetero_llm.quantization.names import ONLINE_NAMES, OnlineName
from hetero_llm.quantization.online import OnlineScheme

ROWS, COLUMNS = 130, 256


def weights(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def inputs(count: int, seed: int) -> Tensor:
    """Of one distribution for all seeds: correlated columns of different size."""
    mixing = torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(1))
    mixing *= torch.logspace(0, -2, COLUMNS).unsqueeze(1)
    hidden = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(seed))
    return hidden @ mixing * torch.logspace(-1, 1, COLUMNS)


def moment(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


def output_error(matrix: QuantizedMatrix, weight: Tensor, x: Tensor) -> float:
    return (x @ (dequantize(matrix, torch.float32) - weight).t()).square().mean().item()


@pytest.mark.parametrize("name", ONLINE_NAMES)
def test_outputs_are_nearer_than_by_rounding_to_nearest(name: OnlineName) -> None:
    weight, seen, unseen = weights(), inputs(2048, 2), inputs(2048, 3)
    hessian = moment(seen)
    nearest = OnlineScheme(name).quantize(weight)
    weighted = OnlineScheme(name).quantize(weight, hessian.diagonal())
    matrix = compensate(weight, weighted, hessian)
    assert matrix.kind == nearest.kind and matrix.group == nearest.group
    assert torch.equal(matrix.scale, weighted.scale)
    for x in (seen, unseen):
        assert output_error(matrix, weight, x) < 0.6 * output_error(nearest, weight, x)


def test_elements_are_those_of_the_definition() -> None:
    """Optimal brain quantization in a fixed order: after each column the others move by what
    minimizes the error, with the inverse of what is left of the matrix."""
    weight, hessian = weights()[:24, :64], moment(inputs(2048, 2))[:64, :64].contiguous()
    start = OnlineScheme("int4", 32).quantize(weight)
    assert start.zero is not None
    scale = start.scale.double().repeat_interleave(32, 1).numpy()
    zero = start.zero.double().repeat_interleave(32, 1).numpy()
    damped = hessian.double().numpy() + 0.01 * hessian.diagonal().mean().item() * np.eye(64)
    order = list(np.argsort(-hessian.diagonal().numpy(), kind="stable"))
    left, codes = weight.double().numpy().copy(), np.zeros((24, 64))
    while order:
        inverse = np.linalg.inv(damped[np.ix_(order, order)])
        now = order[0]
        codes[:, now] = np.clip(np.round(left[:, now] / scale[:, now] + zero[:, now]), 0, 15)
        error = left[:, now] - (codes[:, now] - zero[:, now]) * scale[:, now]
        left[:, order] -= np.outer(error, inverse[0] / inverse[0, 0])
        order.pop(0)
    found = unpack_codes(compensate(weight, start, hessian).data).numpy()
    assert (found == codes).mean() > 0.98  # float32 rounds some ties the other way
    assert (unpack_codes(start.data).numpy() == codes).mean() < 0.9


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_inputs_that_say_nothing(name: OnlineName) -> None:
    """Inputs of zeros leave rounding to nearest; fewer inputs than columns, and columns that are
    always 0, give finite elements that serve those inputs."""
    weight = weights()
    nearest = OnlineScheme(name).quantize(weight)
    assert torch.equal(
        compensate(weight, nearest, torch.zeros(COLUMNS, COLUMNS)).data.view(torch.uint8),
        nearest.data.view(torch.uint8),
    )
    few = inputs(40, 4)
    few[:, ::3] = 0.0
    matrix = compensate(weight, nearest, moment(few))
    assert dequantize(matrix, torch.float32).isfinite().all()
    assert output_error(matrix, weight, few) < 0.6 * output_error(nearest, weight, few)
    unused = dequantize(matrix, torch.float32)[:, ::3]
    assert torch.equal(unused, dequantize(nearest, torch.float32)[:, ::3])
