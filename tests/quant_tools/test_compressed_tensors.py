"""What compressed-tensors compresses, against what it decompresses from that."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import make_tiny_checkpoint, rewrite_config
from tests.quant_tools.reading import MODULE, read_matrix, weight

SCHEMES = (
    *("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A16", "W4A16", "W4A16_ASYM"),
    *("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4"),
)
ROWS, COLUMNS = 192, 256


class Model(nn.Module):
    """One layer under the name that the readers are asked for."""

    def __init__(self) -> None:
        super().__init__()
        inner: nn.Module = nn.Linear(COLUMNS, ROWS, bias=False)
        inner.weight = nn.Parameter(weight(ROWS, COLUMNS), requires_grad=False)
        for name in reversed(MODULE.split(".")[1:]):
            outer = nn.Module()
            outer.add_module(name, inner)
            inner = outer
        self.model = inner


def set_scales(layer: Any, quantization: Any) -> None:
    """Scales and zero points of the smallest and largest weights, by the package's functions."""
    arguments = layer.quantization_scheme.weights
    values = layer.weight.detach()
    dims: Any = (0, 1)
    if arguments.strategy == "channel":
        dims = (1,)
    elif arguments.strategy in ("group", "tensor_group"):
        values, dims = values.unflatten(1, (-1, arguments.group_size)), (2,)
    elif arguments.strategy == "block":
        high, wide = arguments.block_structure
        padded = nn.functional.pad(values, (0, -COLUMNS % wide, 0, -ROWS % high))
        values, dims = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)), (1, 3)
    low, high = values.amin(dims), values.amax(dims)
    if arguments.strategy == "tensor":
        low, high = low.reshape(1), high.reshape(1)
    elif arguments.strategy == "channel":
        low, high = low.unsqueeze(1), high.unsqueeze(1)
    whole = None
    if arguments.strategy == "tensor_group":
        whole = quantization.utils.generate_gparam(low.amin(), high.amax())
        layer.weight_global_scale.data.copy_(whole)
    scale, zero = quantization.utils.calculate_qparams(low, high, arguments, global_scale=whole)
    layer.weight_scale.data = scale.clone()
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zero.clone()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme: str) -> None:
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    config = quantization.QuantizationConfig(
        config_groups={scheme: ["Linear"]}, quantization_status="compressed", ignore=["lm_head"]
    )
    model = Model()
    quantization.apply_quantization_config(model, config)
    layer: Any = model.get_submodule(MODULE)
    set_scales(layer, quantization)
    compressors.compress_module(layer)
    stored = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    said = json.loads(json.dumps(config.to_dict(), default=str))
    said["format"] = layer.quantization_scheme.format.value
    matrix, found = read_matrix(said, stored, ROWS, COLUMNS)
    whole = copy.deepcopy(layer)
    compressors.decompress_module(whole)
    expected = whole.weight.detach().float()
    assert matrix.nbytes < 1.1 * ROWS * COLUMNS
    rounding = 2**-7 if "NVFP4" in scheme else 1e-6  # the package decompresses it in bfloat16
    torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-9)
    # Not only are both readings equal: they are the weights.
    error = (found - weight(ROWS, COLUMNS)).norm() / weight(ROWS, COLUMNS).norm()
    assert error < (0.04 if matrix.kind in ("fp8", "int8") else 0.2)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_scales_of_the_kv_cache(strategy: str, tmp_path: Path) -> None:
    """Of a model whose KV cache alone is quantized, as the package names and shapes them."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    folder = make_tiny_checkpoint(tmp_path, "llama", "gqa", layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    scheme = quantization.QuantizationArgs(
        num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False
    )
    config = quantization.QuantizationConfig(config_groups={}, kv_cache_scheme=scheme)
    quantization.apply_quantization_config(model, config)
    scales = [p for name, p in model.named_parameters() if name.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 4
    for number, scale in enumerate(scales):
        scale.data = torch.rand(scale.shape) + number
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(folder, quantization_config=json.loads(config.model_dump_json()))
    found = load_model(
        folder, load_model_config(folder), dtype=torch.float32, device="cpu", show_progress=False
    ).kv_scales
    assert found is not None
    expected = torch.stack([scale.detach().flatten().expand(2) for scale in scales])
    assert torch.equal(found, expected.view(2, 2, 2))
