"""Grouped products of experts and fused routers against the torch path."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.gpu.fused import speed_up_experts
from hetero_llm.gpu.kernels import experts as op
from hetero_llm.gpu.kernels import routing
from hetero_llm.gpu.kernels.expert_adapters import ExpertKernels
from hetero_llm.gpu.kernels.experts import GroupedConfig, Groups, VectorConfig
from hetero_llm.models.blocks import DecoderLayer
from hetero_llm.models.config import ClampedSwish, Gate
from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import GatedActivation
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.models.tiny import make_tiny_checkpoint

BF16 = torch.bfloat16
# Of the largest value: sums differ in their order, 16-bit results by their rounding in each of
# three steps. (The interpreter cuts bfloat16 off instead of rounding it.)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2**-8, BF16: 2**-5}


def tensors(
    device: torch.device, rows: int, num_experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate_up and down, all of order one in the products."""
    generator = torch.Generator(device).manual_seed(rows * 1009 + hidden)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    x = random(rows, hidden)
    gate_up = random(num_experts, 2 * inner, hidden) / hidden**0.5
    down = random(num_experts, hidden, inner) / inner**0.5
    return x.to(dtype), gate_up.to(dtype), down.to(dtype)


def route(device: torch.device, rows: int, num_experts: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(rows * 31 + num_experts)
    logits = torch.randn(rows, num_experts, generator=generator, device=device)
    return routing.route_top_k(logits, k=k, renormalize=True, rounded=False)


def check(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, name: Gate = "silu",
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    settings: dict[str, Any] = {"activation": name, "biases": biases}
    y = op.experts(x, ids, weights, gate_up, down, **settings)
    expected = op.experts_reference(x, ids, weights, gate_up, down, **settings)
    assert y.dtype == x.dtype and y.shape == x.shape
    bound = TOLERANCE[x.dtype] * float(expected.abs().max())
    torch.testing.assert_close(y, expected, atol=bound, rtol=0)
    return y


# -- Experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, num_experts, k, hidden, inner, dtype",
    [
        (1, 4, 2, 40, 24, torch.float32),
        (1, 5, 3, 40, 16, torch.float16),
        (1, 4, 1, 20, 12, BF16),  # not for the vector kernels
        (2, 4, 2, 64, 48, BF16),
        (9, 5, 3, 40, 24, torch.float32),
        (33, 3, 2, 20, 12, torch.float16),
    ],
)
def test_equals_the_torch_path(
    device: torch.device,
    rows: int,
    num_experts: int,
    k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
) -> None:
    x, gate_up, down = tensors(device, rows, num_experts, hidden, inner, dtype)
    check(x, *route(device, rows, num_experts, k), gate_up, down)


@pytest.mark.parametrize("rows, name", [(1, "relu"), (3, "gelu"), (1, "gelu_new")])
def test_activations(device: torch.device, rows: int, name: str) -> None:
    x, gate_up, down = tensors(device, rows, 4, 16, 16, torch.float16)
    assert op.serves(name) and not op.serves("sigmoid")
    check(x, *route(device, rows, 4, 2), gate_up, down, name)


CLAMPED = ClampedSwish(1.702, 1.0)  # a limit that many products reach


def biases_of(gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Of order one."""
    first, second = (torch.randn(w.shape[:2], device=w.device).to(w.dtype) for w in (gate_up, down))
    return first, second


@pytest.mark.parametrize(
    "rows, num_experts, k, hidden, inner, dtype",
    [
        (1, 4, 2, 40, 24, torch.float16),  # the vector kernels, with a rest of features
        (1, 4, 2, 40, 24, torch.float32),
        (9, 5, 3, 40, 24, torch.float32),
        (33, 3, 2, 20, 12, torch.float16),
    ],
)
@pytest.mark.parametrize("gate", [CLAMPED, "silu"], ids=["clamped", "silu"])
def test_biases_and_gates(
    device: torch.device,
    gate: Gate,
    rows: int,
    num_experts: int,
    k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows)
    x, gate_up, down = tensors(device, rows, num_experts, hidden, inner, dtype)
    biases = biases_of(gate_up, down)
    check(x, *route(device, rows, num_experts, k), gate_up, down, gate, biases)


def test_routes_that_are_not_balanced(device: torch.device) -> None:
    """All rows but one go to the same experts, and one expert gets no row."""
    x, gate_up, down = tensors(device, 20, 5, 16, 16, BF16)
    ids = torch.tensor([[3, 1]], device=device).repeat(20, 1)
    ids[17] = torch.tensor([4, 0])
    check(x, ids, torch.rand(20, 2, device=device), gate_up, down)


def test_no_rows(device: torch.device) -> None:
    x, gate_up, down = tensors(device, 0, 4, 32, 24, BF16)
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    y = op.experts(x, ids, torch.empty(0, 2, device=device), gate_up, down, activation="silu")
    assert y.shape == (0, 32)


def test_rows_may_be_parts_of_wider_ones(device: torch.device) -> None:
    for rows in (1, 3):
        x, gate_up, down = tensors(device, rows, 4, 16, 16, torch.float16)
        wide = torch.cat((torch.ones_like(x), x), dim=1)
        check(wide[:, 16:], *route(device, rows, 4, 2), gate_up, down)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Of one configuration, wherever its pairs are sorted to."""
    x, gate_up, down = tensors(device, 24, 3, 32, 16, BF16)
    ids, weights = route(device, 24, 3, 2)
    first, second = GroupedConfig(16, 16, 32), GroupedConfig(16, 32, 16)

    def rows(index: Tensor) -> Tensor:
        groups = op.align(ids[index].contiguous(), 3, 16)
        middle = op.grouped_product(x[index], gate_up, groups, activation="silu", config=first)
        parts = op.grouped_product(middle, down, groups, activation="", config=second)
        return op.combine(parts, weights[index])

    everything = torch.arange(24, device=device)
    together = rows(everything)
    for index in (everything.flip(0), everything[5:8]):
        assert torch.equal(rows(index), together[index])


# -- One grouped product ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, activation",
    [
        (GroupedConfig(16, 32, 32, group=2, evict_first=True), ""),
        (GroupedConfig(16, 16, 64, swap=False), ""),
        (GroupedConfig(16, 16, 64, swap=False, group=1), "silu"),
        (GroupedConfig(16, 16, 64, swap=False), CLAMPED),
        (GroupedConfig(16, 16, 64), CLAMPED),
    ],
    ids=["swapped", "plain", "gated", "clamped", "clamped swapped"],
)
def test_grouped_product(device: torch.device, config: GroupedConfig, activation: Gate) -> None:
    rows, num_experts, n, k = 21, 3, 40, 72
    x, gate_up, _ = tensors(device, rows, num_experts, k, n, torch.float32)
    weight = gate_up if activation else gate_up[:, :n].contiguous()
    ids, _ = route(device, rows, num_experts, 2)
    groups = op.align(ids, num_experts, config.block_m)
    bias, _ = biases_of(weight, weight)
    y = op.grouped_product(x, weight, groups, activation=activation, config=config, bias=bias)
    products = torch.einsum("pnk,pk->pn", weight[ids.flatten().long()], x.repeat_interleave(2, 0))
    products += bias[ids.flatten().long()]
    if activation == CLAMPED:
        products = GatedActivation(CLAMPED).plain(products)
    elif activation:
        gate, up = products.chunk(2, dim=1)
        products = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y, products, atol=2e-5, rtol=0)


