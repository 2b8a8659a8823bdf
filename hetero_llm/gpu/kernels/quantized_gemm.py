"""Products of few rows with quantized weights: y = x @ matrix^T + bias, activations as they are.

As in `skinny_gemm`, a product is as fast as its weights are read, and there are two kernels:

- `vector_quantized_kernel`, one row: codes become float32 in registers and are multiplied and
  summed outside the tensor cores. Sixteen bytes of a row lie in one thread, all under one scale (or
  one for each quarter, below), so scales cost one multiply for each 16 bytes.
- `matrix_quantized_kernel`, up to 256 rows: codes become 16-bit values in registers, which are the
  left operand of the tensor cores; the rows are the right one. Scales multiply the sums of a group
  or, where those are more numbers than its weights, the weights (`folds`).

Zero points are taken off before the tensor cores (exact), or off the sums (vector kernel, by the
sum of the inputs). Split K, the merge of its parts and the launch are those of `skinny_gemm`.

Weights have to be in the form that `prepare` makes of them once: codes of 4 bits in lanes (see
`quantized_elements`), scales transposed, so that neighbours in memory belong to neighbouring
features and one load brings the scales of a whole tile.

Wrapper `quantized_linear`, reference `quantization.matrix.quantized_product`; timed by
`bench.kernels.quantized_gemm`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.fused_lora import (
    FusedAdapters,
    Shrinking,
    add_to_row,
    kernel_arguments,
    look_for_row,
    num_shrinking,
    prepare_row,
    prepare_rows,
    shrink_row,
    shrink_rows,
)
from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    INTERPRETED,
    Launch,
    let_next_start,
    num_multiprocessors,
    wait_and_release,
    wait_for_inputs,
)
from hetero_llm.gpu.kernels.lora import LoraSlots
from hetero_llm.gpu.kernels.quantized_elements import (
    INT4,
    KIND_CODES,
    multiply,
    pairs_of_part,
    parts,
    subtract,
    unpack_words,
)
from hetero_llm.gpu.kernels.skinny_gemm import (
    SkinnyConfig,
    finish_tile,
    fuses,
    load_weight,
    prefetch_options,
    prefetch_weight,
    room_for_partials,
    steps_per_split,
    tile_options,
    unpack_pairs,
)
from hetero_llm.quantization.matrix import (
    BLOCK_ROWS,
    INT4_ZERO,
    Kind,
    QuantizedMatrix,
    pack_codes,
    unpack_codes,
    with_scale_of_each_row,
)

MAX_ROWS = 256
"""Of one product. Which numbers of rows take it is up to `quantized_product`."""

_DTYPES = (torch.bfloat16, torch.float16)
_LANES = (128, 64, 32, 16)
_CHUNK = 256  # columns at most: the rows of x of a chunk are in shared memory at once
_ALIGNED = 16  # elements in each scale's row are padded to this, for 16-byte loads
_ROWS_AT_ONCE = 1 << 14
_WIDE = 1 << 14  # features of 8 bits for which there are programs enough of 64
_FEW_ELEMENTS = 1 << 25  # of 4 bits, in a matrix that the vector kernel is the faster one for
# By rows: features, warps and stages of a program, and the warps of all programs that K is split
# for. nf4 is looked up in a table, which takes long: more programs hide it.
_EIGHT_BITS = {
    8: (32, 2, 3, 700),
    16: (64, 4, 4, 700),
    32: (64, 4, 3, 700),
    64: (128, 8, 3, 700),
}
_INT4 = {
    8: (32, 1, 4, 700),
    16: (64, 2, 3, 700),
    32: (64, 4, 3, 1000),
    64: (64, 4, 3, 700),
}
_FP4 = {
    8: (64, 2, 3, 760),
    16: (64, 4, 3, 1000),
    32: (64, 4, 3, 1000),
    64: (128, 8, 3, 700),
}
_NF4 = {
    8: (64, 2, 3, 2500),
    16: (64, 4, 3, 2500),
    32: (64, 4, 3, 2500),
    64: (64, 4, 2, 700),
}
# For tiles of 128 rows: columns of a program at most (or one chunk), its features (128 where that
# would be too few programs) and warps, and warps of all programs. The tensor cores are the limit
# here, and next to them reads of x from L2, once for each tile of features.
_LARGE = ((128, 256, 8, 760), (256, 128, 8, 760))
_SHARED_BYTES = 227 << 10  # of a multiprocessor from sm_90 on
_FULL_TILE = 64  # rows, from which on there may be several tiles of rows
_WARPS_AT_ONCE = 8  # of a multiprocessor, by estimate
_LINES, _LORA_K = 32, 128  # of A, lines and columns: as much shared memory as any product takes
_INT4_ZERO = tl.constexpr(INT4_ZERO)

SCALE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
"""Types of scales as kernels have them."""
_FLOAT32, _FLOAT16, _BFLOAT16 = (tl.constexpr(code) for code in range(3))


class MatrixForm(NamedTuple):
    """How a `PreparedMatrix` is stored, one constant of the kernels that read it (as of
    `fused_lora.AdapterShape`).

    Attributes:
        kind: of `KIND_CODES`.
        lanes, group, rows: of `PreparedMatrix`.
        scale: of `SCALE_TYPES`.
        parts: codes in a lane, parts of a chunk.
        together: parts under one scale.
        groups: of a chunk.
        per_word: groups in a word of scales.
    """

    kind: int
    lanes: int
    group: int
    rows: int
    scale: int
    parts: int
    together: int
    groups: int
    per_word: int


@dataclass(frozen=True, slots=True)
class PreparedMatrix:
    """A `QuantizedMatrix` in the order in which the kernels read it.

    Attributes:
        kind: of the elements.
        shape: N, K.
        lanes: of a chunk: 16, 32, 64 or 128; a part's columns are all of one group.
        data: [N, K' / 2] (8 bits) or [N, K' / 4] (4 bits) int16 lanes as of `quantized_elements`;
            K' is K to a multiple of a chunk, and whatever codes are there meet inputs of 0.
        group: columns that share a scale; 0: each row has one scale, which is in `row_scale`.
        rows: rows that share a scale, 1 or `BLOCK_ROWS`.
        scale: int32 words, each with the scales of one, two or four groups that follow each other,
            as many as it has room for, lowest bits first: [groups / those in a word, ceil(N / rows)
            to a multiple of 16]; None where `group` is 0. Loads of 4 bytes can be asynchronous.
        scale_dtype: of `scale` and `offset`.
        offset: as `scale`, with rows 1; or None.
        zero: the same, words of the zero points of one chunk or, where a group is as long or
            longer, of one group; or None.
        row_scale: [N] float32 or None.
        order: [K] int32 or None: column k of `data` is column order[k] of the matrix; [E, K]: see
            `QuantizedMatrix`.
    """

    kind: Kind
    shape: tuple[int, int]
    lanes: int
    data: Tensor
    group: int
    rows: int
    scale: Tensor | None
    scale_dtype: torch.dtype
    zero: Tensor | None
    offset: Tensor | None
    row_scale: Tensor | None
    order: Tensor | None

    @property
    def parts(self) -> int:
        """Codes in a lane."""
        return 2 if self.kind in ("fp8", "int8") else 4

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return self.lanes * self.parts

    @property
    def padded_columns(self) -> int:
        """K'."""
        return self.data.shape[1] * self.parts

    @property
    def groups(self) -> int:
        """0 where each row has one scale."""
        return -(-self.shape[1] // self.group) if self.group else 0

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Arguments of all kernels: scales, zero points, offsets, scales of rows, order."""
        return self.scale, self.zero, self.offset, self.row_scale, self.order

    @property
    def strides(self) -> tuple[int, ...]:
        """Of rows of scales, and of zero points or offsets; 0 without."""
        more = self.zero if self.offset is None else self.offset
        return tuple(0 if one is None else one.shape[1] for one in (self.scale, more))

    @property
    def form(self) -> MatrixForm:
        """A constant of all kernels."""
        whole = self.group == 0 or self.group >= self.chunk
        together = self.parts if whole else self.group // self.lanes
        return MatrixForm(
            KIND_CODES[self.kind],
            self.lanes,
            self.group,
            self.rows,
            SCALE_TYPES[self.scale_dtype],
            parts=self.parts,
            together=together,
            groups=self.parts // together,
            per_word=max(1, 4 // self.scale_dtype.itemsize),
        )

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def prepares(matrix: QuantizedMatrix) -> bool:
    """Whether there is a prepared form: groups of whole parts, of 16 columns at least."""
    return _per_row(matrix) or matrix.group % _LANES[-1] == 0


def prepare(matrix: QuantizedMatrix, *, lanes: int | None = None) -> PreparedMatrix:
    """The same matrix as the kernels read it; called once for each, when a model is loaded.

    Codes and scales are written anew and `matrix` stays as it is, so a call needs memory for
    both; the caller frees `matrix` if only the result is multiplied with.

    Args:
        lanes: Of a chunk, at most; for measurements.
    """
    assert prepares(matrix), f"no prepared form of groups of {matrix.group}"
    scale, row_scale = matrix.scale, matrix.row_scale
    group, rows = matrix.group, matrix.rows
    per_row = _per_row(matrix)
    if per_row:
        of_rows = with_scale_of_each_row(matrix).scale.float().squeeze(1)
        row_scale = of_rows if row_scale is None else of_rows * row_scale
        group, rows = 0, 1
    eight_bits = matrix.kind in ("fp8", "int8")
    num = 2 if eight_bits else 4
    # Bytes of a block stay within it, so that the library's products with blocks can read them.
    most = min(max(group, 2 * _LANES[-1]), _CHUNK) if eight_bits and rows > 1 else _CHUNK
    if lanes is not None:
        most = min(most, lanes * num)
    lanes = _lanes_of_chunk(matrix.shape[1], group, num, most)
    offset = matrix.offset
    if group >= lanes * num and scale.itemsize == 2:
        # Which half of a word is a chunk's would be known when the kernel runs, and for such a
        # scalar Triton takes the weights to the tensor cores by way of shared memory.
        scale, offset = scale.float(), None if offset is None else offset.float()
    # Experts of a layer are one matrix: what lies between the two forms is larger than either.
    pieces = matrix.data.view(torch.uint8).split(_ROWS_AT_ONCE)
    codes = (piece if eight_bits else unpack_codes(piece) for piece in pieces)
    return PreparedMatrix(
        matrix.kind,
        matrix.shape,
        lanes,
        torch.cat([_as_lanes(piece, lanes, num) for piece in codes]),
        group,
        rows,
        None if per_row else _in_words(scale),
        scale.dtype,
        None if matrix.zero is None else _zero_words(matrix.zero, max(1, lanes * num // group)),
        None if offset is None else _in_words(offset),
        row_scale,
        matrix.order,
    )


def stored_codes(matrix: PreparedMatrix, first: int, count: int) -> Tensor:
    """`QuantizedMatrix.data` of some rows, bit for bit: what `prepare` has made the codes of.

    Args:
        first, count: rows.

    Returns:
        [count, K] (8 bits) or [count, K / 2] (4 bits) uint8, on the matrix's device.
    """
    bits = matrix.data[first : first + count].view(torch.uint8)
    low, high = bits.view(count, -1, matrix.lanes, 2).unbind(-1)
    width = matrix.shape[1]
    if matrix.kind in ("fp8", "int8"):
        return torch.stack((low, high), dim=2).flatten(1)[:, :width].contiguous()
    parts = (low & 15, low >> 4, high & 15, high >> 4)
    return pack_codes(torch.stack(parts, dim=2).flatten(1)[:, :width])


def _per_row(matrix: QuantizedMatrix) -> bool:
    """One scale for each row and nothing else: it can be applied at the end."""
    return matrix.group >= matrix.shape[1] and matrix.zero is None and matrix.offset is None


def _lanes_of_chunk(width: int, group: int, parts: int, most: int) -> int:
    """As many as divide the columns, of those whose parts lie in one group each and have at most
    `most` columns together."""
    fitting = [c for c in _LANES if c * parts <= most and group % c == 0]
    return next((c for c in fitting if width % (c * parts) == 0), fitting[-1])


def _as_lanes(codes: Tensor, lanes: int, parts: int) -> Tensor:
    """[N, K] uint8 -> [N, K' / parts] int16."""
    height, width = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -width % (lanes * parts)))
    codes = codes.view(height, -1, parts, lanes)
    if parts == 2:
        low, high = codes.unbind(2)
    else:
        low = codes[:, :, 0] | (codes[:, :, 1] << 4)
        high = codes[:, :, 2] | (codes[:, :, 3] << 4)
    return torch.stack((low, high), dim=-1).flatten(1).view(torch.int16)


