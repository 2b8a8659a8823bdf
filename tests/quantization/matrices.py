"""Random quantized matrices of every kind, for tests of what multiplies with them."""

from __future__ import annotations

import torch

from hetero_llm.quantization.matrix import BLOCK_ROWS, Kind, QuantizedMatrix


def random_matrix(
    kind: Kind,
    height: int,
    width: int,
    *,
    group: int | None = None,
    rows: int = 1,
    zeros: str = "none",
    row_scale: bool = False,
    order: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> QuantizedMatrix:
    """A matrix whose products are of moderate size.

    Args:
        group: None: one scale for each row.
        zeros: "none", "zero" for zero points, "offset".
        row_scale, order: it has them.
    """
    assert rows in (1, BLOCK_ROWS)
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    group = group or width
    shape = (-(-height // rows), -(-width // group))
    if kind == "fp8":
        data = torch.randn(height, width, generator=generator).to(torch.float8_e4m3fn)
    elif kind == "int8":
        data = draw(-127, 128, height, width).to(torch.int8)
    else:
        data = draw(0, 256, height, width // 2).to(torch.uint8)
    largest = {"fp8": 3.0, "int8": 127.0, "int4": 8.0, "fp4": 6.0, "nf4": 1.0}[kind]
    scale = (0.5 + torch.rand(shape, generator=generator)) / largest
    zero = draw(0, 16, *shape).to(torch.uint8) if zeros == "zero" else None
    offset = torch.randn(shape, generator=generator) if zeros == "offset" else None
    matrix = QuantizedMatrix(
        kind,
        data,
        scale.to(scale_dtype),
        group,
        rows,
        zero,
        None if offset is None else offset.to(scale_dtype),
        0.5 + torch.rand(height, generator=generator) if row_scale else None,
        torch.randperm(width, generator=generator).int() if order else None,
    )
    return matrix.to(device)
