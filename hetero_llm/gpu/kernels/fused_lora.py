"""Low-rank adapters inside a product of few rows: no launch of their own.

A product with adapters is y = W x + bias + B (scales * (A x)), A and B each row's own. It has
three parts, in one grid:

- Its first programs, the *shrinking* ones, multiply x with A as the others multiply it with W. All
  adapters of the step's rows are stacked there, one below the other: a tile takes lines of several
  adapters for all rows, and stores what belongs together. They put the sums into memory that holds
  `NOT_YET` before.
- The other programs are those of the plain product. They load their tile of B early, too; with
  one row while their last weights are on their way, since there each register counts.
- When such a program has summed up its tile, it reads the sums, again until none is `NOT_YET`,
  multiplies them with B, and adds them before its result is rounded. With one row each thread does
  so with a few sums of its own, and what comes out is summed up with the product.

A sum is one word, so its reader needs no fence and no counter. Programs start in the order of
their numbers, so those that are waited for run before those that wait (as in CUTLASS's serial
split K); should they never arrive, readers give up after `MOST_LOOKS` and the row becomes NaN.

One row's sums are added in the order of K whatever adapters the other rows have, and lines of other
adapters meet zeros: so a row's result does not depend on what other slots hold.

`skinny_gemm` and `quantized_gemm` take a `FusedAdapters`; `row_slots` makes what they share in a
step. References: `lora.lora_reference`, `row_slots_reference`; timed by `bench.kernels.lora`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import (
    IN_INTERPRETER,
    INTERPRETED,
    let_next_start,
    num_launches,
    pdl_options,
    wait_and_release,
    wait_for_inputs,
)
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots

MAX_ROWS = 64
"""Rows of a product with adapters inside; more take the two kernels of `lora`."""
MAX_RANK = 64
"""Largest padded rank of its adapters."""

_WORD_NOT_YET = -1  # the bits of a NaN that no arithmetic makes
NOT_YET = tl.constexpr(_WORD_NOT_YET)
_NO_MORE = tl.constexpr(-2)  # no slot of a row
_OTHER_NAN = tl.constexpr(0x7FFFFFFF)
MOST_LOOKS = tl.constexpr(1 << 20)
"""Times that sums which are not there are read again: about half a second."""

_TOGETHER = 128  # lines of B that are multiplied at once, of one or several adapters
_MOST_AHEAD = tl.constexpr(8192)  # numbers of B: 32 registers of four warps
_MOST_SHARES = 8  # of K
_MOST_SUMS = 8192  # that a program reads at once: 64 registers of four warps
_LEAST_TILES = 1  # of K in a share of one row
_LINES_OF_ROW = 2  # of A in a program, of one row: as few registers as the product takes
_FILL = 1024  # words that a program sets to `NOT_YET`


@dataclass(frozen=True, slots=True)
class RowSlots:
    """The adapters of a step's rows, on the device.

    Attributes:
        slots: [M] int32 slot of each row, or `NO_SLOT`.
        distinct: [1 + P] int32, P the power of two that holds all slots: how many slots the rows
            name, then those, ascending, then `_NO_MORE`.
        sums: [words] int32, all `NOT_YET`: room for the sums of the step's products.
        launch: the number of the launch that writes them, see `launch.num_launches`.
    """

    slots: Tensor
    distinct: Tensor
    sums: Tensor
    launch: int


@dataclass(frozen=True, slots=True)
class FusedAdapters:
    """What one product adds to its rows.

    Attributes:
        weights: of the layer.
        rows: of the product's rows.
        sums: part of `rows.sums`, not used by another product; `num_sums` words.
    """

    weights: LoraSlots
    rows: RowSlots
    sums: Tensor


class AdapterShape(NamedTuple):
    """What a product with adapters is compiled for, one constant of its kernel. Inside, a field
    becomes a constant by the annotation of the name that it is given.

    Attributes:
        rank, parts: of `LoraSlots`.
        shares, lines, block_k: of `Shrinking`.
        together: adapters whose B is multiplied at once.
    """

    rank: int
    parts: int
    shares: int
    together: int
    lines: int
    block_k: int


@dataclass(frozen=True, slots=True)
class Shrinking:
    """The programs of a product that multiply with A.

    Attributes:
        lines: of A in a program, of several rows lines of different adapters.
        tiles: into which all lines fall.
        shares: of the columns.
        columns: of a share, a multiple of `block_k`.
        block_k: columns read at a time.
    """

    lines: int
    tiles: int
    shares: int
    columns: int
    block_k: int

    @staticmethod
    def of_row(
        weights: LoraSlots, num_warps: int, *, lines: int = _LINES_OF_ROW,
        least_tiles: int = _LEAST_TILES,
    ) -> Shrinking:  # fmt: skip
        """Of one row: many small programs, whose sums are there before they are needed.

        Args:
            lines: of A in a program.
            least_tiles: of K in a share.
        """
        block_k = 256 * num_warps
        tiles = triton.cdiv(weights.a.shape[2], block_k)
        each = max(least_tiles, triton.cdiv(tiles, _MOST_SHARES))
        width = weights.parts * weights.rank
        shares = triton.cdiv(tiles, each)
        return Shrinking(lines, width // lines, shares, each * block_k, block_k)

    @staticmethod
    def of_rows(
        weights: LoraSlots, m: int, *, lines: int, block_k: int, splits: int, programs: int,
        places: int,
    ) -> Shrinking:  # fmt: skip
        """Of m rows. A program takes as long as one of the product. If the device had to run
        another wave of programs because of these, their columns are shared among several instead.

        Args:
            splits: of the product's K, the second axis of its grid.
            programs: of the product without adapters.
            places: programs that the device runs at once.
        """
        width, most = weights.parts * weights.rank, min(m, len(weights.a))
        tiles = triton.cdiv(most * width, lines)
        steps = triton.cdiv(weights.a.shape[2], block_k)
        shares, waves = splits, triton.cdiv(programs, places)
        if triton.cdiv(programs + tiles * splits, places) > waves:
            held = weights.rank * triton.next_power_of_2(m)
            most_shares = min(_MOST_SHARES, _MOST_SUMS // held, steps)
            while 2 * shares <= most_shares:
                shares *= 2
        return Shrinking(lines, tiles, shares, triton.cdiv(steps, shares) * block_k, block_k)


def num_sums(m: int, weights: LoraSlots, shrinking: Shrinking) -> int:
    """Words of `FusedAdapters.sums` of a product of m rows."""
    return shrinking.shares * m * weights.parts * weights.rank


def fits(weights: LoraSlots, block_n: int) -> bool:
    """Whether products in tiles of `block_n` features can add these adapters: they fit into
    registers, and no tile has features of two parts."""
    return (
        weights.rank <= MAX_RANK
        and weights.a.dtype in (torch.bfloat16, torch.float16)
        and (weights.parts == 1 or weights.alignment % block_n == 0)
    )


def kernel_arguments(
    x: Tensor, adapters: FusedAdapters, shrinking: Shrinking, splits: int
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """The part of a product's launch that is due to adapters; called behind `pdl_options` of that
    launch.

    Args:
        x: [M, K], rows contiguous.
        splits: of the product's K, the second axis of its grid.

    Returns:
        How many shrinking programs there are on the grid's first axis, the tuple that kernels take
        as `lora`, and options of the launch.
    """
    weights, rows, m = adapters.weights, adapters.rows, len(x)
    assert x.stride(1) == 1 and x.dtype == weights.a.dtype and x.shape[1] == weights.a.shape[2]
    assert rows.slots.shape == (m,) and rows.slots.is_contiguous()
    assert adapters.sums.numel() == num_sums(m, weights, shrinking)
    assert len(rows.distinct) > len(weights.a) and m <= MAX_ROWS
    assert shrinking.shares % splits == 0, (shrinking, splits)
    most = min(m, len(weights.a))  # adapters that the rows can name
    programs = shrinking.tiles * (shrinking.shares // splits)
    lora = (
        *(x, x.stride(0), adapters.sums, rows.slots, rows.distinct),
        *(weights.a, weights.b, weights.scales, weights.bounds),
        *(weights.a.stride(0), weights.b.stride(0), weights.scales.stride(0)),
        *(x.shape[1], shrinking.columns, programs),
    )
    shape = AdapterShape(
        weights.rank,
        weights.parts,
        shrinking.shares,
        min(triton.next_power_of_2(most), _TOGETHER // weights.rank),
        shrinking.lines,
        shrinking.block_k,
    )
    options: dict[str, Any] = {"ADAPTED": shape}
    if num_launches() <= rows.launch + 1:
        # The kernel before is the one that writes the slots: what is read before the wait for it
        # would not be there, so this launch waits for its end.
        options["launch_pdl"] = False
    return programs, lora, options


@triton.jit
def num_shrinking(lora, ADAPTED: tl.constexpr):
    """Programs on the grid's first axis that multiply with A."""
    if ADAPTED is None:
        return 0
    else:
        _, _, _, _, _, _, _, _, _, _, _, _, _, _, programs = lora
        return programs


