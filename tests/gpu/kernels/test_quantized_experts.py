"""Grouped products with quantized experts against the torch path."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.gpu.fused import speed_up_experts
from hetero_llm.gpu.kernels import quantized_experts as op
from hetero_llm.gpu.kernels.experts import (
    GroupedConfig,
    Groups,
    align,
    combine,
    experts_reference,
    groups_of,
)
from hetero_llm.gpu.kernels.quantized_gemm import prepare
from hetero_llm.models.config import Gate
from hetero_llm.models.experts import Experts
from hetero_llm.quantization.matrix import (
    BLOCK_ROWS,
    KINDS,
    Kind,
    QuantizedStack,
    dequantize,
    stack,
)
from tests.gpu.kernels.test_experts import CLAMPED, TOLERANCE, route
from tests.quantization.matrices import random_matrix

HALF = torch.float16


def stack_of(
    device: torch.device, count: int, n: int, k: int, kind: Kind, **form: Any
) -> QuantizedStack:
    """Experts whose products are of order one."""
    matrices = [random_matrix(kind, n, k, seed=i, **form) for i in range(count)]
    whole = stack(matrices)
    whole.scale.copy_((whole.scale.float() * k**-0.5).to(whole.scale.dtype))
    if whole.offset is not None:
        whole.offset.mul_(0.1 * k**-0.5)
    return QuantizedStack(whole.to(device), count)


def check(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: QuantizedStack, down: QuantizedStack | Tensor,
    gate: Gate = "silu", biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    prepared = [prepare(w.matrix) if isinstance(w, QuantizedStack) else w for w in (gate_up, down)]
    settings: dict[str, Any] = {"activation": gate, "biases": biases}
    y = op.quantized_experts(x, ids, weights, *prepared, **settings)
    expected = experts_reference(x, ids, weights, gate_up, down, **settings)  # type: ignore[arg-type]
    assert y.dtype == x.dtype and y.shape == x.shape
    bound = TOLERANCE[x.dtype] * float(expected.abs().max() if len(x) else 0)
    torch.testing.assert_close(y, expected, atol=bound, rtol=0)
    return y


def inputs(device: torch.device, rows: int, hidden: int, dtype: torch.dtype = HALF) -> Tensor:
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows))
    return x.to(device, dtype)


FORMS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "fp8": ("fp8", {}),
    "fp8 blocks": ("fp8", {"group": 128, "rows": BLOCK_ROWS}),
    "int8": ("int8", {}),
    "int8 groups": ("int8", {"group": 32, "row_scale": True}),
    "int4": ("int4", {"group": 32}),
    "int4 zeros": ("int4", {"group": 32, "zeros": "zero", "scale_dtype": torch.bfloat16}),
    "int4 offsets": ("int4", {"group": 16, "zeros": "offset", "row_scale": True}),
    "int4 ordered": ("int4", {"group": 16, "zeros": "zero", "order": True}),
    "fp4": ("fp4", {"group": 16}),
    "nf4": ("nf4", {"group": 16}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(device: torch.device, form: str) -> None:
    """Inner sizes that no tile divides, and one row beside several."""
    kind, settings = FORMS[form]
    gate_up = stack_of(device, 2, 2 * 48, 80, kind, **settings)
    down = stack_of(device, 2, 80, 48, kind, **settings)
    check(inputs(device, 5, 80), *route(device, 5, 2, 1), gate_up, down)


@pytest.mark.parametrize(("rows", "inner"), [(1, 160), (5, 48), (65, 32)])
def test_biases_and_a_clamped_gate(device: torch.device, rows: int, inner: int) -> None:
    """MXFP4 as gpt-oss has it. Inputs of `down` are split where there are enough: biases are added
    once."""
    form: dict[str, Any] = {"group": 16 if inner % 32 else 32, "scale_dtype": torch.bfloat16}
    gate_up = stack_of(device, 3, 2 * inner, 96, "fp4", **{**form, "group": 32})
    down = stack_of(device, 3, 96, inner, "fp4", **form)
    torch.manual_seed(rows)
    biases = tuple(torch.randn(w.shape[:2], device=device).to(HALF) for w in (gate_up, down))
    routes = route(device, rows, 3, 2)
    check(inputs(device, rows, 96), *routes, gate_up, down, CLAMPED, (biases[0], biases[1]))


def test_biases_of_dequantized_weights(device: torch.device) -> None:
    gate_up, down = (stack_of(device, 3, *size, "fp4", group=16) for size in ((32, 32), (32, 16)))
    biases = tuple(torch.randn(w.shape[:2], device=device) for w in (gate_up, down))
    x = inputs(device, 4, 32, torch.float32)
    check(x, *route(device, 4, 3, 2), gate_up, down, CLAMPED, (biases[0], biases[1]))


def test_one_row(device: torch.device) -> None:
    gate_up, down = stack_of(device, 4, 64, 32, "int4"), stack_of(device, 4, 32, 32, "nf4")
    check(inputs(device, 1, 32), *route(device, 1, 4, 3), gate_up, down)


def test_blocks_of_whole_experts(device: torch.device) -> None:
    """128 divides all rows: a scale stays that of a block."""
    gate_up = stack_of(device, 2, 256, 144, "fp8", group=128, rows=BLOCK_ROWS)
    down = stack_of(device, 2, 144, 128, "fp8", group=128, rows=BLOCK_ROWS)
    assert gate_up.matrix.rows == BLOCK_ROWS and down.matrix.rows == 1
    check(inputs(device, 4, 144), *route(device, 4, 2, 1), gate_up, down)


@pytest.mark.parametrize("rows", [0, 65])
def test_numbers_of_rows(device: torch.device, rows: int) -> None:
    kind = KINDS[rows % len(KINDS)]
    gate_up, down = stack_of(device, 3, 64, 32, kind), stack_of(device, 3, 32, 32, kind)
    check(inputs(device, rows, 32, torch.bfloat16), *route(device, rows, 3, 2), gate_up, down)


def test_routes_that_are_not_balanced(device: torch.device) -> None:
    """All rows but one go to the same experts, and two experts get no row."""
    gate_up, down = stack_of(device, 5, 32, 32, "int4"), stack_of(device, 5, 32, 16, "int4")
    ids = torch.tensor([[3, 1]], device=device).repeat(20, 1)
    ids[17] = torch.tensor([4, 0])
    check(inputs(device, 20, 32), ids, torch.rand(20, 2, device=device), gate_up, down)


def test_one_of_the_two_is_plain(device: torch.device) -> None:
    gate_up, down = stack_of(device, 3, 64, 32, "fp8"), stack_of(device, 3, 32, 32, "int4")
    plain = torch.randn(3, 32, 32, device=device).to(HALF) / 8
    x, routes = inputs(device, 3, 32), route(device, 3, 3, 1)
    check(x, *routes, gate_up, plain)
    y = op.quantized_experts(
        *(x, *routes, plain.repeat(1, 2, 1), prepare(down.matrix)), activation="silu"
    )
    expected = experts_reference(x, *routes, plain.repeat(1, 2, 1), down, activation="silu")  # type: ignore[arg-type]
    torch.testing.assert_close(y, expected, atol=2**-7, rtol=0)


@pytest.mark.parametrize(("hidden", "dtype"), [(64, torch.float32), (40, HALF)])
def test_what_is_dequantized_for_the_call(
    device: torch.device, hidden: int, dtype: torch.dtype
) -> None:
    """Float32, and columns that are no multiple of 16; orders of columns included."""
    form: dict[str, Any] = {"order": True}
    gate_up = stack_of(device, 3, 64, hidden, "int8", **form)
    down = stack_of(device, 3, hidden, 32, "int8", **form)
    assert not op.serves(inputs(device, 1, hidden, dtype), prepare(gate_up.matrix))
    check(inputs(device, 4, hidden, dtype), *route(device, 4, 3, 2), gate_up, down)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Of one configuration, wherever its pairs are sorted to; and so it repeats exactly."""
    matrix = prepare(stack_of(device, 3, 40, 64, "int4", group=32, zeros="zero").matrix)
    x = inputs(device, 24, 64)
    ids, _ = route(device, 24, 3, 2)
    config = GroupedConfig(16, 32, 64, num_warps=2, num_stages=2, group=2)

    def rows(index: Tensor) -> Tensor:
        groups = align(ids[index].contiguous(), 3, 16)
        y = torch.empty(2 * len(index), 40, dtype=HALF, device=device)
        launch = op.plan_quantized_product(
            x[index], matrix, groups, y=y, activation="", config=config
        )
        launch()
        return y.view(-1, 2, 40)

    everything = torch.arange(24, device=device)
    together = rows(everything)
    for index in (everything, everything.flip(0), everything[5:8]):
        assert torch.equal(rows(index), together[index])


