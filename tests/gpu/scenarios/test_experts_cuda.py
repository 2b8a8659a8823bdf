"""Mixtures of experts on the device: kernels at real sizes, in graphs, and through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.gpu.kernels import experts as op
from hetero_llm.gpu.kernels.experts import experts, experts_reference
from hetero_llm.gpu.kernels.routing import (
    gate_product,
    gate_product_reference,
    route_sigmoid,
    route_top_k,
)
from hetero_llm.models.config import Gate
from hetero_llm.models.experts import sigmoid_top_k
from tests.gpu.kernels.test_experts import CLAMPED, biases_of, check, route, tensors
from tests.gpu.scenarios.serving import GREEDY, TIES, generate, regrets, start, tokens_of
from tests.models.tiny import make_tiny_checkpoint

BF16 = torch.bfloat16
# The kernels serve heads from 16 on.
HEADS_OF_16 = {"head_dim": 16}
WIDE = {"hidden_size": 64}  # of families without head_dim: four heads of 16
# What transformers below 5.20 computes in one way whatever the configuration says: it judges here.
OLD_REFERENCE: dict[str, dict[str, Any]] = {
    "minimax_m2": {"rotary_dim": 16},
    "gpt_oss": {"swiglu_limit": 7.0},
}


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


# Rows of every path and tile: one, few (8, 16, 32, 64 a block) and many.
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64, 130, 700])
@pytest.mark.parametrize(
    "num_experts, k, hidden, inner", [(8, 2, 1024, 1792), (60, 4, 512, 352), (16, 2, 520, 328)]
)
def test_equals_the_torch_path(
    device: torch.device, rows: int, num_experts: int, k: int, hidden: int, inner: int
) -> None:
    for dtype in (BF16, torch.float16, torch.float32):
        x, gate_up, down = tensors(device, rows, num_experts, hidden, inner, dtype)
        check(x, *route(device, rows, num_experts, k), gate_up, down)


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """The last expert's weights lie more than 2^31 elements behind the first's."""
    num_experts, hidden, inner = 40, 4096, 8192
    gate_up = torch.zeros(num_experts, 2 * inner, hidden, dtype=BF16, device=device)
    down = torch.zeros(num_experts, hidden, inner, dtype=BF16, device=device)
    assert gate_up.numel() > 1 << 31
    gate_up[-1].normal_(std=hidden**-0.5)
    down[-1].normal_(std=inner**-0.5)
    for rows in (1, 3, 200):
        x = torch.randn(rows, hidden, device=device, dtype=BF16)
        ids = torch.tensor([[num_experts - 1, 0]], device=device).repeat(rows, 1)
        weights = torch.full((rows, 2), 0.5, device=device)
        y = check(x, ids, weights, gate_up, down)
        assert float(y.abs().max()) > 0.1


@pytest.mark.parametrize("rows", [1, 2, 24, 150])
def test_a_graph_serves_every_route(device: torch.device, rows: int) -> None:
    """Captured once, replayed with other routes; the host is never asked."""
    x, gate_up, down = tensors(device, rows, 8, 512, 384, BF16)
    logits = torch.zeros(rows, 8, device=device)

    def body() -> Tensor:
        ids, weights = route_top_k(logits, k=2, renormalize=True, rounded=False)
        return experts(x, ids, weights, gate_up, down, activation="silu")

    body()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        body()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = body()
    for round_ in range(4):
        logits.normal_()
        if round_ == 3:  # all to the same two
            logits[:, 5:7] += 100
        graph.replay()
        ids, weights = route_top_k(logits, k=2, renormalize=True, rounded=False)
        expected = experts_reference(x, ids, weights, gate_up, down, activation="silu")
        bound = 2**-6 * float(expected.abs().max())
        torch.testing.assert_close(y, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 300])
@pytest.mark.parametrize(("num_experts", "groups"), [(160, 1), (256, 8)])
def test_a_graph_of_a_router_in_float32(device: torch.device, rows: int, num_experts: int,
                                        groups: int) -> None:  # fmt: skip
    """Real sizes, captured once; the host is never asked."""
    x = torch.randn(rows, 5120, device=device, dtype=BF16)
    weight = torch.randn(num_experts, 5120, device=device) / 5120**0.5
    correction = torch.randn(num_experts, device=device) * 0.1
    settings = {"groups": groups, "kept_groups": max(1, groups // 2), "renormalize": True}

    def body() -> tuple[Tensor, Tensor, Tensor]:
        logits = gate_product(x, weight)
        return logits, *route_sigmoid(logits, correction=correction, k=8, scale=2.5, **settings)

    body()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        body()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, ids, weights = body()
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(logits, gate_product_reference(x, weight), atol=1e-4, rtol=1e-4)
        expected_ids, expected = sigmoid_top_k(logits, correction, 8, scale=2.5, **settings)
        # Sums that differ in the last bit may come in another order.
        order, expected_order = ids.argsort(1), expected_ids.argsort(1)
        same = (ids.gather(1, order) == expected_ids.gather(1, expected_order)).all(1)
        assert same.float().mean() > 0.98
        shares = weights.gather(1, order)[same], expected.gather(1, expected_order)[same]
        torch.testing.assert_close(*shares, rtol=1e-5, atol=1e-7)


def test_sorting_of_many_pairs(device: torch.device) -> None:
    ids = torch.randint(0, 60, (9001, 4), device=device, dtype=torch.int32)
    groups = op.align(ids, 60, 128)
    assert groups.pairs is not None
    pairs = groups.pairs.view(-1, 128)
    used = groups.experts >= 0
    there = pairs[used] < ids.numel()
    owners = groups.experts[used].long().unsqueeze(1).expand_as(there)[there]
    flat = pairs[used][there].long()
    assert torch.equal(ids.flatten()[flat].long(), owners)
    assert torch.equal(flat.sort().values, torch.arange(ids.numel(), device=device))
    order = (
        ids.flatten().long() * ids.numel() + torch.arange(ids.numel(), device=device)
    ).argsort()
    assert torch.equal(flat, order)


@pytest.mark.parametrize(
    ("gate", "rows"),
    [*((CLAMPED, n) for n in (1, 7, 16, 33, 130, 700)), *(("silu", n) for n in (2, 64, 130))],
)
def test_biases_and_gates(device: torch.device, rows: int, gate: Gate) -> None:
    """Every path and tile; the second size is no multiple of a tile's."""
    for hidden, inner in ((1024, 1792), (720, 360)):
        for dtype in (BF16, torch.float16, torch.float32):
            x, gate_up, down = tensors(device, rows, 8, hidden, inner, dtype)
            biases = biases_of(gate_up, down)
            check(x, *route(device, rows, 8, 4), gate_up, down, gate, biases)


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "phimoe"]
)
def test_through_the_engine(tmp_path: Path, family: str) -> None:
    """Judged token by token by transformers in float32; graphs, chunks and prefix hits."""
    variant = "three_of_seven" if family == "mixtral" else ""
    sizes = WIDE if family in ("qwen2_moe", "phimoe") else HEADS_OF_16
    changes = {**sizes, **OLD_REFERENCE.get(family, {})}
    folder = make_tiny_checkpoint(tmp_path, family, variant, changes=changes)
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 7, 16, 17, 23, 33, 38]
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    params = [GREEDY] * len(prompts)
    settings = {"max_model_len": 64, "skip_tokenizer_init": True}
    with start(folder, **settings) as llm:
        first = generate(llm, prompts, params)
        assert regrets(first, params, folder).max() < TIES
        again = generate(llm, prompts, params)  # with prefix hits
        assert regrets(again, params, folder).max() < TIES
    with start(folder, batch_invariant=True, **settings) as llm:
        together = tokens_of(generate(llm, prompts, params))
        alone = [tokens_of(generate(llm, [p], params[:1]))[0] for p in prompts[:3]]
        assert together[:3] == alone


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "glm4_moe", "minimax_m2"])
def test_half_precision_through_the_engine(tmp_path: Path, family: str) -> None:
    """bf16 reaches the vector and tensor-core kernels; a near tie may fall either way."""
    changes = {**HEADS_OF_16, **OLD_REFERENCE.get(family, {})}
    folder = make_tiny_checkpoint(tmp_path, family, changes=changes)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (5, 9, 20, 31)]
    params = [GREEDY] * len(prompts)
    settings = {"max_model_len": 64, "max_num_seqs": 4, "skip_tokenizer_init": True}
    with start(folder, dtype="bfloat16", **settings) as llm:
        found = regrets(generate(llm, prompts, params), params, folder)
        assert found.median() < TIES and found.mean() < 0.1
        alone = regrets(generate(llm, prompts[:1], params[:1]), params[:1], folder)
        assert alone.median() < TIES


def test_biases_through_the_engine(tmp_path: Path) -> None:
    """gpt-oss in graphs, and with batch invariance in torch, where each expert computes all rows;
    in bfloat16 a near tie may fall either way."""
    folder = make_tiny_checkpoint(tmp_path, "gpt_oss", changes=OLD_REFERENCE["gpt_oss"])
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (1, 9, 20, 38)]
    params = [GREEDY] * len(prompts)
    settings = {"max_model_len": 64, "max_num_seqs": 4, "skip_tokenizer_init": True}
    for invariant in (False, True):
        with start(folder, batch_invariant=invariant, **settings) as llm:
            assert regrets(generate(llm, prompts, params), params, folder).max() < TIES
    with start(folder, dtype="bfloat16", **settings) as llm:
        found = regrets(generate(llm, prompts, params), params, folder)
        assert found.median() < TIES and found.mean() < 0.1