@triton.jit
def store_words(pointers, sums, mask=None):
    """Float32 sums where their readers look for them."""
    bits = sums.to(tl.int32, bitcast=True)
    tl.store(pointers, tl.where(bits == NOT_YET, _OTHER_NAN, bits), mask=mask)


@triton.jit
def take_words(pointers, stride, NUMBER: tl.constexpr):
    """The sum of NUMBER tiles of float32 that other programs put there, `stride` words apart, in
    their order, as soon as all are there; leaves `NOT_YET`."""
    words = (tl.load(pointers, volatile=True),)
    for i in tl.static_range(1, NUMBER):
        words = words + (tl.load(pointers + i * stride, volatile=True),)
    missing = (words[0] == NOT_YET).to(tl.int32)
    for i in tl.static_range(1, NUMBER):
        missing |= (words[i] == NOT_YET).to(tl.int32)
    total = tl.zeros(missing.shape, tl.float32)
    if tl.sum(missing) == 0:
        for i in tl.static_range(NUMBER):
            total += words[i].to(tl.float32, bitcast=True)
    else:
        for i in tl.static_range(NUMBER):
            every = tl.full(missing.shape, 1, tl.int1)
            total += _wait_for_sums(words[i], pointers + i * stride, every)
    for i in tl.static_range(NUMBER):
        tl.store(pointers + i * stride, tl.full(missing.shape, NOT_YET, tl.int32))
    return total


