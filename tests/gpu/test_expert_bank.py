"""The bank: experts of every kind in slots, computed as the layer that has them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetero_llm.bridge.host_experts import HostExperts
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.builders.expert_store import host_experts
from hetero_llm.gpu.expert_bank import ExpertBank, why_not
from hetero_llm.gpu.expert_streams import DirectLane, ExpertStreams, runs
from hetero_llm.gpu.kernels.expert_requests import ON_HOST, post, wait_add
from hetero_llm.gpu.kernels.experts import bank_experts
from hetero_llm.gpu.kernels.quantized_experts import quantized_bank_experts
from hetero_llm.models.config import Gate
from hetero_llm.models.experts import Experts
from hetero_llm.quantization.matrix import BLOCK_ROWS, Kind, stack
from tests.gpu.kernels.test_experts import CLAMPED, TOLERANCE, biases_of, route
from tests.quantization.matrices import random_matrix

BF16, HALF = torch.bfloat16, torch.float16
EXPERTS, LAYERS = 5, 2


def layer_of(
    seed: int, hidden: int, inner: int, dtype: torch.dtype, gate: Gate = "silu",
    kind: Kind | None = None, *, bias: bool = False, **form: Any,
) -> Experts:  # fmt: skip
    """Experts in host memory, of products of order one."""
    torch.manual_seed(seed)
    module = Experts(EXPERTS, hidden, inner, gate, bias=bias)
    module.host_memory = lambda shape, dtype: torch.empty(shape, dtype=dtype)
    for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        if kind is None:
            weight = torch.randn(EXPERTS, n, k) * k**-0.5
            setattr(module, name, nn.Parameter(weight.to(dtype), False))
            continue
        matrices = [random_matrix(kind, n, k, seed=seed + i, **form) for i in range(EXPERTS)]
        whole = stack(matrices)
        whole.scale.copy_((whole.scale.float() * k**-0.5).to(whole.scale.dtype))
        module.set_quantized(name, whole)
    if bias:
        first, second = biases_of(torch.empty(EXPERTS, 2 * inner, 1), torch.empty(EXPERTS, hidden))
        module.gate_up_bias = nn.Parameter(first.view(EXPERTS, -1).to(dtype), False)
        module.down_bias = nn.Parameter(second.view(EXPERTS, -1).to(dtype), False)
    return module


def bank_of(host: HostExperts, slots: int, device: torch.device) -> tuple[ExpertBank, np.ndarray]:
    """With experts of both layers in a mixed order, and the table."""
    bank = ExpertBank(host, slots, staging=EXPERTS, device=device)
    table = np.full((LAYERS, EXPERTS), ON_HOST, np.int32)
    owners = np.random.default_rng(slots).permutation(LAYERS * EXPERTS)[:slots]
    table.flat[owners] = np.arange(len(owners))
    bank.place(table)
    return bank, table


def compute(
    bank: ExpertBank, layer: int, table: Tensor, rows: int, gate: Gate, dtype: torch.dtype,
    k: int = 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x, ids, weights, and what the bank makes of them."""
    device, hidden = bank.device, bank.host.hidden
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)).to(device, dtype)
    ids, weights = route(device, rows, EXPERTS, k)
    weights = 0.7 * weights
    places = post(x, ids, weights, table=table, hits=bank.hits[layer], layer=layer, exchange=None)
    multiply = quantized_bank_experts if bank.is_quantized else bank_experts
    parts = multiply(
        x, places, weights, bank.gate_up.weights, bank.down.weights,  # type: ignore[arg-type]
        table=table, activation=gate, biases=bank.biases,
    )  # fmt: skip
    return x, ids, weights, wait_add(parts, weights, places, dtype=dtype, exchange=None)


def check(modules: list[Experts], dtype: torch.dtype, rows: int, device: torch.device) -> None:
    """A layer with all experts in slots, and all layers with some in slots beside streamed ones."""
    gate = modules[0].activation.name
    host = host_experts(modules)
    for slots in (LAYERS * EXPERTS, 3):
        bank, _ = bank_of(host, slots, device)
        streams = ExpertStreams(bank, bank.table.cpu().numpy(), DirectLane())
        layers = range(1, LAYERS) if slots > 3 else range(LAYERS)
        for layer in layers:
            table = bank.table[layer]
            if slots == 3:
                table = streams.enter(layer, None, rows * 2).table
            assert (table >= 0).all() and len(set(table.tolist())) == EXPERTS
            x, ids, weights, y = compute(bank, layer, table, rows, gate, dtype)
            module = modules[layer]
            expected = module.plain(x.cpu(), ids.cpu(), weights.cpu(), module.gate_up, module.down)
            bound = TOLERANCE[dtype] * float(expected.abs().max())
            torch.testing.assert_close(y.cpu(), expected, atol=bound, rtol=0)
        assert int(bank.hits.sum()) == len(layers) * rows * 2