def test_a_product_of_pairs(device: torch.device) -> None:
    """With as many rows of x as pairs, each pair has its own."""
    x, gate_up, _ = tensors(device, 12, 3, 32, 16, torch.float32)
    ids, _ = route(device, 6, 3, 2)
    groups = op.align(ids, 3, 8)
    y = op.grouped_product(x, gate_up, groups, activation="", config=GroupedConfig(8, 16, 32))
    expected = torch.einsum("pnk,pk->pn", gate_up[ids.flatten().long()], x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


def test_one_row_without_sorting(device: torch.device) -> None:
    x, gate_up, _ = tensors(device, 1, 5, 32, 16, torch.float32)
    ids, _ = route(device, 1, 5, 3)
    y = op.grouped_product(
        x, gate_up, Groups(None, ids.view(-1), 3, 8), activation="", config=GroupedConfig(8, 16, 32)
    )
    expected = torch.einsum("pnk,k->pn", gate_up[ids.flatten().long()], x[0])
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("hidden, inner", [(264, 8), (8, 264)])
def test_vector_kernels_of_several_tiles(device: torch.device, hidden: int, inner: int) -> None:
    x, gate_up, down = tensors(device, 1, 3, hidden, inner, torch.float16)
    ids, weights = route(device, 1, 3, 2)
    configs = VectorConfig(8, 256, 1), VectorConfig(4, 256, 1)
    y = op.vector_experts(x, ids, weights, gate_up, down, activation="silu", configs=configs)
    expected = op.experts_reference(x, ids, weights, gate_up, down, activation="silu")
    bound = TOLERANCE[torch.float16] * float(expected.abs().max())
    torch.testing.assert_close(y, expected, atol=bound, rtol=0)


# -- Sorting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, num_experts, k, block_m",
    [(1, 4, 2, 8), (5, 8, 2, 16), (70, 3, 2, 16), (8, 10, 4, 8)],
)
def test_align(device: torch.device, rows: int, num_experts: int, k: int, block_m: int) -> None:
    ids, _ = route(device, rows, num_experts, k)
    groups = op.align(ids, num_experts, block_m, chunk=64)
    assert groups.pairs is not None and groups.num_pairs == rows * k
    flat = ids.flatten().tolist()
    blocks = groups.pairs.view(-1, block_m).tolist()
    expected: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        pairs = [p for p, e in enumerate(flat) if e == expert]
        for start in range(0, len(pairs), block_m):
            part = pairs[start : start + block_m]
            expected.append((expert, part + [len(flat)] * (block_m - len(part))))
    assert groups.experts.tolist()[: len(expected)] == [e for e, _ in expected]
    assert blocks[: len(expected)] == [pairs for _, pairs in expected]
    assert set(groups.experts.tolist()[len(expected) :]) <= {-1}


