"""Adapters inside of products of few rows against the same in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from hetero_llm.gpu.kernels import fused_lora as op
from hetero_llm.gpu.kernels import launch
from hetero_llm.gpu.kernels import skinny_gemm as products
from hetero_llm.gpu.kernels.fused_lora import FusedAdapters
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots, lora_reference
from hetero_llm.gpu.kernels.quantized_gemm import prepare, quantized_linear
from hetero_llm.gpu.kernels.quantized_gemm import shrinking_programs as of_quantized
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig, plan_launch, skinny_gemm
from hetero_llm.quantization.matrix import Kind, dequantize
from tests.gpu.kernels.test_lora import apart, filled
from tests.quantization.matrices import random_matrix

VECTOR = SkinnyConfig(1, 4, 256, num_warps=1)
MATRIX = SkinnyConfig(8, 16, 64, num_stages=3)


def adapters_of(weights: LoraSlots, slots: Sequence[int], shrinking: op.Shrinking) -> FusedAdapters:
    """Of rows with these slots: one request for each row."""
    device, m = weights.a.device, len(slots)
    rows = op.row_slots(
        torch.arange(m, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        num_slots=len(weights.a),
        words=op.num_sums(m, weights, shrinking),
    )
    return FusedAdapters(weights, rows, rows.sums)


def inputs(weights: LoraSlots, m: int, seed: int) -> tuple[torch.Tensor, ...]:
    """x [m, K] in wider rows, weight [N, K] and bias [N]; products of order one."""
    generator = torch.Generator().manual_seed(seed)
    n, k = weights.b.shape[1], weights.a.shape[2]
    x = torch.randn(m, k + 8, generator=generator)[:, 8:]
    weight = torch.randn(n, k, generator=generator) / k**0.5
    bias = torch.randn(n, generator=generator)
    wide = x.to(weights.a.device, weights.a.dtype)
    return wide, weight.to(wide), bias.to(wide)


def check(
    weights: LoraSlots, slots: Sequence[int], config: SkinnyConfig, seed: int = 0
) -> torch.Tensor:
    """Rows without an adapter have the bits of the plain product; returns the result."""
    x, weight, bias = inputs(weights, len(slots), seed)
    adapters = adapters_of(weights, slots, products.shrinking_programs(config, len(slots), weights))
    y = skinny_gemm(x, weight, bias, config=config, adapters=adapters)
    plain = skinny_gemm(x, weight, bias, config=config)
    exact = x.float() @ weight.float().t() + bias.float()
    expected = lora_reference(exact, x, adapters.rows.slots, weights)
    eps = torch.finfo(y.dtype).eps
    torch.testing.assert_close(
        y.float(), expected, rtol=2 * eps, atol=8 * eps * weights.rank**0.5, check_dtype=False
    )
    without = adapters.rows.slots == NO_SLOT
    assert torch.equal(y[without], plain[without])
    if not without.all():
        assert not torch.equal(y[~without], plain[~without])
    return y


@pytest.mark.parametrize(
    "m, slots, rank, k, features, config, dtype",
    [
        (1, 3, 16, 512, (24, 16, 8), VECTOR, torch.bfloat16),
        (1, 2, 64, 1040, (32,), VECTOR, torch.float16),
        (1, 2, 5, 4608, (14,), VECTOR, torch.bfloat16),  # as many shares as there may be
        (2, 1, 16, 256, (32,), MATRIX, torch.float16),
        (5, 3, 4, 272, (48, 16, 16), MATRIX, torch.bfloat16),
        (8, 12, 16, 256, (16, 16), MATRIX, torch.bfloat16),
        (7, 4, 64, 128, (39,), MATRIX, torch.float16),
        (16, 3, 40, 160, (32, 64), SkinnyConfig(16, 32, 32, num_stages=3), torch.bfloat16),
        (16, 9, 64, 128, (40,), SkinnyConfig(16, 32, 32, num_stages=3), torch.bfloat16),
        (19, 24, 16, 256, (32,), SkinnyConfig(32, 32, 64, 2, num_stages=3), torch.bfloat16),
        (64, 5, 16, 384, (64, 64), SkinnyConfig(64, 64, 64, 3, num_stages=3), torch.bfloat16),
        (3, 2, 16, 256, (32,), SkinnyConfig(8, 16, 64, 4, waits=True), torch.bfloat16),
    ],
)
def test_equals_the_reference(device, m, slots, rank, k, features, config, dtype):
    """Tails of rows, features and columns; more adapters than are multiplied at once."""
    weights = filled(device, slots, rank, k, features, dtype)
    where = torch.randint(NO_SLOT, slots, (m,), generator=torch.Generator().manual_seed(m))
    where[0] = slots - 1
    check(weights, where.tolist(), config)


@pytest.mark.parametrize("m, config", [(1, VECTOR), (3, MATRIX)])
def test_slots_that_lie_apart(device, m, config):
    check(apart(filled(device, 3, 8, 256, (32, 16))), [2, NO_SLOT, 0][:m], config)


@pytest.mark.parametrize("m, config", [(1, VECTOR), (3, MATRIX)])
def test_rows_without_an_adapter_wait_for_nothing(device, m, config):
    weights = filled(device, 2, 16, 256, (32,))
    weights.a.fill_(torch.nan)
    weights.b.fill_(torch.nan)
    check(weights, [NO_SLOT] * m, config)


def test_slots_that_no_row_names_are_not_read(device):
    weights = filled(device, 4, 16, 256, (32,))
    for unnamed in (1, 3):
        weights.a[unnamed], weights.b[unnamed] = torch.nan, torch.nan
        weights.scales[unnamed] = torch.nan
    check(weights, [0, 2, NO_SLOT, 2], MATRIX)


def test_a_row_does_not_depend_on_the_others(device):
    """Whichever slot it has, and whatever the other rows and slots have: the same bits."""
    weights = filled(device, 9, 16, 512, (32, 16))
    weights.a[7], weights.b[7], weights.scales[7] = (
        weights.a[2].clone(), weights.b[2].clone(), weights.scales[2].clone(),
    )  # fmt: skip
    alone = check(weights, [NO_SLOT, NO_SLOT, 2, NO_SLOT], MATRIX)
    for slots in ([0, 1, 2, 3], [8, 8, 7, 8], [2, 2, 2, 2], [5, NO_SLOT, 7, 0]):
        assert torch.equal(check(weights, slots, MATRIX)[2], alone[2])
    weights.a[[0, 1, 3]], weights.b[[0, 1, 3]] = 1e4, -1e4
    assert torch.equal(check(weights, [0, 1, 2, 3], MATRIX, seed=0)[2], alone[2])


@pytest.mark.parametrize(("split_k", "shares"), [(1, 4), (2, 6)])
def test_columns_that_several_programs_share(device, monkeypatch, split_k: int, shares: int):
    weights = filled(device, 3, 16, 704, (32, 16))
    config = SkinnyConfig(8, 16, 64, split_k=split_k, num_stages=3)
    shared = op.Shrinking(lines=16, tiles=6, shares=shares, columns=192, block_k=64)
    monkeypatch.setattr(products, "shrinking_programs", lambda *_: shared)
    check(weights, [2, NO_SLOT, 0, 1, 1], config)


def test_no_wave_of_programs_more(device):
    """Programs that multiply with A are as long as the others; a wave more would be as long."""
    like = torch.empty(0, dtype=torch.bfloat16, device=device)

    def plan(
        slots: int, m: int, programs: int, splits: int = 1, rank: int = 16, k: int = 4096
    ) -> op.Shrinking:
        weights = LoraSlots.empty(slots, rank, k, (64,), like)
        sizes = {"lines": 32, "block_k": 256, "splits": splits, "places": 132}
        return op.Shrinking.of_rows(weights, m, programs=programs, **sizes)

    assert plan(8, 8, 128) == op.Shrinking(32, 4, 1, 4096, 256)
    assert plan(16, 8, 128) == plan(8, 8, 128)  # 8 rows name 8 slots at most
    assert plan(16, 16, 128) == op.Shrinking(32, 8, 8, 512, 256)
    assert plan(8, 16, 126, splits=2) == op.Shrinking(32, 4, 8, 512, 256)
    assert plan(16, 16, 64) == op.Shrinking(32, 8, 1, 4096, 256)
    assert plan(16, 16, 128, k=512) == op.Shrinking(32, 8, 2, 256, 256)  # one step each
    assert plan(16, 64, 128, rank=64).shares == 2  # more would not fit into registers


@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("kind", ["fp8", "int8", "nf4", "int4"])
def test_quantized_products(device, kind: Kind, m: int):
    n, k, slots = 64, 512, ([2], [0, NO_SLOT, 2, 2, NO_SLOT, 1])[m > 1]
    weights = filled(device, 3, 12, k, (32, 32), torch.float16)
    x, _, bias = inputs(weights, m, seed=m)
    matrix = random_matrix(kind, n, k, group=128)
    prepared = prepare(matrix.to(device))
    config = SkinnyConfig(8, 32, prepared.chunk, split_k=2, num_warps=2, num_stages=3)
    if m == 1 and kind != "nf4":
        config = SkinnyConfig(1, 16, 256 * prepared.parts, num_warps=1)
    adapters = adapters_of(weights, slots, of_quantized(config, m, weights))
    y = quantized_linear(x, prepared, bias, config=config, adapters=adapters)
    plain = quantized_linear(x, prepared, bias, config=config)
    exact = x.float() @ dequantize(matrix, torch.float32).to(device).t() + bias.float()
    expected = lora_reference(exact, x, adapters.rows.slots, weights)
    assert (y.float() - expected).abs().max() < 2e-3 * expected.abs().max()
    without = adapters.rows.slots == NO_SLOT
    assert torch.equal(y[without], plain[without])
    assert not torch.equal(y[~without], plain[~without])


def test_sums_that_are_no_numbers_arrive(device):
    weights = filled(device, 2, 16, 256, (32,))
    weights.a[1] = torch.nan
    x, weight, bias = inputs(weights, 2, seed=0)
    adapters = adapters_of(weights, [0, 1], products.shrinking_programs(MATRIX, 2, weights))
    y = skinny_gemm(x, weight, bias, config=MATRIX, adapters=adapters)
    assert y[1].isnan().all() and not y[0].isnan().any()


@pytest.mark.parametrize("m, config", [(1, VECTOR), (3, MATRIX)])
def test_a_program_whose_sums_do_not_come_gives_up(device, monkeypatch, m, config):
    """Without the programs that it waits for: a row of NaN, which is no result."""
    if INTERPRETED:
        monkeypatch.setattr(op, "MOST_LOOKS", 3)
    weights = filled(device, 2, 16, 256, (32,))
    x, weight, _ = inputs(weights, m, seed=0)
    adapters = adapters_of(
        weights, [1, NO_SLOT, 0][:m], products.shrinking_programs(config, m, weights)
    )
    y = torch.zeros(m, 32, dtype=x.dtype, device=device)
    planned = plan_launch(x, weight, None, y=y, config=config, adapters=adapters)
    (place,) = (i for i, value in enumerate(planned.arguments) if isinstance(value, tuple))
    *lora, shrinking = planned.arguments[place]
    arguments = (*planned.arguments[:place], (*lora, 0), *planned.arguments[place + 1 :])
    grid = (planned.grid[0] - shrinking, planned.grid[1])
    dataclasses.replace(planned, arguments=arguments, grid=grid)()
    assert y[0].isnan().all() and not y[1:2].isnan().any()


@pytest.mark.parametrize("m, config", [(1, VECTOR), (3, MATRIX)])
def test_a_product_right_behind_row_slots_does_not_overlap_with_it(device, monkeypatch, m, config):
    """Programs read the slots before they wait for the kernel before."""
    weights = filled(device, 2, 16, 256, (32,))
    x, weight, _ = inputs(weights, m, seed=0)
    y, shrinking = torch.empty(m, 32).to(x), products.shrinking_programs(config, m, weights)

    def overlaps(adapters: FusedAdapters) -> list[bool]:
        """Whether two such products do, one behind the other; planned, not launched."""
        with monkeypatch.context() as patch:
            patch.setattr(launch, "overlap_options", lambda _: {"PDL": True, "launch_pdl": True})
            sizes = {"y": y, "config": config, "adapters": adapters}
            planned = [plan_launch(x, weight, None, **sizes) for _ in range(2)]
        return [one.options["launch_pdl"] for one in planned]

    assert overlaps(adapters_of(weights, [0] * m, shrinking)) == [False, True]
    adapters = adapters_of(weights, [0] * m, shrinking)
    skinny_gemm(x, weight, config=config)
    assert overlaps(adapters) == [True, True]


@pytest.mark.parametrize("m", [1, 5, 64])
def test_row_slots_equal_the_reference(device, m: int):
    generator = torch.Generator().manual_seed(m)
    requests = torch.randint(0, 40, (m,), generator=generator).int().to(device)
    adapter_of = torch.randint(NO_SLOT, 11, (40,), generator=generator).int().to(device)
    sizes = {"num_slots": 11, "words": 1500}
    found = op.row_slots(requests, adapter_of, **sizes)
    expected = op.row_slots_reference(requests, adapter_of, **sizes)
    assert torch.equal(found.slots, expected.slots) and torch.equal(found.sums, expected.sums)
    assert torch.equal(found.distinct, expected.distinct)


def test_what_does_not_fit(device):
    like = torch.empty(0, dtype=torch.bfloat16, device=device)

    def fits(rank: int, features: tuple[int, ...], dtype: torch.dtype, block_n: int) -> bool:
        return op.fits(LoraSlots.empty(1, rank, 32, features, like.to(dtype)), block_n)

    assert fits(64, (32, 64), torch.bfloat16, 32)
    assert fits(16, (50,), torch.float16, 32)  # one part may end anywhere
    assert not fits(65, (32, 64), torch.bfloat16, 32)
    assert not fits(16, (48, 64), torch.bfloat16, 32)
    assert not fits(16, (32, 64), torch.float32, 32)