@pytest.mark.parametrize(
    ("rows", "dtype", "bias"),
    [
        (1, BF16, False),
        (1, torch.float32, True),
        (6, HALF, False),
        (40, BF16, False),
        (40, BF16, True),
    ],
)
def test_plain_experts(device: torch.device, rows: int, dtype: torch.dtype, bias: bool) -> None:
    gate: Gate = CLAMPED if bias else "silu"
    check([layer_of(i, 40, 24, dtype, gate, bias=bias) for i in range(LAYERS)], dtype, rows, device)


FORMS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "fp8": ("fp8", {}),
    "int8 groups": ("int8", {"group": 32, "row_scale": True}),
    "int4 zeros": ("int4", {"group": 32, "zeros": "zero", "scale_dtype": BF16}),
    "int4 offsets": ("int4", {"group": 16, "zeros": "offset", "row_scale": True}),
    "fp4": ("fp4", {"group": 16}),
}


@pytest.mark.parametrize("form", FORMS)
def test_quantized_experts(device: torch.device, form: str) -> None:
    kind, settings = FORMS[form]
    modules = [layer_of(9 * i, 96, 48, HALF, "silu", kind, **settings) for i in range(LAYERS)]
    check(modules, HALF, 5, device)


@pytest.mark.parametrize("rows", [1, 9])
def test_blocks_of_scales(device: torch.device, rows: int) -> None:
    """Each expert's rows are whole blocks, so its scales are its own."""
    modules = [
        layer_of(9 * i, 128, 128, HALF, "silu", "fp8", group=128, rows=BLOCK_ROWS)
        for i in range(LAYERS)
    ]
    check(modules, HALF, rows, device)


def test_pairs_without_a_slot_are_left_out(device: torch.device) -> None:
    """Only experts in slots are added, whatever is in the memory of the others' products."""
    modules = [layer_of(i, 40, 24, torch.float32) for i in range(LAYERS)]
    bank, _ = bank_of(host_experts(modules), 4, device)
    table = bank.table[0]
    x, ids, weights, y = compute(bank, 0, table, 7, "silu", torch.float32)
    there = table[ids.long()] >= 0
    assert there.any() and not there.all()
    module = modules[0]
    own = torch.where(there, weights, 0.0).cpu()
    expected = module.plain(x.cpu(), ids.cpu(), own, module.gate_up, module.down)
    torch.testing.assert_close(y.cpu(), expected, atol=1e-5, rtol=0)


def test_the_table_says_who_is_where(device: torch.device) -> None:
    modules = [layer_of(i, 40, 24, torch.float32) for i in range(LAYERS)]
    bank, table = bank_of(host_experts(modules), 4, device)
    assert (bank.table.cpu().numpy() == table).all() and (table != ON_HOST).sum() == 4
    for layer, expert in np.argwhere(table != ON_HOST).tolist():
        slot = table[layer, expert]
        assert isinstance(bank.gate_up.weights, Tensor)
        assert torch.equal(bank.gate_up.weights[slot].cpu(), modules[layer].gate_up[expert])


def test_what_no_bank_holds() -> None:
    plain = host_experts([layer_of(0, 40, 24, BF16)])
    assert why_not(plain, BF16, "silu") is None
    assert "bfloat16 experts of a model that runs in float32" in str(
        why_not(plain, torch.float32, "silu")
    )
    assert "activation" in str(why_not(plain, BF16, "sigmoid"))
    eight = host_experts([layer_of(0, 40, 24, HALF, "silu", "fp8")])
    assert "runs in float32" in str(why_not(eight, torch.float32, "silu"))
    assert "16 does not divide" in str(why_not(eight, HALF, "silu"))
    narrow = host_experts([layer_of(0, 64, 32, HALF, "silu", "int4", group=8)])
    assert "groups of 8" in str(why_not(narrow, HALF, "silu"))


def test_columns_in_an_order_of_their_own_are_refused() -> None:
    module = layer_of(0, 64, 32, HALF, "silu", "int4", group=16, zeros="zero", order=True)
    with pytest.raises(ConfigError, match="order of their own"):
        host_experts([module])


def test_layers_that_differ_are_refused() -> None:
    modules = [layer_of(0, 64, 32, HALF), layer_of(0, 64, 32, HALF, "silu", "fp8")]
    with pytest.raises(ConfigError, match="quantized alike"):
        host_experts(modules)


@pytest.mark.parametrize("wanted", ["", "0", "1", "0110", "1011", "111"])
def test_runs(wanted: str) -> None:
    flags = np.array([c == "1" for c in wanted], bool)
    found = np.zeros(len(wanted), int)
    for first, count in runs(flags):
        assert count > 0
        found[first : first + count] += 1
    assert (found == flags).all()


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_expert_a_token(device: torch.device, rows: int, dtype: torch.dtype) -> None:
    """Its weight counts once, whichever kernel has multiplied by it."""
    modules = [layer_of(i, 40, 24, dtype) for i in range(LAYERS)]
    bank, _ = bank_of(host_experts(modules), LAYERS * EXPERTS, device)
    x, ids, weights, y = compute(bank, 0, bank.table[0], rows, "silu", dtype, k=1)
    module = modules[0]
    expected = module.plain(x.cpu(), ids.cpu(), weights.cpu(), module.gate_up, module.down)
    bound = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(y.cpu(), expected, atol=bound, rtol=0)
