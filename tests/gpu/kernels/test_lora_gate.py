"""Gated activation of a product with each row's adapter, against both one after the other."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.gpu.kernels.activation import gated_activation
from hetero_llm.gpu.kernels.lora import NO_SLOT, block_of, choose, lora_expand, lora_shrink
from hetero_llm.gpu.kernels.lora_gate import lora_gate, lora_gate_reference
from hetero_llm.gpu.kernels.lora_product import group_rows
from tests.gpu.kernels.test_lora import apart, filled


@pytest.mark.parametrize(
    ("m", "rank", "inner", "dtype", "name"),
    [
        (70, 16, 72, torch.bfloat16, "silu"),
        (3, 5, 40, torch.float16, "gelu_pytorch_tanh"),
        (5, 100, 48, torch.float32, "silu"),
        (66, 100, 48, torch.bfloat16, "relu"),
    ],
)
def test_equals_expand_and_activation(device, m, rank, inner, dtype, name):
    generator = torch.Generator().manual_seed(m)
    weights = apart(filled(device, 3, rank, 64, (inner, inner), dtype))
    x = torch.randn(m, 64, generator=generator).to(device, dtype)
    wide = torch.randn(m, 2 * inner + 8, generator=generator).to(device, dtype)
    gate_up, before = wide[:, : 2 * inner], wide.clone()
    slots = torch.randint(NO_SLOT, 3, (m,), generator=generator).int().to(device)
    slots[0], slots[1] = NO_SLOT, 2
    groups = group_rows(slots, num_slots=3, block=block_of(choose(m, weights.rank, dtype)))
    u = lora_shrink(x, groups, weights)
    out = lora_gate(gate_up, u, groups, weights, name=name)
    assert torch.equal(wide, before)
    plain = slots == NO_SLOT
    assert torch.equal(out[plain], gated_activation(gate_up[plain], name))
    expected = lora_gate_reference(gate_up, x, slots, weights, name=name)
    eps = torch.finfo(dtype).eps
    assert (out - expected).abs().max() < 8 * eps * expected.abs().max()
    lora_expand(gate_up, u, groups, weights)
    after = gated_activation(gate_up, name)
    assert (out - after).abs().max() <= 8 * eps * after.abs().max()
    assert (out - gated_activation(before[:, : 2 * inner], name)).abs().max() > 0.1


def test_a_step_without_rows(device):
    weights = filled(device, 1, 16, 64, (32, 32))
    slots = torch.empty(0, dtype=torch.int32, device=device)
    groups = group_rows(slots, num_slots=1, block=16)
    x = weights.a.new_empty(0, 64)
    u = lora_shrink(x, groups, weights)
    assert lora_gate(x, u, groups, weights, name="silu").shape == (0, 32)
