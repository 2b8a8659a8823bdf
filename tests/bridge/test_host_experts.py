"""Experts in host memory: addresses, sizes, and what their types refuse."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from hetero_llm.bridge.host_experts import TENSORS, HostExperts, HostLayer, HostMatrices

EXPERTS, HIDDEN, INNER = 3, 256, 128


def plain_layer(seed: int) -> HostLayer:
    generator = torch.Generator().manual_seed(seed)

    def matrices(rows: int, columns: int) -> HostMatrices:
        data = torch.randn(EXPERTS, rows, columns, generator=generator)
        return HostMatrices("float32", data, bias=torch.randn(EXPERTS, rows, generator=generator))

    return HostLayer(matrices(2 * INNER, HIDDEN), matrices(HIDDEN, INNER))


def block_layer() -> HostLayer:
    def matrices(rows: int, columns: int) -> HostMatrices:
        data = torch.zeros(EXPERTS, rows, columns).to(torch.float8_e4m3fn)
        scale = torch.ones(EXPERTS, rows // 128, columns // 128)
        return HostMatrices("fp8", data, scale, group=128, scale_rows=128)

    return HostLayer(matrices(2 * INNER, HIDDEN), matrices(HIDDEN, INNER))


def floats_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).copy()


def test_pointers_lead_to_each_experts_rows() -> None:
    experts = HostExperts((plain_layer(0), plain_layer(1)), "silu")
    pointers = experts.pointers()
    assert pointers.shape == (2, EXPERTS, 2, len(TENSORS)) and pointers.dtype == np.int64
    for layer in range(2):
        for expert in range(EXPERTS):
            parts = (experts.layers[layer].gate_up, experts.layers[layer].down)
            for which, part in enumerate(parts):
                address = int(pointers[layer, expert, which, TENSORS.index("data")])
                found = floats_at(address, part.rows * part.columns)
                assert np.array_equal(found, part.data[expert].numpy().ravel())
                assert part.bias is not None
                bias = floats_at(int(pointers[layer, expert, which, -1]), part.rows)
                assert np.array_equal(bias, part.bias[expert].numpy())
    assert not pointers[..., 1:5].any()


def test_sizes() -> None:
    plain = HostExperts((plain_layer(0),), "silu")
    assert (plain.num_layers, plain.num_experts, plain.hidden, plain.inner) == (
        *(1, EXPERTS),
        *(HIDDEN, INNER),
    )
    numbers = 3 * INNER * HIDDEN + 2 * INNER + HIDDEN
    assert plain.expert_bytes == 4 * numbers
    blocks = HostExperts((block_layer(),), "silu")
    assert blocks.expert_bytes == 3 * INNER * HIDDEN + 4 * (2 * 2 + 2 * 1)


def test_four_bits_have_two_columns_in_a_byte() -> None:
    data = torch.zeros(EXPERTS, 8, 32, dtype=torch.uint8)
    four = HostMatrices("int4", data, torch.ones(EXPERTS, 8, 2), group=32)
    assert four.columns == 64


def test_layers_of_several_kinds_are_refused() -> None:
    with pytest.raises(AssertionError):
        HostExperts((plain_layer(0), block_layer()), "silu")


def test_a_scale_needs_its_group() -> None:
    with pytest.raises(AssertionError):
        HostMatrices("int8", torch.zeros(2, 4, 4, dtype=torch.int8), torch.ones(2, 4, 1))
