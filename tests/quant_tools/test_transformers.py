"""What transformers quantizes to fp8, and how it reads the experts of gpt-oss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8, mxfp4

from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.matrix import dequantize
from tests.quant_tools.reading import MODULE, read_matrix, weight
from tests.quantization.formats.stored import matrix_of

ROWS, COLUMNS = 256, 384


@pytest.mark.parametrize(
    ("block", "scale"),
    [(None, "float"), ((128, 128), "float"), ((64, 32), "float"), ((128, 128), "ue8m0")],
)
def test_fp8(block: tuple[int, int] | None, scale: str) -> None:
    options = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale)
    writer: Any = finegrained_fp8.Fp8Quantize(SimpleNamespace(quantization_config=options))
    values = weight(ROWS, COLUMNS)
    written = writer.convert({f"{MODULE}.weight": values})
    stored = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in written.items()}
    inverse = stored["weight_scale_inv"]
    if inverse.dtype == torch.float8_e8m0fnu:  # read from files as bytes
        stored["weight_scale_inv"] = inverse.view(torch.uint8)
    config = options.to_dict()
    matrix, found = read_matrix(config, stored, ROWS, COLUMNS)
    high, wide = block or (ROWS, COLUMNS)
    scales = inverse.float().reshape(ROWS // high, COLUMNS // wide)
    scales = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    assert torch.equal(found, stored["weight"].float() * scales)
    assert matrix.kind == "fp8" and (found - values).norm() / values.norm() < 0.04


def test_experts_of_gpt_oss() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 8, 2), generator=generator, dtype=torch.uint8)
    scheme = read_format({"quant_method": "mxfp4"}).scheme("layers.0.mlp.experts.down_proj")
    matrix = matrix_of(scheme, {"blocks": blocks, "scales": scales}, 24, 64)
    # transformers has the inputs of each expert as rows.
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found = dequantize(matrix, torch.float32).view(3, 8, 64)
    assert torch.equal(found, expected.transpose(1, 2))
