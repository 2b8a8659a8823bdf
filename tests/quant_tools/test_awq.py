"""What AutoAWQ packs, against what it dequantizes from that."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.quant_tools.reading import read_matrix, weight

ROWS, COLUMNS = 64, 256


@pytest.fixture(autouse=True)
def parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets parts of AutoAWQ be imported without the package's `__init__`, which imports data sets
    and models of older releases of transformers."""
    spec = importlib.util.find_spec("awq")
    assert spec is not None and spec.submodule_search_locations is not None
    package = ModuleType("awq")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "awq", package)


@pytest.mark.parametrize("group", [32, 128])
def test_packing(group: int) -> None:
    gemm: Any = importlib.import_module("awq.modules.linear.gemm")
    packing: Any = importlib.import_module("awq.utils.packing_utils")
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = nn.Parameter(weight(ROWS, COLUMNS), requires_grad=False)
    grouped = linear.weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2), grouped.amax(2)
    scale = ((high - low) / 15).half().float()
    zero = torch.round(-low / scale).clamp(0, 15)
    layer = gemm.WQLinear_GEMM.from_linear(
        linear, 4, group, scales=scale.t().contiguous(), zeros=zero.t().contiguous()
    )
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    _, found = read_matrix(config, stored, ROWS, COLUMNS)
    expected = packing.dequantize_gemm(
        layer.qweight, layer.qzeros, layer.scales.float(), 4, group
    ).t()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    error = (found - linear.weight).norm() / linear.weight.norm()
    assert error < 0.15
