"""Blocks of GGUF files as a `QuantizedMatrix`, or as plain numbers.

The layouts are those of ggml-common.h and of the dequantizers in ggml-quants.c. Elements stand in
another order in a block than in `QuantizedMatrix.data`; all of them are repacked here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hetero_llm.quantization.gguf.types import BLOCK_TYPES, MATRIX_TYPES, BlockType
from hetero_llm.quantization.matrix import INT4_ZERO, QuantizedMatrix, pack_codes

_BY_NAME = {block.name: block for block in BLOCK_TYPES.values()}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 64
"""Elements that the two halves of 32 bytes hold in the 4-bit part of Q4_K and Q5_K."""
_MOST_FLOAT16 = 65504.0


def to_matrix(name: str, raw: Tensor) -> QuantizedMatrix:
    """A quantized matrix in the engine's form.

    Scales of Q4_0, Q4_1, Q5_0 and Q8_0 are those of the file. Those of Q4_K and Q6_K are products
    of two stored numbers, rounded to float16 (float32 where float16 would overflow).

    Args:
        name: of `MATRIX_TYPES`.
        raw: [N, bytes of a row] uint8.

    Raises:
        ValueError: a scale is not finite.
    """
    blocks = _blocks(_BY_NAME[name], raw)
    kind, group = MATRIX_TYPES[name]
    offset = None
    if name in _AFFINE:
        scale, codes, offset = _AFFINE[name](blocks)
        scale, offset = _rounded(scale, offset)
    else:
        scale, codes = _PRODUCTS[name](blocks)
        (scale,) = _rounded(scale)
        codes = codes + INT4_ZERO if kind == "int4" else codes
    for part in (scale, offset):
        if part is not None and not torch.isfinite(part).all():
            raise ValueError(f"{name} blocks with a scale that is no finite number")
    codes = codes.flatten(1)
    data = pack_codes(codes) if kind == "int4" else codes.contiguous()
    return QuantizedMatrix(kind, data, scale, group, offset=offset)


def to_floats(name: str, raw: Tensor) -> Tensor:
    """The numbers of a tensor: [N, K] float32, as ggml computes them.

    Args:
        name: of `BLOCK_TYPES`.
        raw: [N, bytes of a row] uint8.
    """
    if name in _PLAIN:
        return raw.contiguous().view(_PLAIN[name]).float()
    blocks = _blocks(_BY_NAME[name], raw)
    if name in _AFFINE:
        scale, codes, offset = _AFFINE[name](blocks)
        values = codes.float() * scale.unsqueeze(-1) + offset.unsqueeze(-1)
        return values.flatten(1)
    scale, values = _PRODUCTS[name](blocks)
    return (values.float() * scale.unsqueeze(-1)).flatten(1)


def _blocks(block: BlockType, raw: Tensor) -> Tensor:
    """[N, row bytes] -> [N, blocks, bytes of a block]."""
    return raw.view(raw.shape[0], -1, block.nbytes)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: [N, blocks] float32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] codes: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit j of the 32-bit integer at byte `at`, for each element j: [N, blocks, 32]."""
    four = blocks[..., at : at + 4]
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((four.unsqueeze(-1) >> shifts) & 1).flatten(-2)


# Each returns scales [N, groups] float32 and elements [N, groups, group]; "affine" ones unsigned
# codes between them and offsets [N, groups] float32: element = scale * code + offset.


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _half(blocks, 0), _nibbles(blocks[..., 2:]).to(torch.int8) - 8


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    codes = _nibbles(blocks[..., 6:]) | (_fifth_bits(blocks, 2) << 4)
    return _half(blocks, 0), codes.to(torch.int8) - 16


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _half(blocks, 0), blocks[..., 2:].view(torch.int8)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    rows = blocks.shape[0]
    low = blocks[..., :128].unflatten(-1, (2, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    # Each half of 128: low bits of the elements 0 to 63, then of 64 to 127 from the high halves;
    # the upper two bits of the elements l, l + 32, l + 64 and l + 96 share a byte.
    upper = (high >> shifts.view(4, 1)) & 3
    codes = _nibbles(low) | (upper.flatten(-2) << 4)
    scales = blocks[..., 192:208].view(torch.int8).float() * _half(blocks, 208).unsqueeze(-1)
    return scales.reshape(rows, -1), (codes.to(torch.int8) - 32).reshape(rows, -1, 16)


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _half(blocks, 0), _nibbles(blocks[..., 4:]), _half(blocks, 2)


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = _nibbles(blocks[..., 8:]) | (_fifth_bits(blocks, 4) << 4)
    return _half(blocks, 0), codes, _half(blocks, 2)


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, offset = _scales_k(blocks)
    codes = _nibbles(blocks[..., 16:144].unflatten(-1, (256 // _CHUNK, 32)))
    return scale, codes.reshape(blocks.shape[0], -1, 32), offset


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, offset = _scales_k(blocks)
    low = _nibbles(blocks[..., 48:176].unflatten(-1, (256 // _CHUNK, 32)))
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    # Bit g of byte l is the fifth bit of element l of group g.
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> shifts.view(8, 1)) & 1
    codes = low.unflatten(-1, (2, 32)).flatten(-3, -2) | (fifth << 4)
    return scale, codes.reshape(blocks.shape[0], -1, 32), offset


def _scales_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of the 8 groups of each block of Q4_K and Q5_K: 6 bits each, in 12 bytes
    (`get_scale_min_k4` of ggml-quants.c), times two float16 of the block."""
    first, second, third = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    scale = scales.float() * _half(blocks, 0).unsqueeze(-1)
    offset = mins.float() * -_half(blocks, 2).unsqueeze(-1)
    return scale.flatten(1), offset.flatten(1)


_PRODUCTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
}
_AFFINE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}


def _rounded(*values: Tensor) -> tuple[Tensor, ...]:
    """In float16, which scales that are stored as such are already; else in float32."""
    fits = all(bool((part.abs() <= _MOST_FLOAT16).all()) for part in values)
    return tuple(part.to(torch.float16 if fits else torch.float32).contiguous() for part in values)
