"""Products with int4 and with int8 in groups against sums in double, and how such weights are
packed: integers of checkpoints as they are, floats rounded to int4."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.kernels.native_parts import (
    ONLINE_GROUPS,
    STRIP,
    Format,
    Groups,
    PackedMatrix,
    PreparedRows,
    Zeros,
    empty_matrix,
    multiply,
    pack,
    pack_quantized,
    prepare,
)
from tests.cpu.csrc.step.references import ref_quantize_groups, ref_round, ref_unpack_groups

ROWS = (1, 2, 3, 4, 6, 7, 8, 13, 16, 17, 33, 65)
SIZES = ((16, 32), (40, 100), (200, 1000), (129, 334))  # outputs, depth
UNTOUCHED = 12345.0
FORMS = [
    (Format.INT4, Groups(32, True, Zeros.NONE)),
    (Format.INT4, Groups(64, False, Zeros.POINTS)),
    (Format.INT4, Groups(96, True, Zeros.OFFSETS)),
    (Format.INT4, Groups(128, True, Zeros.POINTS)),
    (Format.INT4, Groups(128, False, Zeros.OFFSETS)),
    (Format.INT8_GROUPS, Groups(16, False, Zeros.NONE)),
    (Format.INT8_GROUPS, Groups(128, True, Zeros.NONE)),
]
IDS = [f"{f.name}-{g.size}-{'half' if g.half_scales else 'float'}-{g.zeros.name}" for f, g in FORMS]
every_form = pytest.mark.parametrize(("format", "groups"), FORMS, ids=IDS)


@dataclass(frozen=True, eq=False)
class Source:
    """A quantized weight [outputs, depth] as checkpoints have it, and its values."""

    data: NDArray[np.generic]
    scales: NDArray[np.float32]
    points: NDArray[np.uint8] | None
    offsets: NDArray[np.float32] | None
    values: NDArray[np.float64]


@cache
def source_of(format: Format, groups: Groups, outputs: int, depth: int) -> Source:
    rng = np.random.default_rng(outputs + depth)
    shape = outputs, -(-depth // groups.size)

    def exact(values: NDArray[np.float64]) -> NDArray[np.float32]:
        return values.astype(np.float16).astype(np.float32)

    def spread(values: NDArray[np.generic]) -> NDArray[np.float64]:
        return np.repeat(values.astype(np.float64), groups.size, axis=1)[:, :depth]

    scales = exact(0.5 + rng.random(shape))
    points = rng.integers(0, 17, shape).astype(np.uint8) if groups.zeros is Zeros.POINTS else None
    offsets = exact(rng.standard_normal(shape)) if groups.zeros is Zeros.OFFSETS else None
    if format is Format.INT8_GROUPS:
        data = rng.integers(-128, 128, (outputs, depth)).astype(np.int8)
        return Source(data, scales, None, None, data * spread(scales))
    integers = rng.integers(0, 16, (outputs, depth)).astype(np.uint8)
    values = integers - (8.0 if groups.zeros is Zeros.NONE else 0.0)
    if points is not None:
        values = values - spread(points)
    values = values * spread(scales)
    if offsets is not None:
        values = values + spread(offsets)
    data = integers[:, 0::2] | integers[:, 1::2] << 4
    return Source(data, scales, points, offsets, values)


def packed(
    library: ctypes.CDLL, format: Format, groups: Groups, outputs: int, depth: int
) -> PackedMatrix:
    source = source_of(format, groups, outputs, depth)
    matrix = empty_matrix(library, format, outputs, depth=depth, groups=groups)
    pack_quantized(
        library, matrix, source.data, source.scales, points=source.points, offsets=source.offsets
    )
    return matrix


@cache
def random_rows(rows: int, depth: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows).standard_normal((rows, depth), dtype=np.float32)


@cache
def rounded_rows(rows: int, depth: int, size: int) -> NDArray[np.float64]:
    """The values of random rows after quantization."""
    integers, scales, _ = ref_quantize_groups(random_rows(rows, depth), size)
    return integers * np.repeat(scales.astype(np.float64), size, axis=1)[:, :depth]


def prepared(
    library: ctypes.CDLL, matrix: PackedMatrix, x: NDArray[np.float32], isa: int
) -> PreparedRows:
    return prepare(library, matrix.format, x, isa=isa, groups=matrix.groups)


def product(
    library: ctypes.CDLL, matrix: PackedMatrix, x: PreparedRows, isa: int
) -> NDArray[np.float32]:
    out = np.full((len(x.data), matrix.padded_outputs), UNTOUCHED, np.float32)
    multiply(library, matrix, x, isa=isa, out=out)
    return out


@cache
def expected_product(
    format: Format, groups: Groups, outputs: int, depth: int, rows: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[rows, outputs] of `random_rows`, and how far a result may be from it."""
    values = source_of(format, groups, outputs, depth).values
    x = rounded_rows(rows, depth, groups.size)
    # Half an ulp for each of the sums of a group, and of an offset's.
    sizes = np.sqrt((x**2) @ (values.T**2)) + np.abs(x).max()
    allowed = 1e-6 * np.sqrt(depth / groups.size + 1) * sizes
    return x @ values.T, allowed * (8 if groups.zeros is Zeros.OFFSETS else 1)