@triton.jit
def _num_missing(bits):
    return tl.sum((bits == NOT_YET).to(tl.int32))


@triton.jit
def _wait_for_sums(bits, pointers, mask):
    """Float32 sums; `bits`: what was there when it was read first."""
    missing = _num_missing(bits)
    looks = 0
    while (missing > 0) & (looks < MOST_LOOKS):
        bits = tl.load(pointers, mask=mask, other=0, volatile=True)
        missing = _num_missing(bits)
        looks += 1
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _part_of(bounds, feature, PARTS: tl.constexpr):
    """The part in which a feature lies."""
    part = 0
    for i in tl.static_range(1, PARTS):
        part += (feature >= tl.load(bounds + i)).to(tl.int32)
    return part


@triton.jit
def shrink_row(lora, ADAPTED: tl.constexpr, PDL: tl.constexpr):
    """A shrinking program of one row: some lines of A, one share of K."""
    SHARES: tl.constexpr = ADAPTED.shares
    LINES: tl.constexpr = ADAPTED.lines
    BLOCK_K: tl.constexpr = ADAPTED.block_k
    WIDTH: tl.constexpr = ADAPTED.parts * ADAPTED.rank
    x, _, sums, slots, _, a, _, scales, _, a_stride, _, scale_stride, k, columns, _ = lora
    slot = tl.load(slots)
    share = tl.program_id(0) % SHARES
    lines = tl.program_id(0) // SHARES * LINES + tl.arange(0, LINES)
    start = share * columns
    stop = tl.minimum(k, start + columns)
    wait_and_release(PDL)
    if slot >= 0:
        matrix = a + slot.to(tl.int64) * a_stride
        products = tl.zeros((LINES, BLOCK_K), tl.float32)
        for offset in tl.range(start, stop, BLOCK_K, num_stages=1):
            inner = offset + tl.arange(0, BLOCK_K)
            pointers = matrix + lines[:, None] * k + inner[None, :]
            left = tl.load(
                pointers, mask=(inner < k)[None, :], other=0.0, eviction_policy="evict_first"
            )
            right = tl.load(x + inner, mask=inner < k, other=0.0, eviction_policy="evict_last")
            products += left.to(tl.float32) * right.to(tl.float32)[None, :]
        scale = tl.load(scales + slot.to(tl.int64) * scale_stride + lines)
        own = tl.sum(products, axis=1) * scale
        store_words(sums + share * WIDTH + lines, own, lines < WIDTH)


