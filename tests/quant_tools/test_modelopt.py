"""What ModelOpt exports, against the weights and what it dequantizes itself."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quant_tools.reading import read_matrix, weight

ROWS, COLUMNS = 256, 384
LARGEST = 448  # of e4m3


def test_nvfp4() -> None:
    export: Any = importlib.import_module("modelopt.torch.export.quant_utils")
    tensors: Any = importlib.import_module("modelopt.torch.quantization.qtensor")
    values = weight(ROWS, COLUMNS)
    scale, whole = tensors.NVFP4QTensor.get_weights_scaling_factor(values, 16)
    stored = {
        "weight": export.to_quantized_weight(values, scale, "nvfp4", whole, 16),
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.25),
    }
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    matrix, found = read_matrix(config, stored, ROWS, COLUMNS)
    assert matrix.kind == "fp4"
    quantized, *_ = tensors.NVFP4QTensor.quantize(values, 16, scale, whole)
    expected = quantized.dequantize(
        dtype=torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16}
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert (found - values).norm() / values.norm() < 0.12


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
def test_fp8(algorithm: str) -> None:
    export: Any = importlib.import_module("modelopt.torch.export.quant_utils")
    values = weight(ROWS, COLUMNS)
    scale: Tensor
    if algorithm == "FP8":
        scale, name = values.abs().amax() / LARGEST, "fp8"
    elif algorithm == "FP8_PB_WO":
        blocks = values.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs()
        scale, name = blocks.amax((1, 3), keepdim=True) / LARGEST, "fp8_pb_wo"
    else:
        scale, name = values.abs().amax(1) / LARGEST, "fp8_pc_pt"
    stored = {
        "weight": export.to_quantized_weight(values, scale, name, block_size=128),
        "weight_scale": scale,
    }
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    _, found = read_matrix(config, stored, ROWS, COLUMNS)
    assert (found - values).norm() / values.norm() < 0.04
