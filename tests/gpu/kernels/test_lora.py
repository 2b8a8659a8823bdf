"""Products with each row's own low-rank adapter against the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hetero_llm.gpu.kernels import lora as op
from hetero_llm.gpu.kernels.lora import NO_SLOT, LoraSlots
from hetero_llm.gpu.kernels.lora_product import group_rows


def filled(
    device: torch.device, slots: int, rank: int, k: int, features: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
) -> LoraSlots:  # fmt: skip
    """Slots with random adapters of `rank`, padded by zeros; products of order one."""
    generator = torch.Generator().manual_seed(k + rank)
    weights = LoraSlots.empty(slots, rank, k, features, torch.empty(0, dtype=dtype, device=device))
    for part in range(len(features)):
        low = torch.randn(slots, rank, k, generator=generator) / k**0.5
        weights.a[:, part * weights.rank : part * weights.rank + rank] = low
    weights.b[..., :rank] = torch.randn(slots, sum(features), rank, generator=generator)
    weights.scales.copy_(torch.rand(weights.scales.shape, generator=generator) + 0.5)
    return weights


def apart(weights: LoraSlots) -> LoraSlots:
    """The same in slots with something between them."""

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.new_full((len(tensor), 2, *tensor.shape[1:]), torch.nan)
        wide[:, 0] = tensor
        return wide[:, 0]

    return replace(weights, a=spread(weights.a), b=spread(weights.b), scales=spread(weights.scales))


def check(weights: LoraSlots, slots: list[int], seed: int = 0) -> torch.Tensor:
    """Rows and outputs lie in wider tensors; returns what was added."""
    device, m = weights.a.device, len(slots)
    generator = torch.Generator().manual_seed(seed)
    k, n = weights.a.shape[2], weights.b.shape[1]
    dtype = weights.a.dtype
    x = torch.randn(m, k + 8, generator=generator).to(device, dtype)[:, 8:]
    wide = torch.randn(m, n + 16, generator=generator).to(device, dtype)
    before, y = wide.clone(), wide[:, :n]
    where = torch.tensor(slots, dtype=torch.int32, device=device)
    expected = op.lora_reference(y, x, where, weights)
    assert torch.equal(wide, before)
    block = op.block_of(op.choose(m, weights.rank, dtype))
    groups = group_rows(where, num_slots=len(weights.a), block=block)
    u = op.lora_shrink(x, groups, weights)
    assert op.lora_expand(y, u, groups, weights) is y
    # u is rounded to the adapters' type before it is multiplied with B.
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": 2 * eps, "atol": 8 * eps * weights.rank**0.5}
    torch.testing.assert_close(y, expected, **tolerance)
    plain = where == NO_SLOT
    assert torch.equal(wide[plain], before[plain])
    assert torch.equal(wide[:, n:], before[:, n:])

    bias = torch.randn(n, generator=generator).to(device, dtype)
    for given in (bias, None):
        written = torch.full_like(wide, torch.nan)
        op.lora_expand(written[:, :n], u, groups, weights, add=False, bias=given)
        assert written[:, n:].isnan().all()
        start = torch.zeros(m, n, dtype=dtype, device=device)
        start += 0 if given is None else given
        wanted = op.lora_reference(start, x, where, weights)
        torch.testing.assert_close(written[:, :n], wanted, **tolerance)
        assert torch.equal(written[:, :n][plain], start[plain])
    return y.float() - before[:, :n].float()


@pytest.mark.parametrize(
    "m, slots, rank, k, features",
    [
        (1, 1, 16, 256, (128,)),
        (5, 3, 1, 272, (40, 24, 24)),
        (17, 4, 8, 96, (130,)),
        (65, 2, 40, 80, (16, 16)),
        (150, 5, 16, 136, (600, 24)),
        (3, 2, 100, 144, (70, 10)),
    ],
)
def test_equals_the_reference(device, m, slots, rank, k, features):
    weights = filled(device, slots, rank, k, features)
    rng = torch.Generator().manual_seed(m)
    where = torch.randint(NO_SLOT, slots, (m,), generator=rng).tolist()
    where[0] = slots - 1
    assert check(weights, where).abs().max() > 0.1


def test_slots_that_lie_apart(device):
    check(apart(filled(device, 3, 8, 96, (40, 24))), [2, NO_SLOT, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(device, dtype):
    check(filled(device, 2, 16, 64, (32, 16), dtype), [1, NO_SLOT, 0])


def test_rows_without_an_adapter_are_not_touched(device):
    weights = filled(device, 2, 16, 64, (32,))
    weights.a.fill_(torch.nan)
    weights.b.fill_(torch.nan)
    added = check(weights, [NO_SLOT] * 3)
    assert (added == 0).all()


def test_slots_that_no_row_names_are_not_read(device):
    weights = filled(device, 3, 16, 64, (32,))
    weights.a[1], weights.b[1], weights.scales[1] = torch.nan, torch.nan, torch.nan
    check(weights, [0, 2, NO_SLOT, 2])


def test_a_step_without_rows(device):
    check(filled(device, 1, 16, 64, (32,)), [])


def test_a_row_does_not_depend_on_the_others(device):
    """Rows of a step may come and go: the same bits for the same number of rows."""
    weights = filled(device, 3, 16, 512, (64, 32))
    alone = check(weights, [NO_SLOT, 2, NO_SLOT])
    beside = check(weights, [0, 2, 1])
    assert torch.equal(alone[1], beside[1])


def test_too_large_a_rank_is_refused(device):
    with pytest.raises(AssertionError):
        LoraSlots.empty(1, 257, 64, (32,), torch.empty(0, device=device))
