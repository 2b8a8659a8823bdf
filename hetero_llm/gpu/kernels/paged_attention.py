"""Attention over the paged KV cache: prefill chunks, decode rows and draft trees in one kernel.

A *row* is one token of the step. A *tile* is up to `tile_rows` consecutive rows of one sequence;
with the G query heads that share a KV head they are the rows of one matrix (FlashDecoding, Dao et
al. 2023; grouped heads packed as in FlashInfer, Ye et al. 2025). A *work item* is a tile and a
piece of its context. Programs take the items times KV heads with a fixed stride, so one captured
launch serves any mix of rows. A second kernel merges the pieces of cut tiles by log-sum-exp, each
row and head by itself.

Keys that several sequences share can be read once for all of them: an item may have rows of
neighbouring sequences of the step, if all of them see all its keys and their block tables agree
there. Their rows then have pieces of two tiles, the shared one and their own sequence's (Hydragen,
Juravsky et al. 2024; "cascade" attention in FlashInfer).

A row sees the keys below its limit (and inside its window), and of the 64 keys from the limit on
those whose bit is set in its ancestor mask. A plain row at position p has limit p + 1 and no bits;
node i of a draft tree has its sequence's length as limit and the bits of itself and its ancestors,
so the key of a node is at position limit + number of its ancestors.

Keys and values in e4m3 come to few rows as lanes of 16 bits, two neighbours of a token each: so
they go from shared memory to the tensor cores' operands as 16-bit numbers do, transposed by the
load, and become numbers of 16 bits in registers. Even and odd dimensions are two products. (The
compiler takes bytes out of shared memory one by one.)

A sink is a learned score of each query head that takes part in the softmax without a value
(gpt-oss; "Efficient Streaming Language Models with Attention Sinks", Xiao et al. 2023, compares
with one that is 0): a whole tile begins its sums with it, and cut tiles get it once, when their
pieces are merged.

Wrapper `paged_attention`, reference `paged_attention_reference`; timed by `bench.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import (
    INTERPRETED,
    num_multiprocessors,
    pdl_options,
    wait_and_release,
)
from hetero_llm.gpu.kernels.quantized_elements import FP8, parts

WORK_FIELDS = 8
"""int32 fields of a work item: request slot whose block table is read, first row, rows, key begin,
key end, piece (index among all pieces of cut tiles; -1: the tile is whole), two unused for
alignment."""

CUT_ROW_FIELDS = 8
"""int32 fields of a row whose tile is cut: row, the tile's first piece, the tile's pieces, the
row's index in the tile; the same three of the tile that it shares with other sequences (0 pieces:
there is none); one unused for alignment."""

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_GROUP = 128
"""Most query heads on a KV head: a tile has whole groups of rows."""
TREE_NODES = 64
_LOG2_E = 1.4426950408889634
_ROWS_OF_GROUPS = 64
_MERGED_AT_ONCE = 16
_MERGING_PROGRAMS = 64  # for each head; few, since a step that cuts nothing launches them too


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which keys each row sees, as the head of this file says.

    Attributes:
        limits, positions: [T] int32.
        ancestors: [T] int64, bits of tree nodes; None: no row of the step belongs to a tree.
    """

    limits: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """The step's work list on the device, int32.

    Attributes:
        items: [W, 8], see `WORK_FIELDS`.
        cut_rows: [C, 8], see `CUT_ROW_FIELDS`.
        counts: [2] items and cut rows in use.
    """

    items: torch.Tensor
    cut_rows: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class TileShape:
    """How the kernel is compiled.

    Attributes:
        rows: matrix rows of a tile: tokens times group, padded.
        keys: keys of one iteration.
        num_warps, num_stages: as Triton names them.
        programs: resident on one SM.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory for pieces of cut tiles: sums [P, N, M, D], maxima and weights [P, N, 2, M],
    float32."""

    sums: torch.Tensor
    states: torch.Tensor

    @property
    def num_pieces(self) -> int:
        return self.sums.shape[0]


def make_workspace(
    num_pieces: int, num_kv_heads: int, tile_rows: int, head_dim: int, device: torch.device
) -> Workspace:
    """Room for `num_pieces` pieces of tiles with `tile_rows` matrix rows."""
    padded = triton.next_power_of_2(head_dim)
    return Workspace(
        torch.empty(num_pieces, num_kv_heads, tile_rows, padded, device=device),
        torch.empty(num_pieces, num_kv_heads, 2, tile_rows, device=device),
    )


