"""The attention kernel against its reference: random rows, tables, trees, windows, head sizes,
types."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hetero_llm.gpu.attention_plan import PlanLimits, plan_work
from hetero_llm.gpu.kernels.paged_attention import (
    CUT_ROW_FIELDS,
    RowMasks,
    TileShape,
    Work,
    make_workspace,
    paged_attention,
    paged_attention_reference,
)

BLOCK = 16


# large: every input of the kernel.
@dataclass
class Case:
    """Sequences as (keys in the cache, rows, parent of each row if they form a tree).

    shared: all block tables begin with the same blocks, so many keys. differs: one of these
    blocks, which each sequence has for itself. scaled: every KV head has scales of its own.
    """

    sequences: list[tuple[int, int, list[int] | None]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block: int = BLOCK
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    tile_rows: int = 16
    keys: int = 16
    parallel: int = 4
    block_first: bool = True
    softcap: float | None = None
    alibi: bool = False
    scaled: bool = False
    sinks: float | None = None  # a head's sinks are spread around it
    shared: int = 0
    differs: int | None = None
    tile: TileShape | None = None  # instead of tile_rows and keys

    def __post_init__(self) -> None:
        if self.tile is not None:
            self.tile_rows, self.keys = self.tile.rows, self.tile.keys


def random_tree(generator: np.random.Generator, size: int) -> list[int]:
    """Parents of `size` nodes in topological order; the root's is -1."""
    return [-1, *(int(generator.integers(0, i)) for i in range(1, size))]


def tree_masks(parents: list[int]) -> tuple[list[int], list[int]]:
    """Ancestor bits (the node's own included) and depth of each node."""
    bits: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        bits.append((1 << node) | (bits[parent] if parent >= 0 else 0))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return bits, depths