def test_split_inputs_are_added_up(device: torch.device) -> None:
    """The last one of four splits has no tile of K."""
    weights = stack_of(device, 3, 40, 160, "int4", group=32, zeros="zero")
    x = inputs(device, 6, 160)
    ids, shares = route(device, 3, 3, 2)
    groups = groups_of(ids, 3, 8)
    matrix = prepare(weights.matrix)
    bias = torch.randn(3, 40, device=device).to(HALF)
    config = GroupedConfig(8, 32, matrix.chunk, num_warps=2, num_stages=2, split_k=4)
    assert matrix.padded_columns == 3 * matrix.chunk
    y = op.outputs_of(x, groups, 40, config)
    assert y.shape == (4, 6, 40) and y.dtype == torch.float32
    op.plan_quantized_product(x, matrix, groups, y=y, activation="", config=config, bias=bias)()
    found = combine(y, shares, HALF)
    dense = dequantize(weights.matrix, torch.float32).view(3, 40, 160)
    products = torch.einsum("pnk,pk->pn", dense[ids.flatten().long()], x.float())
    products = (products + bias.float()[ids.flatten().long()]).to(HALF)
    expected = (products.float().view(3, 2, 40) * shares.unsqueeze(2)).sum(1)
    assert found.dtype == HALF
    torch.testing.assert_close(found.float(), expected, atol=2**-7, rtol=0)