def _in_words(values: Tensor) -> Tensor:
    """[rows, groups] -> [ceil(groups / those in a word), rows to a multiple of 16] int32."""
    height, groups = values.shape
    size = values.dtype.itemsize
    bits = values.contiguous().view(torch.uint8).view(height, groups * size)
    bits = torch.nn.functional.pad(bits, (0, -groups * size % 4, 0, -height % _ALIGNED))
    words = bits.view(torch.int32)
    assert words.numel() < 1 << 31, f"kernels count words in 32 bits: {tuple(words.shape)}"
    return words.t().contiguous()


def _zero_words(zero: Tensor, in_chunk: int) -> Tensor:
    """The same for zero points, a word for each chunk or, where groups are longer, each group."""
    wide = zero.to({1: torch.int32, 2: torch.int16, 4: torch.uint8}[in_chunk])
    return _in_words(wide)


@triton.jit
def of_slot(words, slot, TYPE: tl.constexpr):
    """Float32 scales from the words that hold them.

    Args:
        slot: which of the groups in each word.
        TYPE: of `SCALE_TYPES`.
    """
    if TYPE == _FLOAT32:
        return words.to(tl.float32, bitcast=True)
    elif TYPE == _FLOAT16:
        half = (words >> (slot * 16)).to(tl.int16)
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    elif TYPE == _BFLOAT16:
        return (words >> (slot * 16) << 16).to(tl.float32, bitcast=True)
    else:
        code = ((words >> (slot * 8)) & 255).to(tl.uint8)
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def zero_of_slot(words, SLOT: tl.constexpr, SLOTS: tl.constexpr):
    """Float32 zero points from the words that hold those of SLOTS groups each."""
    if SLOTS == 1:
        return words.to(tl.float32)
    else:
        return ((words >> (SLOT * (32 // SLOTS))) & 255).to(tl.float32)


@triton.jit
def _load_pairs(x, order, pairs, k, DTYPE: tl.constexpr, EVEN_K: tl.constexpr):
    """Float32 inputs 2p and 2p + 1 for each p of `pairs`."""
    if order is None:
        if EVEN_K:
            values = tl.load(x + pairs, eviction_policy="evict_last")
        else:
            values = tl.load(x + pairs, mask=pairs * 2 < k, other=0, eviction_policy="evict_last")
        return unpack_pairs(values, DTYPE)
    else:
        return _gather(x, order, pairs * 2, k), _gather(x, order, pairs * 2 + 1, k)


@triton.jit
def _gather(x, order, columns, k):
    places = tl.load(order + columns, mask=columns < k, other=0)
    return tl.load(x + places, mask=columns < k, other=0.0).to(tl.float32)


@triton.jit
def _sum_pieces(values, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):
    """[BLOCK_N, WORDS] -> [BLOCK_N, WORDS / 4]; the four lie in one thread."""
    return tl.sum(tl.reshape(values, (BLOCK_N, WORDS // 4, 4)), axis=2)


@triton.jit
def _load_tile(
    scale, tile, word, features, words, stride, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Words of scales (or zero points, offsets) [features, word]; [1, word] for blocks of rows,
    which hold a whole tile of features each."""
    inside = (word < words)[None, :]
    if ROWS > 1:
        pointers = scale + tile * BLOCK_N // ROWS + word[None, :] * stride
        return tl.load(pointers, mask=inside, other=0)
    else:
        pointers = scale + features[:, None] + word[None, :] * stride
        # A row's length is a multiple of 16 and so of a tile: all of a thread's features or none.
        return tl.load(pointers, mask=inside & (features < stride)[:, None], other=0)


@triton.jit
def _add_tile(
    sums, w, tile, place, x, matrix, features, k, FORM: tl.constexpr, EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N, WORDS / 4] + scaled products of a tile of words, the first one at `place`."""
    scale, zero, offset, order, groups, scale_stride, zero_stride = matrix
    BLOCK_N: tl.constexpr = w.shape[0]
    WORDS: tl.constexpr = w.shape[1]
    KIND: tl.constexpr = FORM.kind
    LANES: tl.constexpr = FORM.lanes
    GROUP: tl.constexpr = FORM.group
    ROWS: tl.constexpr = FORM.rows
    SCALE: tl.constexpr = FORM.scale
    PARTS: tl.constexpr = FORM.parts
    CHUNK: tl.constexpr = LANES * PARTS
    TOGETHER: tl.constexpr = FORM.together
    GROUPS: tl.constexpr = FORM.groups
    PER_WORD: tl.constexpr = FORM.per_word
    inner = tl.arange(0, WORDS)
    pairs = place * PARTS + inner // (LANES // 2) * (CHUNK // 2) + inner % (LANES // 2)
    first = place * (2 * PARTS) + tl.arange(0, WORDS // 4) // (LANES // 8) * CHUNK
    unpacked = unpack_words(w, KIND)
    for i in tl.static_range(GROUPS):
        products = tl.zeros((BLOCK_N, WORDS), tl.float32)
        inputs = tl.zeros((WORDS,), tl.float32)
        for j in tl.static_range(TOGETHER):
            here = pairs + (i * TOGETHER + j) * (LANES // 2)
            even, odd = _load_pairs(x, order, here, k, DTYPE, EVEN_K)
            low, high = pairs_of_part(unpacked, i * TOGETHER + j, KIND)
            products += low * even[None, :]
            products += high * odd[None, :]
            inputs += even + odd
        products = _sum_pieces(products, BLOCK_N, WORDS)
        inputs = tl.sum(tl.reshape(inputs, (WORDS // 4, 4)), axis=1)[None, :]
        if KIND == INT4:
            if zero is not None:
                words = tl.cdiv(groups, GROUPS)
                zeros = _load_tile(
                    *(zero, tile, first // GROUP // GROUPS, features, words, zero_stride),
                    *(1, BLOCK_N),
                )
                products -= (128.0 + zero_of_slot(zeros, i, GROUPS)) * inputs
            elif offset is not None:
                products -= 128.0 * inputs
            else:
                products -= (128.0 + _INT4_ZERO) * inputs
        if GROUP > 0:
            group = first // GROUP + i
            word, words = group // PER_WORD, tl.cdiv(groups, PER_WORD)
            slot = (group % PER_WORD)[None, :]
            scales = _load_tile(scale, tile, word, features, words, scale_stride, ROWS, BLOCK_N)
            products *= of_slot(scales, slot, SCALE)
            if offset is not None:
                offsets = _load_tile(offset, tile, word, features, words, zero_stride, 1, BLOCK_N)
                products += of_slot(offsets, slot, SCALE) * inputs
        sums += products
    return sums


@triton.jit(do_not_specialize=["steps"])
def vector_quantized_kernel(
    x,  # [k / 2] int32, pairs of neighbours; with an order [k]
    data,  # [n, words] int32: two lanes each
    scale,  # [words of groups, scale_stride] int32, or None
    zero,  # the same, [words of groups, zero_stride], or None
    offset,  # the same, or None
    row_scale,  # [n] float32, or None
    order,  # [k] int32, or None
    bias,  # [n] or None
    y,  # [1, n]
    partials,  # [tiles, SPLIT_K, BLOCK_N] fp32, or None
    counters,  # [tiles] int32, zero between launches, or None
    lora,  # of fused_lora.kernel_arguments, then SPLIT_K is 1; or None
    n,
    k,
    words,
    groups,
    scale_stride,
    zero_stride,
    steps,  # tiles of K of one split
    FORM: tl.constexpr,  # MatrixForm
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
    ADAPTED: tl.constexpr = None,  # fused_lora.AdapterShape; None: without adapters
):
    """One row; grid (tiles of N, SPLIT_K), the shrinking programs first. Every split has at least
    one tile of K.

    WORDS is 128 per warp, so that a thread meets the same inputs in every feature.
    """
    tl.static_assert(ADAPTED is None or SPLIT_K == 1)
    shrinking = num_shrinking(lora, ADAPTED)
    if ADAPTED is not None and tl.program_id(0) < shrinking:
        shrink_row(lora, ADAPTED, PDL)
    else:
        tile = tl.program_id(0) - shrinking
        DTYPE: tl.constexpr = y.dtype.element_ty
        features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.program_id(1) * steps * WORDS
        stop = tl.minimum(words, place + steps * WORDS)
        columns = place + tl.arange(0, WORDS)
        sums = tl.zeros((BLOCK_N, WORDS // 4), tl.float32)
        w = load_weight(data, features, columns, n, words, EVEN_N, EVEN_K, EVICT)
        scales_of_rows = load_row_scale(row_scale, features, n)
        if ADAPTED is not None:
            prepared = prepare_row(lora, ADAPTED)
        matrix = scale, zero, offset, order, groups, scale_stride, zero_stride
        wait_and_release(PDL)
        for _ in tl.range(place + WORDS, stop, WORDS, num_stages=1):
            sums = _add_tile(sums, w, tile, place, x, matrix, features, k, FORM, EVEN_K, DTYPE)
            place += WORDS
            columns += WORDS
            w = load_weight(data, features, columns, n, words, EVEN_N, EVEN_K, EVICT)
        if ADAPTED is not None:
            found = look_for_row(lora, prepared, tile, n, ADAPTED, BLOCK_N, WORDS // 4, EVEN_N)
        sums = _add_tile(sums, w, tile, place, x, matrix, features, k, FORM, EVEN_K, DTYPE)
        if ADAPTED is None:
            total = tl.sum(sums, axis=1)[:, None] * scales_of_rows
        elif row_scale is None:
            total = tl.sum(add_to_row(sums, found), axis=1)[:, None]
        else:
            more = add_to_row(tl.zeros(sums.shape, tl.float32), found)
            sums, more = tl.reduce((sums, more), 1, _add_both)
            total = sums[:, None] * scales_of_rows + more[:, None]
        rows = tl.arange(0, 1)
        finish_tile(
            *(total, y, bias, partials, counters, features, rows, 1, n, tile, None, None),
            *(HAS_BIAS, SPLIT_K, None),
        )


@triton.jit
def _add_both(one, other, more, still_more):
    return one + more, other + still_more


@triton.jit
def load_row_scale(row_scale, features, n):
    """[features, 1], or 1. Loaded before the wait: at the end of a program it would be waited for
    as long as for the first weights."""
    if row_scale is None:
        return 1.0
    else:
        return tl.load(row_scale + features, mask=features < n, other=0.0)[:, None]


@triton.jit
def load_inputs(x, order, columns, rows, m, k, x_stride, EVEN_K: tl.constexpr):
    """[columns, rows] of x [m, k], the right operand; zeros outside of it.

    Args:
        order: [k] int32, the columns of x in the order of the weight's; None: as they are.
    """
    inside = (rows < m)[None, :]
    if not EVEN_K:
        inside = inside & (columns < k)[:, None]
    if order is not None:
        columns = tl.load(order + columns, mask=columns < k, other=0)
    pointers = x + rows.to(tl.int64)[None, :] * x_stride + columns[:, None]
    inputs = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_last")
    if IN_INTERPRETER:
        inputs = inputs.to(tl.float32)
    return inputs


@triton.jit
def _load_column(
    scale, word, features, words, stride, n, ROWS: tl.constexpr, EVEN_N: tl.constexpr
):  # fmt: skip
    """One row of words of scales (or zero points, offsets) as [features, 1]."""
    inside = (features >= 0) & (word < words)
    if not EVEN_N:
        inside = inside & (features < n)
    return tl.load(scale + word * stride + features // ROWS, mask=inside, other=0)[:, None]


@triton.jit
def multiply_chunk(
    sums, first, x, matrix, features, rows, m, n, k, x_stride, FORM: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVICT: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """sums + scaled products of the chunk of columns that begins at `first`.

    Args:
        matrix: data, scale, zero, offset, order, width, groups, scale_stride and zero_stride of
            `matrix_quantized_kernel`.
        features: rows of the matrix, of n.
        FOLD: weights are multiplied with their scales and rounded to x's type, as `dequantize_to`
            does it, and all products have one sum. Without it each group has a sum of its own,
            which is scaled in fp32: exact, but it costs two instructions for each row and group.
    """
    data, scale, zero, offset, order, width, groups, scale_stride, zero_stride = matrix
    KIND: tl.constexpr = FORM.kind
    LANES: tl.constexpr = FORM.lanes
    GROUP: tl.constexpr = FORM.group
    ROWS: tl.constexpr = FORM.rows
    SCALE: tl.constexpr = FORM.scale
    PARTS: tl.constexpr = FORM.parts
    TOGETHER: tl.constexpr = FORM.together
    GROUPS: tl.constexpr = FORM.groups
    PER_WORD: tl.constexpr = FORM.per_word
    DTYPE: tl.constexpr = x.dtype.element_ty
    # Groups that are loaded with a word of scales.
    LOADED: tl.constexpr = GROUPS if GROUPS < PER_WORD else PER_WORD
    inner = tl.arange(0, LANES)
    lanes = load_weight(data, features, first // PARTS + inner, n, width, EVEN_N, EVEN_K, EVICT)
    values = parts(lanes, KIND, DTYPE)
    group = first // GROUP if GROUP > 0 else 0
    words = tl.cdiv(groups, PER_WORD)
    if zero is not None:
        zero_words = tl.cdiv(groups, GROUPS)
        zeros = _load_column(zero, group // GROUPS, features, zero_words, zero_stride, n, 1, EVEN_N)
    for i in tl.static_range(GROUPS):
        begin = first + i * TOGETHER * LANES
        of_part = tl.zeros(sums.shape, tl.float32)
        of_inputs = tl.zeros(sums.shape, tl.float32)
        base = tl.full((sums.shape[0], 1), 128.0 if tl.bfloat16 == DTYPE else 1024.0, tl.float32)
        if KIND == INT4:
            if zero is not None:
                base += zero_of_slot(zeros, i, GROUPS)
            elif offset is None:
                base += _INT4_ZERO
        if GROUP > 0:
            if i % LOADED == 0:
                word = (group + i) // PER_WORD
                scales = _load_column(scale, word, features, words, scale_stride, n, ROWS, EVEN_N)
                if offset is not None:
                    offsets = _load_column(offset, word, features, words, zero_stride, n, 1, EVEN_N)
            slot = i % LOADED if LOADED == PER_WORD else (group + i) % PER_WORD
            of_group = of_slot(scales, slot, SCALE)
        for j in tl.static_range(TOGETHER):
            right = load_inputs(x, order, begin + j * LANES + inner, rows, m, k, x_stride, EVEN_K)
            left = values[i * TOGETHER + j]
            if KIND == INT4:
                left = subtract(left, base.to(DTYPE), DTYPE)
            if FOLD:
                left = multiply(left, of_group.to(DTYPE), DTYPE)
            if GROUP == 0 or FOLD:
                sums = tl.dot(left, right, sums)
            else:
                of_part = tl.dot(left, right, of_part)
            if offset is not None:
                # Their sum for each feature: the tensor cores have time, threads have not.
                of_inputs = tl.dot(tl.full(left.shape, 1.0, right.dtype), right, of_inputs)
        if GROUP > 0 and not FOLD:
            sums += of_part * of_group
            if offset is not None:
                sums += of_inputs * of_slot(offsets, (group + i) % PER_WORD, SCALE)
    return sums


@triton.jit(do_not_specialize=["m", "steps"])
def matrix_quantized_kernel(
    x,  # [m, k], rows x_stride apart
    data,  # [n, width] int16 lanes
    scale,  # as of vector_quantized_kernel, and so on
    zero,
    offset,
    row_scale,
    order,
    bias,
    y,  # [m, n]
    partials,  # [tiles, SPLIT_K, BLOCK_M, BLOCK_N] fp32, or None
    counters,  # [tiles] int32, zero between launches, or None
    lora,  # of fused_lora.kernel_arguments, or None
    m,
    n,
    k,
    width,  # of a row of data
    padded,  # columns of data
    x_stride,
    groups,
    scale_stride,
    zero_stride,
    steps,  # tiles of K of one split
    FORM: tl.constexpr,  # MatrixForm
    CHUNKS: tl.constexpr,  # of a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIECES: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns of each feature that are brought into L2 before the wait
    EVICT: tl.constexpr,
    FOLD: tl.constexpr,  # see multiply_chunk
    ROW_TILES: tl.constexpr,  # programs that share a tile of features; with adapters 1
    PDL: tl.constexpr,
    ADAPTED: tl.constexpr = None,  # fused_lora.AdapterShape; None: without adapters
):
    """At most ROW_TILES x BLOCK_M rows; grid (tiles of N x ROW_TILES, SPLIT_K), the shrinking
    programs first. Every split has at least one tile of K."""
    shrinking = num_shrinking(lora, ADAPTED)
    if ADAPTED is not None and tl.program_id(0) < shrinking:
        shrink_rows(lora, m, ADAPTED, SPLIT_K, BLOCK_M, STAGES, PDL)
    else:
        tile = tl.program_id(0) - shrinking
        LANE: tl.constexpr = FORM.parts
        CHUNK: tl.constexpr = FORM.lanes * LANE
        TILE: tl.constexpr = CHUNK * CHUNKS
        features = tile // ROW_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tile % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
        start = tl.program_id(1) * steps * TILE
        stop = tl.minimum(padded, start + steps * TILE)
        prepared = 0  # nothing
        if ADAPTED is not None:
            prepared = prepare_rows(lora, features, tile * BLOCK_N, rows, m, n, ADAPTED)
        scales_of_rows = load_row_scale(row_scale, features, n)
        if PREFETCH > 0:
            prefetch_weight(data, features, start // LANE, n, width, PIECES, PREFETCH // LANE)
        matrix = data, scale, zero, offset, order, width, groups, scale_stride, zero_stride
        wait_for_inputs(PDL)
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for place in tl.range(0, stop - start, TILE, num_stages=STAGES):
            for piece in tl.static_range(CHUNKS):
                first = start + place + piece * CHUNK
                sums = multiply_chunk(
                    *(sums, first, x, matrix, features, rows, m, n, k, x_stride),
                    *(FORM, EVEN_N, EVEN_K, EVICT, FOLD),
                )
        # Not earlier: the next kernel's programs would take shared memory from this one's.
        let_next_start(PDL)
        sums = sums * scales_of_rows
        finish_tile(
            *(sums, y, bias, partials, counters, features, rows, m, n, tile, lora, prepared),
            *(HAS_BIAS, SPLIT_K, ADAPTED),
        )


def fits(config: SkinnyConfig, m: int, matrix: PreparedMatrix) -> bool:
    """Whether a product of m rows can be launched so.

    The vector kernel (`block_m` 1) takes 256 lanes a warp in `block_k`, which it counts in columns
    as the other one does, and at most 16 features; it prefetches nothing.
    """
    if config.block_m == 1:
        tile = 256 * matrix.parts * config.num_warps
        alike = config.block_k == tile and config.block_n <= _ALIGNED and config.prefetch == 0
    else:
        alike = config.block_k % matrix.chunk == 0 and config.prefetch % (8 * matrix.parts) == 0
        alike &= m <= config.block_m or not config.waits
    # One row of the vector kernel reads one scale for all features of a program.
    whole = BLOCK_ROWS % config.block_n == 0 or (config.block_m > 1 and matrix.rows == 1)
    several = config.block_m >= _FULL_TILE  # tiles of rows
    return alike and whole and fits_tiles(config, m, matrix, several=several)


def fits_tiles(config: SkinnyConfig, m: int, matrix: PreparedMatrix, *, several: bool) -> bool:
    """Whether `config` fits a product of m rows, if `several` in tiles of them, which have counters
    and partial sums of their own."""
    rows = min(m, config.block_m) if several else m
    features = triton.cdiv(m, config.block_m) * triton.cdiv(matrix.shape[0], config.block_n)
    columns = -(-matrix.padded_columns // 16) * 16
    return 0 < m <= MAX_ROWS and config.fits(rows, features * config.block_n, columns)


def folds(matrix: PreparedMatrix, block_m: int) -> bool:
    """Whether a product of tiles of `block_m` rows multiplies weights by their scales and rounds
    them again, as `dequantize` does, instead of multiplying sums.

    That is fewer instructions as soon as a group's sums are more numbers than its weights, and
    one set of sums is enough, which leaves registers for larger tiles.
    """
    return 0 < matrix.group <= block_m and matrix.offset is None


def shared_bytes(config: SkinnyConfig, matrix: PreparedMatrix) -> int:
    """Shared memory of a program of the matrix kernel with at least two stages, as Triton 3.6
    allocates it: what goes from there to registers has one stage less than the inputs."""
    inputs = 2 * config.block_k * config.block_m
    words = [(1, 0 if matrix.zero is None else max(matrix.group, matrix.chunk))]
    in_word = max(1, 4 // matrix.scale_dtype.itemsize)
    for tensor in (matrix.scale, matrix.offset):
        words.append((in_word, 0 if tensor is None else matrix.group))
    loaded = sum(
        max(config.block_k // matrix.chunk, config.block_k // (groups * columns))
        for groups, columns in words
        if columns > 0
    )
    codes = config.block_n * (config.block_k // matrix.parts * 2 + 4 * loaded)
    return inputs * config.num_stages + codes * (config.num_stages - 1)


def plan_launch(
    x: Tensor,
    matrix: PreparedMatrix,
    bias: Tensor | None,
    *,
    y: Tensor,
    config: SkinnyConfig,
    adapters: FusedAdapters | None = None,
    fold: bool | None = None,
) -> Launch:
    """The launch that writes x @ matrix^T + bias into `y`; see `quantized_linear`.

    Args:
        fold: In place of what `folds` says, for measurements.
    """
    m, n, k = x.shape[0], *matrix.shape
    assert fits(config, m, matrix), f"{config} does not fit m={m}, n={n}, k={k}, {matrix.kind}"
    assert y.shape == (m, n) and y.is_contiguous() and y.dtype == x.dtype
    row_tiles = triton.cdiv(m, config.block_m)
    tiles = triton.cdiv(n, config.block_n) * row_tiles
    partials, counters = room_for_partials(tiles * config.block_n, config, x.device)
    steps = steps_per_split(matrix.padded_columns, config)
    options = tile_options(config, n, bias, x.device)
    options["FORM"] = matrix.form
    # Rows of x then end with those of the data, and both with a tile.
    options["EVEN_K"] = k % config.block_k == 0 and k == matrix.padded_columns
    lora = None
    if adapters is not None:
        assert fuses(config, adapters.weights), f"{config} does not fit the adapters"
        assert row_tiles == 1, f"adapters of {m} rows in tiles of {config.block_m}"
        shrinking = shrinking_programs(config, m, adapters.weights)
        more, lora, adapted = kernel_arguments(x, adapters, shrinking, config.split_k)
        tiles += more
        options |= adapted
    if config.block_m == 1:
        words = matrix.data.view(torch.int32)
        row = x[0].view(torch.int32) if matrix.order is None else x[0]
        arguments: tuple[Any, ...] = (row, words, *matrix.tensors, bias, y, partials, counters)
        arguments += (lora, n, k, words.shape[1], matrix.groups, *matrix.strides, steps)
        options["WORDS"] = 128 * config.num_warps
        return Launch(vector_quantized_kernel, (tiles, config.split_k), arguments, options)
    arguments = (x, matrix.data, *matrix.tensors, bias, y, partials, counters, lora)
    arguments += (m, n, k, matrix.data.shape[1], matrix.padded_columns, x.stride(0))
    arguments += (matrix.groups, *matrix.strides, steps)
    options["BLOCK_M"] = config.block_m
    options["CHUNKS"] = config.block_k // matrix.chunk
    options["STAGES"] = config.num_stages
    options["FOLD"] = folds(matrix, config.block_m) if fold is None else fold
    options["ROW_TILES"] = row_tiles
    options |= prefetch_options(config, options, 16 // matrix.parts)
    small = matrix.parts == 2 and config.num_warps == 2 and config.block_m * config.block_n <= 256
    if small and x.is_cuda:
        # Eight programs at once. Asked for nothing, ptxas takes 72 or 96, and local memory.
        options["maxnreg"] = 128
    return Launch(matrix_quantized_kernel, (tiles, config.split_k), arguments, options)


def quantized_linear(
    x: Tensor,
    matrix: PreparedMatrix,
    bias: Tensor | None = None,
    *,
    config: SkinnyConfig | None = None,
    out: Tensor | None = None,
    adapters: FusedAdapters | None = None,
) -> Tensor:
    """x @ matrix^T + bias with fp32 sums, for a few rows, which are not quantized.

    Codes become values in x's dtype, exactly but for nf4, whose values are rounded to it. As with
    `skinny_gemm`, products of one device must run one after the other, and may be captured in a
    CUDA graph after one run outside of it.

    Args:
        x: [M, K] bf16 or fp16, rows contiguous, M at most 256, K a multiple of 16; `serves` says.
        matrix: Of N rows and K columns.
        bias: [N] of x's dtype.
        config: How to launch it; by default what `choose` says.
        out: [M, N] of x's dtype, contiguous: where to write the result.
        adapters: What is added to the rows that have an adapter, before the result is rounded.

    Returns:
        [M, N] in x's dtype.
    """
    assert serves(x, matrix, bias), "quantized_linear cannot serve these tensors"
    y = out
    if y is None:
        y = torch.empty((x.shape[0], matrix.shape[0]), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        config = config or choose(x.shape[0], matrix)
        plan_launch(x, matrix, bias, y=y, config=config, adapters=adapters)()
    return y


def shrinking_programs(config: SkinnyConfig, m: int, weights: LoraSlots) -> Shrinking:
    """The programs of such a product of m rows that multiply with A of their adapters."""
    if config.block_m == 1:
        return Shrinking.of_row(weights, config.num_warps)
    multiprocessors = num_multiprocessors(weights.a.device)
    return Shrinking.of_rows(
        weights,
        m,
        lines=_LINES,
        block_k=_LORA_K,
        splits=config.split_k,
        programs=triton.cdiv(weights.b.shape[1], config.block_n) * config.split_k,
        places=max(1, _WARPS_AT_ONCE // config.num_warps) * multiprocessors,
    )


def serves(x: Tensor, matrix: PreparedMatrix, bias: Tensor | None) -> bool:
    """Whether `quantized_linear` can compute this product: device, dtypes, strides and sizes."""
    return (
        (x.is_cuda or INTERPRETED)
        and x.ndim == 2
        and x.shape[0] <= MAX_ROWS
        and x.shape[1] == matrix.shape[1]
        and x.dtype in _DTYPES
        and x.device == matrix.device
        and x.shape[1] % 16 == 0
        and x.stride(1) == 1
        and (x.stride(0) % 8 == 0 or x.shape[0] == 1)
        and x.data_ptr() % 16 == 0
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


def choose(m: int, matrix: PreparedMatrix) -> SkinnyConfig:
    """A launch of a product of m rows that fits: on an H200 the best, or nearly, for fp8, int4,
    nf4 and fp4 in the layers of an 8B shape (`bench.kernels.quantized_gemm`); int8 goes with fp8.

    What decides: with many small programs on each multiprocessor there are always some that wait
    for memory while others convert; elements of 4 bits are bound by the instructions that convert
    them, and a row of the tensor cores' kernel, padded to 8, takes fewer of these than the vector
    kernel, which begins sooner.
    """
    n, columns = matrix.shape[0], matrix.padded_columns
    if m == 1 and (matrix.parts == 2 or n * columns <= _FEW_ELEMENTS):
        # With one warp, scales of rows change their layout without shared memory.
        plain = matrix.group == 0 or matrix.rows > 1
        most = 4 if matrix.parts == 4 else (2 if plain else 1)
        tile = 256 * matrix.parts
        warps = next(w for w in (4, 2, 1) if w <= most and (w == 1 or columns % (tile * w) == 0))
        return SkinnyConfig(1, 4, tile * warps, num_warps=warps)
    block_m = next((size for size in (8, 16, 32, 64) if m <= size), 128)
    if block_m == 128:
        most, block_n, warps, enough = next(of for of in _LARGE if matrix.chunk <= of[0])
        if matrix.rows > 1 or (matrix.group > 0 and not folds(matrix, block_m)):
            block_n = 128  # two sets of sums; blocks of rows
        if triton.cdiv(n, block_n) * triton.cdiv(m, block_m) * warps < enough:
            block_n = 128
        block_k = most // matrix.chunk * matrix.chunk
        config = SkinnyConfig(block_m, block_n, block_k, 1, warps, num_stages=4)
        while config.num_stages > 2 and shared_bytes(config, matrix) > _SHARED_BYTES:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    else:
        of_four_bits = {"int4": _INT4, "fp4": _FP4, "nf4": _NF4}
        of_kind = _EIGHT_BITS if matrix.parts == 2 else of_four_bits[matrix.kind]
        block_n, warps, stages, enough = of_kind[block_m]
        if matrix.parts == 2 and block_m == 8 and n >= _WIDE:
            block_n, warps = 64, 4
        block_k = max(matrix.chunk, min(_CHUNK, columns) // matrix.chunk * matrix.chunk)
        if matrix.lanes * block_m < 64 * warps:  # x's tiles are copied 4 bytes a thread at least
            block_n, warps = 32, 2
        config = SkinnyConfig(block_m, block_n, block_k, 1, warps, stages)
    tiles = triton.cdiv(n, block_n) * triton.cdiv(m, block_m)
    for split in (2, 4, 8):
        wider = dataclasses.replace(config, split_k=split)
        if tiles * config.split_k * warps >= enough or not fits(wider, m, matrix):
            break
        config = wider
    if matrix.parts == 2 and 8 <= config.block_m <= 32 and config.split_k == 2:
        # The first share is summed up soon after the second: its reader waits for next to nothing.
        waiting = dataclasses.replace(config, waits=True)
        config = waiting if fits(waiting, m, matrix) else config
    return config
