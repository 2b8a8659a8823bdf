"""The compiled CPU kernels against their torch references, and the loader without a compiler."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import native
from hetero_llm.cpu.fused import native_add_rms_norm, native_silu_mul
from hetero_llm.cpu.paged_attention import NativeRowKernel, native_row_kernel
from hetero_llm.models.layers import GatedActivation, add_rms_norm
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.scored_attention import Scoring
from hetero_llm.utils.env import cache_dir
from tests.cpu.attention_cases import AttentionCase, attend_all, attend_both

CPU = torch.device("cpu")
HAS_BF16_DOT = "avx512_bf16" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(heads=4, kv_heads=1, dim=128, window=None, block_size=16),
        AttentionCase(heads=8, kv_heads=8, dim=64, window=None, block_size=8),
        AttentionCase(heads=6, kv_heads=2, dim=80, window=37, block_size=16),
        AttentionCase(heads=14, kv_heads=2, dim=128, window=None, block_size=128),
        AttentionCase(heads=12, kv_heads=4, dim=256, window=300, block_size=16),
        AttentionCase(heads=3, kv_heads=3, dim=16, window=1, block_size=16),
        AttentionCase(heads=7, kv_heads=1, dim=64, window=None, block_size=16, softcap=0.7),
        AttentionCase(heads=4, kv_heads=4, dim=80, window=300, block_size=16, alibi=True),
        AttentionCase(8, 2, dim=64, window=None, block_size=8, softcap=0.7, alibi=True),
    ],
    ids=str,
)
def test_row_attention_equals_its_reference(case: AttentionCase, dtype: torch.dtype) -> None:
    reference, ours, exact, same_cache = attend_all(case, dtype)
    assert same_cache, "K and V were stored differently"
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)


def test_a_rows_result_does_not_depend_on_batch_or_threads() -> None:
    shape = KVCacheShape(1, 2, 64, 16, torch.bfloat16)
    cache = PagedKVCache(shape, 100, CPU)
    cache.data.normal_()
    kernel = native_row_kernel(cache, 8, 0.125)
    assert kernel is not None
    contexts = np.array([700, 3, 257, 1024])
    pieces = np.random.default_rng(0).permutation(100)[:64].reshape(1, 64).repeat(4, 0) * 2
    q = torch.randn(4, 8, 64).bfloat16()
    together = kernel.attend(kernel.plan(contexts, pieces, None), 0, q)
    torch.set_num_threads(1)
    for row in range(4):
        one = slice(row, row + 1)
        alone = kernel.attend(kernel.plan(contexts[one], pieces[one], None), 0, q[one])
        assert torch.equal(alone, together[one])


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    shape = KVCacheShape(1, 1, 16, 16, torch.float32)
    cache = PagedKVCache(shape, 2, CPU)
    cache.data.zero_()
    cache.data[0, 0, 0, :, 0, 0] = torch.linspace(-3e4, 3e4, 16)
    cache.data[0, 0, 1, :, 0, :] = torch.arange(16.0).unsqueeze(1)
    kernel = native_row_kernel(cache, 1, 1.0)
    assert kernel is not None
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    out = kernel.attend(kernel.plan(np.array([16]), np.zeros((1, 1), np.int64), None), 0, q)
    torch.testing.assert_close(out, torch.full((1, 1, 16), 15.0))


def chunk_kernel(cache: PagedKVCache, heads: int, scale: float) -> NativeRowKernel | None:
    """The kernel; None, and asserted to say so, on a CPU that cannot attend chunks."""
    kernel = native_row_kernel(cache, heads, scale, chunks=True)
    assert kernel is not None
    assert kernel.supports_chunks == HAS_BF16_DOT
    return kernel if HAS_BF16_DOT else None


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(heads=4, kv_heads=1, dim=128, window=None, block_size=16),
        AttentionCase(heads=4, kv_heads=1, dim=128, window=100, block_size=16),
        AttentionCase(heads=8, kv_heads=8, dim=64, window=None, block_size=8),
        AttentionCase(heads=14, kv_heads=2, dim=64, window=1, block_size=32),
        AttentionCase(heads=12, kv_heads=4, dim=256, window=37, block_size=16),
        AttentionCase(heads=6, kv_heads=2, dim=96, window=None, block_size=8),
        AttentionCase(heads=130, kv_heads=1, dim=32, window=64, block_size=16),
    ],
    ids=str,
)
def test_chunk_attention_equals_its_reference(case: AttentionCase) -> None:
    """Alone and between decoding rows; on a CPU without bf16 dot products torch serves both."""
    chunks = [(0, 2), (0, 63), (0, 65), (1, 64), (5, 5), (61, 64), (300, 300), (932, 36)]
    steps = [([start], [count]) for start, count in chunks]
    steps.append(([40, 9, 0, 77, 200], [1, 5, 64, 1, 70]))
    for starts, counts in steps:
        reference, ours, exact, same_cache = attend_all(case, torch.bfloat16, starts, counts)
        assert same_cache
        torch.testing.assert_close(ours, reference, rtol=1e-2, atol=1e-2)
        reference_error, our_error = (
            (x.double() - exact).square().mean().sqrt() for x in (reference, ours)
        )
        assert our_error <= 1.5 * reference_error, (starts, counts)


@pytest.mark.parametrize("window", [None, 50])
def test_a_chunks_row_does_not_depend_on_the_other_rows_or_threads(window: int | None) -> None:
    cache = PagedKVCache(KVCacheShape(1, 2, 64, 16, torch.bfloat16), 40, CPU)
    cache.data.normal_()
    kernel = chunk_kernel(cache, 6, 0.125)
    if kernel is None:
        return
    pieces = np.random.default_rng(0).permutation(40) * 2
    q = torch.randn(300, 6, 64).bfloat16()
    together = kernel.attend_chunk(kernel.plan_chunk(250, 300, pieces, window), 0, q)
    torch.set_num_threads(1)
    for first, last in ((0, 300), (0, 7), (7, 8), (130, 197), (299, 300)):
        plan = kernel.plan_chunk(250 + first, last - first, pieces, window)
        part = kernel.attend_chunk(plan, 0, q[first:last])
        assert torch.equal(part, together[first:last])


@pytest.mark.parametrize(("start", "window"), [(70, None), (70, 20), (3, None)])
def test_a_chunk_reads_only_the_tokens_it_sees(start: int, window: int | None) -> None:
    """NaN in other layers, other blocks, behind the last row and before the window, and in what
    an earlier call left on the stack."""
    torch.set_num_threads(1)
    cache = PagedKVCache(KVCacheShape(2, 1, 32, 16, torch.bfloat16), 12, CPU)
    cache.data.fill_(torch.nan)
    kernel = chunk_kernel(cache, 3, 0.2)
    if kernel is None:
        return
    every = kernel.plan_chunk(64, 64, np.arange(8) * 4, None)
    assert bool(kernel.attend_chunk(every, 1, torch.ones(64, 3, 32).bfloat16()).isnan().all())
    count = 22
    table = np.array([7, 2, 9, 4, 11, 0])
    first, last = 0 if window is None else start - window + 1, start + count
    for position in range(first, last):
        cache.data[table[position // 16], 1, :, position % 16] = 0.5
    # Entries that no token sees may point anywhere.
    columns = np.arange(6)
    seen = (columns >= first // 16) & (columns * 16 < last)
    pieces = np.where(seen, table * 4, 2**40)
    q = torch.randn(count, 3, 32).bfloat16()
    out = kernel.attend_chunk(kernel.plan_chunk(start, count, pieces, window), 1, q)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))


def test_a_chunks_scores_far_apart_neither_overflow_nor_vanish() -> None:
    cache = PagedKVCache(KVCacheShape(1, 1, 32, 16, torch.bfloat16), 9, CPU)
    cache.data.zero_()
    steps = torch.linspace(-3e4, 3e4, 144)
    kernel = chunk_kernel(cache, 1, 1.0)
    if kernel is None:
        return
    pieces = np.arange(9) * 2
    q = torch.zeros(144, 1, 32).bfloat16()
    q[..., 0] = 1.0
    for sign, want in ((1, torch.arange(144.0)), (-1, torch.zeros(144))):
        cache.data[:, 0, 0, :, 0, 0] = sign * steps.view(9, 16)
        cache.data[:, 0, 1, :, 0, :] = torch.arange(144.0).view(9, 16, 1)
        out = kernel.attend_chunk(kernel.plan_chunk(0, 144, pieces, None), 0, q)
        torch.testing.assert_close(out[:, 0, 0].float(), want)


@pytest.mark.parametrize(
    ("dim", "dtype", "scoring"),
    [
        (80, torch.bfloat16, Scoring(1.0)),
        (16, torch.bfloat16, Scoring(1.0)),
        (64, torch.float32, Scoring(1.0)),
        (64, torch.bfloat16, Scoring(1.0, softcap=9.0)),
        (64, torch.bfloat16, Scoring(1.0, slopes=(0.5,))),
    ],
)
def test_chunks_the_kernel_cannot_do_stay_on_torch(
    dim: int, dtype: torch.dtype, scoring: Scoring
) -> None:
    cache = PagedKVCache(KVCacheShape(1, 1, dim, 16, dtype), 2, CPU)
    kernel = native_row_kernel(cache, 1, scoring, chunks=True)
    assert kernel is not None and not kernel.supports_chunks
    alibi = scoring.slopes is not None
    case = AttentionCase(2, 1, dim, None, 16, softcap=scoring.softcap, alibi=alibi)
    reference, ours, _ = attend_both(case, dtype, [20, 3], [7, 1])
    assert torch.equal(reference[:7], ours[:7])


@pytest.mark.parametrize(("dim", "dtype"), [(24, torch.float32), (64, torch.float16)])
def test_shapes_the_kernel_cannot_do_stay_on_torch(dim: int, dtype: torch.dtype) -> None:
    cache = PagedKVCache(KVCacheShape(1, 1, dim, 16, dtype), 2, CPU)
    assert native_row_kernel(cache, 1, 1.0) is None


def test_sinks_stay_on_torch() -> None:
    cache = PagedKVCache(KVCacheShape(1, 1, 64, 16, torch.float32), 2, CPU)
    assert native_row_kernel(cache, 1, Scoring(1.0)) is not None
    assert native_row_kernel(cache, 1, Scoring(1.0, sinks=True)) is None


@pytest.mark.parametrize(("rows", "size"), [(1, 320), (16, 320), (33, 4096), (300, 768)])
def test_norm_and_gate_equal_torch_up_to_one_rounding(rows: int, size: int) -> None:
    library = native.load()
    assert library is not None
    x, residual = torch.randn(rows, size).bfloat16(), torch.randn(rows, size).bfloat16()
    weight = torch.randn(size).bfloat16()
    for given in (None, residual):
        copies = [None if given is None else given.clone() for _ in range(2)]
        want, want_total = add_rms_norm(x, copies[0], weight, 1e-5)
        got, got_total = native_add_rms_norm(library)(x, copies[1], weight, 1e-5)
        assert torch.equal(got_total, want_total)
        assert float((got != want).float().mean()) < 1e-3
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
    gate = GatedActivation("silu")
    gate_up = 6 * torch.randn(rows, 2 * size).bfloat16()
    want, got = gate.plain(gate_up), native_silu_mul(library, gate.plain)(gate_up)
    assert float((got != want).float().mean()) < 1e-3
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def test_without_a_compiler_torch_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path))  # where no library lies
    native.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.load() is None
        assert "no C++ compiler" in caplog.text
        cache = PagedKVCache(KVCacheShape(1, 1, 16, 16, torch.float32), 2, CPU)
        assert native_row_kernel(cache, 1, 1.0) is None
    finally:
        native.load.cache_clear()


def test_the_library_is_built_once_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the cache of this user: building it anew takes a minute. test_native.py has empty ones."""
    first = native.build()
    assert first.parent == cache_dir() and first.exists()
    stamp = first.stat().st_mtime_ns
    assert native.build() == first and first.stat().st_mtime_ns == stamp
    native.load.cache_clear()
    try:
        monkeypatch.setenv("HETERO_LLM_NATIVE", "0")
        assert native.load() is None
        monkeypatch.setenv("HETERO_LLM_NATIVE", "maybe")
        native.load.cache_clear()
        with pytest.raises(ConfigError, match="HETERO_LLM_NATIVE='maybe'"):
            native.load()
    finally:
        native.load.cache_clear()


def test_mixed_steps_use_the_kernel_for_single_rows_only() -> None:
    """A chunk between two decoding rows: the same result with and without the kernel."""
    case = AttentionCase(heads=4, kv_heads=2, dim=32, window=None, block_size=8)
    reference, ours, same_cache = attend_both(
        case, torch.float32, starts=[40, 9, 0, 77], counts=[1, 5, 6, 1]
    )
    assert same_cache
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


def test_with_amx_chunks_are_left_to_torch() -> None:
    cache = PagedKVCache(KVCacheShape(1, 1, 64, 16, torch.bfloat16), 2, CPU)
    kernel = native_row_kernel(cache, 1, 1.0)
    assert kernel is not None
    has_amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    assert kernel.supports_chunks == (HAS_BF16_DOT and not has_amx)
