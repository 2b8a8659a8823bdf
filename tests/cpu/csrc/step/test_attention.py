"""The step's attention against textbook attention in double, for every kind of rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch

from bench.kernels.native_parts import AttentionTokens, StepAttention
from tests.cpu.csrc.step.references import ref_attention

LAYERS = 2
BF16, FLOAT = torch.bfloat16, torch.float32
BF16_DOT = 3  # the level from which weights are rounded to bf16 where lanes are many


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_size: int = 16


@dataclass(frozen=True)
class Sequence:
    """window: of a tree, the tokens before its start that not all its rows see."""

    start: int
    count: int
    tree: bool = False
    window: int = 0


@dataclass(frozen=True, eq=False)
class Case:
    rows: AttentionTokens
    cache: torch.Tensor
    q: torch.Tensor
    scale: float
    expected: torch.Tensor


SHAPES = (
    Shape(heads=4, kv_heads=2, dim=64),
    Shape(heads=3, kv_heads=3, dim=8, block_size=8),
    Shape(heads=5, kv_heads=1, dim=40),
    Shape(heads=7, kv_heads=1, dim=128, block_size=128),
    Shape(heads=9, kv_heads=1, dim=96),
    Shape(heads=1, kv_heads=1, dim=256, block_size=1),
    Shape(heads=6, kv_heads=2, dim=80),
)


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    """Bits of each node's ancestors and itself; parents come before their children."""
    bits = [1]
    for node in range(1, count):
        parent = int(rng.integers(-1, node))
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
    return bits


