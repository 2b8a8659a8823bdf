"""A part of the experts on the host, computed by the GPU: against plain torch, for every kind of
weights; and what the compiler makes of the kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import LinkPart
from hetero_llm.bridge.host_experts import HostLayer
from hetero_llm.gpu.kernels.activation import gate_form
from hetero_llm.gpu.kernels.expert_requests import NOWHERE, ON_HOST
from hetero_llm.gpu.kernels.linked_experts import (
    MOST_TOKENS,
    linked_experts,
    linked_experts_reference,
    linked_gates_kernel,
    linked_outputs_kernel,
    why_not_linked,
)
from hetero_llm.models.config import ClampedSwish, Gate
from tests.cpu.expert_cases import KINDS, Kind, make_mixture
from tests.helpers.compiled import printed_kernels

EXPERTS, HIDDEN, INNER = 6, 272, 320


def layer_of(
    kind: Kind, *, gate: Gate = "silu", bias: torch.dtype | None = None, hidden: int = HIDDEN,
    inner: int = INNER,
) -> HostLayer:  # fmt: skip
    """In page-locked memory where there is a device."""
    host = make_mixture(
        kind, experts=EXPERTS, hidden=hidden, inner=inner, gate=gate, bias=bias
    ).host.layers[0]
    if not torch.cuda.is_available():
        return host
    pinned = [
        replace(part, **{name: tensor.pin_memory() for name, tensor in part.tensors()})
        for part in (host.gate_up, host.down)
    ]
    return HostLayer(*pinned)


def routes(
    device: torch.device, rows: int, k: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> tuple[Tensor, ...]:
    """x, ids, weights and slots; odd experts are on the host, and the first one that is chosen; the
    last token is padding if there are several."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(rows)])
    weights = torch.rand(rows, k, generator=generator)
    on_host = (ids % 2 == 1) | (ids == ids[0, 0])
    slots = torch.where(on_host, ON_HOST, ids + 3).to(torch.int32)
    if rows > 1:
        slots[-1] = NOWHERE
    return x.to(device), ids.to(device, torch.int32), weights.to(device), slots.to(device)


