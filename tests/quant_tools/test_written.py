"""What `hetero-llm quantize` writes, as compressed-tensors reads it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from hetero_llm.quantization import nf4_checkpoint, online
from hetero_llm.quantization.calibrated import compensate
from hetero_llm.quantization.compressed import WRITTEN, quantization_config, stored_tensors
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize
from hetero_llm.quantization.names import OnlineName
from tests.quant_tools.reading import weight

QUANTIZERS: dict[OnlineName, Any] = {
    "fp8": online.quantize_fp8,
    "fp8_block": online.quantize_fp8_block,
    "ifq": online.quantize_int8,
    "int4": online.quantize_int4,
}


def calibrated(matrix: QuantizedMatrix, rows: int, columns: int) -> QuantizedMatrix:
    """The matrix rounded for some inputs."""
    x = weight(512, columns, seed=1) @ weight(columns, columns, seed=2)
    return compensate(weight(rows, columns), matrix, x.t() @ x / len(x))


@pytest.mark.parametrize("for_inputs", [False, True])
@pytest.mark.parametrize(
    ("name", "symmetric"), [*((name, False) for name in WRITTEN), ("int4", True)]
)
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 256)])
def test_the_package_decompresses_it(
    name: OnlineName, symmetric: bool, rows: int, columns: int, for_inputs: bool
) -> None:
    """Names, types and shapes of tensors, keys of the config, and the values."""
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    options = {"symmetric": True} if symmetric else {}
    matrix = QUANTIZERS[name](weight(rows, columns), **options)
    if for_inputs:
        matrix = calibrated(matrix, rows, columns)
    config = quantization_config(name, matrix.group, ["lm_head"], **options)
    read = quantization.QuantizationConfig.model_validate(config)
    scheme = read.config_groups["group_0"]
    inferring: Any = importlib.import_module("compressed_tensors.compressors.format")
    assert inferring.infer_module_format(nn.Linear, scheme).value == read.format
    compressor = compressors.BaseCompressor.get_value_from_registry(read.format)
    stored = stored_tensors(matrix)
    assert set(stored) == set(compressor.compression_param_names(scheme))
    whole = compressor.decompress(stored, scheme)["weight"]
    # The package multiplies in the type of the scales.
    rounding = 2**-7 if matrix.scale.dtype == torch.bfloat16 else 1e-6
    expected = dequantize(matrix, torch.float32)
    torch.testing.assert_close(whole.float(), expected, rtol=rounding, atol=1e-9)


def test_bitsandbytes_dequantizes_nf4() -> None:
    """Through its own reader of the stored state, and through transformers' of the config."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    matrix = calibrated(online.quantize_nf4(weight(96, 512)), 96, 512)
    stored = nf4_checkpoint.stored_tensors(matrix)
    parts = {name.removeprefix("weight."): t for name, t in stored.items() if name != "weight"}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    found = functional.dequantize_4bit(stored["weight"], state)
    assert found.dtype == torch.bfloat16
    expected = dequantize(matrix, torch.float32)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-7)
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig.from_dict(nf4_checkpoint.quantization_config(["lm_head"]))
    assert config.quantization_method() == "nf4" and config.llm_int8_skip_modules == ["lm_head"]
    assert not config.bnb_4bit_use_double_quant
