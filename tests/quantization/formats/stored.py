"""Stored tensors of quantized matrices as the texts of the formats have them, element by element,
and what their matrices are. Nothing here is the engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_llm.quantization.formats.read import read_format
from hetero_llm.quantization.formats.scheme import CheckpointFormat, Scheme
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize
from hetero_llm.quantization.names import older_method

Numbers = NDArray[Any]

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8",
    torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
"""Names of safetensors."""

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-one for one in E2M1]


def matrix_of(
    scheme: Scheme | None, stored: Mapping[str, Tensor], rows: int, columns: int
) -> QuantizedMatrix:
    """What a scheme makes of stored tensors, which must be those that it asks for."""
    assert scheme is not None
    parts = {part.suffix: part for part in scheme.parts(rows, columns)}
    assert set(stored) <= set(parts)
    assert {suffix for suffix, part in parts.items() if not part.optional} <= set(stored)
    for suffix, tensor in stored.items():
        assert TYPES[tensor.dtype] in parts[suffix].types, suffix
        assert parts[suffix].admits(tuple(tensor.shape)), suffix
    matrix = scheme.convert(stored, rows, columns)
    assert matrix.shape == (rows, columns)
    return matrix


def assert_is(matrix: QuantizedMatrix, expected: Numbers) -> None:
    """The matrix is [N, K] `expected` but for the rounding of float32."""
    found = dequantize(matrix, torch.float32).double().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)


def read_quantize_config(content: Mapping[str, Any]) -> CheckpointFormat:
    """The format that a quantize_config.json or quant_config.json of this content stands for."""
    method = older_method("quantize_config.json", content)
    return read_format({**content, "quant_method": method})


def read_hf_quant_config(content: Mapping[str, Any]) -> CheckpointFormat:
    """The format that a hf_quant_config.json of this content stands for."""
    return read_format({**content, "quant_method": older_method("hf_quant_config.json", content)})


def draw(seed: int, low: int, high: int, *shape: int) -> Numbers:
    """Integers from `low` to below `high`."""
    return np.random.default_rng(seed).integers(low, high, shape)


def scales(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scales of both signs of the exponent."""
    values = np.random.default_rng(seed).uniform(0.25, 4.0, shape)
    return torch.tensor(values).to(dtype)


def numbers(tensor: Tensor) -> Numbers:
    """float64."""
    return tensor.double().numpy()


def spread(values: Numbers, group: int, axis: int = 1) -> Numbers:
    """Each value for `group` columns, or rows."""
    return np.repeat(values, group, axis)


def words(codes: Numbers, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """[A, B] codes -> [A, ceil(B x bits / 32)] int32, the first code of a word in its lowest bits.

    Args:
        order: position i of a word has its code order[i].
    """
    each = 32 // bits
    order = order or range(each)
    height, width = codes.shape
    packed = np.zeros((height, -(-width // each)), np.uint32)
    for row in range(height):
        for word in range(packed.shape[1]):
            for position, code in enumerate(order):
                column = word * each + code
                if column < width:
                    packed[row, word] |= np.uint32(int(codes[row, column]) << (bits * position))
    return torch.from_numpy(packed.view(np.int32))


def halves(codes: Numbers, *, high_first: bool = False) -> Tensor:
    """[A, B] codes of 4 bits -> [A, B / 2] uint8."""
    first, second = codes[:, 0::2], codes[:, 1::2]
    low, high = (second, first) if high_first else (first, second)
    return torch.from_numpy((low + 16 * high).astype(np.uint8))


def e4m3(byte: int) -> float:
    """float8 e4m3fn (OCP 8-bit Floating Point Specification): 1 sign, 4 exponent, 3 mantissa bits,
    bias 7, no infinity."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def e4m3_bytes(seed: int, *shape: int) -> Numbers:
    """Bytes of finite e4m3 numbers."""
    return draw(seed, 0, 127, *shape) + 128 * draw(seed + 1, 0, 2, *shape)


def e4m3_tensor(codes: Numbers) -> Tensor:
    """The bytes as float8_e4m3fn."""
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)


def e4m3_numbers(codes: Numbers) -> Numbers:
    """What bytes of e4m3 stand for."""
    return np.vectorize(e4m3, otypes=[np.float64])(codes)