def test_nothing_is_written_beside_the_output(device: torch.device) -> None:
    weights = stack_of(device, 3, 40, 64, "fp8")
    ids, _ = route(device, 3, 3, 1)
    frame = torch.full((5, 40), 7.0, dtype=HALF, device=device)
    config = GroupedConfig(8, 32, 64, num_warps=2, num_stages=2)
    op.plan_quantized_product(
        inputs(device, 3, 64), prepare(weights.matrix), groups_of(ids, 3, 8),
        y=frame[1:-1], activation="", config=config,
    )()  # fmt: skip
    assert (frame[0] == 7).all() and (frame[-1] == 7).all() and (frame[1:-1] != 7).all()


@pytest.mark.parametrize("block_m", [8, 64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_every_choice_can_be_launched(form: str, block_m: int) -> None:
    kind, settings = FORMS[form]
    for k in (2048, 48):
        matrix = prepare(random_matrix(kind, 128, k, **settings))
        groups = Groups(None, torch.zeros(2), 2, block_m)
        for parts in (1, 2):
            config = op.choose(groups, matrix, 4096, parts)
            assert (config.split_k > 1) == (k == 2048 and parts == 1 and block_m <= 64)
            assert config.block_m == block_m and config.block_k % matrix.chunk == 0
            # 16 features at least are the left operand; a stage has to leave room for others.
            assert config.block_n * parts >= 32
            lanes = config.block_n * parts * config.block_k // matrix.parts
            assert 2 * config.num_stages * (lanes + config.block_k * block_m) <= 227 << 10


def test_a_module_keeps_one_copy(device: torch.device) -> None:
    module = Experts(3, 64, 32, "silu").to(device)
    module.set_quantized("gate_up", stack_of(device, 3, 64, 64, "int8").matrix)
    module.set_quantized("down", stack_of(device, 3, 64, 32, "int8").matrix)
    x, routes = inputs(device, 3, 64), route(device, 3, 3, 2)
    expected = module(x, *routes)
    speed_up_experts(torch.nn.ModuleList([module]))  # type: ignore[arg-type]
    assert not isinstance(module.function, partial) and module.function != module.plain
    assert all(s.device.type == "meta" for s in module.quantized.values())
    assert module.down.shape == (3, 64, 32)
    torch.testing.assert_close(module(x, *routes), expected, atol=2**-7, rtol=0)


def test_groups_that_have_no_prepared_form_stay_with_torch(device: torch.device) -> None:
    module = Experts(2, 48, 24, "silu").to(device)
    module.set_quantized("gate_up", stack_of(device, 2, 48, 48, "int8", group=24).matrix)
    module.set_quantized("down", stack_of(device, 2, 48, 24, "int8").matrix)
    x, routes = inputs(device, 2, 48), route(device, 2, 2, 1)
    expected = module(x, *routes)
    speed_up_experts(torch.nn.ModuleList([module]))  # type: ignore[arg-type]
    assert module.function == module.plain
    assert torch.equal(module(x, *routes), expected)
