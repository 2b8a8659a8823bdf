"""Quantized matrices as compressed-tensors stores them: what `hetero-llm quantize` writes, and
vLLM, SGLang, llm-compressor and `formats.compressed_tensors` read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetero_llm.quantization.matrix import BLOCK_ROWS, QuantizedMatrix
from hetero_llm.quantization.names import OnlineName

WRITTEN: dict[OnlineName, str] = {
    "fp8": "float-quantized",
    "fp8_block": "float-quantized",
    "ifq": "pack-quantized",
    "int4": "pack-quantized",
}
"""The format of compressed-tensors for each way to quantize; it has none for nf4."""


def stored_tensors(matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """The tensors of a matrix that `online` made, by their suffix behind the module's name."""
    if matrix.kind == "fp8":
        return {"weight": matrix.data, "weight_scale": matrix.scale}
    rows, columns = matrix.shape
    if matrix.kind == "int8":
        codes = (matrix.data.view(torch.uint8) ^ 128).contiguous()
    else:
        assert matrix.kind == "int4"
        codes = matrix.data
    stored = {
        "weight_packed": _words(codes),
        "weight_scale": matrix.scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if matrix.zero is not None:
        stored["weight_zero_point"] = _packed_zeros(matrix.zero)
    return stored


def quantization_config(
    name: OnlineName, group: int, ignore: list[str], *, symmetric: bool = False
) -> Mapping[str, Any]:
    """The value of `quantization_config` in config.json.

    Args:
        group: columns that share a scale; of int4.
        ignore: names of the linear layers that stay plain.
        symmetric: int4 without zero points.
    """
    weights: dict[str, Any] = {
        "num_bits": 4 if name == "int4" else 8,
        "type": "float" if name in ("fp8", "fp8_block") else "int",
        "symmetric": symmetric or name != "int4",
        "strategy": {"fp8_block": "block", "int4": "group"}.get(name, "channel"),
        "dynamic": False,
        "observer": "minmax",
    }
    if name == "int4":
        weights["group_size"] = group
    if name == "fp8_block":
        weights["block_structure"] = [BLOCK_ROWS, BLOCK_ROWS]
    activations = None
    if name == "fp8":  # readers that quantize activations do so for each token
        activations = {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
        }  # fmt: skip
    if name == "fp8_block":
        activations = {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group",
            "group_size": BLOCK_ROWS, "dynamic": True,
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": WRITTEN[name],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": WRITTEN[name],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _words(codes: Tensor) -> Tensor:
    """[N, bytes] uint8 -> [N, bytes / 4] int32, the first byte in the lowest bits; zeros behind."""
    missing = -codes.shape[1] % 4
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    return codes.contiguous().view(torch.int32)


def _packed_zeros(zero: Tensor) -> Tensor:
    """[N, groups] uint8 -> [N / 8, groups] int32, eight rows to a word."""
    rows, groups = zero.shape
    padded = torch.nn.functional.pad(zero, (0, 0, 0, -rows % 8)).view(-1, 4, 2, groups)
    bytes_of_pairs = padded[:, :, 0] | (padded[:, :, 1] << 4)  # [N / 8, 4, groups]
    return bytes_of_pairs.transpose(1, 2).flatten().view(torch.int32).view(-1, groups)
