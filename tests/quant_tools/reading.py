"""Reads what a tool stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize
from tests.quantization.formats.stored import matrix_of

MODULE = "model.layers.3.mlp.up_proj"


def read_matrix(
    config: Mapping[str, Any], stored: Mapping[str, Tensor], rows: int, columns: int
) -> tuple[QuantizedMatrix, Tensor]:
    """The matrix of MODULE, and what it stands for in float32."""
    kept = {name: tensor.detach() for name, tensor in stored.items() if name != "bias"}
    matrix = matrix_of(read_format(config).scheme(MODULE), kept, rows, columns)
    return matrix, dequantize(matrix, torch.float32)


def weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Weights like those of a model."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05
