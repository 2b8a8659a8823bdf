"""What the parts of the native step compute, in numpy and torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bench.kernels.native_parts import DEPTH, PANEL, AttentionTokens, Format, PackedMatrix, Zeros

_MOST_INTEGER = np.float32(127)


def ref_round(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; reference of `prepare` with BF16."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def ref_widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def ref_quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers and scale of each row, symmetric, to nearest; reference of `prepare` with INT8."""
    largest = np.abs(x).max(axis=1)
    is_zero = largest < _MOST_INTEGER * np.finfo(np.float32).tiny
    safe = np.where(is_zero, np.float32(1), largest)
    inverse = np.where(is_zero, np.float32(0), _MOST_INTEGER / safe)
    scales = np.where(is_zero, np.float32(0), largest / _MOST_INTEGER)
    return np.rint(x * inverse[:, None]).astype(np.int8), scales


def ref_multiply(
    format: Format, weight: NDArray[np.float32], x: NDArray[np.float32]
) -> NDArray[np.float64]:
    """x [rows, depth] @ weight [outputs, depth].T, both brought to `format`, summed in double."""
    if format is Format.FLOAT:
        return x.astype(np.float64) @ weight.T.astype(np.float64)
    if format is Format.BF16:
        low_x, low_weight = (ref_widen(ref_round(a)).astype(np.float64) for a in (x, weight))
        return low_x @ low_weight.T
    (x_integers, x_scales), (integers, scales) = ref_quantize(x), ref_quantize(weight)
    sums = x_integers.astype(np.float64) @ integers.T.astype(np.float64)
    return sums * (x_scales[:, None] * scales)


def ref_quantize_groups(
    x: NDArray[np.float32], size: int
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int32]]:
    """Integers [rows, depth], scales and sums [rows, groups] of rows [rows, depth] whose groups of
    `size` are quantized each for itself."""
    rows, depth = x.shape
    integers = np.zeros((rows, depth), np.int8)
    scales = np.zeros((rows, -(-depth // size)), np.float32)
    for group in range(scales.shape[1]):
        columns = slice(group * size, (group + 1) * size)
        integers[:, columns], scales[:, group] = ref_quantize(np.ascontiguousarray(x[:, columns]))
    starts = np.arange(0, depth, size)
    return integers, scales, np.add.reduceat(integers, starts, axis=1, dtype=np.int32)


def ref_unpack_groups(
    matrix: PackedMatrix,
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.generic] | None]:
    """What a packed matrix with groups holds, padding included: integers [padded outputs, padded
    depth], those of int8 as unsigned bytes; scales and, if it has any, points or offsets [padded
    outputs, groups]."""
    assert matrix.groups is not None
    size, panels = matrix.groups.size, matrix.padded_outputs // PANEL
    padded = -(-matrix.depth // DEPTH) * DEPTH
    wide = np.float16 if matrix.groups.half_scales else np.float32
    zeros_of = {Zeros.POINTS: np.dtype(np.uint8), Zeros.OFFSETS: np.dtype(wide)}
    integers = np.zeros((panels, PANEL, padded), np.uint8)
    scales: list[NDArray[np.float32]] = []
    zeros: list[NDArray[np.generic]] = []
    rest = matrix.data[: matrix.data.size // matrix.copies].reshape(panels, -1)

    def take(count: int) -> NDArray[np.uint8]:
        nonlocal rest
        taken, rest = rest[:, :count], rest[:, count:]
        return np.ascontiguousarray(taken)

    for begin in range(0, padded, size):
        depth = min(size, padded - begin)
        scales.append(take(PANEL * np.dtype(wide).itemsize).view(wide).astype(np.float32))
        if matrix.groups.zeros is not Zeros.NONE:
            kind = zeros_of[matrix.groups.zeros]
            zeros.append(take(PANEL * kind.itemsize).view(kind))
        if matrix.format is Format.INT4:
            four = take(depth * PANEL // 2).reshape(panels, depth // 8, PANEL, 4)
            here = np.concatenate((four & 15, four >> 4), axis=-1)
        else:
            here = take(depth * PANEL).reshape(panels, depth // 4, PANEL, 4)
        integers[:, :, begin : begin + depth] = here.swapaxes(1, 2).reshape(panels, PANEL, depth)
    assert rest.size == 0
    of_groups = [
        np.stack(parts, axis=-1).reshape(-1, len(parts)) for parts in (scales, zeros) if parts
    ]
    return integers.reshape(-1, padded), of_groups[0], of_groups[1] if zeros else None


def ref_attention(
    cache: torch.Tensor,
    tokens: AttentionTokens,
    q: torch.Tensor,
    *,
    layer: int,
    heads: int,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Attention in float64, [tokens, heads * dim]; arguments as in `StepAttention`."""
    block_size, kv_heads, dim = cache.shape[3:]
    outputs, first = [], 0
    for s, slot in enumerate(tokens.request_slots):
        start, count = int(tokens.num_computed[s]), int(tokens.num_scheduled[s])
        columns = -(-(start + count) // block_size)
        table = torch.from_numpy(tokens.block_tables[slot][:columns]).long()
        cached = cache[table, layer].transpose(0, 1).flatten(1, 2)[:, : start + count].double()
        k, v = cached.repeat_interleave(heads // kv_heads, dim=2)
        mine = q[first : first + count].double().view(count, heads, dim)
        seen = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        if tokens.is_tree[s]:
            bits, base = tokens.ancestors[first : first + count], int(tokens.bases[s])
            behind = np.arange(start + count - base, dtype=np.uint64)
            seen[:, base:] = torch.from_numpy((bits[:, None] >> behind & np.uint64(1)) != 0)
        if window:  # the last ones of those that would be seen
            order = seen.cumsum(1)
            seen &= order > order[:, -1:] - window
        scores = torch.einsum("qhd,khd->hqk", mine, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        first += count
    return torch.cat(outputs)