@every_form
def test_products_equal_their_reference(
    library: ctypes.CDLL, format: Format, groups: Groups, isa: int
) -> None:
    for outputs, depth in SIZES:
        matrix = packed(library, format, groups, outputs, depth)
        for rows in ROWS:
            out = product(
                library, matrix, prepared(library, matrix, random_rows(rows, depth), isa), isa
            )
            expected, allowed = expected_product(format, groups, outputs, depth, rows)
            error = np.abs(out[:, :outputs] - expected)
            assert (error <= allowed).all(), (outputs, depth, rows, (error / allowed).max())
            assert (out[:, outputs:] == 0).all(), "padding must give zeros"


@every_form
def test_the_same_on_every_instruction_set(
    library: ctypes.CDLL, format: Format, groups: Groups, isa: int
) -> None:
    matrix = packed(library, format, groups, 129, 1100)
    for rows in (1, 5, 23):
        x = random_rows(rows, 1100)
        want = product(library, matrix, prepared(library, matrix, x, 0), 0)
        got = product(library, matrix, prepared(library, matrix, x, isa), isa)
        np.testing.assert_array_equal(got, want)


@every_form
def test_results_do_not_depend_on_how_strips_and_rows_are_shared(
    library: ctypes.CDLL, format: Format, groups: Groups, isa: int
) -> None:
    """Depth 1100 takes several blocks of k where rows share a panel."""
    matrix = packed(library, format, groups, 208, 1100)
    x = prepared(library, matrix, random_rows(23, 1100), isa)
    whole = product(library, matrix, x, isa)
    strips = matrix.padded_outputs // STRIP
    for first, last in ((0, 1), (1, 3), (2, 7), (5, 6), (7, strips)):
        out = np.full_like(whole, UNTOUCHED)
        multiply(library, matrix, x, isa=isa, out=out, first=first, strips=last - first)
        columns = slice(first * STRIP, last * STRIP)
        np.testing.assert_array_equal(out[:, columns], whole[:, columns])
        out[:, columns] = UNTOUCHED
        assert (out == UNTOUCHED).all(), "columns outside the strips were written"
    for begin, end in ((0, 8), (8, 23), (0, 1), (9, 14), (3, 20)):
        part = PreparedRows(format, 1100, x.data[begin:end], None, groups)
        np.testing.assert_array_equal(product(library, matrix, part, isa), whole[begin:end])


@every_form
def test_nan_reaches_the_result(
    library: ctypes.CDLL, format: Format, groups: Groups, isa: int
) -> None:
    x = random_rows(9, 334).copy()
    x[4, 77] = np.nan
    matrix = packed(library, format, groups, 129, 334)
    out = product(library, matrix, prepared(library, matrix, x, isa), isa)
    assert np.isnan(out[4]).all() and not np.isnan(np.delete(out, 4, axis=0)).any()


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("zeros", [Zeros.NONE, Zeros.OFFSETS], ids=lambda zeros: zeros.name)
def test_rows_are_prepared_as_by_their_reference(
    library: ctypes.CDLL, size: int, zeros: Zeros, isa: int
) -> None:
    x = random_rows(6, 331) * np.float32(3)
    x[1] = 0
    x[3] *= np.float32(1e-41)  # too small to have an inverse
    x[4, :200] *= np.float32(1e3)  # groups of several sizes
    rows = prepare(library, Format.INT8_GROUPS, x, isa=isa, groups=Groups(size, zeros=zeros))
    integers, scales, corrections = rows.groups_of_rows()
    wanted = ref_quantize_groups(x, size)
    np.testing.assert_array_equal(integers[:, :331], wanted[0])
    assert integers.shape[1] == 384 and not integers[:, 331:].any()
    sums = wanted[2]
    wanted_corrections = -sums if zeros is Zeros.NONE else wanted[1] * sums.astype(np.float32)
    for found, expected in ((scales, wanted[1]), (corrections, wanted_corrections)):
        np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
        assert not found[:, expected.shape[1] :].any()


