"""Packed products against sums in double, for every instruction set of the machine and every format
but those with groups (test_matmul_groups.py)."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.kernels.native_parts import (
    PANEL,
    STRIP,
    Format,
    PackedMatrix,
    PreparedRows,
    empty_matrix,
    multiply,
    pack,
    pack_quantized,
    prepare,
)
from tests.cpu.csrc.step.references import ref_multiply, ref_quantize, ref_round

ISA_NAMES = ("base", "avx2", "avx512", "avx512_bf16", "amx")
ROWS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64, 200)
SIZES = ((16, 32), (64, 64), (40, 100), (200, 1000), (129, 333), (192, 577))  # outputs, depth
FORMATS = (Format.BF16, Format.FLOAT, Format.INT8)
UNTOUCHED = 12345.0


def random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def packed(library: ctypes.CDLL, format: Format, weight: NDArray[np.float32]) -> PackedMatrix:
    matrix = empty_matrix(library, format, weight.shape[0], depth=weight.shape[1])
    pack(library, matrix, weight)
    return matrix


def product(
    library: ctypes.CDLL, matrix: PackedMatrix, x: PreparedRows, isa: int
) -> NDArray[np.float32]:
    out = np.full((len(x.data), matrix.padded_outputs), UNTOUCHED, np.float32)
    multiply(library, matrix, x, isa=isa, out=out)
    return out


def bound(
    format: Format, weight: NDArray[np.float32], x: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Largest errors to expect of sums in float: half an ulp for each of about sqrt(k) of them.

    Products of bf16 are exact in float; int8 sums are exact and rounded three times.
    """
    if format is Format.INT8:
        return 3e-7 * np.abs(ref_multiply(format, weight, x)) + 1e-30
    sizes = np.sqrt((x.astype(np.float64) ** 2) @ (weight.T.astype(np.float64) ** 2))
    return 6e-8 * 6 * np.sqrt(weight.shape[1]) * sizes


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_equal_their_reference(
    library: ctypes.CDLL, format: Format, size: tuple[int, int], isa: int
) -> None:
    outputs, depth = size
    weight = random(0, outputs, depth)
    matrix = packed(library, format, weight)
    for rows in ROWS:
        x = random(rows, rows, depth)
        out = product(library, matrix, prepare(library, format, x, isa=isa), isa)
        expected, allowed = _expected(format, outputs, depth, rows)
        error = np.abs(out[:, :outputs] - expected)
        assert (error <= allowed).all(), (rows, error.max())
        assert (out[:, outputs:] == 0).all(), "padding must give zeros"


