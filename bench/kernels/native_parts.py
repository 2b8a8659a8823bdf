"""Parts of the native step, called one by one: packed products (csrc/step/matmul.h) and attention
(csrc/step/attention.h). For benches and tests; the executor calls the C++ functions itself.

bf16 travels as its bits in uint16 arrays. Everything lies in CPU memory.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PANEL, STRIP, DEPTH = 64, 16, 64
_ALIGNMENT = 64
_MAX_DIM, _MAX_GROUP, _MAX_TREE = 256, 16, 64
_DTYPES = (torch.bfloat16, torch.float32)


def call(library: ctypes.CDLL, name: str, *arguments: Any, result: Any = None) -> Any:
    """Calls `hetero_<name>`: arrays go as their addresses, integers as int64, floats by pointer.

    Args:
        result: the ctypes type of what the function returns.
    """
    function = getattr(library, f"hetero_{name}")
    function.restype = result
    return function(*map(_converted, arguments))


def _converted(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.byref(ctypes.c_float(argument))
    if isinstance(argument, int | np.integer | np.bool_):
        return ctypes.c_int64(int(argument))
    return ctypes.c_void_p(None) if argument is None else argument


class Format(enum.IntEnum):
    """Of weights and of the rows that meet them."""

    BF16 = 0
    FLOAT = 1
    INT8 = 2
    INT4 = 3
    INT8_GROUPS = 4


class Zeros(enum.IntEnum):
    """What a group of integers has beside its scale."""

    NONE = 0
    POINTS = 1
    OFFSETS = 2


@dataclass(frozen=True, slots=True)
class Groups:
    """Of INT4 and INT8_GROUPS: size along k; scales and offsets half floats, else floats."""

    size: int
    half_scales: bool = True
    zeros: Zeros = Zeros.POINTS


ONLINE_GROUPS = Groups(32)
"""With which `pack` rounds weights to INT4."""

_TYPES = {
    Format.BF16: np.uint16, Format.FLOAT: np.float32, Format.INT8: np.int8,
    Format.INT4: np.int8, Format.INT8_GROUPS: np.int8,
}  # fmt: skip


class _Packed(ctypes.Structure):
    """`Packed` of matmul.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("format", "group", "half_scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("outputs", "depth")),
        *((name, ctypes.c_void_p) for name in ("data", "scales", "sums")),
    ]


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A weight [outputs, depth] in panels, `copies` times one after the other.

    Attributes:
        data: uint8, 64-byte aligned.
        scales, sums: [padded outputs] float32 and int32 for INT8, else None.
        groups: None without groups.
    """

    format: Format
    outputs: int
    depth: int
    data: NDArray[np.uint8]
    scales: NDArray[np.float32] | None
    sums: NDArray[np.int32] | None
    copies: int = 1
    groups: Groups | None = None

    @property
    def padded_outputs(self) -> int:
        return -(-self.outputs // PANEL) * PANEL

    @property
    def arguments(self) -> Any:
        """The matrix as the C functions take it, by pointer; the arrays outlive the call."""
        arrays = (self.data, self.scales, self.sums)
        addresses = (None if array is None else array.ctypes.data for array in arrays)
        size, half, zeros = _of_groups(self.groups)
        return ctypes.byref(
            _Packed(self.format, size, half, zeros, self.outputs, self.depth, *addresses)
        )


def _of_groups(groups: Groups | None) -> tuple[int, bool, int]:
    return (0, False, 0) if groups is None else (groups.size, groups.half_scales, groups.zeros)


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Rows as `multiply` takes them: data [rows, stride]; scales [rows] for INT8. With groups, a
    row of data is its integers [padded depth], then the bytes of scales and corrections."""

    format: Format
    depth: int
    data: NDArray[np.generic]
    scales: NDArray[np.float32] | None
    groups: Groups | None = None

    def groups_of_rows(self) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.generic]]:
        """Integers [rows, padded depth], scales and corrections [rows, groups] of rows with
        groups; corrections are float32 where weights have offsets, else int32."""
        assert self.groups is not None
        padded = -(-self.depth // DEPTH) * DEPTH
        count = -(-padded // self.groups.size)
        integers, rest = self.data[:, :padded], np.ascontiguousarray(self.data[:, padded:])
        scales, corrections = rest[:, : 4 * count], rest[:, 4 * count : 8 * count]
        kind = np.float32 if self.groups.zeros is Zeros.OFFSETS else np.int32
        return (
            integers.view(np.int8),
            np.ascontiguousarray(scales).view(np.float32),
            np.ascontiguousarray(corrections).view(kind),
        )


def aligned_zeros(size: int) -> NDArray[np.uint8]:
    """`size` zero bytes at a 64-byte boundary."""
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size]


def empty_matrix(
    library: ctypes.CDLL,
    format: Format,
    outputs: int,
    *,
    depth: int,
    copies: int = 1,
    groups: Groups | None = None,
) -> PackedMatrix:
    """A matrix of zeros; with INT8, one scale and one sum for all copies.

    Args:
        groups: None for INT4: those of `pack`.
    """
    if format is Format.INT4 and groups is None:
        groups = ONLINE_GROUPS
    form = _Packed(format, *_of_groups(groups), outputs, depth, None, None, None)
    size = call(library, "matmul_packed_bytes", ctypes.byref(form), result=ctypes.c_int64)
    padded = -(-outputs // PANEL) * PANEL
    scales, sums = None, None
    if format is Format.INT8:
        scales, sums = np.zeros(padded, np.float32), np.zeros(padded, np.int32)
    data = aligned_zeros(size * copies)
    return PackedMatrix(format, outputs, depth, data, scales, sums, copies, groups)


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
    assert matrix.format is not Format.INT8_GROUPS
    stride = weight.strides[0] // weight.itemsize
    is_bf16 = weight.dtype == np.uint16
    call(library, "matmul_pack", matrix.arguments, weight, is_bf16, stride, first, last, to)


def pack_quantized(
    library: ctypes.CDLL,
    matrix: PackedMatrix,
    data: NDArray[np.generic],
    scales: NDArray[np.float32],
    *,
    points: NDArray[np.uint8] | None = None,
    offsets: NDArray[np.float32] | None = None,
    first: int = 0,
    last: int | None = None,
    to: int = 0,
) -> None:
    """Packs rows [first, last) of integers as they are to the outputs from `to`.

    Args:
        data: INT4: [n, depth / 2] uint8, k in the low half of a byte, k + 1 in its high half; else
            [n, depth] int8.
        scales, points, offsets: [n, groups]; points and offsets where the matrix has them.
    """
    last = len(data) if last is None else last
    count = 1 if matrix.groups is None else -(-matrix.depth // matrix.groups.size)
    per_byte = 2 if matrix.format is Format.INT4 else 1
    assert data.shape == (len(data), matrix.depth // per_byte) and data.flags.c_contiguous
    assert data.dtype == (np.uint8 if matrix.format is Format.INT4 else np.int8)
    zeros = Zeros.NONE if matrix.groups is None else matrix.groups.zeros
    assert (points is not None) == (zeros is Zeros.POINTS)
    assert (offsets is not None) == (zeros is Zeros.OFFSETS)
    for array in (scales, points, offsets):
        assert array is None or (array.shape == (len(data), count) and array.flags.c_contiguous)
    assert scales.dtype == np.float32
    assert 0 <= first <= last <= len(data) and 0 <= to <= matrix.outputs - (last - first)
    parts = (data, scales, points, offsets, first, last, to)
    call(library, "matmul_pack_quantized", matrix.arguments, *parts)


def prepare(
    library: ctypes.CDLL,
    format: Format,
    x: NDArray[np.float32],
    *,
    isa: int,
    groups: Groups | None = None,
) -> PreparedRows:
    """Rounds or quantizes rows [rows, depth], contiguous float32.

    Args:
        groups: of the matrix; None for INT4: those of `pack`.
    """
    assert x.dtype == np.float32 and x.ndim == 2 and x.flags.c_contiguous
    if format is Format.INT4 and groups is None:
        groups = ONLINE_GROUPS
    rows, depth = x.shape
    form = _Packed(format, *_of_groups(groups), 0, depth, None, None, None)
    stride = call(library, "matmul_row_stride", ctypes.byref(form), result=ctypes.c_int64)
    data = np.empty((rows, stride), _TYPES[format])
    scales = np.empty(rows, np.float32) if format is Format.INT8 else None
    call(library, "matmul_prepare", ctypes.byref(form), x, rows, data, scales, isa)
    return PreparedRows(format, depth, data, scales, groups)


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
    assert x.format is matrix.format and x.depth == matrix.depth and x.groups == matrix.groups
    assert out.dtype == np.float32 and out.flags.c_contiguous
    assert out.shape == (len(x.data), matrix.padded_outputs)
    assert first >= 0 and 0 <= strips <= matrix.padded_outputs // STRIP - first
    rows = (x.data, x.data.shape[1], x.scales, len(x.data))
    to = (first, strips, out, out.shape[1])
    call(library, "matmul_multiply", matrix.arguments, *rows, *to, isa, matrix.copies)


@dataclass(frozen=True, eq=False)
class AttentionTokens:
    """What attends what in one step. The tokens of a sequence follow each other.

    Attributes:
        request_slots: [sequences] int32 row of `block_tables`.
        num_computed: [sequences] int32 tokens in the cache before the step.
        num_scheduled: [sequences] int32 tokens in the step.
        bases: [sequences] int32 of a tree: the first token that not all its nodes see, at most
            num_computed.
        is_tree: [sequences] uint8.
        ancestors: [tokens] uint64, of a tree's nodes bit i says whether token base + i is seen:
            those of their ancestors, which lie before them, and their own.
        block_tables: [request slots, columns] int32 block ids.
    """

    request_slots: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    num_scheduled: NDArray[np.int32]
    bases: NDArray[np.int32]
    is_tree: NDArray[np.uint8]
    ancestors: NDArray[np.uint64]
    block_tables: NDArray[np.int32]

    @property
    def count(self) -> int:
        return int(self.num_scheduled.sum())

    def check(self, block_size: int) -> None:
        """Asserts that the arrays are what the library may follow without looking."""
        sequences = len(self.request_slots)
        for field in fields(self)[:-1]:
            array = getattr(self, field.name)
            kind = {"is_tree": np.uint8, "ancestors": np.uint64}.get(field.name, np.int32)
            size = self.count if field.name == "ancestors" else sequences
            assert array.dtype == kind and array.shape == (size,) and array.flags.c_contiguous
        tables = self.block_tables
        assert tables.dtype == np.int32 and tables.flags.c_contiguous
        trees, ends = self.is_tree != 0, self.num_computed + self.num_scheduled
        assert int(ends.max()) <= tables.shape[1] * block_size
        assert (self.num_scheduled > 0).all()
        assert (self.bases[trees] <= self.num_computed[trees]).all()
        assert ((ends - self.bases)[trees] <= _MAX_TREE).all()


class StepAttention:
    """A plan and the team of Python threads that carries it out."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        assert threads > 0
        self._library = library
        self._threads = threads
        plan = call(library, "attention_new", threads, result=ctypes.c_void_p)
        self._plan = ctypes.c_void_p(plan)
        self._tokens: AttentionTokens | None = None

    def close(self) -> None:
        """Frees the plan; nothing may be called afterwards."""
        call(self._library, "attention_free", self._plan)

    def plan(
        self,
        cache: torch.Tensor,
        tokens: AttentionTokens,
        *,
        heads: int,
        window: int,
        scale: float,
        isa: int,
    ) -> bool:
        """Prepares a step; true if cut contexts have to be joined.

        Args:
            cache: [blocks, layers, 2, block size, kv heads, dim] bf16 or float32, contiguous.
            window: tokens that a token sees, itself included; 0 for all.
        """
        _, layers, pair, block_size, kv_heads, dim = cache.shape
        assert cache.dtype in _DTYPES and cache.is_contiguous() and pair == 2
        assert dim % 8 == 0 and 8 <= dim <= _MAX_DIM
        assert heads % kv_heads == 0 and heads // kv_heads <= _MAX_GROUP and window >= 0
        tokens.check(block_size)
        sizes = np.array(
            [cache.dtype == torch.bfloat16, layers, block_size, kv_heads, dim]
            + [len(tokens.request_slots), tokens.count, tokens.block_tables.shape[1]]
            + [heads, window, isa],
            np.int64,
        )
        self._tokens = tokens  # the plan points into its arrays
        self._cache, self._width = cache, heads * dim
        arrays = (getattr(tokens, field.name) for field in fields(tokens))
        call(self._library, "attention_plan", self._plan, cache, sizes, *arrays, float(scale))
        return self._needs_merge()

    def _needs_merge(self) -> bool:
        name = "attention_needs_merge"
        return bool(call(self._library, name, self._plan, result=ctypes.c_int64))

    def __call__(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attends one layer.

        Args:
            q: [tokens, heads * dim] of the cache's dtype; tokens may be apart.
            out: [tokens, heads * dim] float32; tokens may be apart.
        """
        assert self._tokens is not None and 0 <= layer < self._cache.shape[1]
        assert q.shape == out.shape == (self._tokens.count, self._width)
        assert q.dtype == self._cache.dtype and out.dtype == torch.float32
        assert q.stride(1) == out.stride(1) == 1
        library, plan = self._library, self._plan
        call(library, "attention_begin_layer", plan)
        joins = self._needs_merge()
        barrier = threading.Barrier(self._threads)

        def part(thread: int) -> None:
            target = (out, out.stride(0), thread)
            call(library, "attention_attend", plan, layer, q, q.stride(0), *target)
            if joins:
                barrier.wait()
                call(library, "attention_merge", plan, *target)

        others = [threading.Thread(target=part, args=(i,)) for i in range(1, self._threads)]
        for other in others:
            other.start()
        part(0)
        for other in others:
            other.join()