def check(
    device: torch.device, layer: HostLayer, rows: int, k: int, *, dtype: torch.dtype,
    part: LinkPart, gate: Gate = "silu",
) -> None:  # fmt: skip
    x, ids, weights, slots = routes(device, rows, k, dtype, layer.down.rows)
    found, wanted = (
        function(x, ids, weights, slots, layer, part=part, activation=gate)
        for function in (linked_experts, linked_experts_reference)
    )
    asked = (slots == ON_HOST).any(1)
    assert asked.any()
    # In 16 bits a value between the two products may round to the other side.
    tolerance = {torch.bfloat16: 0.03, torch.float16: 2e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(
        found[asked], wanted[asked], rtol=0, atol=tolerance * float(wanted.abs().max())
    )
    again = linked_experts(x, ids, weights, slots, layer, part=part, activation=gate)
    assert torch.equal(again[asked], found[asked])


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_weights(device: torch.device, name: str) -> None:
    """float16 holds all codes; the interpreter rounds to bfloat16 in its own way."""
    dtype = {"float32": torch.float32, "bf16": torch.bfloat16}.get(name, torch.float16)
    hidden, inner = {"fp8_blocks": (256, 384), "int8_groups": (320, 320)}.get(name, (256, 320))
    layer = layer_of(KINDS[name], hidden=hidden, inner=inner)
    assert why_not_linked(layer, 3, "silu") is None
    check(device, layer, 1, 3, dtype=dtype, part=LinkPart(inner - 128))
    check(device, layer, 5, 2, dtype=dtype, part=LinkPart(whole=128))


@pytest.mark.parametrize("rows, k", [(2, EXPERTS), (9, 4), (MOST_TOKENS, EXPERTS)])
@pytest.mark.parametrize("part", [LinkPart(64), LinkPart(192), LinkPart(whole=150)], ids=str)
def test_tokens_and_choices(device: torch.device, rows: int, k: int, part: LinkPart) -> None:
    check(device, layer_of(KINDS["float32"]), rows, k, dtype=torch.float32, part=part)


@pytest.mark.parametrize("gate", ["gelu_new", ClampedSwish(1.702, 7.0)], ids=str)
def test_gates_and_biases(device: torch.device, gate: Gate) -> None:
    layer = layer_of(KINDS["fp4"], gate=gate, bias=torch.float16)
    for part in (LinkPart(192), LinkPart(whole=200)):
        check(device, layer, 3, 3, dtype=torch.float16, part=part, gate=gate)


def test_experts_in_places(device: torch.device) -> None:
    """Numbers lie in another order than scales."""
    layer = layer_of(KINDS["int4_64"])
    order = np.array([4, -1, 2, 0, -1, 1], np.int32)
    moved = []
    for part in (layer.gate_up, layer.down):
        data = torch.empty_like(part.data[:5], pin_memory=torch.cuda.is_available())
        for expert, place in enumerate(order.tolist()):
            if place >= 0:
                data[place] = part.data[expert]
        moved.append(replace(part, data=data, places=order))
    x, ids, weights, slots = routes(device, 4, 3, torch.float16)
    slots = torch.where(ids.cpu() % 3 != 1, ON_HOST, 0).to(torch.int32).to(device)
    places = torch.from_numpy(order).to(device)
    found = linked_experts(
        x,
        ids,
        weights,
        slots,
        HostLayer(*moved),
        part=LinkPart(64),
        activation="silu",
        places=places,
    )
    wanted = linked_experts_reference(
        x, ids, weights, slots, layer, part=LinkPart(64), activation="silu"
    )
    asked = (slots == ON_HOST).any(1)
    limit = 2e-3 * float(wanted.abs().max())
    torch.testing.assert_close(found[asked], wanted[asked], rtol=0, atol=limit)


def test_without_an_expert_on_the_host_nothing_is_written(device: torch.device) -> None:
    layer = layer_of(KINDS["float32"])
    x, ids, weights, slots = routes(device, 3, 2, torch.float32)
    slots.fill_(5)
    layer.down.data.fill_(float("nan"))
    layer.gate_up.data.fill_(float("nan"))
    found = linked_experts(x, ids, weights, slots, layer, part=LinkPart(64), activation="silu")
    assert found.shape == (3, HIDDEN)


def test_what_is_not_read_over_the_link() -> None:
    def reason(kind: Kind, k: int = 4, gate: Gate = "silu", **sizes: int) -> str:
        layer = make_mixture(kind, experts=1, **sizes).host.layers[0]
        found = why_not_linked(layer, k, gate)
        assert found is not None
        return found

    small = {"hidden": 64, "inner": 256}
    assert "cannot be cut" in reason(KINDS["bf16"], inner=128)
    assert "experts a token" in reason(KINDS["bf16"], 17, **small)
    assert "groups of 192" in reason(Kind("int8", 192), hidden=384, inner=384)
    row = Kind("int4", 256, scale_dtype=torch.float16, zeros="offsets")
    assert "one offset" in reason(row, hidden=256, inner=256)
    assert "activation" in reason(KINDS["bf16"], gate="quick", **small)  # type: ignore[arg-type]


def test_what_the_compiler_makes_of_it() -> None:
    """Weights go to shared memory two tiles ahead, by at least 8 bytes a thread."""
    kernels = printed_kernels(__name__)
    assert len(kernels) == 2
    for ptx in kernels:
        sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+)[,;]", ptx)
        wide = sum(int(size, 16) >= 8 for size in sizes)
        assert wide >= 24 and "ld.global.b8" not in ptx
        assert "cp.async.wait_group" in ptx and "mma" in ptx
        assert "griddepcontrol.wait" in ptx


def print_ptx() -> None:
    """The kernels for fp8 weights in blocks and eight experts a token, as compiled for Hopper, in a
    process without the interpreter."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types: dict[str, str | None] = {
        "x": "*bf16", "middle": "*bf16", "ids": "*i32", "slots": "*i32", "data": "*u8",
        "scale": "*fp32", "weights": "*fp32", "y": "*fp32",
    }  # fmt: skip
    types |= dict.fromkeys(("places", "zero", "offset", "row_scale", "bias"))
    constants: dict[str, object] = {
        "K": 8, "K_LANES": 8, "PAIRS": 16, "GATE": gate_form("silu"), "KIND": 0,
        "GROUP": 128, "SCALE_ROWS": 128, "TILE": 128, "FEATURES": 64, "PROGRAMS": 132, "PDL": True,
    }  # fmt: skip
    kernels: tuple[Any, ...] = (linked_gates_kernel, linked_outputs_kernel)
    for kernel in kernels:
        signature: dict[str, str] = {}
        fixed: dict[str, object] = {}
        aligned: dict[tuple[int, ...], list[list[object]]] = {}
        for i, name in enumerate(kernel.arg_names):
            kind = types.get(name, "i32")
            if name in constants or kind is None:
                signature[name], fixed[name] = "constexpr", constants.get(name)
                continue
            signature[name] = kind
            if name not in ("num_rows", "groups"):
                aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, fixed, aligned)
        options = {"launch_pdl": True, "num_warps": 4}
        print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
