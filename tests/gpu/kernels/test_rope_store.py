"""q/k norm, rotary embedding and KV store against the torch path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_llm.gpu.kernels.rope_store import (
    FP8_LIMITS,
    rope_store,
    rope_store_reference,
    store,
    store_reference,
)

BLOCK, BLOCKS, MAX_LEN = 16, 4, 64
FP8 = torch.float8_e4m3fn


def make_caches(
    device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [blocks, 16, N, D] of the second of two layers, filled with 7."""
    if layout == "block_first":
        data = torch.full((BLOCKS, 2, 2, BLOCK, kv_heads, dim), 7.0, device=device).to(dtype)
        return data[:, 1, 0], data[:, 1, 1]
    data = torch.full((2, 2, BLOCKS, kv_heads, BLOCK, dim), 7.0, device=device).to(dtype)
    return data[1, 0].transpose(1, 2), data[1, 1].transpose(1, 2)


def assert_same(result: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """Exactly, or to the last bits of numbers of up to about 4: the order of the norm's sum
    decides roundings, and the interpreter cuts bfloat16 off instead of rounding it."""
    if exact:
        assert torch.equal(result, expected)
        return
    eps = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result, expected, rtol=4 * eps, atol=16 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, rotary_dim",
    [(4, 2, 64, 64), (10, 2, 80, 80), (3, 3, 96, 96), (9, 1, 128, 128), (2, 1, 256, 256),
     (4, 1, 80, 32), (2, 2, 128, 6)],
)  # fmt: skip
@pytest.mark.parametrize("has_norm", [False, True])
def test_matches_torch(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary_dim: int,
    has_norm: bool,
) -> None:
    torch.manual_seed(dim + rotary_dim)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    angles = torch.randn(MAX_LEN, rotary_dim // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([5, 63, 10**6, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([21, 63, -1, 0], device=device)
    scales = 1 + torch.randn(2, dim, device=device).to(dtype) / 4
    q_weight, k_weight = scales if has_norm else (None, None)
    layout = "block_first" if heads % 2 else "slabs"
    caches = make_caches(device, dtype, kv_heads, dim, layout)
    expected_caches = make_caches(device, dtype, kv_heads, dim, layout)

    arguments = (qkv, positions, slots, table, q_weight, k_weight, 1e-6)
    q = rope_store(*arguments, *caches, heads)
    expected = rope_store_reference(*arguments, *expected_caches, heads)
    assert q.shape == (4, heads, dim) and q.is_contiguous() and q.dtype == dtype
    cut_off = device.type == "cpu" and dtype == torch.bfloat16
    exact = not has_norm and not cut_off
    kept = [0, 1, 3]  # the queries of a padding row mean nothing
    assert_same(q[kept], expected[kept], exact=exact)
    assert_same(caches[0], expected_caches[0], exact=exact)
    assert torch.equal(caches[1], expected_caches[1])
    assert not torch.equal(caches[0][0, 0], torch.full_like(caches[0][0, 0], 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8, scaled", [(FP8, False), (FP8, True), (torch.float8_e5m2, False)])
def test_float8_cache(
    device: torch.device, dtype: torch.dtype, fp8: torch.dtype, scaled: bool
) -> None:
    """Values that float8 can hold arrive exactly, larger ones saturate, NaN stays NaN. With scales,
    each head's keys and values are divided by their own.

    The interpreter neither rounds to float8 correctly nor keeps NaN: those are for devices only.
    """
    torch.manual_seed(0)
    heads, kv_heads, dim = 2, 2, 64
    most = FP8_LIMITS[fp8]
    scales = torch.tensor([[2.0, 0.5], [0.25, 4.0]], device=device)  # exact in every type
    inverses = 1 / scales if scaled else None
    if device.type == "cpu":
        qkv = torch.randint(1, 8, (3, 6, dim)) / 4 * torch.randn(3, 6, dim).sign()
    else:
        qkv = torch.randn(3, 6, dim, device=device)
        qkv[:, 4, 2] = float("nan")
    qkv[:, 2, :2] = torch.tensor([6e4, -min(2.5 * most, 6e4)])
    qkv[:, 4, :2] = torch.tensor([most, -6e4])
    if scaled:
        qkv[:, 3] = qkv[:, 3].clamp(-1, 1) * 0.5
        qkv[:, 4, 0] = most / 4
    qkv = qkv.view(3, -1).to(dtype)
    table = torch.cat((torch.ones(8, dim // 2), torch.zeros(8, dim // 2)), -1).to(device)
    positions = torch.arange(3, dtype=torch.int32, device=device)
    slots = torch.tensor([40, 2, -1], dtype=torch.int32, device=device)
    caches = make_caches(device, fp8, kv_heads, dim, "block_first")
    expected = make_caches(device, fp8, kv_heads, dim, "block_first")
    arguments = (qkv, positions, slots, table, None, None, 0.0)
    q = rope_store(*arguments, *caches, heads, inverses=inverses)
    rope_store_reference(*arguments, *expected, heads, inverses=inverses)
    assert torch.equal(q[:2].view(2, -1), qkv[:2, : 2 * dim])
    for cache, other in zip(caches, expected):
        torch.testing.assert_close(cache.float(), other.float(), rtol=0, atol=0, equal_nan=True)
    key, value = caches[0][2, 8, 0].float(), caches[1][2, 8, 0].float()
    assert key[:2].tolist() == [most, -most]
    assert value[:2].tolist() == [most, -most]
    assert value[2].isnan() or device.type == "cpu"
    if scaled:  # what is read back, times the scale, is what was stored
        read = caches[0][2, 8].float() * scales[0, :, None]
        torch.testing.assert_close(read[1], qkv.view(3, 6, dim)[0, 3].float(), rtol=2**-4, atol=0)

    stored = make_caches(device, fp8, kv_heads, dim, "block_first")
    k, v = qkv.view(3, 6, dim)[:, 2:4], qkv.view(3, 6, dim)[:, 4:]
    store(k, v, slots, *stored, inverses=inverses)
    for cache, other in zip(stored, expected):
        torch.testing.assert_close(cache.float(), other.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads, dim", [(12, 64), (3, 80), (1, 256)])
@pytest.mark.parametrize("layout", ["block_first", "slabs"])
def test_store(
    device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int, layout: str
) -> None:
    """Keys and values that are views of a fused projection."""
    torch.manual_seed(dim)
    qkv = torch.randn(3, 3, kv_heads, dim, device=device).to(dtype)
    slots = torch.tensor([33, -5, 15], dtype=torch.int32, device=device)
    caches = make_caches(device, dtype, kv_heads, dim, layout)
    expected = make_caches(device, dtype, kv_heads, dim, layout)
    store(qkv[:, 1], qkv[:, 2], slots, *caches)
    store_reference(qkv[:, 1], qkv[:, 2], slots, *expected)
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])
    assert torch.equal(caches[0][2, 1], qkv[0, 1]) and torch.equal(caches[1][0, 15], qkv[2, 2])
    assert int((caches[0] == 7.0).all((2, 3)).sum()) == BLOCKS * BLOCK - 2


def test_many_rows_and_strided_projection(device: torch.device) -> None:
    """More tiles than programs; rows of qkv lie apart."""
    torch.manual_seed(0)
    rows, heads, kv_heads, dim = (5000 if device.type == "cuda" else 48), 2, 1, 32
    qkv = torch.randn(rows, 256, device=device)[:, 64 : 64 + 4 * dim]
    table = torch.randn(rows, dim, device=device)
    positions = torch.arange(rows, device=device).flip(0)
    slots = torch.randperm(rows, device=device)
    shape = (-(-rows // BLOCK), BLOCK, kv_heads, dim)
    caches = [torch.zeros(shape, device=device) for _ in range(2)]
    expected_caches = [torch.zeros(shape, device=device) for _ in range(2)]
    q = rope_store(qkv, positions, slots, table, None, None, 0.0, *caches, heads)
    arguments = (qkv.contiguous(), positions, slots, table, None, None, 0.0)
    expected = rope_store_reference(*arguments, *expected_caches, heads)
    assert torch.equal(q, expected)
    assert torch.equal(caches[0], expected_caches[0])
    assert torch.equal(caches[1], expected_caches[1])


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """A float8 cache whose third block begins 2**31 elements in."""
    elements = 2**31 + 2 * BLOCK * 64
    if device.type == "cpu":  # the system's zeros: pages that nobody writes cost no memory
        flat = torch.from_numpy(np.zeros(elements, np.uint8)).view(FP8)
    else:
        flat = torch.zeros(elements, dtype=torch.uint8, device=device).view(FP8)
    shape, strides = (3, BLOCK, 1, 64), (2**30, 64, 64, 1)
    caches = [flat.as_strided(shape, strides, kind * BLOCK * 64) for kind in range(2)]
    positions, slots = torch.tensor([[0], [37]], device=device)
    qkv = torch.arange(1.0, 4.0, device=device).repeat_interleave(64)[None]
    table = torch.cat((torch.ones(4, 32), torch.zeros(4, 32)), -1).to(device)
    rope_store(qkv, positions, slots, table, None, None, 0.0, *caches, 1)
    assert torch.equal(caches[0][2, 5].float(), qkv[:, 64:128])
    assert torch.equal(caches[1][2, 5].float(), qkv[:, 128:])
    heads = qkv.view(1, 3, 64)
    store(heads[:, :1], heads[:, 1:2], slots - 1, *caches)
    assert torch.equal(caches[0][2, 4].float(), qkv[:, :64])
    assert torch.equal(caches[1][2, 4].float(), qkv[:, 64:128])


def test_empty_and_refused(device: torch.device) -> None:
    key, value = make_caches(device, torch.float32, 1, 64, "block_first")
    table = torch.zeros(8, 64, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    qkv = torch.empty(0, 3 * 64, device=device)
    q = rope_store(qkv, none, none, table, None, None, 0.0, key, value, 1)
    assert q.shape == (0, 1, 64)
    store(q, q, none, key, value)
    with pytest.raises(AssertionError):  # the projection has no room for two query heads
        rope_store(qkv, none, none, table, None, None, 0.0, key, value, 2)
    with pytest.raises(AssertionError):  # a cache of another type
        store(q, q, none, key.half(), value.half())
