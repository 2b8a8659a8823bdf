"""Experts with the adapters of their rows, against the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from hetero_llm.gpu.kernels import expert_adapters as op
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots, RowGroups
from hetero_llm.gpu.kernels.quantized_gemm import prepare
from hetero_llm.models.config import Gate
from hetero_llm.models.layers import ClampedSwish
from hetero_llm.quantization.matrix import QuantizedStack
from tests.quantization.matrices import random_matrix

EXPERTS, HIDDEN, INNER, K = 5, 48, 32, 2


def filled(
    device: torch.device, slots: int, rank: int, columns: int, features: Sequence[int],
    dtype: torch.dtype,
) -> LoraSlots:  # fmt: skip
    """Random adapters of ranks of 16, in slots that lie apart."""
    generator = torch.Generator().manual_seed(columns + rank)

    def random(*shape: int, scale: float = 1.0, of: torch.dtype = dtype) -> torch.Tensor:
        wide = torch.full((slots, 2, EXPERTS, *shape), torch.nan, dtype=of, device=device)
        wide[:, 0] = torch.randn(slots, EXPERTS, *shape, generator=generator) * scale
        return wide[:, 0]

    parts = len(features)
    return LoraSlots(
        a=random(parts * rank, columns, scale=columns**-0.5),
        b=random(sum(features), rank, scale=rank**-0.5),
        scales=random(parts * rank, of=torch.float32),
        bounds=torch.tensor([0, *accumulate(features)], dtype=torch.int32, device=device),
        widest=max(features),
        alignment=8,
        experts=EXPERTS,
    )


def adapters_of(device: torch.device, slots: torch.Tensor, dtype: torch.dtype, count: int = 3):
    return op.ExpertAdapters(
        slots,
        filled(device, count, 16, HIDDEN, (INNER, INNER), dtype),
        filled(device, count, 16, INNER, (HIDDEN,), dtype),
    )


def inputs(device: torch.device, rows: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator)
    weights, ids = torch.randn(rows, EXPERTS, generator=generator).softmax(-1).topk(K)
    slots = torch.randint(NO_SLOT, 3, (rows,), generator=generator, dtype=torch.int32)
    if rows > 1:
        slots[:2] = torch.tensor([NO_SLOT, 1])
    made = (x.to(dtype), ids.to(torch.int32), weights, slots)
    return tuple(tensor.to(device) for tensor in made)


def plain_weights(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5
    return gate_up.to(device, dtype), down.to(device, dtype)


@pytest.mark.parametrize(
    ("rows", "dtype", "activation", "biased"),
    [
        (1, torch.bfloat16, "silu", False),
        (7, torch.bfloat16, ClampedSwish(1.702, 7.0), True),
        (70, torch.float16, "gelu_pytorch_tanh", False),
        (5, torch.float32, "silu", False),
        (0, torch.bfloat16, "silu", False),
    ],
)
def test_equals_the_reference(
    device: torch.device, rows: int, dtype: torch.dtype, activation: Gate, biased: bool
) -> None:
    x, ids, weights, slots = inputs(device, rows, dtype)
    matrices = plain_weights(device, dtype)
    adapters = adapters_of(device, slots, dtype)
    biases = None
    if biased:
        generator = torch.Generator().manual_seed(3)
        biases = tuple(
            torch.randn(EXPERTS, n, generator=generator).to(device, dtype)
            for n in (2 * INNER, HIDDEN)
        )
    kernels = op.ExpertKernels(activation, biases)
    found = kernels.adapted(x, ids, weights, *matrices, adapters=adapters)
    expected = op.adapted_experts_reference(
        *(x, ids, weights, *matrices), activation=activation, biases=biases, adapters=adapters
    )
    assert found.dtype == dtype and found.shape == x.shape
    scale = expected.abs().max() if rows else 1.0
    # Five roundings to bf16, which the interpreter makes towards zero.
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    assert rows == 0 or (found.float() - expected.float()).abs().max() < tolerance * scale
    plain = kernels(x, ids, weights, *matrices)
    adapted = slots != NO_SLOT
    torch.testing.assert_close(found[~adapted], plain[~adapted], rtol=tolerance, atol=tolerance)
    for row in adapted.nonzero().flatten().tolist():
        assert (found[row] - plain[row]).abs().max() > 0.02 * scale


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_weights(device: torch.device, kind: str) -> None:
    x, ids, weights, slots = inputs(device, 6, torch.bfloat16)
    stacks = [
        QuantizedStack(random_matrix(kind, EXPERTS * n, k, device=device), EXPERTS)
        for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    ]
    adapters = adapters_of(device, slots, torch.bfloat16)
    expected = op.adapted_experts_reference(
        *(x, ids, weights, *stacks), activation="silu", biases=None, adapters=adapters
    )
    kernels = op.ExpertKernels("silu", None, *(prepare(stack.matrix) for stack in stacks))
    nothing = torch.empty(0, device=device)
    found = kernels.adapted(x, ids, weights, nothing, nothing, adapters=adapters)
    assert (found.float() - expected.float()).abs().max() < 5e-2 * expected.float().abs().max()


def test_experts_and_slots_that_no_pair_names_are_not_read(device: torch.device) -> None:
    x, ids, weights, slots = inputs(device, 4, torch.bfloat16)
    ids[:] = torch.tensor([1, 3], dtype=torch.int32)
    slots[:] = torch.tensor([0, NO_SLOT, 2, 0], dtype=torch.int32)
    matrices = plain_weights(device, torch.bfloat16)
    adapters = adapters_of(device, slots, torch.bfloat16)
    for own in (adapters.gate_up, adapters.down):
        for tensor in (own.a, own.b, own.scales):
            tensor[1] = torch.nan
            tensor[:, [0, 2, 4]] = torch.nan
    kernels = op.ExpertKernels("silu", None)
    assert kernels.adapted(x, ids, weights, *matrices, adapters=adapters).isfinite().all()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("block", [16, 64])
def test_both_ways_of_grouping(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, block: int
) -> None:
    """Blocks have the same pairs; they may lie in another order."""
    _, ids, _, slots = inputs(device, rows, torch.float32, seed=rows)
    sizes = {"num_slots": 3, "num_experts": EXPERTS, "block": block}

    def blocks(groups: RowGroups) -> list[tuple[int, list[int]]]:
        pairs = groups.rows.view(-1, block).tolist()
        return sorted(
            (adapter, [pair for pair in own if pair < groups.num_rows])
            for adapter, own in zip(groups.adapters.tolist(), pairs, strict=True)
            if adapter >= 0
        )

    aligned = blocks(op.group_pairs(slots, ids, **sizes))
    monkeypatch.setattr(op, "MOST_BINS", 0)
    assert blocks(op.group_pairs(slots, ids, **sizes)) == aligned
    seen = sorted(pair for _, own in aligned for pair in own)
    assert seen == list(range(rows * K))
    for adapter, own in aligned:
        for pair in own:
            slot, expert = int(slots[pair // K]), int(ids.flatten()[pair])
            assert adapter == (0 if slot == NO_SLOT else 1 + slot * EXPERTS + expert)


def test_more_pairs_than_a_grid_has_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are cut into parts, whose pairs fit."""
    x, ids, weights, slots = inputs(device, 11, torch.float32)
    matrices = plain_weights(device, torch.float32)
    adapters = adapters_of(device, slots, torch.float32)
    arguments = (x, ids, weights, *matrices)
    kernels = op.ExpertKernels("silu", None)
    expected = kernels.adapted(*arguments, adapters=adapters)
    grouped: list[int] = []
    group_pairs = op.group_pairs

    def counted(slots: torch.Tensor, *others: torch.Tensor, **sizes: int) -> RowGroups:
        grouped.append(len(slots))
        return group_pairs(slots, *others, **sizes)

    monkeypatch.setattr(op, "group_pairs", counted)
    monkeypatch.setattr(op, "MOST_TILES", 7)
    found = kernels.adapted(*arguments, adapters=adapters)
    assert grouped == [2, 3, 3, 3]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