@triton.jit
def _prefetch(pointers, LINES: tl.constexpr):
    """Brings LINES lines of 128 bytes from each of [rows] addresses on into the L2 cache."""
    for line in tl.static_range(LINES):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(pointers + line * 128).to(tl.uint64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# The counts of a window lie at an address of their own alignment: one kernel serves all windows,
# and steps that are captured or not.
@triton.jit(do_not_specialize_on_alignment=["count_ptr"])
def _merge(
    out_ptr, sums_ptr, states_ptr, cut_ptr, count_ptr, sink_ptr, out_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    TILE_M: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query head of every n-th cut row: joins the pieces of the row's own tile, and then those
    of the tile that it shares, by log-sum-exp, WIDE at a time."""
    total = tl.load(count_ptr + 1)
    q_head = tl.program_id(1)
    wide = tl.arange(0, WIDE)
    dims = tl.arange(0, PADDED)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + q_head).to(tl.float32) * 1.4426950408889634  # log2(e)
    wait_and_release(PDL)
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        cut = cut_ptr + index * 8
        row = tl.load(cut).to(tl.int64)
        own_first, own_pieces, own_index = tl.load(cut + 1), tl.load(cut + 2), tl.load(cut + 3)
        first, index_there = tl.load(cut + 4), tl.load(cut + 6)
        pieces = own_pieces + tl.load(cut + 5)
        if sink_ptr is not None:
            highest = sink
            weight = 1.0
        else:
            highest = float("-inf")
            weight = 0.0
        acc = tl.zeros((PADDED,), tl.float32)
        for low in tl.range(0, pieces, WIDE):
            part = low + wide
            exists, own = part < pieces, part < own_pieces
            piece = part + tl.where(own, own_first, first - own_pieces)
            line = tl.where(own, own_index, index_there) * GROUP + q_head % GROUP
            place = (piece * KV_HEADS + q_head // GROUP).to(tl.int64)
            state = states_ptr + place * (2 * TILE_M) + line
            part_highest = tl.load(state, mask=exists, other=float("-inf"))
            part_weight = tl.load(state + TILE_M, mask=exists, other=0.0)
            part_sums = tl.load(
                sums_ptr + (place * (TILE_M * PADDED) + line * PADDED)[:, None] + dims[None, :],
                mask=exists[:, None],
                other=0.0,
            )
            higher = tl.maximum(highest, tl.max(part_highest, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(highest - base)
            grow = tl.exp2(part_highest - base)
            weight = weight * shrink + tl.sum(part_weight * grow, 0)
            acc = acc * shrink + tl.sum(part_sums * grow[:, None], 0)
            highest = higher
        acc = acc / tl.where(weight == 0.0, 1.0, weight)
        place = out_ptr + row * out_stride + q_head * DIM
        tl.store(place + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _fetch_early(
    keys, values, table, begin, end, columns, block_stride, token_stride,
    BLOCK: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Prefetches the item's first keys and values. The keys of this very step may not be written
    yet, which does no harm: the L2 cache is coherent."""
    token = tl.minimum(begin + columns, end - 1)
    block = tl.load(table + token // BLOCK).to(tl.int64)
    offset = block * block_stride + (token % BLOCK) * token_stride
    _prefetch(keys + offset, LINES)
    _prefetch(values + offset, LINES)


@triton.jit
def _hide(
    scores, token, end, limit, low, ancestors,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
):  # fmt: skip
    """Scores, -inf where a row does not see a key; see `RowMasks`."""
    seen = token[None, :] < limit[:, None]
    if HAS_WINDOW:
        seen = seen & (token[None, :] > low[:, None])
    if HAS_TREE:
        node = token[None, :] - limit[:, None]
        words_low, words_high = ancestors.to(tl.int32), (ancestors >> 32).to(tl.int32)
        bits = tl.where(node < 32, words_low[:, None], words_high[:, None])
        bit = (bits >> (node & 31)) & 1
        seen = seen | ((node >= 0) & (node < 64) & (bit != 0))
    return tl.where(seen & (token < end)[None, :], scores, float("-inf"))


@triton.jit
def _ancestors_below(word, node):
    """[rows, keys] number of bits set among bits 0 .. node - 1 of `word`, [rows] int32.

    node: [rows, keys] int32.
    """
    kept = tl.where(node >= 32, -1, (1 << (node & 31)) - 1)
    bits = word[:, None] & tl.where(node <= 0, 0, kept)
    # Sums of neighbouring bits, pairs, nibbles, bytes; masks and shifts never leave a sign behind.
    bits = (bits & 0x55555555) + ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return (bits + (bits >> 16)) & 0x3F


@triton.jit
def _displacement(token, limit, ancestors):
    """Position of a key that a row sees minus its index in the cache, where a tree's nodes lie
    behind each other."""
    node = token[None, :] - limit[:, None]
    earlier = _ancestors_below(ancestors.to(tl.int32), node)
    earlier += _ancestors_below((ancestors >> 32).to(tl.int32), node - 32)
    return earlier - tl.maximum(node, 0)


@triton.jit
def _weigh(scores, highest):
    """One step of the online softmax: weights, the factor for earlier sums, new maxima."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(scores - base[:, None]), tl.exp2(highest - base), higher


@triton.jit
def _change(
    scores, token, limit, position, ancestors, slope, near_end,
    SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_TREE: tl.constexpr,
):  # fmt: skip
    """Scores, as exponents of two, after soft cap and ALiBi.

    With a soft cap the scores come multiplied by 2 / cap: c * tanh(x / c) = c - 2 c / (e^(2 x / c)
    + 1). near_end: some of the keys may be a tree's.
    """
    if SOFTCAP > 0:
        scores = SOFTCAP - (2 * SOFTCAP) / (tl.exp2(scores) + 1.0)
    if HAS_SLOPES:
        distance = token[None, :] - position[:, None]
        if HAS_TREE and near_end:
            distance += _displacement(token, limit, ancestors)
        scores += slope[:, None] * distance.to(tl.float32)
    return scores


@triton.jit
def _sight(
    limit, position_ptr, ancestor_ptr, slope_ptr, row, q_head, in_tile, window,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Of each row of a tile: position, last position before its window, ancestors, slope (as an
    exponent of two). Values that the constexprs do not ask for are undefined."""
    position, low, ancestors, slope = limit, limit, row, limit
    if HAS_WINDOW or HAS_SLOPES:
        position = tl.load(position_ptr + row, mask=in_tile, other=0)
    if HAS_WINDOW:
        low = position - window
    if HAS_TREE:
        ancestors = tl.load(ancestor_ptr + row, mask=in_tile, other=0)
    if HAS_SLOPES:
        slope = tl.load(slope_ptr + q_head) * 1.4426950408889634  # log2(e)
    return position, low, ancestors, slope


@triton.jit
def _begin_with_sink(pointers, piece):
    """Maxima and sums of weights of a tile's lines before any key: a whole tile's have the sink,
    for pieces of cut ones `_merge` has it."""
    sink = tl.load(pointers).to(tl.float32) * 1.4426950408889634  # log2(e)
    whole = piece < 0
    highest = tl.where(whole, sink, float("-inf"))
    return highest, tl.zeros_like(sink) + tl.where(whole, 1.0, 0.0)


@triton.jit
def _keep(sums_ptr, states_ptr, kept, lines, dims, in_tile, acc, highest, weight):
    """Stores a piece of a cut tile for `_merge`."""
    TILE_M: tl.constexpr = lines.shape[0]
    PADDED: tl.constexpr = dims.shape[0]
    sums = sums_ptr + kept * (TILE_M * PADDED)
    state = states_ptr + kept * (2 * TILE_M) + lines
    stored = sums + lines[:, None] * PADDED + dims[None, :]
    tl.store(stored, acc, mask=in_tile[:, None])
    tl.store(state, highest, mask=in_tile)
    tl.store(state + TILE_M, weight, mask=in_tile)


@triton.jit
def _load_query(pointers, in_tile, in_lane, WIDEN: tl.constexpr):
    q = tl.load(pointers, mask=in_tile[:, None] & in_lane[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    return q


# large: one loop, with a few lines for each option.
@triton.jit(do_not_specialize_on_alignment=["count_ptr"])
def _attend(
    out_ptr, q_ptr, key_ptr, value_ptr, table_ptr, limit_ptr, position_ptr, ancestor_ptr,
    slope_ptr, kv_scale_ptr, sink_ptr, item_ptr, count_ptr, sums_ptr, states_ptr,
    q_stride, out_stride, block_stride, token_stride, head_stride, table_stride,
    scale, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
    LANES: tl.constexpr,  # elements of a row of the cache: int16 lanes of two e4m3, or as PADDED
):  # fmt: skip
    HAS_SLOPES: tl.constexpr = slope_ptr is not None
    IN_PAIRS: tl.constexpr = LANES < PADDED
    NOTHING: tl.constexpr = 0 if IN_PAIRS else 0.0
    dims = tl.arange(0, PADDED)
    lanes = tl.arange(0, LANES)
    in_dim = dims < DIM
    in_lane = lanes < DIM // (PADDED // LANES)
    lines, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    total = tl.load(count_ptr) * KV_HEADS
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        head = index % KV_HEADS
        item = item_ptr + (index // KV_HEADS) * 8
        slot, first_row, num_rows = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        begin, end, piece = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)

        in_tile = lines // GROUP < num_rows
        row = (first_row + lines // GROUP).to(tl.int64)
        q_head = head * GROUP + lines % GROUP
        valid = in_tile[:, None] & in_dim[None, :]
        limit = tl.load(limit_ptr + row, mask=in_tile, other=0x7FFFFFFF)
        seen_by_all = tl.min(limit, 0)  # keys below this need no mask
        position, low, ancestors, slope = _sight(
            limit, position_ptr, ancestor_ptr, slope_ptr, row, q_head, in_tile, window,
            HAS_WINDOW, HAS_TREE, HAS_SLOPES,
        )  # fmt: skip

        table = table_ptr + slot.to(tl.int64) * table_stride
        keys, values = key_ptr + head * head_stride, value_ptr + head * head_stride
        if PDL:  # the first keys reach L2 while the previous kernel still runs
            _fetch_early(
                keys, values, table, begin, end, columns, block_stride, token_stride, BLOCK,
                (DIM * key_ptr.dtype.element_ty.primitive_bitwidth) // (1024 * (PADDED // LANES)),
            )  # fmt: skip
        wait_and_release(PDL)
        q_row = q_ptr + (row * q_stride + q_head * DIM)[:, None]
        q = _load_query(q_row + (lanes * (PADDED // LANES))[None, :], in_tile, in_lane, WIDEN)
        if IN_PAIRS:
            odd_q = _load_query(q_row + (lanes * 2 + 1)[None, :], in_tile, in_lane, WIDEN)
        factor = scale
        if kv_scale_ptr is not None:
            factor = scale * tl.load(kv_scale_ptr + head)
        if sink_ptr is not None:
            highest, weight = _begin_with_sink(sink_ptr + q_head, piece)
        else:
            highest = tl.full((TILE_M,), float("-inf"), tl.float32)
            weight = tl.zeros((TILE_M,), tl.float32)
        acc = tl.zeros((TILE_M, LANES), tl.float32)
        odd_acc = tl.zeros((TILE_M, LANES), tl.float32)
        for start in tl.range(begin, end, TILE_N):
            token = start + columns
            exists = token < end
            block = tl.load(table + token // BLOCK, mask=exists, other=0).to(tl.int64)
            place = (block * block_stride + (token % BLOCK) * token_stride)[:, None] + lanes[
                None, :
            ]
            loadable = exists[:, None] & in_lane[None, :]
            k = tl.load(keys + place, mask=loadable, other=NOTHING)
            v = tl.load(values + place, mask=loadable, other=NOTHING)
            if IN_PAIRS:
                even_k, odd_k = parts(tl.trans(k), FP8, q_ptr.dtype.element_ty)
                scores = tl.dot(odd_q, odd_k, tl.dot(q, even_k)) * factor
            else:
                scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * factor
            scores = _change(
                scores, token, limit, position, ancestors, slope, start + TILE_N > seen_by_all,
                SOFTCAP, HAS_SLOPES, HAS_TREE,
            )  # fmt: skip
            if HAS_WINDOW or start + TILE_N > seen_by_all:
                scores = _hide(scores, token, end, limit, low, ancestors, HAS_WINDOW, HAS_TREE)
            p, shrink, highest = _weigh(scores, highest)
            weight = weight * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            if IN_PAIRS:
                # To float16 in half the instructions; it holds e4m3 and weights up to 1.
                even_v, odd_v = parts(v, FP8, tl.float16)
                p = p.to(tl.float32 if WIDEN else tl.float16)
                acc = tl.dot(p, even_v, acc)
                odd_acc = tl.dot(p, odd_v, odd_acc * shrink[:, None])
            else:
                acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)

        if IN_PAIRS:
            acc = tl.reshape(tl.join(acc, odd_acc), (TILE_M, PADDED))
        if kv_scale_ptr is not None:
            acc = acc * tl.load(kv_scale_ptr + KV_HEADS + head)
        if piece < 0:
            acc = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
            result = out_ptr + (row * out_stride + q_head * DIM)[:, None] + dims[None, :]
            tl.store(result, acc.to(out_ptr.dtype.element_ty), mask=valid)
        else:
            kept = (piece * KV_HEADS + head).to(tl.int64)
            _keep(sums_ptr, states_ptr, kept, lines, dims, in_tile, acc, highest, weight)
    wait_and_release(PDL)  # so programs without an item end no earlier, either


# large: one launch with each of its arguments, and what they are.
def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: RowMasks,
    work: Work,
    workspace: Workspace,
    tile: TileShape,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    any_cut: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends every row that the work list covers; other rows of `out` are left unchanged.

    Args:
        q: [T, H, D], heads and dims contiguous, rows strided.
        key_cache, value_cache: [blocks, block size, N, D] views of one layer, equal strides, last
            dim contiguous; q's dtype or one of 8 bits.
        block_tables: [slots, columns] int32 block ids.
        rows: of T rows.
        work: covers the rows to attend.
        workspace: made for `tile.rows`.
        scale: factor of the scores.
        window: a row sees the last `window` positions only; tree nodes always see their ancestors.
        softcap: if given, scores become softcap * tanh(score / softcap).
        slopes: [H] float32; if given, slope * (position of the key - position of the row) is added.
        kv_scales: [2, N] float32: what the cached keys of each head, and the values, are multiplied
            with; None: 1.
        sinks: [H], contiguous, any float type: scores that the softmax of each head counts, too,
            beside those of the keys; nothing is multiplied with their weights.
        any_cut: whether the work list may have cut tiles; False saves the merging kernel.

    Returns:
        `out`, [T, H, D] in q's dtype.
    """
    _check(q, key_cache, value_cache, block_tables, work, workspace, tile)
    num_rows, num_heads, dim = q.shape
    _, block_size, kv_heads, _ = key_cache.shape
    group = num_heads // kv_heads
    if slopes is not None:
        assert slopes.shape == (num_heads,) and slopes.dtype == torch.float32
    if kv_scales is not None:
        assert kv_scales.shape == (2, kv_heads) and kv_scales.dtype == torch.float32
        assert kv_scales.is_contiguous()
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.is_contiguous()
    # The kernel's exponentials are powers of two; see there for the soft cap's.
    factor = scale * _LOG2_E * (1.0 if softcap is None else 2.0 / softcap)
    if out is None:
        out = torch.empty(num_rows, num_heads, dim, dtype=q.dtype, device=q.device)
    ancestors = rows.ancestors
    grid = (num_multiprocessors(q.device) * tile.programs,)
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "TILE_M": tile.rows}
    padded = triton.next_power_of_2(dim)
    sizes["PADDED"] = padded
    in_pairs = _comes_in_pairs(q, key_cache, value_cache, tile)
    if in_pairs:
        key_cache, value_cache = key_cache.view(torch.int16), value_cache.view(torch.int16)
    _attend[grid](
        *(out, q, key_cache, value_cache, block_tables, rows.limits, rows.positions),
        *(rows.positions if ancestors is None else ancestors, slopes, kv_scales, sinks),
        *(work.items, work.counts, workspace.sums, workspace.states),
        *(q.stride(0), out.stride(0), *key_cache.stride()[:3], block_tables.stride(0)),
        *(factor, 0 if window is None else window),
        **sizes,
        BLOCK=block_size,
        TILE_N=tile.keys,
        HAS_WINDOW=window is not None,
        HAS_TREE=ancestors is not None,
        SOFTCAP=0.0 if softcap is None else softcap * _LOG2_E,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        WIDEN=INTERPRETED,  # its dot takes no bfloat16
        LANES=padded // 2 if in_pairs else padded,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_options(q.device),
    )
    if not any_cut:
        return out
    _merge[(min(num_rows, _MERGING_PROGRAMS), num_heads)](
        *(out, workspace.sums, workspace.states, work.cut_rows, work.counts, sinks),
        out.stride(0),
        **sizes,
        WIDE=_MERGED_AT_ONCE,
        num_warps=4,
        **pdl_options(q.device),
    )
    return out


def _comes_in_pairs(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tile: TileShape
) -> bool:
    """Whether keys and values are read as lanes of two dimensions. Tiles of 64 rows and more take
    the tensor cores' products that have both operands in shared memory."""
    return (
        key_cache.dtype == torch.float8_e4m3fn
        and q.dtype in (torch.bfloat16, torch.float16)
        and tile.rows < _ROWS_OF_GROUPS
        and q.shape[2] >= 2 * MIN_HEAD_DIM
        and q.shape[2] % 2 == 0
        and all(stride % 2 == 0 for stride in key_cache.stride()[:3])
        and key_cache.data_ptr() % 4 == 0
        and value_cache.data_ptr() % 4 == 0
    )


def _check(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    work: Work,
    workspace: Workspace,
    tile: TileShape,
) -> None:
    _, num_heads, dim = q.shape
    kv_heads = key_cache.shape[2]
    assert q.stride(2) == 1 and q.stride(1) == dim and num_heads % kv_heads == 0
    assert num_heads // kv_heads <= tile.rows and MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM
    assert key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1
    assert key_cache.dtype == q.dtype or key_cache.dtype.itemsize == 1
    assert block_tables.dtype == torch.int32
    assert work.items.shape[1] == WORK_FIELDS and work.items.is_contiguous()
    assert work.cut_rows.shape[1] == CUT_ROW_FIELDS and work.cut_rows.is_contiguous()
    assert workspace.sums.shape[1:3] == (kv_heads, tile.rows)


def paged_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    row_ends: torch.Tensor,
    rows: RowMasks,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` in float32 with plain torch, row by row.

    Args:
        row_slots: [T] request slot of each row.
        row_ends: [T] keys in the cache of each row's sequence, this step's included.
        others: as of `paged_attention`.
    """
    num_rows, num_heads, dim = q.shape
    _, block_size, kv_heads, _ = key_cache.shape
    out = torch.empty_like(q)
    for row in range(num_rows):
        token = torch.arange(int(row_ends[row]), device=q.device)
        block = block_tables[int(row_slots[row])].long()[token // block_size]
        limit = int(rows.limits[row])
        seen = token < limit
        if window is not None:
            seen &= token > int(rows.positions[row]) - window
        if rows.ancestors is not None:
            node = token - limit
            bits = rows.ancestors[row] >> node.clamp(0, TREE_NODES - 1)
            seen |= (node >= 0) & (node < TREE_NODES) & (bits & 1 != 0)
        k = key_cache[block, token % block_size].float()[seen]  # [seen, N, D]
        v = value_cache[block, token % block_size].float()[seen]
        if kv_scales is not None:
            k, v = k * kv_scales[0, :, None], v * kv_scales[1, :, None]
        query = q[row].float().view(kv_heads, -1, dim)
        scores = torch.einsum("ngd,tnd->ngt", query, k) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if slopes is not None:
            distance = _key_positions(token[seen], rows, row) - int(rows.positions[row])
            scores = scores + slopes.view(kv_heads, -1, 1) * distance
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(kv_heads, -1, 1)), -1)
        weights = scores.softmax(-1)[..., : len(v)]
        out[row] = torch.einsum("ngt,tnd->ngd", weights, v).view(num_heads, dim)
    return out


def _key_positions(token: torch.Tensor, rows: RowMasks, row: int) -> torch.Tensor:
    """[seen] positions of keys, given by their indices in the cache, as a row sees them."""
    if rows.ancestors is None:
        return token
    limit, bits = int(rows.limits[row]), int(rows.ancestors[row]) & (2**TREE_NODES - 1)
    places = token.tolist()
    for i, place in enumerate(places):
        if place > limit:
            places[i] = limit + (bits & ((1 << (place - limit)) - 1)).bit_count()
    return torch.tensor(places, device=token.device)