def row_masks(case: Case, device: torch.device) -> RowMasks:
    limits, positions, ancestors = [], [], []
    for start, count, parents in case.sequences:
        if parents is None:
            positions += range(start, start + count)
            limits += range(start + 1, start + count + 1)
            ancestors += [0] * count
        else:
            bits, depths = tree_masks(parents)
            limits += [start] * count
            positions += [start + d for d in depths]
            ancestors += bits
    has_tree = any(p is not None for _, _, p in case.sequences)
    signed = np.array(ancestors, np.uint64).view(np.int64)
    return RowMasks(
        torch.tensor(limits, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.from_numpy(signed).to(device) if has_tree else None,
    )


def block_tables(case: Case, slots: np.ndarray, blocks: list[int], order: np.ndarray) -> np.ndarray:
    """[slots, columns] int32 of sequences with these numbers of blocks, taken in `order`."""
    tables = np.full((len(slots) + 2, max(blocks) + 1), 2**30, np.int32)  # the rest is never read
    used = 0
    for slot, n in zip(slots, blocks):
        tables[slot, :n] = order[used : used + n]
        used += n
    longest = tables[slots[int(np.argmax(blocks))]].copy()
    for slot, n in zip(slots, blocks):
        for column in range(min(case.shared // case.block, n)):
            if column != case.differs:
                tables[slot, column] = longest[column]
    return tables


def check(case: Case, device: torch.device, seed: int = 0) -> int:
    """Compares; returns how many rows have pieces of a tile of several sequences."""
    out, expected, num_shared = run(case, device, seed)
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected.float(), rtol=tolerance, atol=tolerance)
    return num_shared


def run(case: Case, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What kernel and reference return, and how many rows have pieces of a tile of sequences."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num = len(case.sequences)
    starts = np.array([s for s, _, _ in case.sequences], np.int32)
    counts = np.array([c for _, c, _ in case.sequences], np.int32)
    slots = rng.permutation(num + 2)[:num].astype(np.int32)
    blocks = [-(-int(s + c) // case.block) for s, c in zip(starts, counts)]
    num_blocks = sum(blocks) + 3
    tables = block_tables(case, slots, blocks, rng.permutation(num_blocks))
    rows = row_masks(case, device)
    group = case.heads // case.kv_heads
    work, cut_rows = plan_work(
        slots,
        starts,
        counts,
        np.array([p is not None for _, _, p in case.sequences]),
        case.window,
        PlanLimits(case.tile_rows // group, case.keys, case.parallel, 64, case.keys),
        tables,
        case.block,
    )
    cache_dtype = case.cache_dtype or case.dtype
    layers = 2
    if case.block_first:
        cache = torch.randn(
            num_blocks, layers, 2, case.block, case.kv_heads, case.dim, device=device
        )
        k, v = (cache.to(cache_dtype)[:, 1, i] for i in range(2))
    else:  # one slab a layer, heads before tokens
        cache = torch.randn(
            layers, 2, num_blocks, case.kv_heads, case.block, case.dim, device=device
        )
        k, v = (cache.to(cache_dtype)[1, i].transpose(1, 2) for i in range(2))
    total = int(counts.sum())
    # q is a view of a wider projection, as in the model.
    fused = torch.randn(total, case.heads + 3, case.dim, device=device).to(case.dtype)
    q = fused[:, : case.heads]
    workspace = make_workspace(64, case.kv_heads, case.tile_rows, case.dim, device)
    slopes = None
    if case.alibi:
        slopes = torch.tensor([0.8 ** (i + 1) for i in range(case.heads)], device=device)
    changes = {"window": case.window, "softcap": case.softcap, "slopes": slopes}
    if case.scaled:
        changes["kv_scales"] = 0.3 + torch.rand(2, case.kv_heads, device=device)
    if case.sinks is not None:
        generator = torch.Generator(device).manual_seed(seed)
        sinks = case.sinks + torch.randn(case.heads, generator=generator, device=device)
        changes["sinks"] = sinks.to(case.dtype)
    out = torch.full((total, case.heads, case.dim), float("nan"), device=device).to(case.dtype)
    device_tables = torch.from_numpy(tables).to(device)
    spare = np.zeros((3, 8), np.int32)
    items = torch.from_numpy(np.concatenate([work, spare])).to(device)
    count = torch.tensor([len(work), len(cut_rows)], dtype=torch.int32, device=device)
    paged_attention(
        q,
        k,
        v,
        device_tables,
        rows,
        Work(items, torch.from_numpy(cut_rows).to(device), count),
        workspace,
        case.tile or TileShape(case.tile_rows, case.keys, 4, 2, 1),
        scale=case.dim**-0.5,
        out=out,
        **changes,
    )
    expected = paged_attention_reference(
        q,
        k,
        v,
        device_tables,
        torch.from_numpy(np.repeat(slots, counts)),
        torch.from_numpy(np.repeat(starts + counts, counts)),
        rows,
        scale=case.dim**-0.5,
        **changes,
    )
    return out, expected, int((cut_rows[:, 5] > 0).sum())


@pytest.mark.parametrize(
    "case",
    [
        Case([(0, 1, None), (37, 1, None), (5, 1, None), (130, 1, None)]),
        Case([(130, 1, None)], parallel=9),  # one sequence in many pieces
        Case([(0, 33, None), (20, 9, None), (100, 1, None)], keys=32),
        Case([(40, 1, None), (70, 20, None)], window=24),
        Case([(35, 1, None)], heads=7, kv_heads=1),  # a group that does not fill the tile
        Case([(35, 6, None)], heads=2, kv_heads=2),
        Case([(50, 3, None)], dim=80),
        Case([(20, 3, None)], dim=256, keys=32),
        Case([(35, 5, None), (90, 1, None)], dim=128, dtype=torch.bfloat16),
        Case([(35, 5, None), (90, 1, None)], dim=96, dtype=torch.float16, block_first=False),
        Case([(90, 2, None)], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
        Case([(90, 2, None)], dtype=torch.bfloat16, cache_dtype=torch.float8_e5m2),
        Case(
            [(90, 2, None), (40, 1, None)],
            dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, scaled=True, parallel=7,
        ),
        Case(
            [(40, 6, [-1, 0, 0, 1, 2, 4]), (3, 1, None)],
            cache_dtype=torch.float8_e4m3fn, scaled=True, softcap=0.7, alibi=True,
        ),
        Case(
            [(150, 1, None), (170, 2, None), (144, 1, None)], heads=6, kv_heads=3,
            cache_dtype=torch.float8_e4m3fn, scaled=True, shared=144, parallel=2,
        ),
    ],
)  # fmt: skip
def test_plain_rows(case: Case, device: torch.device) -> None:
    check(case, device)


def test_trees(device: torch.device) -> None:
    rng = np.random.default_rng(7)
    trees = [random_tree(rng, size) for size in (1, 5, 64)]
    check(Case([(33, len(t), t) for t in trees] + [(20, 1, None), (17, 6, None)], keys=32), device)


def test_a_chain_is_plain_decoding(device: torch.device) -> None:
    chain = list(range(-1, 7))
    check(Case([(61, 8, chain), (90, 8, chain)], parallel=7), device)


TREE = random_tree(np.random.default_rng(3), 64)


@pytest.mark.parametrize(
    "case",
    [
        Case([(50, 1, None), (0, 2, None)], parallel=9, softcap=0.7),
        Case([(50, 1, None), (0, 2, None)], parallel=9, alibi=True),
        Case([(40, 6, None)], window=24, heads=5, kv_heads=1, softcap=0.7, alibi=True),
        Case([(9, 64, TREE)], heads=1, kv_heads=1, dim=16, tile_rows=64, keys=32, alibi=True),
        Case([(40, 6, TREE[:6]), (3, 1, None)], window=40, softcap=0.7, alibi=True),
    ],
)
def test_scores_that_change(case: Case, device: torch.device) -> None:
    check(case, device)


SINKS = [
    Case([(0, 1, None), (37, 1, None), (5, 4, None)]),  # whole tiles
    Case([(130, 1, None)], parallel=9, window=24),
    Case([(130, 1, None), (40, 2, None)], parallel=9),  # one sequence in many pieces
    Case([(35, 6, None), (90, 1, None)], heads=7, kv_heads=1, dim=80, dtype=torch.bfloat16),
    Case([(40, 6, TREE[:6]), (3, 1, None)], window=40, parallel=7, dtype=torch.float16),
    Case([(9, 64, TREE)], heads=1, kv_heads=1, dim=16, tile_rows=64, keys=32),
    Case([(50, 1, None), (0, 2, None)], parallel=9, softcap=0.7, alibi=True),
    Case(
        [(90, 2, None), (40, 1, None)],
        dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, scaled=True, parallel=7,
    ),
    Case([(303, 8, TREE[:8])] * 2, shared=288, parallel=3, tile_rows=32),
    Case([(150, 1, None), (170, 2, None), (144, 1, None)], shared=144, parallel=1),
]  # fmt: skip


@pytest.mark.parametrize("case", SINKS)
def test_sinks(case: Case, device: torch.device) -> None:
    """Once for each row: in whole tiles, cut ones, and beside a tile of several sequences."""
    check(dataclasses.replace(case, sinks=1.0), device)


@pytest.mark.parametrize("case", [SINKS[1], SINKS[4], SINKS[9]])
def test_sinks_without_end(case: Case, device: torch.device) -> None:
    """With one of minus infinity the kernel is that without, to the bit; a large one takes all."""
    without, _, _ = run(case, device)
    faint, _, _ = run(dataclasses.replace(case, sinks=float("-inf")), device)
    assert torch.equal(faint, without)
    outshone, _, _ = run(dataclasses.replace(case, sinks=1e4), device)
    assert not outshone.any()


FIVE = [(150, 1, None), (170, 2, None), (144, 1, None), (181, 1, None), (160, 3, None)]
MIXED = [(150, 2, None), (160, 6, TREE[:6]), (155, 1, None), (9, 3, None), (180, 4, None)]


@pytest.mark.parametrize(
    "case, rows_that_share",
    [
        (Case(FIVE, shared=144, parallel=1), 8),
        (Case(FIVE, shared=144, parallel=7), 8),  # the shared tile is cut, too
        (Case(FIVE, shared=160, parallel=2, softcap=0.7, alibi=True), 8),
        (Case(FIVE, shared=160, parallel=2, window=200), 0),
        (Case(FIVE, shared=112, parallel=1), 0),  # too few keys
        (Case(FIVE, shared=144, parallel=2, heads=5, kv_heads=1, tile_rows=32), 5),
        (Case(FIVE, shared=144, parallel=2, dim=80, dtype=torch.bfloat16, block_first=False), 8),
        (Case(FIVE, shared=144, parallel=2, dtype=torch.float16), 8),
        (Case(MIXED, shared=144, parallel=2, tile_rows=32, alibi=True), 9),
        (Case(MIXED, shared=144, parallel=3, tile_rows=32), 9),
        (Case([(303, 8, TREE[:8])] * 2, shared=288, parallel=3, tile_rows=32), 16),
        # Blocks after one that differs are the same ones again: to compare these alone is wrong.
        (Case([(303, 2, None)] * 3, shared=288, differs=0, parallel=1), 0),
        (Case([(303, 2, None)] * 3, shared=288, differs=7, parallel=1), 0),
        (Case([(303, 2, None)] * 3, shared=288, differs=9, parallel=1), 6),
    ],
)
def test_a_shared_prefix(case: Case, rows_that_share: int, device: torch.device) -> None:
    assert check(case, device) == rows_that_share


@pytest.mark.parametrize("heads, dim, tile_rows", [(71, 64, 128), (48, 32, 64), (24, 16, 32)])
def test_groups_that_are_no_power_of_two(
    heads: int, dim: int, tile_rows: int, device: torch.device
) -> None:
    """One KV head for all (Falcon-7B, StarCoder): a row's group takes most of a tile."""
    sequences = [(20, 1, None), (9, 2, None), (11, 3, [-1, 0, 0])]
    case = Case(sequences, heads=heads, kv_heads=1, dim=dim, tile_rows=tile_rows, alibi=True)
    check(case, device)


def test_a_node_is_at_the_position_of_its_depth(device: torch.device) -> None:
    """With ALiBi a path of a branching tree gives what a chain of the same keys gives."""
    torch.manual_seed(0)
    parents = [-1, 0, 0, 1, 2, 4, 3, 5, 7]  # the path of node 8: 0, 2, 4, 5, 7, 8
    path = [0, 2, 4, 5, 7, 8]
    q = torch.randn(9, 4, 32, device=device)
    k, v = torch.randn(2, 2, BLOCK, 2, 32, device=device)
    slopes = torch.tensor([0.5, 0.25, 0.3, 0.1], device=device)
    tables = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    outs = []
    for taken in (list(range(9)), path):
        places = [*range(11), *(11 + node for node in taken)]
        keys, values = (torch.zeros_like(t) for t in (k, v))
        for t, from_ in ((keys, k), (values, v)):
            t.view(-1, 2, 32)[: len(places)] = from_.reshape(-1, 2, 32)[places]
        chain = [-1, *range(len(taken) - 1)]
        case = Case([(11, len(taken), parents if len(taken) == 9 else chain)])
        rows = row_masks(case, device)
        item = torch.tensor([[0, 0, len(taken), 0, len(places), -1, 0, 0]], dtype=torch.int32)
        none = torch.zeros(0, CUT_ROW_FIELDS, dtype=torch.int32, device=device)
        work = Work(item.to(device), none, torch.tensor([1, 0], device=device).int())
        out = paged_attention(
            q[taken], keys, values, tables, rows, work, make_workspace(1, 2, 32, 32, device),
            TileShape(32, 16, 4, 2, 1), scale=0.2, slopes=slopes, any_cut=False,
        )  # fmt: skip
        outs.append(out if len(taken) == 6 else out[path])
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    sequences: list[tuple[int, int, list[int] | None]] = []
    for _ in range(int(rng.integers(1, 6))):
        count = int(rng.choice([1, 1, int(rng.integers(1, 20))]))
        tree = random_tree(rng, count) if rng.random() < 0.3 else None
        sequences.append((int(rng.integers(0, 120)), count, tree))
    window = int(rng.integers(70, 100)) if rng.random() < 0.4 else None
    block = (16, 16, 64, 128)[seed]
    parallel = int(rng.integers(1, 12))
    check(Case(sequences, window=window, parallel=parallel, block=block), device, seed)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_that_share(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    sequences: list[tuple[int, int, list[int] | None]] = []
    for _ in range(int(rng.integers(2, 7))):
        count = int(rng.integers(1, 6))
        tree = random_tree(rng, count) if rng.random() < 0.3 else None
        sequences.append((int(rng.integers(128, 300)), count, tree))
    differs = int(rng.integers(8, 18)) if rng.random() < 0.5 else None
    case = Case(sequences, parallel=int(rng.integers(1, 4)), shared=288, differs=differs)
    assert check(case, device, seed) > 0
