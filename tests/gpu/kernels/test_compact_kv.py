"""Compaction of accepted KV against its reference, and against copies made from an untouched
cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_llm.gpu.kernels.compact_kv import MAX_MOVES, compact_kv, compact_kv_reference

BLOCK = 16


def make_cache(
    device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int, block_first: bool = True
) -> torch.Tensor:
    """[10 blocks, 2 layers, 2, 16, N, D]; as slabs: layers outermost, heads before tokens."""
    blocks, layers = 10, 2
    if block_first:
        data = torch.randn(blocks, layers, 2, BLOCK, kv_heads, dim, device=device)
    else:
        data = torch.randn(layers, 2, blocks, kv_heads, BLOCK, dim, device=device)
    data = data.to(dtype)
    return data if block_first else data.permute(2, 0, 1, 4, 3, 5)


def accepted_moves(
    rng: np.random.Generator, bases: list[int], paths: list[int], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random accepted paths of trees whose first node lies `base` tokens into each sequence.

    Sequence s owns the blocks 3s .. 3s + 2, in reverse order, so a path crosses scattered blocks.
    """
    sources = rng.integers(-(2**40), 2**40, (len(bases), width))  # unused entries are never read
    destinations = rng.integers(-(2**40), 2**40, (len(bases), width))
    for row, (base, length) in enumerate(zip(bases, paths)):
        nodes = np.sort(rng.choice(3 * BLOCK - base, length, replace=False))
        for moves, tokens in ((sources, base + nodes), (destinations, base + np.arange(length))):
            moves[row, :length] = (3 * row + 2 - tokens // BLOCK) * BLOCK + tokens % BLOCK
    return sources, destinations


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "dtype, kv_heads, dim, width, block_first",
    [
        (torch.float32, 2, 64, 5, True),
        (torch.bfloat16, 3, 80, 8, True),
        (torch.float16, 1, 96, 16, False),
        (torch.float8_e4m3fn, 2, 128, 13, False),
        (torch.bfloat16, 1, 256, MAX_MOVES, True),
    ],
)
def test_matches_twin(
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int,
    dim: int,
    width: int,
    block_first: bool,
) -> None:
    torch.manual_seed(dim)
    rng = np.random.default_rng(dim)
    paths = [min(width, 30), 0, 3]
    moves = accepted_moves(rng, [5, 0, 14], paths, width)
    sources, destinations = (torch.from_numpy(m).to(device) for m in moves)
    counts = torch.tensor(paths, dtype=torch.int32, device=device)
    cache = make_cache(device, dtype, kv_heads, dim, block_first)
    before = cache.clone(memory_format=torch.contiguous_format)
    expected = before.clone()
    compact_kv_reference(expected, sources, destinations, counts)
    compact_kv(cache, sources, destinations, counts)
    assert torch.equal(as_bytes(cache), as_bytes(expected))
    assert not torch.equal(as_bytes(cache), as_bytes(before))

    for row, count in enumerate(paths):  # the reference itself, move by move
        for source, target in zip(sources[row, :count].tolist(), destinations[row, :count]):
            old = before[source // BLOCK, :, :, source % BLOCK]
            new = cache[target // BLOCK, :, :, target % BLOCK]
            assert torch.equal(as_bytes(new), as_bytes(old))


def test_destination_is_an_earlier_source(device: torch.device) -> None:
    """A chain of moves by one: each token arrives unchanged, also in the opposite order."""
    for step in (1, -1):
        cache = make_cache(device, torch.float32, 1, 64)
        before = cache.clone()
        slots = torch.arange(20, 40, device=device)[None]
        counts = torch.tensor([20], dtype=torch.int32, device=device)
        compact_kv(cache, slots + step, slots.clone(), counts)
        tokens = cache[:, 1, 0].reshape(-1, 64)
        assert torch.equal(tokens[20:40], before[:, 1, 0].reshape(-1, 64)[20 + step : 40 + step])


def test_nothing_to_do(device: torch.device) -> None:
    """Counts of 0 and moves in place leave the cache alone."""
    cache = make_cache(device, torch.float32, 1, 64)
    before = cache.clone()
    slots = torch.tensor([[3, 4], [20, 21]], device=device)
    counts = torch.tensor([2, 0], dtype=torch.int32, device=device)
    compact_kv(cache, slots, torch.tensor([[3, 4], [40, 41]], device=device), counts)
    compact_kv(cache, slots[:0], slots[:0], counts[:0])
    assert torch.equal(cache, before)


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """A cache of one-byte elements whose third block begins 2**31 elements in."""
    elements = 2**31 + 2 * BLOCK * 64
    if device.type == "cpu":  # the system's zeros: pages that nobody writes cost no memory
        flat = torch.from_numpy(np.zeros(elements, np.uint8))
    else:
        flat = torch.zeros(elements, dtype=torch.uint8, device=device)
    strides = (2**30, 2 * BLOCK * 64, BLOCK * 64, 64, 64, 1)
    cache = flat.as_strided((3, 1, 2, BLOCK, 1, 64), strides)
    token = torch.arange(64, dtype=torch.uint8, device=device)
    cache[2, 0, :, 5, 0] = token
    source, target = (torch.tensor([[slot]], device=device) for slot in (37, 33))
    compact_kv(cache, source, target, torch.ones(1, dtype=torch.int32, device=device))
    assert torch.equal(cache[2, 0, 0, 1, 0], token) and torch.equal(cache[2, 0, 1, 1, 0], token)


def test_too_many_moves(device: torch.device) -> None:
    moves = torch.zeros(1, MAX_MOVES + 1, dtype=torch.int64, device=device)
    counts = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(AssertionError):
        compact_kv(make_cache(device, torch.float32, 1, 64), moves, moves, counts)
