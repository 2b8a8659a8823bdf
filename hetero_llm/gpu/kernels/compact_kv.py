"""Compaction after a draft tree was verified: the KV of accepted nodes moves to its final KV slots.

The nodes of a tree lie in consecutive KV slots in the order of the draft; those of the accepted
path have to be consecutive afterwards. Node i of the path moves from slot base + node_i to slot
base + i, and as node_i >= i, a destination may be an earlier move's source.

Wrapper `compact_kv`, reference `compact_kv_reference`; timed by `bench.kernels.elementwise`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import pdl_options, strided_grid, wait_and_release

MAX_MOVES = 64
"""Moves of one sequence: a program holds them all in registers."""

_PROGRAMS_PER_SM = 8


@triton.jit(do_not_specialize=["num_sequences"])
def _compact(
    cache_ptr, source_ptr, destination_ptr, count_ptr, num_sequences, move_stride,
    block_stride, layer_stride, kind_stride, token_stride, head_stride,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    MOVES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_and_release(PDL)
    moves = tl.arange(0, MOVES)
    dims = tl.arange(0, PADDED)
    pieces: tl.constexpr = LAYERS * 2 * KV_HEADS
    total = num_sequences * pieces
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        sequence = tl.cast(index // pieces, tl.int64)
        count = tl.load(count_ptr + sequence)
        if count > 0:
            head = tl.cast(index % KV_HEADS, tl.int64)
            kind = tl.cast(index // KV_HEADS % 2, tl.int64)
            layer = tl.cast(index % pieces // (2 * KV_HEADS), tl.int64)
            piece = cache_ptr + layer * layer_stride + kind * kind_stride + head * head_stride

            place = sequence * move_stride + moves
            source = tl.load(source_ptr + place, mask=moves < count, other=0).to(tl.int64)
            target = tl.load(destination_ptr + place, mask=moves < count, other=0).to(tl.int64)
            source_offset = source // BLOCK * block_stride + source % BLOCK * token_stride
            target_offset = target // BLOCK * block_stride + target % BLOCK * token_stride
            real = ((moves < count) & (source != target))[:, None] & (dims < DIM)[None, :]
            kv = tl.load(piece + source_offset[:, None] + dims[None, :], mask=real)
            tl.debug_barrier()  # every thread has read before any thread writes
            tl.store(piece + target_offset[:, None] + dims[None, :], kv, mask=real)


def compact_kv(
    cache: torch.Tensor,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Copies the K and V of tokens between KV slots, in all layers.

    A slot is block * block size + offset. All sources of one sequence are read before any of its
    destinations is written, so they may overlap in any way; a slot of one sequence must not be
    another one's destination.

    Args:
        cache: [blocks, layers, 2, block size, kv_heads, dim], any dtype, last dim contiguous;
            changed in place.
        sources, destinations: [S, M] int64 slots, M at most `MAX_MOVES`, equal strides. A move
            from a slot to itself is skipped.
        counts: [S] int32, moves in use of each sequence: the first ones of its row. A sequence
            without moves costs one read.
    """
    num_sequences, num_moves = sources.shape
    _, layers, kinds, block_size, kv_heads, dim = cache.shape
    assert kinds == 2 and cache.stride(5) == 1, (cache.shape, cache.stride())
    assert destinations.shape == sources.shape and counts.shape == (num_sequences,)
    assert sources.dtype == destinations.dtype == torch.int64 and counts.dtype == torch.int32
    assert sources.stride() == destinations.stride() and sources.stride(1) == 1
    assert counts.is_contiguous() and num_moves <= MAX_MOVES, (counts.stride(), num_moves)
    if sources.numel() == 0:
        return
    padded_moves = triton.next_power_of_2(num_moves)
    padded = triton.next_power_of_2(dim)
    total = num_sequences * layers * 2 * kv_heads
    _compact[strided_grid(total, _PROGRAMS_PER_SM, cache.device)](
        cache,
        sources,
        destinations,
        counts,
        num_sequences,
        sources.stride(0),
        *cache.stride()[:5],
        LAYERS=layers,
        KV_HEADS=kv_heads,
        DIM=dim,
        PADDED=padded,
        MOVES=padded_moves,
        BLOCK=block_size,
        num_warps=min(max(padded_moves * padded // 512, 1), 8),
        **pdl_options(cache.device),
    )


def compact_kv_reference(
    cache: torch.Tensor,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """`compact_kv` in plain torch, one sequence at a time."""
    block_size = cache.shape[3]
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    for row, count in enumerate(counts.tolist()):
        source, target = sources[row, :count], destinations[row, :count]
        kv = raw[source // block_size, :, :, source % block_size]  # [count, layers, 2, N, D], copy
        raw[target // block_size, :, :, target % block_size] = kv
