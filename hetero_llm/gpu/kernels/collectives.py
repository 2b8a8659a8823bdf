"""Sums over the ranks of one host, and columns gathered from them, through memory that peers write.

Every rank has receive buffers that all others map (`gpu.peer_memory`). A launch sends pieces, which
are rows or tiles, and waits for those of the peers. **An element is its own flag**: a buffer holds
`NOT_YET` wherever nothing has arrived, no element that is sent has these bits, and the receiver
reads its own memory until none is left, then puts `NOT_YET` back. So one write over the link is all
that a piece costs: no fence, no flag behind it, no read over the link. (The protocol that NCCL
calls LL, and TensorRT-LLM's all-reduce Lamport; here with flags as wide as the elements.)

Each piece has two places, which its exchanges use in turn; `turns`, on the device, has the next
one, so a captured launch needs nothing from the host. Two are enough: a rank sends the next but one
exchange of a piece once it has received the next one, and its peer sent that in a later launch than
the one in which it emptied the place. All ranks run the same launches in the same order.

A launch has at most one program for each multiprocessor, and a program sends a piece before it
waits for one, so no program waits for one that has no room to run.

- `sum_rows` ("one-shot"): every rank sends its rows to all others and sums all of them; with a
  residual add and an RMS norm behind the sum. (size - 1) * S bytes leave a rank, one hop.
- `two_shot_sum`: each rank sums a share of the tiles and sends the sums: 2 (size - 1) / size * S
  bytes, two hops.
- `gather_columns`: every rank sends its columns to all others.

Sums are in float32, in the order of the ranks, and rounded once: the same bits on every rank. A NaN
with the bits of `NOT_YET` becomes another NaN.

Reading gives up after a number of looks that lies on the device (`Patience`), and says so to the
host. What was to be received is then garbage, in this and all later launches.

References `sum_reference` and torch's `cat`; timed by `bench.kernels.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.kernels.launch import num_multiprocessors, pdl_options, wait_and_release
from hetero_llm.gpu.kernels.norm import MAX_NORM_SIZE, num_warps, rms_norm_row

TILE_BYTES = 8192
"""Of a tile of `two_shot_sum` and `gather_columns`."""

NOT_YET_BITS = -1
NOT_YET = tl.constexpr(NOT_YET_BITS)

PUSH, TAKE, COLLECT = 1, 2, 4
"""Parts of a launch: what it sends, what it takes (and in `two_shot_sum` sends), and there what it
takes last. A test runs one part for all ranks, then the next one."""

ALL = PUSH | TAKE | COLLECT

LOOKS, GAVE_UP = 0, 1
CONTROL_WORDS = 2

_PLACES = 2
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class ReceiveBuffer:
    """Where pieces of the peers arrive: at the same place in the memory of every rank.

    Attributes:
        memories: [at least `num_bytes`] int16 of each rank, in rank order, 16-byte aligned; all
            `NOT_YET_BITS` on all ranks before the first launch on any.
        turns: [num_pieces] int32 on this rank's device, the place of each piece's next exchange;
            zeros at first.
        rank: Of this process.
        piece_bytes: A multiple of 128.

    At most 2 GiB: kernels count elements in 32 bits.
    """

    memories: tuple[Tensor, ...]
    turns: Tensor
    rank: int
    piece_bytes: int

    def __post_init__(self) -> None:
        assert self.size > 1 and self.piece_bytes % 128 == 0, (self.size, self.piece_bytes)
        needed = self.num_bytes(self.size, self.num_pieces, self.piece_bytes)
        assert needed < 2**31 and all(len(m) * 2 >= needed for m in self.memories), needed

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.memories)

    @property
    def num_pieces(self) -> int:
        return len(self.turns)

    @staticmethod
    def num_bytes(size: int, num_pieces: int, piece_bytes: int) -> int:
        """What it takes of every rank's memory: places, then senders, then pieces."""
        return _PLACES * (size - 1) * num_pieces * piece_bytes

    def strides(self, element_size: int) -> tuple[int, int, int]:
        """From a piece, a sender and a place to the next, in elements."""
        piece = self.piece_bytes // element_size
        sender = piece * self.num_pieces
        return piece, sender, sender * (self.size - 1)

    def views(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """`memories` as integers of the width of `dtype`."""
        return self._words if dtype.itemsize == 4 else self.memories

    @cached_property
    def _words(self) -> tuple[Tensor, ...]:
        return tuple(memory.view(torch.int32) for memory in self.memories)


@dataclass(frozen=True)
class Patience:
    """How long launches wait for their peers, and whether one has given up.

    Attributes:
        control: [CONTROL_WORDS] int32 on the device: most looks, and 1 once a launch has given up,
            or the host says that none has to wait: running ones stop then, later ones do not wait.
        errors: [1] int32 in page-locked host memory: 1 once a launch has given up.
    """

    control: Tensor
    errors: Tensor


@dataclass(frozen=True)
class Norm:
    """An RMS norm behind a sum: `weight` [size] of the rows' dtype; `gemma`: Gemma's."""

    weight: Tensor
    eps: float
    gemma: bool


@triton.jit
def _other_nan(bits):
    """`NOT_YET` as another NaN, everything else as it is."""
    LARGEST: tl.constexpr = (1 << (bits.dtype.primitive_bitwidth - 1)) - 1
    return tl.where(bits == NOT_YET, LARGEST, bits).to(bits.dtype)


@triton.jit
def _send(peers, offset, sender_stride, bits, inside, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Writes a piece into the buffers of all peers, beginning with the next rank, so that not all
    write to the same one first. A rank's senders are numbered from the next rank on.

    Stored past all caches, which matters to no result: a peer is waiting."""
    for i in tl.static_range(1, RANKS):
        pointers = peers[(RANK + i) % RANKS] + offset + (RANKS - 1 - i) * sender_stride
        tl.store(pointers, bits, mask=inside, cache_modifier=".wt")


@triton.jit
def _look(pointers, sender_stride, inside, SENDERS: tl.constexpr):
    parts = (tl.load(pointers, mask=inside, other=0, volatile=True),)
    for i in tl.static_range(1, SENDERS):
        here = pointers + i * sender_stride
        parts = parts + (tl.load(here, mask=inside, other=0, volatile=True),)
    return parts


@triton.jit
def _num_missing(parts, SENDERS: tl.constexpr):
    missing = (parts[0] == NOT_YET).to(tl.int32)
    for i in tl.static_range(1, SENDERS):
        missing |= (parts[i] == NOT_YET).to(tl.int32)
    return tl.sum(missing, 0)


@triton.jit
def _take(
    pointers, sender_stride, inside, most_looks, control_ptr, error_ptr, SENDERS: tl.constexpr
):
    """The bits of a piece of all senders, as soon as all are there; leaves `NOT_YET`."""
    parts = _look(pointers, sender_stride, inside, SENDERS)
    missing = _num_missing(parts, SENDERS)
    looks = 0
    while (missing > 0) & (looks < most_looks):
        stopped = tl.load(control_ptr + 1, volatile=True)  # by another program, or by the host
        parts = _look(pointers, sender_stride, inside, SENDERS)
        missing = _num_missing(parts, SENDERS)
        looks = tl.where(stopped != 0, most_looks, looks + 1)
    # The sums above are barriers: all threads have read the pieces before any thread empties one.
    for i in tl.static_range(SENDERS):
        tl.store(
            pointers + i * sender_stride, tl.full(inside.shape, NOT_YET, parts[i].dtype), inside
        )
    if missing > 0:
        tl.store(control_ptr + 1, 1)
        tl.store(error_ptr, 1)
    return parts


@triton.jit
def _sum_of_ranks(own, parts, RANK: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr):
    """Float32 sum in the order of the ranks, rounded to DTYPE; `own`, `parts`: bits."""
    for q in tl.static_range(RANKS):
        if q == RANK:
            bits = own
        else:
            bits = parts[(q - RANK - 1 + RANKS) % RANKS]
        value = bits.to(DTYPE, bitcast=True).to(tl.float32)
        if q == 0:
            total = value
        else:
            total += value
    return total.to(DTYPE)


@triton.jit
def _most_looks(control_ptr):
    """Read before the wait for the kernel before, so it may not know that this one gave up: then
    the launch waits once more."""
    looks = tl.load(control_ptr)
    return tl.where(tl.load(control_ptr + 1) != 0, 0, looks)


@triton.jit(do_not_specialize=["rows"])
def sum_rows_kernel(
    out_ptr, total_ptr, x_ptr, weight_ptr, own_ptr, peers, turn_ptr, control_ptr, error_ptr,
    rows, eps, piece_stride, sender_stride, place_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GEMMA: tl.constexpr, PHASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes rows with a fixed stride and sends one ahead of the one that it waits for."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, PADDED)
    inside = columns < SIZE
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    most_looks = _most_looks(control_ptr)
    wait_and_release(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    sent = rows if PHASES & 1 else 0
    behind = programs if PHASES & 1 and PHASES & 2 else 0
    for row in tl.range(program, rows + behind, programs, num_stages=1):
        if row < sent:
            offset = tl.load(turn_ptr + row) * place_stride + row * piece_stride + columns
            bits = tl.load(x_ptr + row * SIZE + columns, mask=inside, other=0)
            _send(peers, offset, sender_stride, _other_nan(bits), inside, RANK, RANKS)
        if PHASES & 2:
            taken = row - behind
            if taken >= 0:
                turn = tl.load(turn_ptr + taken)
                place = taken * SIZE + columns
                own = tl.load(x_ptr + place, mask=inside, other=0)
                if HAS_RESIDUAL:
                    residual = tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float32)
                pointers = own_ptr + turn * place_stride + taken * piece_stride + columns
                parts = _take(
                    *(pointers, sender_stride, inside, most_looks, control_ptr, error_ptr),
                    RANKS - 1,
                )
                tl.store(turn_ptr + taken, 1 - turn)
                total = _sum_of_ranks(_other_nan(own), parts, RANK, RANKS, DTYPE)
                if weight_ptr is None:
                    tl.store(out_ptr + place, total, mask=inside)
                else:
                    if HAS_RESIDUAL:
                        total = (total.to(tl.float32) + residual).to(DTYPE)
                    tl.store(total_ptr + place, total, mask=inside)
                    normed = rms_norm_row(total.to(tl.float32), weight, eps, SIZE, GEMMA, DTYPE)
                    tl.store(out_ptr + place, normed, mask=inside)


@triton.jit
def two_shot_sum_kernel(
    out_ptr, x_ptr, own_parts_ptr, parts_peers, own_sums_ptr, sums_peers,
    turn_ptr, control_ptr, error_ptr, total, piece_stride, sender_stride, place_stride,
    TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    PHASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A group is as many tiles as there are ranks, and rank q sums its tile q. A program takes
    groups with a fixed stride."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    GROUP: tl.constexpr = TILE * RANKS
    columns = tl.arange(0, TILE)
    everywhere = columns >= 0
    most_looks = _most_looks(control_ptr)
    wait_and_release(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    groups = tl.cdiv(total, GROUP)
    if PHASES & 1:
        for group in tl.range(program, groups, programs, num_stages=1):
            offset = tl.load(turn_ptr + group) * place_stride + group * piece_stride + columns
            for i in tl.static_range(1, RANKS):
                place = group * GROUP + ((RANK + i) % RANKS) * TILE + columns
                bits = _other_nan(tl.load(x_ptr + place, mask=place < total, other=0))
                peer = parts_peers[(RANK + i) % RANKS]
                pointers = peer + offset + (RANKS - 1 - i) * sender_stride
                tl.store(pointers, bits, cache_modifier=".wt")
    if PHASES & 2:
        for group in tl.range(program, groups, programs, num_stages=1):
            offset = tl.load(turn_ptr + group) * place_stride + group * piece_stride + columns
            place = group * GROUP + RANK * TILE + columns
            inside = place < total
            own = _other_nan(tl.load(x_ptr + place, mask=inside, other=0))
            parts = _take(
                *(own_parts_ptr + offset, sender_stride, everywhere),
                *(most_looks, control_ptr, error_ptr, RANKS - 1),
            )
            rounded = _sum_of_ranks(own, parts, RANK, RANKS, DTYPE)
            bits = _other_nan(rounded.to(own.dtype, bitcast=True))
            tl.store(out_ptr + place, bits.to(DTYPE, bitcast=True), mask=inside)
            _send(sums_peers, offset, sender_stride, bits, everywhere, RANK, RANKS)
    if PHASES & 4:
        for group in tl.range(program, groups, programs, num_stages=1):
            turn = tl.load(turn_ptr + group)
            pointers = own_sums_ptr + turn * place_stride + group * piece_stride + columns
            parts = _take(
                *(pointers, sender_stride, everywhere, most_looks, control_ptr, error_ptr),
                RANKS - 1,
            )
            tl.store(turn_ptr + group, 1 - turn)
            for i in tl.static_range(1, RANKS):
                place = group * GROUP + ((RANK + i) % RANKS) * TILE + columns
                tl.store(out_ptr + place, parts[i - 1].to(DTYPE, bitcast=True), mask=place < total)


@triton.jit(do_not_specialize=["rows"])
def gather_columns_kernel(
    out_ptr, x_ptr, own_ptr, peers, turn_ptr, control_ptr, error_ptr,
    rows, n, piece_stride, sender_stride, place_stride,
    TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    PHASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes tiles of rows with a fixed stride, and sends one ahead of the one that it
    waits for. All pointers are to bits."""
    columns = tl.arange(0, TILE)
    most_looks = _most_looks(control_ptr)
    wait_and_release(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_of_row = tl.cdiv(n, TILE)
    tiles = rows * tiles_of_row
    sent = tiles if PHASES & 1 else 0
    behind = programs if PHASES & 1 and PHASES & 2 else 0
    for tile in tl.range(program, tiles + behind, programs, num_stages=1):
        if tile < sent:
            offset = tl.load(turn_ptr + tile) * place_stride + tile * piece_stride + columns
            column = tile % tiles_of_row * TILE + columns
            row = tile // tiles_of_row
            bits = _other_nan(tl.load(x_ptr + row * n + column, mask=column < n, other=0))
            _send(peers, offset, sender_stride, bits, column < n, RANK, RANKS)
        if PHASES & 2:
            taken = tile - behind
            if taken >= 0:
                turn = tl.load(turn_ptr + taken)
                column = taken % tiles_of_row * TILE + columns
                row = taken // tiles_of_row
                inside = column < n
                own = tl.load(x_ptr + row * n + column, mask=inside, other=0)
                pointers = own_ptr + turn * place_stride + taken * piece_stride + columns
                parts = _take(
                    *(pointers, sender_stride, inside, most_looks, control_ptr, error_ptr),
                    RANKS - 1,
                )
                tl.store(turn_ptr + taken, 1 - turn)
                out = out_ptr + row * (n * RANKS) + column
                tl.store(out + RANK * n, _other_nan(own), mask=inside)
                for i in tl.static_range(1, RANKS):
                    tl.store(out + ((RANK + i) % RANKS) * n, parts[i - 1], mask=inside)


def sum_rows(
    x: Tensor,
    buffer: ReceiveBuffer,
    patience: Patience,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    phases: int = ALL,
) -> tuple[Tensor, Tensor]:
    """The sum of x over the ranks, or with a norm that of `sum + residual`, and what was normed.

    The sum is rounded before the residual is added, as if each had a launch of its own.

    Args:
        x: [rows, n], contiguous; float32, bfloat16 or float16; as many rows at most as the buffer
            has pieces, n elements at most a piece, and `MAX_NORM_SIZE`.
        residual: As x, overwritten with what is normed; only with a norm.
        out: As x, for sum or norm; None: a new one.
        phases: PUSH, TAKE or ALL; see there.

    Returns:
        Sum or norm (`out`) and total (`residual`, or new; without a norm the sum), [rows, n] both.
    """
    rows, n = x.shape
    assert x.is_contiguous() and x.dtype in _BITS, (x.shape, x.stride(), x.dtype)
    assert rows <= buffer.num_pieces and n * x.itemsize <= buffer.piece_bytes, x.shape
    assert n <= MAX_NORM_SIZE, x.shape
    assert residual is None or (norm is not None and residual.is_contiguous())
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    assert norm is None or (norm.weight.shape == (n,) and norm.weight.dtype == x.dtype)
    assert out is None or (out.is_contiguous() and out.shape == x.shape and out.dtype == x.dtype)
    if out is None:
        out = torch.empty_like(x)
    total = out
    if norm is not None:
        total = torch.empty_like(x) if residual is None else residual
    if x.numel() == 0:
        return out, total
    bits = _BITS[x.dtype]
    views, padded = buffer.views(x.dtype), triton.next_power_of_2(n)
    sum_rows_kernel[(min(rows, num_multiprocessors(x.device)),)](
        *(out, total, x.view(bits), None if norm is None else norm.weight),
        *(views[buffer.rank], views, buffer.turns, patience.control, patience.errors),
        *(rows, 0.0 if norm is None else norm.eps, *buffer.strides(x.itemsize)),
        SIZE=n,
        PADDED=padded,
        RANK=buffer.rank,
        RANKS=buffer.size,
        HAS_RESIDUAL=residual is not None,
        GEMMA=norm is not None and norm.gemma,
        PHASES=phases & (PUSH | TAKE),
        num_warps=_warps(padded, buffer.size),
        **pdl_options(x.device),
    )
    return out, total


def two_shot_sum(
    x: Tensor,
    out: Tensor,
    parts: ReceiveBuffer,
    sums: ReceiveBuffer,
    *,
    patience: Patience,
    phases: int = ALL,
) -> None:
    """Writes the sum of x over the ranks to `out`.

    Args:
        x: Any shape, contiguous; float32, bfloat16 or float16; at most `two_shot_elements` of it.
        out: As x.
        parts, sums: Of pieces of `TILE_BYTES`, alike; `turns` of `parts` serves both.
        phases: PUSH, TAKE, COLLECT or ALL; see there.
    """
    assert x.is_contiguous() and out.is_contiguous() and x.dtype in _BITS, (x.stride(), x.dtype)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert parts.piece_bytes == sums.piece_bytes == TILE_BYTES
    assert parts.num_pieces == sums.num_pieces and parts.rank == sums.rank
    assert x.numel() <= two_shot_elements(parts, x.dtype), x.shape
    if x.numel() == 0:
        return
    tile = TILE_BYTES // x.itemsize
    groups = triton.cdiv(x.numel(), tile * parts.size)
    part_views, sum_views = parts.views(x.dtype), sums.views(x.dtype)
    two_shot_sum_kernel[(min(groups, num_multiprocessors(x.device)),)](
        *(out, x.view(_BITS[x.dtype])),
        *(part_views[parts.rank], part_views, sum_views[sums.rank], sum_views),
        *(parts.turns, patience.control, patience.errors),
        *(x.numel(), *parts.strides(x.itemsize)),
        TILE=tile,
        RANK=parts.rank,
        RANKS=parts.size,
        PHASES=phases,
        num_warps=_warps(tile, parts.size),
        **pdl_options(x.device),
    )


def two_shot_elements(buffer: ReceiveBuffer, dtype: torch.dtype) -> int:
    """Most elements that a launch of `two_shot_sum` sums."""
    return buffer.num_pieces * buffer.size * (TILE_BYTES // dtype.itemsize)


def gather_columns(
    x: Tensor,
    out: Tensor,
    buffer: ReceiveBuffer,
    *,
    patience: Patience,
    phases: int = ALL,
) -> None:
    """Writes the columns of all ranks, in their order, to `out`.

    Args:
        x: [rows, n], contiguous; float32, bfloat16 or float16; at most `gathered_rows` rows.
        out: [rows, n * ranks] of the same dtype, contiguous.
        buffer: Of pieces of `TILE_BYTES`.
        phases: PUSH, TAKE or ALL; see there.
    """
    rows, n = x.shape
    assert x.is_contiguous() and out.is_contiguous() and x.dtype in _BITS, (x.stride(), x.dtype)
    assert out.shape == (rows, n * buffer.size) and out.dtype == x.dtype
    assert buffer.piece_bytes == TILE_BYTES and rows <= gathered_rows(buffer, n, x.dtype)
    if x.numel() == 0:
        return
    tile = TILE_BYTES // x.itemsize
    bits, views = _BITS[x.dtype], buffer.views(x.dtype)
    tiles = rows * triton.cdiv(n, tile)
    gather_columns_kernel[(min(tiles, num_multiprocessors(x.device)),)](
        *(out.view(bits), x.view(bits), views[buffer.rank], views),
        *(buffer.turns, patience.control, patience.errors),
        *(rows, n, *buffer.strides(x.itemsize)),
        TILE=tile,
        RANK=buffer.rank,
        RANKS=buffer.size,
        PHASES=phases & (PUSH | TAKE),
        num_warps=_warps(tile, buffer.size),
        **pdl_options(x.device),
    )


def gathered_rows(buffer: ReceiveBuffer, n: int, dtype: torch.dtype) -> int:
    """Most rows of n columns that a launch of `gather_columns` gathers."""
    return buffer.num_pieces // max(triton.cdiv(n * dtype.itemsize, TILE_BYTES), 1)


def _warps(padded: int, size: int) -> int:
    """Those of a norm. From 8 ranks on twice as many: a thread holds its elements of all ranks."""
    return min(num_warps(padded) * (1 if size < 6 else 2), 32)


def sum_reference(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what each rank has, in plain torch: in float32, in order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