@cache
def _expected(
    format: Format, outputs: int, depth: int, rows: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Product and its bound, the same for all instruction sets."""
    weight, x = random(0, outputs, depth), random(rows, rows, depth)
    return ref_multiply(format, weight, x), bound(format, weight, x)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("depth", [576, 4096])
def test_results_do_not_depend_on_how_strips_and_rows_are_shared(
    library: ctypes.CDLL, format: Format, depth: int, isa: int
) -> None:
    """Depth 4096 takes several blocks of k where rows share a panel."""
    outputs, rows = 208, 23
    matrix = packed(library, format, random(1, outputs, depth))
    x = prepare(library, format, random(2, rows, depth), isa=isa)
    whole = product(library, matrix, x, isa)
    strips = matrix.padded_outputs // STRIP
    for first, last in ((0, 1), (1, 3), (2, 7), (3, 13), (5, 6), (7, strips), (8, 12)):
        out = np.full_like(whole, UNTOUCHED)
        multiply(library, matrix, x, isa=isa, out=out, first=first, strips=last - first)
        columns = slice(first * STRIP, last * STRIP)
        np.testing.assert_array_equal(out[:, columns], whole[:, columns])
        out[:, columns] = UNTOUCHED
        assert (out == UNTOUCHED).all(), "columns outside the strips were written"
    for begin, end in ((0, 8), (8, 23), (3, 20), (0, 1), (4, 6), (9, 14)):
        scales = None if x.scales is None else x.scales[begin:end]
        part = PreparedRows(format, depth, x.data[begin:end], scales)
        np.testing.assert_array_equal(product(library, matrix, part, isa), whole[begin:end])


def test_integers_give_the_same_on_every_instruction_set(library: ctypes.CDLL, isa: int) -> None:
    weight, x = random(3, 96, 700), random(4, 9, 700)
    weight[5] = np.abs(weight[5]).max()  # all at +127, and with the row below at -127
    x[2] = -np.abs(x[2]).max()
    matrix = packed(library, Format.INT8, weight)
    want = product(library, matrix, prepare(library, Format.INT8, x, isa=0), 0)
    got = product(library, matrix, prepare(library, Format.INT8, x, isa=isa), isa)
    np.testing.assert_array_equal(got, want)


def test_integers_of_a_checkpoint_are_packed_as_they_are(library: ctypes.CDLL, isa: int) -> None:
    """-128 among them, which rounding never gives."""
    rng = np.random.default_rng(5)
    weight = rng.integers(-128, 128, (90, 333)).astype(np.int8)
    weight[3] = -128
    scales = (rng.random((90, 1)) + 0.5).astype(np.float32)
    matrix = empty_matrix(library, Format.INT8, 90, depth=333)
    for first, last, to in ((0, 40, 50), (40, 90, 0)):
        pack_quantized(library, matrix, weight, scales, first=first, last=last, to=to)
    for rows in (1, 2, 3, 9):
        x = random(rows, rows, 333)
        integers, x_scales = ref_quantize(x)
        sums = integers.astype(np.int64) @ np.roll(weight, 50, axis=0).T.astype(np.int64)
        expected = sums * (x_scales[:, None] * np.roll(scales[:, 0], 50))
        out = product(library, matrix, prepare(library, Format.INT8, x, isa=isa), isa)
        np.testing.assert_allclose(out[:, :90], expected, rtol=3e-7)


def test_rows_are_prepared_as_by_their_references(library: ctypes.CDLL, isa: int) -> None:
    x = random(5, 6, 331) * np.float32(3)
    x[1] = 0
    x[2, ::3] = np.float32(1.00390625)  # a tie between two bf16
    x[3] *= np.float32(1e-41)  # too small to have an inverse
    rounded = prepare(library, Format.BF16, x, isa=isa)
    np.testing.assert_array_equal(rounded.data[:, :331], ref_round(x))
    quantized = prepare(library, Format.INT8, x, isa=isa)
    integers, scales = ref_quantize(x)
    np.testing.assert_array_equal(quantized.data[:, :331], integers)
    np.testing.assert_array_equal(quantized.scales, scales)
    plain = prepare(library, Format.FLOAT, x, isa=isa)
    np.testing.assert_array_equal(plain.data[:, :331], x)
    for rows in (rounded, quantized, plain):
        assert rows.data.shape[1] == 384 and not rows.data[:, 331:].any()


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_nan_reaches_the_result(library: ctypes.CDLL, format: Format, isa: int) -> None:
    x = random(6, 9, 128)
    x[4, 77] = np.nan
    matrix = packed(library, format, random(7, 64, 128))
    out = product(library, matrix, prepare(library, format, x, isa=isa), isa)
    assert np.isnan(out[4]).all() and not np.isnan(np.delete(out, 4, axis=0)).any()


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("depth", [64, 90, 1500, 2100])
def test_pieces_are_packed_where_they_belong(
    library: ctypes.CDLL, format: Format, depth: int
) -> None:
    """Rows far apart, bf16 and float, in pieces of odd sizes and in another order."""
    outputs = 150
    wide = random(8, outputs, depth + 13)
    bits = ref_round(wide)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    want = packed(library, format, np.ascontiguousarray(rounded[:, :depth]))
    for source in (rounded[:, :depth], bits[:, :depth]):
        matrix = empty_matrix(library, format, outputs, depth=depth)
        for first, last in ((100, 150), (0, 7), (7, 8), (8, 33), (33, 100)):
            pack(library, matrix, source, first=first, last=last, to=first)
        np.testing.assert_array_equal(matrix.data, want.data)
        if matrix.scales is not None:
            np.testing.assert_array_equal(matrix.scales, want.scales)
            np.testing.assert_array_equal(matrix.sums, want.sums)
    swapped = empty_matrix(library, format, outputs, depth=depth)
    pack(library, swapped, bits[:, :depth], first=0, last=70, to=80)
    pack(library, swapped, bits[:, :depth], first=70, last=150, to=0)
    x = prepare(library, format, random(9, 2, depth), isa=0)
    out = product(library, swapped, x, 0)[:, :outputs]
    np.testing.assert_array_equal(
        np.roll(out, 70, axis=1), product(library, want, x, 0)[:, :outputs]
    )


def test_the_layout_is_the_documented_one(library: ctypes.CDLL) -> None:
    outputs, depth = 70, 70
    weight = random(10, outputs, depth)
    full = np.zeros((2 * PANEL, 2 * PANEL), np.float32)
    full[:outputs, :depth] = weight
    panels = full.reshape(2, PANEL, -1)
    data = packed(library, Format.FLOAT, weight).data.view(np.float32)
    np.testing.assert_array_equal(data.reshape(2, -1, PANEL), panels.transpose(0, 2, 1))
    data = packed(library, Format.BF16, weight).data.view(np.uint16)
    pairs = ref_round(panels).reshape(2, PANEL, -1, 2)
    np.testing.assert_array_equal(data.reshape(2, -1, PANEL, 2), pairs.transpose(0, 2, 1, 3))
    matrix = packed(library, Format.INT8, weight)
    integers, scales = ref_quantize(weight)
    fours = np.zeros((2 * PANEL, 2 * PANEL), np.int8)
    fours[:outputs, :depth] = integers
    np.testing.assert_array_equal(
        matrix.data.view(np.int8).reshape(2, -1, PANEL, 4),
        fours.reshape(2, PANEL, -1, 4).transpose(0, 2, 1, 3),
    )
    assert matrix.scales is not None and matrix.sums is not None
    np.testing.assert_array_equal(matrix.scales[:outputs], scales)
    np.testing.assert_array_equal(matrix.sums[:outputs], integers.sum(axis=1, dtype=np.int32))
