"""Products with packed weights (csrc/step/matmul.h) for tests and benches.

The executor calls the C++ functions itself; this is the checked way to them from Python, with the
twins in numpy. bf16 travels as its bits in uint16 arrays. Everything lies in CPU memory.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PANEL, STRIP, DEPTH = 64, 16, 64
_ALIGNMENT = 64
_MOST_INTEGER = np.float32(127)


class Format(enum.IntEnum):
    """Of weights and of the rows that meet them."""

    BF16 = 0
    FLOAT = 1
    INT8 = 2


_TYPES = {Format.BF16: np.uint16, Format.FLOAT: np.float32, Format.INT8: np.int8}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A weight [outputs, depth] in panels, `copies` times one after the other.

    Attributes:
        data: uint8, 64-byte aligned.
        scales, sums: [padded outputs] float32 and int32 for INT8, else None.
    """

    format: Format
    outputs: int
    depth: int
    data: NDArray[np.uint8]
    scales: NDArray[np.float32] | None
    sums: NDArray[np.int32] | None
    copies: int = 1

    @property
    def padded_outputs(self) -> int:
        return -(-self.outputs // PANEL) * PANEL


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Rows as `multiply` takes them: data [rows, padded depth]; scales [rows] for INT8."""

    format: Format
    depth: int
    data: NDArray[np.generic]
    scales: NDArray[np.float32] | None


def _pointer(array: NDArray[np.generic] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _integers(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(value) for value in values]


def aligned_zeros(size: int) -> NDArray[np.uint8]:
    """`size` zero bytes at a 64-byte boundary."""
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size]


def empty_matrix(
    library: ctypes.CDLL, format: Format, outputs: int, *, depth: int, copies: int = 1
) -> PackedMatrix:
    """A matrix of zeros; with INT8, one scale and one sum for all copies."""
    function = library.hetero_matmul_packed_bytes
    function.restype = ctypes.c_int64
    size = function(*_integers(format, outputs, depth))
    padded = -(-outputs // PANEL) * PANEL
    is_int8 = format is Format.INT8
    return PackedMatrix(
        format,
        outputs,
        depth,
        aligned_zeros(size * copies),
        np.zeros(padded, np.float32) if is_int8 else None,
        np.zeros(padded, np.int32) if is_int8 else None,
        copies,
    )


def pack(
    library: ctypes.CDLL,
    matrix: PackedMatrix,
    weight: NDArray[np.generic],
    *,
    first: int = 0,
    last: int | None = None,
    to: int = 0,
) -> None:
    """Packs rows [first, last) of `weight` to the outputs from `to` of the matrix's first copy.

    Args:
        weight: [n, depth] float32 or bf16 bits; rows may be apart, values of a row not.
    """
    last = weight.shape[0] if last is None else last
    assert weight.dtype in (np.float32, np.uint16) and weight.ndim == 2
    assert weight.shape[1] == matrix.depth and weight.strides[1] == weight.itemsize
    assert 0 <= first <= last <= weight.shape[0] and 0 <= to <= matrix.outputs - (last - first)
    library.hetero_matmul_pack.restype = None
    library.hetero_matmul_pack(
        *_integers(matrix.format, matrix.outputs, matrix.depth),
        *map(_pointer, (matrix.data, matrix.scales, matrix.sums, weight)),
        *_integers(weight.dtype == np.uint16, weight.strides[0] // weight.itemsize),
        *_integers(first, last, to),
    )


def prepare(
    library: ctypes.CDLL, format: Format, x: NDArray[np.float32], *, isa: int
) -> PreparedRows:
    """Rounds or quantizes rows [rows, depth], contiguous float32."""
    assert x.dtype == np.float32 and x.ndim == 2 and x.flags.c_contiguous
    rows, depth = x.shape
    data = np.empty((rows, -(-depth // DEPTH) * DEPTH), _TYPES[format])
    scales = np.empty(rows, np.float32) if format is Format.INT8 else None
    library.hetero_matmul_prepare.restype = None
    library.hetero_matmul_prepare(
        ctypes.c_int64(format),
        _pointer(x),
        *_integers(rows, depth),
        *map(_pointer, (data, scales)),
        ctypes.c_int64(isa),
    )
    return PreparedRows(format, depth, data, scales)


def multiply(
    library: ctypes.CDLL,
    matrix: PackedMatrix,
    x: PreparedRows,
    *,
    isa: int,
    out: NDArray[np.float32],
    first: int = 0,
    strips: int | None = None,
) -> None:
    """out[:, 16 * first : 16 * (first + strips)] = x @ weight.T, for every copy of the matrix.

    Args:
        out: [rows, padded outputs] float32, contiguous. Other columns are left alone.
    """
    strips = matrix.padded_outputs // STRIP - first if strips is None else strips
    assert x.format is matrix.format and x.depth == matrix.depth
    assert out.dtype == np.float32 and out.flags.c_contiguous
    assert out.shape == (len(x.data), matrix.padded_outputs)
    assert first >= 0 and 0 <= strips <= matrix.padded_outputs // STRIP - first
    library.hetero_matmul_multiply.restype = None
    library.hetero_matmul_multiply(
        *_integers(matrix.format, matrix.outputs, matrix.depth),
        *map(_pointer, (matrix.data, matrix.scales, matrix.sums, x.data)),
        ctypes.c_int64(x.data.shape[1]),
        _pointer(x.scales),
        *_integers(len(x.data), first, strips),
        _pointer(out),
        *_integers(out.shape[1], isa, matrix.copies),
    )


def ref_round(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; twin of `prepare` with BF16."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def ref_widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def ref_quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers and scale of each row, symmetric, to nearest; twin of `prepare` with INT8."""
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