@triton.jit
def prepare_row(lora, ADAPTED: tl.constexpr):
    """What `look_for_row` needs, loaded before the wait for the kernel before and behind the first
    weights: nothing waits for it then.

    Returns:
        The row's slot, and where all parts but the first one begin.
    """
    PARTS: tl.constexpr = ADAPTED.parts
    _, _, _, slots, _, _, _, _, bounds, _, _, _, _, _, _ = lora
    prepared = (tl.load(slots),)
    for i in tl.static_range(1, PARTS):
        prepared = prepared + (tl.load(bounds + i),)
    return prepared


@triton.jit
def look_for_row(
    lora, prepared, tile, n, ADAPTED: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """Asks for the row's B and sums, for `add_to_row`, while the last weights are on their way.

    Sums are spread over the columns of the product's own sums, as many times as they take: a thread
    reads a word or a few, waits for these alone, and what it adds is summed up with the product. So
    there is neither a barrier nor a change of layout more than without adapters.

    Args:
        prepared: of `prepare_row`.
        tile: of features.
        COLUMNS: of the product's own sums.

    Returns:
        B [BLOCK_N, times, COLUMNS], the words [times, COLUMNS], where they lie, and which exist.
    """
    RANK: tl.constexpr = ADAPTED.rank
    PARTS: tl.constexpr = ADAPTED.parts
    SHARES: tl.constexpr = ADAPTED.shares
    _, _, sums, _, _, _, b, _, _, _, b_stride, _, _, _, _ = lora
    slot = prepared[0]
    first = 0  # line of the part's A
    for i in tl.static_range(1, PARTS):
        first += (tile * BLOCK_N >= prepared[i]).to(tl.int32) * RANK
    TIMES: tl.constexpr = triton.next_power_of_2(triton.cdiv(SHARES * RANK, COLUMNS))
    number = tl.arange(0, TIMES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (number < SHARES * RANK) & (slot >= 0)
    # As if they were aligned to nothing: neighbours then lie in different threads, as those of the
    # product's sums do.
    line = tl.multiple_of(number % RANK, [1, 1])
    pointers = sums + first + (number // RANK * (PARTS * RANK) + line)
    words = tl.load(pointers, mask=there, other=0, volatile=True)
    features = tl.arange(0, BLOCK_N)[:, None, None]
    inside = there[None, :, :]
    if not EVEN_N:
        inside = inside & (features < n - tile * BLOCK_N)
    matrix = b + slot.to(tl.int64) * b_stride + tile.to(tl.int64) * (BLOCK_N * RANK)
    factors = tl.load(matrix + (features * RANK + line[None, :, :]), mask=inside, other=0.0)
    return factors, words, pointers, there


# All lanes of a warp leave the loop at once: the compiler need not bring them together again.
_AWAIT_WORD = tl.constexpr(f"""{{
.reg .pred missing, any;
.reg .b32 looks;
mov.b32 $0, $1;
mov.b32 looks, {MOST_LOOKS.value};
look:
setp.eq.s32 missing, $0, {_WORD_NOT_YET};
setp.gt.and.s32 missing, looks, 0, missing;
vote.sync.any.pred any, missing, 0xffffffff;
@!any bra.uni there;
@missing ld.relaxed.gpu.global.b32 $0, [$2];
sub.s32 looks, looks, 1;
bra.uni look;
there:
}}""")


@triton.jit
def _await_words(words, pointers, there):
    """Float32 sums; `words`: what was there when it was read first. A warp waits for its own, not
    for all of the program's."""
    if IN_INTERPRETER:
        return _wait_for_sums(words, pointers, there)
    else:
        words = tl.inline_asm_elementwise(
            _AWAIT_WORD, "=&r,r,l", [words, pointers], dtype=tl.int32, is_pure=False, pack=1
        )
        return words.to(tl.float32, bitcast=True)


@triton.jit
def add_to_row(sums, found):
    """sums [features, COLUMNS] + the row's B times its sums, which are to be summed up with these.

    Args:
        found: of `look_for_row`.
    """
    factors, words, pointers, there = found
    low = _await_words(words, pointers, there)
    return sums + tl.sum(factors.to(tl.float32) * low[None, :, :], 1)


@triton.jit
def shrink_rows(
    lora, m, ADAPTED: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A shrinking program of several rows: some lines of the stacked A of all adapters that rows
    name, one share of K. SPLIT_K: of the product, the grid's second axis."""
    LINES: tl.constexpr = ADAPTED.lines
    BLOCK_K: tl.constexpr = ADAPTED.block_k
    EACH: tl.constexpr = ADAPTED.shares // SPLIT_K  # shares of a split
    WIDTH: tl.constexpr = ADAPTED.parts * ADAPTED.rank
    (
        x, x_stride, sums, slots, distinct, a, _, scales, _, a_stride, _, scale_stride, k, columns,
        _,
    ) = lora  # fmt: skip
    first = tl.program_id(0) // EACH * LINES
    lines = first + tl.arange(0, LINES)
    rows = tl.arange(0, BLOCK_M)
    num_lines = tl.load(distinct) * WIDTH
    exists = lines < num_lines
    slot = tl.load(distinct + 1 + lines // WIDTH, mask=exists, other=0)
    inner = lines % WIDTH
    row_slots = tl.load(slots + rows, mask=rows < m, other=-1)
    share = tl.program_id(1) * EACH + tl.program_id(0) % EACH
    start = share * columns
    stop = tl.minimum(k, start + columns)
    wait_for_inputs(PDL)
    if first < num_lines:
        line_pointers = a + slot.to(tl.int64) * a_stride + inner * k
        row_pointers = x + rows.to(tl.int64) * x_stride
        products = tl.zeros((LINES, BLOCK_M), tl.float32)
        for offset in tl.range(0, stop - start, BLOCK_K, num_stages=STAGES):
            place = start + offset + tl.arange(0, BLOCK_K)
            left = tl.load(
                line_pointers[:, None] + place[None, :],
                mask=exists[:, None] & (place < k)[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            right = tl.load(
                row_pointers[None, :] + place[:, None],
                mask=(rows < m)[None, :] & (place < k)[:, None],
                other=0.0,
                eviction_policy="evict_last",
            )
            if IN_INTERPRETER:
                left, right = left.to(tl.float32), right.to(tl.float32)
            products = tl.dot(left, right, products)
        scale = tl.load(scales + slot.to(tl.int64) * scale_stride + inner, mask=exists, other=0.0)
        pointers = sums + (share * m + rows)[None, :] * WIDTH + inner[:, None]
        own = exists[:, None] & (row_slots[None, :] == slot[:, None])
        store_words(pointers, products * scale[:, None], own)
    let_next_start(PDL)


@triton.jit
def _load_names(lora, first, count, TOGETHER: tl.constexpr):
    """[TOGETHER]: the slots `first` and so on of the `count` ones that rows name, `_NO_MORE` behind
    the last one."""
    _, _, _, _, distinct, _, _, _, _, _, _, _, _, _, _ = lora
    index = first + tl.arange(0, TOGETHER)
    return tl.load(distinct + 1 + index, mask=index < count, other=_NO_MORE)


@triton.jit
def _load_factors(lora, named, features, n, RANK: tl.constexpr):
    """The B of slots, [features, TOGETHER, RANK]."""
    _, _, _, _, _, _, b, _, _, _, b_stride, _, _, _, _ = lora
    # Three dimensions: the compiler sees that ranks are neighbours.
    place = features.to(tl.int64)[:, None, None] * RANK + tl.arange(0, RANK)[None, None, :]
    pointers = b + (named.to(tl.int64) * b_stride)[None, :, None] + place
    mask = (named >= 0)[None, :, None] & (features < n)[:, None, None]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def prepare_rows(lora, features, feature, rows, m, n, ADAPTED: tl.constexpr):
    """What `add_to_rows` needs and can be loaded before the wait for the kernel before.

    Args:
        feature: the first of `features`, which lie in one part.
    """
    RANK: tl.constexpr = ADAPTED.rank
    PARTS: tl.constexpr = ADAPTED.parts
    TOGETHER: tl.constexpr = ADAPTED.together
    _, _, _, slots, distinct, _, _, _, bounds, _, _, _, _, _, _ = lora
    named = tl.load(distinct + 1 + tl.arange(0, TOGETHER))
    factors = _load_factors(lora, named, features, n, RANK)
    row_slots = tl.load(slots + rows, mask=rows < m, other=-1)
    count = tl.load(distinct)
    more = _load_names(lora, TOGETHER, count, TOGETHER)
    return factors, named, row_slots, _part_of(bounds, feature, PARTS), count, more


@triton.jit
def _add_factors(total, factors, named, low, row_slots, RANK: tl.constexpr, TOGETHER: tl.constexpr):
    """total + `_load_factors` times the sums `low` [RANK, rows] of the rows that have these."""
    mine = named[:, None, None] == row_slots[None, None, :]
    spread = tl.where(mine, low[None, :, :], 0.0)
    factors = tl.reshape(factors, (total.shape[0], TOGETHER * RANK))
    spread = tl.reshape(spread, (TOGETHER * RANK, row_slots.shape[0])).to(factors.dtype)
    if IN_INTERPRETER:
        factors, spread = factors.to(tl.float32), spread.to(tl.float32)
    return tl.dot(factors, spread, total)


@triton.jit
def add_to_rows(total, lora, prepared, features, rows, m, n, ADAPTED: tl.constexpr):
    """total [features, rows] + each row's B times its sums; `prepared`: of `prepare_rows`.

    Of more than TOGETHER adapters the next ones' B is on its way while these are multiplied, and
    the names behind those: 40 adapters would wait for memory twice in each of five turns. Where B
    takes 64 registers, a second one has no room (it spills), so only the names are there early.
    """
    RANK: tl.constexpr = ADAPTED.rank
    PARTS: tl.constexpr = ADAPTED.parts
    SHARES: tl.constexpr = ADAPTED.shares
    TOGETHER: tl.constexpr = ADAPTED.together
    AHEAD: tl.constexpr = features.shape[0] * TOGETHER * RANK <= _MOST_AHEAD
    _, _, sums, _, _, _, _, _, _, _, _, _, _, _, _ = lora
    factors, named, row_slots, part, count, names = prepared
    shares = tl.arange(0, triton.next_power_of_2(SHARES))
    line = part * RANK + tl.arange(0, RANK)
    place = (shares[:, None] * m + rows[None, :]) * (PARTS * RANK)
    pointers = sums + place[:, None, :] + line[None, :, None]
    mask = (row_slots >= 0)[None, :] & (shares < SHARES)[:, None]
    mask = mask[:, None, :] & (line >= 0)[None, :, None]
    bits = tl.load(pointers, mask=mask, other=0, volatile=True)
    low = tl.sum(_wait_for_sums(bits, pointers, mask), 0)
    more = factors
    if AHEAD:
        more = _load_factors(lora, names, features, n, RANK)
    names_behind = _load_names(lora, 2 * TOGETHER, count, TOGETHER)
    total = _add_factors(total, factors, named, low, row_slots, RANK, TOGETHER)
    for first in tl.range(TOGETHER, count, TOGETHER, num_stages=1):
        named = names
        names = names_behind
        if AHEAD:
            factors = more
            more = _load_factors(lora, names, features, n, RANK)
        else:
            factors = _load_factors(lora, named, features, n, RANK)
        names_behind = _load_names(lora, first + 2 * TOGETHER, count, TOGETHER)
        total = _add_factors(total, factors, named, low, row_slots, RANK, TOGETHER)
    return total


@triton.jit(do_not_specialize=["m", "words"])
def row_slots_kernel(
    slots,  # [m] int32
    distinct,  # [1 + SLOTS] int32
    sums,  # [words] int32
    request_slots,  # [m] int32
    adapter_of,  # [requests] int32
    m,
    words,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    FILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program sets words of the sums; the first one does the rest, too."""
    wait_and_release(PDL)
    place = tl.program_id(0) * FILL + tl.arange(0, FILL)
    tl.store(sums + place, tl.full((FILL,), NOT_YET, tl.int32), mask=place < words)
    if tl.program_id(0) == 0:
        rows = tl.arange(0, ROWS)
        request = tl.load(request_slots + rows, mask=rows < m, other=0)
        own = tl.load(adapter_of + request, mask=rows < m, other=-1)
        tl.store(slots + rows, own, mask=rows < m)
        numbers = tl.arange(0, SLOTS)
        named = tl.max((own[None, :] == numbers[:, None]).to(tl.int32), 1)
        count = tl.sum(named, 0)
        tl.store(distinct + tl.cumsum(named, 0), numbers, mask=named > 0)
        tl.store(distinct + 1 + numbers, _NO_MORE, mask=numbers >= count)
        tl.store(distinct, count)


def row_slots(request_slots: Tensor, adapter_of: Tensor, *, num_slots: int, words: int) -> RowSlots:
    """The adapters of a step's rows, and room for the sums of its products.

    The programs of a product with adapters read the slots before they wait for the kernel before.
    So a product that no other kernel of ours lies before begins when this one has ended (see
    `kernel_arguments`), and overlaps with nothing.

    Args:
        request_slots: [M] int32 request slot of each row, M from 1 to `MAX_ROWS`.
        adapter_of: [requests] int32 adapter slot of each request slot, or `NO_SLOT`.
        num_slots: adapter slots.
        words: of the sums of all products.
    """
    m, device = len(request_slots), request_slots.device
    size = triton.next_power_of_2(num_slots)
    assert 0 < m <= MAX_ROWS and request_slots.is_contiguous() and adapter_of.is_contiguous()
    assert request_slots.dtype == adapter_of.dtype == torch.int32
    assert request_slots.is_cuda or INTERPRETED
    options = pdl_options(device)
    rows = RowSlots(
        torch.empty(m, dtype=torch.int32, device=device),
        torch.empty(1 + size, dtype=torch.int32, device=device),
        torch.empty(words, dtype=torch.int32, device=device),
        num_launches(),
    )
    row_slots_kernel[(max(1, triton.cdiv(words, _FILL)),)](
        *(rows.slots, rows.distinct, rows.sums, request_slots, adapter_of, m, words),
        ROWS=triton.next_power_of_2(m),
        SLOTS=size,
        FILL=_FILL,
        num_warps=4,
        **options,
    )
    return rows


def row_slots_reference(
    request_slots: Tensor, adapter_of: Tensor, *, num_slots: int, words: int
) -> RowSlots:
    """`row_slots` in plain torch."""
    slots = adapter_of[request_slots.long()]
    named = slots[slots != NO_SLOT].unique()
    distinct = slots.new_full((1 + triton.next_power_of_2(num_slots),), _NO_MORE.value)
    distinct[0], distinct[1 : 1 + len(named)] = len(named), named
    return RowSlots(slots, distinct, slots.new_full((words,), _WORD_NOT_YET), num_launches())
