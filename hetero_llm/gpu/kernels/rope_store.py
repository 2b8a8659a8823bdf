"""Between the qkv projection and attention: q/k norm, rotary embedding, store into the KV cache.

Work is cut into tiles of a few heads of one row, all of one kind (queries, keys or values), which
the programs share in a fixed stride: one row spreads over its heads, many rows over the chip, and
one compiled kernel serves both.

Wrappers `rope_store` and `store`, references `*_reference`; timed by `bench.kernels.elementwise`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import INTERPRETED, pdl_options, strided_grid, wait_and_release
from hetero_llm.models.rotary import apply_rotary

MAX_HEAD_DIM = 256
FP8_LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Types of an 8-bit cache, and their largest values; larger ones are stored as these."""

_TILE_HEADS = 8
_PROGRAMS_PER_SM = 32
# A fused multiply-add rounds once where the torch path rounds twice.
_NO_FUSION = {} if INTERPRETED else {"enable_fp_fusion": False}


@triton.jit
def _for_cache(x, element_ty: tl.constexpr):
    """Converts to the cache's type; to 8 bits with saturation, NaN staying NaN."""
    if element_ty.primitive_bitwidth == 8:
        limit: tl.constexpr = 57344.0 if element_ty.is_fp8e5() else 448.0
        x = tl.clamp(x.to(tl.float32), -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return x.to(element_ty)


@triton.jit
def _cache_offset(slot, head, block_stride, token_stride, head_stride, BLOCK: tl.constexpr):
    """Elements from the cache's start to the heads of one token; slot is int64."""
    start = slot // BLOCK * block_stride + slot % BLOCK * token_stride
    return start + head.to(tl.int64) * head_stride


@triton.jit
def _times_weight(x, scale, weight, dtype: tl.constexpr):
    """x * scale rounded to dtype, then times the weight, rounded again; float32 in and out."""
    return ((x * scale[:, None]).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _rotate(x, cos, y, sin, dtype: tl.constexpr):
    """x * cos + y * sin, every product and the sum rounded to dtype; float32 in and out."""
    first = (x * cos).to(dtype).to(tl.float32)
    second = (y * sin).to(dtype).to(tl.float32)
    return (first + second).to(dtype).to(tl.float32)


@triton.jit
def _place_and_angle(
    slot_ptr, position_ptr, table_ptr, index, num_rows, dims, dtype: tl.constexpr,
    TILES: tl.constexpr, TURNED_TILES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """KV slot of a tile's row, cos and sin of its position (unused in tiles of values).

    Loaded ahead of the tile: three loads, each of which depends on the one before.
    """
    row = tl.cast(index // TILES, tl.int64)
    exists = row < num_rows
    slot = tl.load(slot_ptr + row, mask=exists, other=-1).to(tl.int64)
    position = tl.load(position_ptr + row, mask=exists, other=0).to(tl.int64)
    # A padding row may hold any position: its factors are not read.
    angles = table_ptr + position * (2 * HALF) + dims
    mask = (dims < HALF) & (slot >= 0) & (index % TILES < TURNED_TILES)
    cos = tl.load(angles, mask=mask, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angles + HALF, mask=mask, other=0.0).to(dtype).to(tl.float32)
    return slot, cos, sin


@triton.jit
def _put_heads(
    ptrs, low, high, rest, valid,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """Stores tiles of heads from `ptrs` on: both rotated halves and the entries behind them."""
    element_ty: tl.constexpr = ptrs.dtype.element_ty
    dims = tl.arange(0, HALF_PADDED)[None, :]
    mask = valid[:, None] & (dims < HALF)
    tl.store(ptrs[:, None] + dims, _for_cache(low, element_ty), mask=mask)
    tl.store(ptrs[:, None] + HALF + dims, _for_cache(high, element_ty), mask=mask)
    if REST > 0:
        others = tl.arange(0, REST_PADDED)[None, :]
        tl.store(
            ptrs[:, None] + 2 * HALF + others,
            _for_cache(rest, element_ty),
            mask=valid[:, None] & (others < REST),
        )


# large: one loop, with a few lines for each option.
@triton.jit(do_not_specialize=["num_rows"])
def _rope_store(
    q_ptr, qkv_ptr, position_ptr, slot_ptr, table_ptr, q_weight_ptr, k_weight_ptr,
    key_ptr, value_ptr, inverse_ptr, num_rows, eps,
    qkv_stride, block_stride, token_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    # Tiles [heads, dims] even of values that all heads share: broadcasting would cost a barrier.
    heads = tl.arange(0, TILE)
    dims = (heads * 0)[:, None] + tl.arange(0, HALF_PADDED)[None, :]
    in_half = dims < HALF
    others = (heads * 0)[:, None] + 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
    if HAS_NORM:
        q_low = tl.load(q_weight_ptr + dims, mask=in_half, other=0.0).to(tl.float32)
        q_high = tl.load(q_weight_ptr + HALF + dims, mask=in_half, other=0.0).to(tl.float32)
        k_low = tl.load(k_weight_ptr + dims, mask=in_half, other=0.0).to(tl.float32)
        k_high = tl.load(k_weight_ptr + HALF + dims, mask=in_half, other=0.0).to(tl.float32)
        if REST > 0:
            q_rest = tl.load(q_weight_ptr + others, mask=others < DIM, other=0.0).to(tl.float32)
            k_rest = tl.load(k_weight_ptr + others, mask=others < DIM, other=0.0).to(tl.float32)
    q_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    kv_tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    tiles: tl.constexpr = q_tiles + 2 * kv_tiles
    turned_tiles: tl.constexpr = q_tiles + kv_tiles
    first = tl.program_id(0)
    slot, cos, sin = _place_and_angle(
        slot_ptr, position_ptr, table_ptr, first, num_rows, dims, dtype, tiles, turned_tiles, HALF
    )
    wait_and_release(PDL)

    for index in tl.range(first, num_rows * tiles, tl.num_programs(0), num_stages=1):
        row = tl.cast(index // tiles, tl.int64)
        tile = index % tiles
        is_query = tile < q_tiles
        is_value = tile >= turned_tiles
        first_tile = tl.where(is_query, 0, tl.where(is_value, turned_tiles, q_tiles))
        first_head = tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
        head = (tile - first_tile) * TILE + heads
        valid = head < tl.where(is_query, HEADS, KV_HEADS)
        source = qkv_ptr + row * qkv_stride + ((first_head + head) * DIM)[:, None]
        loadable = valid[:, None] & in_half
        low = tl.load(source + dims, mask=loadable, other=0.0).to(tl.float32)
        high = tl.load(source + HALF + dims, mask=loadable, other=0.0).to(tl.float32)
        rest = low
        if REST > 0:
            in_rest = valid[:, None] & (others < DIM)
            rest = tl.load(source + others, mask=in_rest, other=0.0).to(tl.float32)

        if tile < turned_tiles:
            if HAS_NORM:
                squares = tl.sum(low * low + high * high, 1)
                if REST > 0:
                    squares += tl.sum(rest * rest, 1)
                scale = tl.rsqrt(squares / DIM + eps)
                low = _times_weight(low, scale, tl.where(is_query, q_low, k_low), dtype)
                high = _times_weight(high, scale, tl.where(is_query, q_high, k_high), dtype)
                if REST > 0:
                    rest = _times_weight(rest, scale, tl.where(is_query, q_rest, k_rest), dtype)
            turned = _rotate(low, cos, high, -sin, dtype)
            high = _rotate(high, cos, low, sin, dtype)
            low = turned

        if is_query:
            queries = q_ptr + (row * HEADS + head) * DIM
            _put_heads(queries, low, high, rest, valid, HALF, HALF_PADDED, REST, REST_PADDED)
        else:
            cache = key_ptr
            if is_value:
                cache = value_ptr
            place = cache + _cache_offset(
                slot, head, block_stride, token_stride, head_stride, BLOCK
            )
            stored = valid & (slot >= 0)
            if inverse_ptr is not None:
                inverses = inverse_ptr + tl.where(is_value, KV_HEADS, 0) + head
                inverse = tl.load(inverses, mask=valid, other=1.0)[:, None]
                low, high, rest = low * inverse, high * inverse, rest * inverse
            _put_heads(place, low, high, rest, stored, HALF, HALF_PADDED, REST, REST_PADDED)
        slot, cos, sin = _place_and_angle(
            slot_ptr, position_ptr, table_ptr, index + tl.num_programs(0), num_rows, dims, dtype,
            tiles, turned_tiles, HALF,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _store(
    k_ptr, v_ptr, slot_ptr, key_ptr, value_ptr, inverse_ptr, num_rows,
    k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    block_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_release(PDL)
    dims = tl.arange(0, PADDED)[None, :]
    tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    for index in tl.range(tl.program_id(0), num_rows * tiles, tl.num_programs(0), num_stages=1):
        row = tl.cast(index // tiles, tl.int64)
        head = (index % tiles) * TILE + tl.arange(0, TILE)
        slot = tl.load(slot_ptr + row).to(tl.int64)
        mask = (head < KV_HEADS)[:, None] & (dims < DIM)
        k_heads = k_ptr + row * k_row_stride + (head * k_head_stride)[:, None]
        v_heads = v_ptr + row * v_row_stride + (head * v_head_stride)[:, None]
        k = tl.load(k_heads + dims, mask=mask, other=0.0)
        v = tl.load(v_heads + dims, mask=mask, other=0.0)
        offset = _cache_offset(slot, head, block_stride, token_stride, head_stride, BLOCK)
        place = offset[:, None] + dims
        mask = mask & (slot >= 0)
        if inverse_ptr is not None:
            inverses, valid = inverse_ptr + head, head < KV_HEADS
            k = k.to(tl.float32) * tl.load(inverses, mask=valid, other=1.0)[:, None]
            v = v.to(tl.float32) * tl.load(inverses + KV_HEADS, mask=valid, other=1.0)[:, None]
        tl.store(key_ptr + place, _for_cache(k, key_ptr.dtype.element_ty), mask=mask)
        tl.store(value_ptr + place, _for_cache(v, value_ptr.dtype.element_ty), mask=mask)


# large: one launch with each of its arguments, and what they are.
def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    table: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    *,
    inverses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms and rotates queries and keys, stores keys and values, returns the queries.

    Rounds where the torch path rounds (`QKNorm`, `apply_rotary`): every factor, product and sum.
    `positions`, `slot_mapping` and `table` are read before the kernel launched before this one has
    ended, so that kernel must not write them.

    Args:
        qkv: [T, (H + 2 N) * D], queries, keys, values; float32, bfloat16 or float16; rows may be
            strided. D is at most `MAX_HEAD_DIM`.
        positions: [T] int32 or int64, each row's position, a row of `table`.
        slot_mapping: [T] int32 or int64 KV slots, block * block size + offset; negative for a
            padding row: nothing is stored, its queries are undefined, its position may be any.
        table: [max_len, rotary_dim] float32 of `RotaryEmbedding`; the entries of a head behind
            rotary_dim pass through.
        q_weight, k_weight: [D], dtype of qkv: RMS norm of each head first; None: no norm.
        eps: Added to the mean of squares.
        key_cache, value_cache: [blocks, block size, N, D] views of one layer with equal strides,
            last dim contiguous; dtype of qkv, or one of `FP8_LIMITS`.
        num_heads: H.
        inverses: [2, N] float32: keys of each head, and values, are multiplied with these before
            they are stored (`PagedKVCache.inverses`); None: they are not.

    Returns:
        Queries, [T, H, D], contiguous, in qkv's dtype.
    """
    num_rows, width = qkv.shape
    block_size, kv_heads, dim = key_cache.shape[1:]
    rotary_dim = table.shape[1]
    half, rest = rotary_dim // 2, dim - rotary_dim
    _check_cache(key_cache, value_cache, qkv.dtype, inverses)
    _check_rows(num_rows, slot_mapping, positions)
    assert qkv.stride(1) == 1 and width == (num_heads + 2 * kv_heads) * dim, (width, num_heads)
    assert table.dtype == torch.float32 and table.is_contiguous()
    assert rotary_dim % 2 == 0 and 0 < rotary_dim <= dim
    _check_norm(q_weight, k_weight, dim, qkv.dtype)
    q = torch.empty(num_rows, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return q
    half_padded = triton.next_power_of_2(half)
    tile = min(_TILE_HEADS, triton.next_power_of_2(num_heads))
    tiles = triton.cdiv(num_heads, tile) + 2 * triton.cdiv(kv_heads, tile)
    _rope_store[strided_grid(num_rows * tiles, _PROGRAMS_PER_SM, qkv.device)](
        q,
        qkv,
        positions,
        slot_mapping,
        table,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        key_cache,
        value_cache,
        inverses,
        num_rows,
        eps,
        qkv.stride(0),
        *key_cache.stride()[:3],
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        HALF_PADDED=half_padded,
        REST=rest,
        REST_PADDED=triton.next_power_of_2(max(rest, 1)),
        TILE=tile,
        BLOCK=block_size,
        HAS_NORM=q_weight is not None,
        num_warps=max(tile * half_padded // 256, 1),  # 8 elements of each half a thread
        **_NO_FUSION,
        **pdl_options(qkv.device),
    )
    return q


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    inverses: torch.Tensor | None = None,
) -> None:
    """Stores keys and values as they are, for families without a rotary embedding.

    Args:
        k, v: [T, N, D], last dim contiguous, rows and heads strided.
        slot_mapping, key_cache, value_cache, inverses: As of `rope_store`.
    """
    num_rows, kv_heads, dim = k.shape
    block_size = key_cache.shape[1]
    _check_cache(key_cache, value_cache, k.dtype, inverses)
    _check_rows(num_rows, slot_mapping)
    assert v.shape == k.shape and v.dtype == k.dtype and key_cache.shape[2:] == k.shape[1:]
    assert k.stride(2) == 1 and v.stride(2) == 1, (k.stride(), v.stride())
    if num_rows == 0:
        return
    padded = triton.next_power_of_2(dim)
    tile = min(_TILE_HEADS, triton.next_power_of_2(kv_heads))
    tiles = num_rows * triton.cdiv(kv_heads, tile)
    _store[strided_grid(tiles, _PROGRAMS_PER_SM, k.device)](
        k,
        v,
        slot_mapping,
        key_cache,
        value_cache,
        inverses,
        num_rows,
        *k.stride()[:2],
        *v.stride()[:2],
        *key_cache.stride()[:3],
        KV_HEADS=kv_heads,
        DIM=dim,
        PADDED=padded,
        TILE=tile,
        BLOCK=block_size,
        num_warps=max(tile * padded // 256, 1),
        **pdl_options(k.device),
    )


def _check_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    dtype: torch.dtype,
    inverses: torch.Tensor | None,
) -> None:
    assert key_cache.shape == value_cache.shape and key_cache.shape[3] <= MAX_HEAD_DIM
    assert key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1
    assert key_cache.dtype == value_cache.dtype
    assert key_cache.dtype in (dtype, *FP8_LIMITS), (key_cache.dtype, dtype)
    if inverses is not None:
        assert inverses.shape == (2, key_cache.shape[2]) and inverses.is_contiguous()
        assert inverses.dtype == torch.float32


def _check_norm(
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, dim: int, dtype: torch.dtype
) -> None:
    assert (q_weight is None) == (k_weight is None)
    for weight in (q_weight, k_weight):
        if weight is not None:
            assert weight.shape == (dim,) and weight.dtype == dtype and weight.is_contiguous()


def _check_rows(num_rows: int, *vectors: torch.Tensor) -> None:
    for vector in vectors:
        assert vector.shape == (num_rows,) and vector.is_contiguous(), (vector.shape, num_rows)
        assert vector.dtype in (torch.int32, torch.int64), vector.dtype


def rope_store_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    table: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    *,
    inverses: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_store` as the torch path computes it."""
    kv_heads, dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), num_heads + 2 * kv_heads, dim)
    qk, v = heads.split((num_heads + kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        qk = F.rms_norm(qk, (dim,), None, eps)
        qk[:, :num_heads].mul_(q_weight)
        qk[:, num_heads:].mul_(k_weight)
    known = torch.where(slot_mapping < 0, 0, positions).long()
    cos, sin = table[known].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
    turned, rest = qk.split((table.shape[1], dim - table.shape[1]), dim=-1)
    turned = apply_rotary(turned, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    q, k = torch.cat((turned, rest), -1).split((num_heads, kv_heads), dim=1)
    store_reference(k, v, slot_mapping, key_cache, value_cache, inverses=inverses)
    return q.contiguous()


def store_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    inverses: torch.Tensor | None = None,
) -> None:
    """`store` in plain torch."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for part, (cache, new) in enumerate(((key_cache, k), (value_cache, v))):
        if cache.dtype in FP8_LIMITS:
            values = new[kept].float()
            if inverses is not None:
                values = values * inverses[part, :, None]
            saturated = values.clamp(-FP8_LIMITS[cache.dtype], FP8_LIMITS[cache.dtype])
            cache.view(torch.uint8)[block, offset] = saturated.to(cache.dtype).view(torch.uint8)
        else:
            cache[block, offset] = new[kept]