@every_form
def test_pieces_are_packed_where_they_belong(
    library: ctypes.CDLL, format: Format, groups: Groups
) -> None:
    source = source_of(format, groups, 150, 334)
    zeros = {"points": source.points, "offsets": source.offsets}
    want = packed(library, format, groups, 150, 334)
    matrix = empty_matrix(library, format, 150, depth=334, groups=groups)
    for first, last in ((100, 150), (0, 7), (7, 8), (8, 33), (33, 100)):
        pack_quantized(
            library, matrix, source.data, source.scales, **zeros, first=first, last=last, to=first
        )
    np.testing.assert_array_equal(matrix.data, want.data)


@every_form
def test_the_layout_is_the_documented_one(
    library: ctypes.CDLL, format: Format, groups: Groups
) -> None:
    outputs, depth = 70, 334
    source = source_of(format, groups, outputs, depth)
    integers, scales, zeros = ref_unpack_groups(packed(library, format, groups, outputs, depth))
    data = source.data
    if format is Format.INT4:
        data = np.stack((data & 15, data >> 4), axis=-1).reshape(outputs, depth)
    np.testing.assert_array_equal(integers[:outputs, :depth], data.view(np.uint8))
    assert not integers[outputs:].any() and not integers[:, depth:].any()
    count = source.scales.shape[1]
    np.testing.assert_array_equal(scales[:outputs, :count], source.scales)
    for wanted in (source.points, source.offsets):
        if wanted is not None:
            assert zeros is not None
            np.testing.assert_array_equal(zeros[:outputs, :count], wanted)


# -- rounding floats -------------------------------------------------------------------------------


def rounded(library: ctypes.CDLL, weight: NDArray[np.generic]) -> PackedMatrix:
    matrix = empty_matrix(library, Format.INT4, len(weight), depth=weight.shape[1])
    pack(library, matrix, weight)
    return matrix


def values_of(matrix: PackedMatrix) -> NDArray[np.float64]:
    integers, scales, points = ref_unpack_groups(matrix)
    assert points is not None
    size = ONLINE_GROUPS.size
    wide = [np.repeat(a.astype(np.float64), size, axis=1) for a in (scales, points)]
    values = (integers - wide[1][:, : integers.shape[1]]) * wide[0][:, : integers.shape[1]]
    return values[: matrix.outputs, : matrix.depth]


def plainly_rounded(weight: NDArray[np.float32], size: int) -> NDArray[np.float64]:
    """Over the whole range of each group, zero included."""
    groups = weight.astype(np.float64).reshape(len(weight), -1, size)
    low = np.minimum(groups.min(axis=2, keepdims=True), 0)
    scale = (np.maximum(groups.max(axis=2, keepdims=True), 0) - low) / 15
    point = np.rint(-low / scale)
    return ((np.clip(np.rint(groups / scale) + point, 0, 15) - point) * scale).reshape(weight.shape)


def test_rounding_is_to_nearest_with_scales_that_lower_the_error(library: ctypes.CDLL) -> None:
    weight = np.random.default_rng(11).standard_normal((96, 640), dtype=np.float32)
    weight[:8] = np.abs(weight[:8]) + 1  # one sign: the range begins at zero
    matrix = rounded(library, weight)
    values = values_of(matrix)
    error = np.mean((values - weight) ** 2)
    plain = np.mean((plainly_rounded(weight, ONLINE_GROUPS.size) - weight) ** 2)
    assert 0.8 * plain < error < 0.95 * plain
    integers, scales, points = ref_unpack_groups(matrix)
    assert points is not None and (points <= 15).all()
    steps = np.repeat(scales[:96], 32, axis=1)
    away = np.abs(values - weight) / steps
    inside = (integers[:96] > 0) & (integers[:96] < 15)
    assert away[inside].max() <= 0.5 + 1e-3, "not the nearest integer"
    assert (values[:8] >= 0).all()


def test_rounding_of_bf16_and_of_floats_is_the_same(library: ctypes.CDLL) -> None:
    bits = ref_round(np.random.default_rng(12).standard_normal((40, 130), dtype=np.float32))
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(rounded(library, bits).data, rounded(library, floats).data)


def test_rounding_of_unusual_groups(library: ctypes.CDLL) -> None:
    weight = np.random.default_rng(13).standard_normal((7, 64), dtype=np.float32)
    weight[0] = 0
    weight[1] *= np.float32(1e-12)  # scales below the least half float
    weight[2, 40] = np.nan
    weight[3] = 2
    weight[4] *= np.float32(1e-5)  # scales are subnormal half floats
    weight[5, 1:] = 0
    values = values_of(rounded(library, weight))
    assert not values[:2].any()
    assert np.isnan(values[2, 32:]).all() and not np.isnan(values[2, :32]).any()
    np.testing.assert_allclose(values[3], 2, rtol=1e-3)
    assert np.abs(values[4] - weight[4]).max() < 0.2 * np.abs(weight[4]).max()
    np.testing.assert_allclose(values[5], weight[5], rtol=1e-3)
