"""What GPTQModel packs, against what it dequantizes from that."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.quant_tools.reading import read_matrix, weight

ROWS, COLUMNS, GROUP = 64, 256, 32


def grid(values: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points [ROWS, groups] of [ROWS, groups, GROUP] weights."""
    low, high = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
    most = 2**bits - 1
    if symmetric:
        scale = 2 * torch.maximum(-low, high) / most
        return scale.half().float(), torch.full_like(scale, 2 ** (bits - 1))
    scale = ((high - low) / most).half().float()
    return scale, torch.round(-low / scale)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_packing(bits: int, symmetric: bool, desc_act: bool, form: str) -> None:
    torch_linear: Any = importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    converting: Any = importlib.import_module("gptqmodel.utils.model")
    quantization: Any = importlib.import_module("gptqmodel.quantization")
    options = {"bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": desc_act}
    layer = torch_linear(
        **options, in_features=COLUMNS, out_features=ROWS, bias=False, pack_dtype=torch.int32
    )
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = nn.Parameter(weight(ROWS, COLUMNS), requires_grad=False)
    # Weights of one sign have the zero point 0, from which format "gptq" borrows.
    linear.weight[:8, :GROUP].abs_()
    group_of = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    order = torch.arange(COLUMNS)
    if desc_act:
        order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
        group_of[order] = group_of.clone()
    grouped = linear.weight.detach()[:, order].unflatten(1, (-1, GROUP))
    scale, zero = grid(grouped, bits, symmetric=symmetric)
    layer.pack_original(linear, scale, zero, group_of)
    layer.post_init()
    expected = layer.dequantize_weight().t().float()
    if form == "gptq":
        converting.convert_gptq_v2_to_v1_format_module(
            layer, quantization.QuantizeConfig(**options)
        )
    config = {"quant_method": "gptq", "checkpoint_format": form, **options}
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    matrix, found = read_matrix(config, stored, ROWS, COLUMNS)
    assert (matrix.order is not None) == desc_act
    assert (matrix.zero is None) == symmetric
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)  # its own product is float16
    error = (found - linear.weight).norm() / linear.weight.norm()
    assert error < (0.02 if bits == 8 else 0.15)