def test_no_routing_takes_more_blocks(device: torch.device) -> None:
    for num_pairs, num_experts, block_m in ((5, 3, 2), (12, 4, 8), (3, 8, 16), (100, 7, 16)):
        limit = op.most_blocks(num_pairs, num_experts, block_m)
        worst = 0
        for seed in range(200):
            generator = torch.Generator().manual_seed(seed)
            skew = torch.rand(num_experts, generator=generator) ** (seed % 5)
            ids = skew.multinomial(num_pairs, replacement=True, generator=generator)
            counts = ids.bincount(minlength=num_experts)
            worst = max(worst, int((-(-counts // block_m)).sum()))
        single = [num_pairs - min(num_pairs, num_experts) + 1]
        single += [1] * (min(num_pairs, num_experts) - 1)
        assert worst <= limit == max(sum(-(-c // block_m) for c in single), limit)


def test_every_choice_is_one_of_the_table() -> None:
    for rows in [*range(1, 130), 512, 4096, 16384]:
        for num_experts, k in ((8, 2), (16, 2), (60, 4), (4, 4), (1, 1)):
            for itemsize in (2, 4):
                first, second = op.choose(rows, k, num_experts, itemsize)
                assert first.block_m == second.block_m >= 8
    assert op.choose(32, 2, 8, 2)[0].block_m == 16
    assert op.choose(16384, 2, 8, 2)[0].block_m == 128


# -- Routers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_experts, k, dtype",
    [(4, 2, BF16), (7, 3, torch.float16), (60, 4, torch.float32), (2, 1, BF16), (5, 5, BF16)],
)
def test_route_top_k(device: torch.device, num_experts: int, k: int, dtype: torch.dtype) -> None:
    # Steps of a half, all different in a row: no ties, in any type.
    generator = torch.Generator().manual_seed(k)
    logits = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(4)])
    logits = (logits / 2 - 3).to(dtype).to(device)
    for renormalize in (False, True):
        settings = {"k": k, "renormalize": renormalize, "rounded": False}
        ids, weights = routing.route_top_k(logits, **settings)
        expected_ids, expected = routing.route_top_k_reference(logits, **settings)
        assert torch.equal(ids.long(), expected_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-8)


def test_rounded_weights(device: torch.device) -> None:
    logits = torch.randn(5, 6, device=device).half()
    settings = partial(routing.route_top_k, logits, k=2, renormalize=True)
    exact, rounded = (settings(rounded=rounded)[1] for rounded in (False, True))
    assert torch.equal(rounded, exact.half().float())


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_ties_and_what_is_no_number(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [float("nan")] * 4, [0.0] * 4], device=device)
    ids, _ = routing.route_top_k(logits, k=2, renormalize=True, rounded=False)
    assert ids[0].tolist() == [1, 2] and ids[2].tolist() == [0, 1]
    for found in (ids, routing.route_sparse_mixer(logits, jitter=0.01)[0]):
        assert int(found.min()) >= 0 and int(found.max()) < 4


@pytest.mark.parametrize(
    "num_experts, jitter, dtype",
    [(16, 0.01, torch.float32), (5, 0.3, torch.float16), (2, 0.0, torch.float32)],
)
def test_route_sparse_mixer(
    device: torch.device, num_experts: int, jitter: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator(device).manual_seed(num_experts)
    logits = torch.randn(12, num_experts, generator=generator, device=device)
    logits[:3] -= 9  # all below zero
    logits = logits.to(dtype)
    ids, weights = routing.route_sparse_mixer(logits, jitter=jitter)
    expected_ids, expected = routing.route_sparse_mixer_reference(logits, jitter)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-3 if dtype != torch.float32 else 2e-6,
                               atol=0)  # fmt: skip
    assert jitter == 0 or num_experts == 2 or (weights < 1).any()


@pytest.mark.parametrize(
    "num_experts, k, groups, kept, dtype",
    [
        (160, 8, 1, 1, torch.float32),
        (7, 3, 1, 1, BF16),
        (12, 4, 4, 2, torch.float32),
        (12, 4, 3, 1, torch.float16),
        (6, 6, 3, 3, torch.float32),
    ],
)
def test_route_sigmoid(
    device: torch.device, num_experts: int, k: int, groups: int, kept: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = (torch.randn(9, num_experts, generator=generator) * 3).to(dtype).to(device)
    correction = (torch.randn(num_experts, generator=generator) * 0.4 - 1).to(device)
    for renormalize in (False, True):
        settings = {"groups": groups, "kept_groups": kept, "renormalize": renormalize}
        ids, weights = routing.route_sigmoid(
            logits, correction=correction, k=k, scale=2.5, **settings
        )
        expected_ids, expected = routing.route_sigmoid_reference(
            logits, correction, k, scale=2.5, **settings
        )
        assert torch.equal(ids.long(), expected_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_sigmoids_at_their_ends(device: torch.device) -> None:
    """Weights that are all zero stay so, equal experts come in order, and what is no number leads
    to no expert that there is not."""
    logits = torch.tensor(
        [[-200.0] * 5, [200.0] * 5, [float("nan")] * 5, [0.0, -200.0, 200.0, 0.0, 0.0]],
        device=device,
    )
    correction = torch.zeros(5, device=device)
    ids, weights = routing.route_sigmoid(
        logits, correction=correction, k=2, groups=1, kept_groups=1, renormalize=True, scale=3.0
    )
    assert weights[0].tolist() == [0.0, 0.0] and weights[1].tolist() == [1.5, 1.5]
    assert ids[0].tolist() == ids[1].tolist() == [0, 1] and ids[3].tolist() == [2, 0]
    assert int(ids.min()) >= 0 and int(ids.max()) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(
    "rows, num_experts, hidden", [(1, 6, 64), (2, 5, 40), (7, 33, 1500), (65, 3, 64), (0, 4, 16)]
)
def test_gate_product(
    device: torch.device, rows: int, num_experts: int, hidden: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(hidden)
    wide = torch.randn(rows, hidden + 8, generator=generator).to(dtype).to(device)
    weight = torch.randn(num_experts, hidden, generator=generator).to(device)
    for x in (wide[:, :hidden].contiguous(), wide[:, :hidden]):  # rows may be strided
        y = routing.gate_product(x, weight)
        assert y.dtype == torch.float32
        expected = routing.gate_product_reference(x, weight)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-5)


def test_rows_of_logits_may_be_strided(device: torch.device) -> None:
    wide = torch.randn(6, 20, device=device)
    view = wide[:, 4:12]
    ids, weights = routing.route_top_k(view, k=2, renormalize=False, rounded=False)
    expected = routing.route_top_k(view.contiguous(), k=2, renormalize=False, rounded=False)
    assert torch.equal(ids, expected[0]) and torch.equal(weights, expected[1])
    settings = {"k": 2, "groups": 2, "kept_groups": 1, "renormalize": True, "scale": 1.0}
    correction = torch.zeros(8, device=device)
    ids, weights = routing.route_sigmoid(view, correction=correction, **settings)
    expected = routing.route_sigmoid(view.contiguous(), correction=correction, **settings)
    assert torch.equal(ids, expected[0]) and torch.equal(weights, expected[1])
    ids, weights = routing.route_sparse_mixer(view, jitter=0.1)
    expected = routing.route_sparse_mixer(view.contiguous(), jitter=0.1)
    assert torch.equal(ids, expected[0]) and torch.equal(weights, expected[1])


# -- In a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "phimoe"])
def test_speed_up_replaces_routers_and_experts(
    device: torch.device, tmp_path: Path, family: str
) -> None:
    changes = {"first_k_dense_replace": 0} if family == "glm4_moe" else {}
    folder = make_tiny_checkpoint(tmp_path, family, layers=1, changes=changes)
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device=device, show_progress=False)
    (block,) = (m.mlp for m in model.modules() if isinstance(m, DecoderLayer))
    x = torch.randn(3, config.hidden_size, device=device)
    with torch.inference_mode():
        expected = block(x)
        speed_up_experts(model)
        assert isinstance(block.experts.function, ExpertKernels)
        assert isinstance(block.router.function, partial)
        torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=0)


def test_other_activations_stay_with_torch() -> None:
    module = Experts(2, 8, 8, "sigmoid")
    speed_up_experts(torch.nn.ModuleList([module]))  # type: ignore[arg-type]
    assert module.function == module.plain