def make_rows(sequences: tuple[Sequence, ...], block_size: int) -> AttentionTokens:
    """Request slots and blocks in random order; one slot stays unused."""
    rng = np.random.default_rng(len(sequences))
    count = len(sequences)
    columns = -(-max(s.start + s.count for s in sequences) // block_size)
    slots = rng.permutation(count + 1)[:count].astype(np.int32)
    blocks = rng.permutation((count + 1) * columns).astype(np.int32)
    ancestors = [
        bits
        for s in sequences
        for bits in (random_tree(rng, s.window + s.count)[s.window :] if s.tree else [0] * s.count)
    ]
    return AttentionTokens(
        slots,
        np.array([s.start for s in sequences], np.int32),
        np.array([s.count for s in sequences], np.int32),
        np.array([s.start - s.window for s in sequences], np.int32),
        np.array([s.tree for s in sequences], np.uint8),
        np.array(ancestors, np.uint64),
        blocks.reshape(-1, columns),
    )


@lru_cache(maxsize=64)
def make_case(
    shape: Shape, dtype: torch.dtype, window: int, sequences: tuple[Sequence, ...]
) -> Case:
    """Layer 1 of a cache that holds NaN wherever no token may read."""
    size = shape.block_size
    rows = make_rows(sequences, size)
    generator = torch.Generator().manual_seed(5)
    blocks = rows.block_tables.size
    cache = torch.full((blocks, LAYERS, 2, size, shape.kv_heads, shape.dim), torch.nan)
    for slot, sequence in zip(rows.request_slots, sequences):
        count = sequence.start + sequence.count
        tokens = np.arange(count)
        block = torch.from_numpy(rows.block_tables[slot][tokens // size]).long()
        values = torch.randn(count, 2, shape.kv_heads, shape.dim, generator=generator)
        cache[block, 1, :, torch.from_numpy(tokens % size)] = values
    width = shape.heads * shape.dim
    q = torch.randn(rows.count, width + 24, generator=generator).to(dtype)[:, :width]
    cache, scale = cache.to(dtype), shape.dim**-0.5 * 1.5
    expected = ref_attention(cache, rows, q, layer=1, heads=shape.heads, window=window, scale=scale)
    return Case(rows, cache, q, scale, expected)


def check(
    library: ctypes.CDLL,
    shape: Shape,
    sequences: tuple[Sequence, ...],
    *,
    dtype: torch.dtype,
    isa: int,
    window: int = 0,
    threads: int = 1,
) -> bool:
    """Compares with the reference; returns whether contexts were cut."""
    case = make_case(shape, dtype, window, sequences)
    width = shape.heads * shape.dim
    out = torch.full((case.rows.count, width + 8), 7.0)
    attention = StepAttention(library, threads)
    try:
        cut = attention.plan(
            case.cache, case.rows, heads=shape.heads, window=window, scale=case.scale, isa=isa
        )
        attention(1, case.q, out[:, :width])
    finally:
        attention.close()
    assert (out[:, width:] == 7).all()
    error = (out[:, :width].double() - case.expected).abs().max().item()
    rounds = dtype is BF16 and isa >= BF16_DOT
    assert error < (1e-2 if rounds else 1e-5), f"{error:.2e}"
    return cut


MIXED = (
    Sequence(37, 1),
    Sequence(0, 1),
    Sequence(70, 21, tree=True),
    Sequence(0, 70),
    Sequence(65, 9),
    Sequence(100, 1, tree=True),
    Sequence(130, 33, tree=True),
    Sequence(63, 2),
    Sequence(90, 1, tree=True, window=40),
    Sequence(63, 1, tree=True, window=63),
    Sequence(150, 30, tree=True, window=34),
    Sequence(7, 3, tree=True, window=5),
)


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bf16", "float"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_kinds_of_rows_in_one_step(
    library: ctypes.CDLL, shape: Shape, dtype: torch.dtype, isa: int
) -> None:
    check(library, shape, MIXED, dtype=dtype, isa=isa, threads=2)


@pytest.mark.parametrize("window", [1, 3, 70])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_window_hides_tokens_and_ancestors(
    library: ctypes.CDLL, shape: Shape, window: int, isa: int
) -> None:
    check(library, shape, MIXED, dtype=BF16, isa=isa, window=window, threads=2)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "sequences",
    [
        (Sequence(1300, 1),),
        (Sequence(1023, 1), Sequence(4, 1)),
        (Sequence(900, 20, tree=True),),
        (Sequence(1100, 64, tree=True),),
        (Sequence(1131, 1, tree=True, window=63),),
        (Sequence(1100, 32, tree=True, window=32),),
        (Sequence(777, 20),),
    ],
    ids=str,
)
def test_contexts_are_cut_where_threads_want_work(
    library: ctypes.CDLL, sequences: tuple[Sequence, ...], threads: int, isa: int
) -> None:
    shape = Shape(heads=4, kv_heads=1, dim=64)
    cut = check(library, shape, sequences, dtype=BF16, isa=isa, threads=threads)
    if threads == 1 or sequences[0].count == 1:
        assert cut == (threads > 1)
    check(library, shape, sequences, dtype=BF16, isa=isa, threads=threads, window=600)


def test_a_float_cache_is_cut_too(library: ctypes.CDLL, isa: int) -> None:
    shape = Shape(heads=4, kv_heads=1, dim=72)
    assert check(library, shape, (Sequence(1300, 1),), dtype=FLOAT, isa=isa, threads=3)


def test_a_long_chunk(library: ctypes.CDLL, isa: int) -> None:
    shape = Shape(heads=3, kv_heads=1, dim=64)
    for window in (0, 100):
        check(library, shape, (Sequence(190, 300),), dtype=BF16, isa=isa, threads=2, window=window)


def test_a_rows_result_does_not_depend_on_threads_or_neighbours(
    library: ctypes.CDLL, isa: int
) -> None:
    """As long as no context is cut."""
    shape = Shape(heads=8, kv_heads=4, dim=64)
    sequences = (
        Sequence(200, 1),
        Sequence(17, 40),
        Sequence(90, 1),
        Sequence(250, 12, tree=True),
        Sequence(250, 1, tree=True, window=20),
        Sequence(250, 12, tree=True, window=20),
    )
    case = make_case(shape, BF16, 0, sequences)
    rows = case.rows

    def run(part: AttentionTokens, queries: torch.Tensor, threads: int) -> torch.Tensor:
        out = torch.empty(queries.shape)
        attention = StepAttention(library, threads)
        assert not attention.plan(case.cache, part, heads=8, window=0, scale=0.1, isa=isa)
        attention(1, queries, out)
        attention.close()
        return out

    together = run(rows, case.q, 3)
    first = 0
    for s, sequence in enumerate(sequences):
        one, last = slice(s, s + 1), first + sequence.count
        alone = AttentionTokens(
            rows.request_slots[one],
            rows.num_computed[one],
            rows.num_scheduled[one],
            rows.bases[one],
            rows.is_tree[one],
            rows.ancestors[first:last],
            rows.block_tables,
        )
        assert torch.equal(run(alone, case.q[first:last], 1), together[first:last])
        first = last


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bf16", "float"])
@pytest.mark.parametrize("count", [1, 9])
def test_scores_far_apart_neither_overflow_nor_vanish(
    library: ctypes.CDLL, count: int, dtype: torch.dtype, isa: int
) -> None:
    """One token far above all others, which are far apart: its V comes out alone."""
    rows = make_rows((Sequence(400, count),), 16)
    tokens = torch.arange(rows.block_tables.shape[1] * 16)
    keys = torch.where(tokens % 2 == 1, -3e4, -1e4)
    keys[100] = 3e4
    cache = torch.empty(rows.block_tables.size, 1, 2, 16, 1, 32, dtype=dtype)
    table = torch.from_numpy(rows.block_tables[rows.request_slots[0]]).long()
    for part, values in enumerate((keys, tokens % 7)):
        cache[table, 0, part] = values.to(dtype).view(-1, 16, 1, 1).expand(-1, -1, 1, 32)
    q = torch.ones(count, 32, dtype=dtype)
    out = torch.empty(count, 32)
    attention = StepAttention(library, 1)
    attention.plan(cache, rows, heads=1, window=0, scale=1.0, isa=isa)
    attention(0, q, out)
    attention.close()
    assert (out == 100 % 7).all()
