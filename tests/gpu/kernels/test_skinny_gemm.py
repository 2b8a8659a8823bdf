"""Products of few rows against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hetero_llm.gpu.kernels import skinny_gemm as op
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig

VECTOR = SkinnyConfig(1, 4, 256, num_warps=1)
MATRIX = SkinnyConfig(16, 16, 32, num_stages=3)
ROWS = SkinnyConfig(4, 4, 256, num_warps=1, vector=True)

# (hidden, inner, features of the fused q, k and v, vocabulary) of the models that we measure.
MODELS = {
    "llama-3.1-8b": (4096, 14336, 6144, 128256),
    "mistral-7b": (4096, 14336, 6144, 32000),
    "qwen2.5-7b": (3584, 18944, 4608, 152064),
    "llama-3.2-1b": (2048, 8192, 3072, 128256),
}


def tensors(
    device: torch.device, m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [m, k], weight [n, k] and bias [n], all of order one in the product."""
    generator = torch.Generator(device).manual_seed(m * 1_000_003 + n * 1009 + k)
    x = torch.randn(m, k, generator=generator, device=device)
    weight = torch.randn(n, k, generator=generator, device=device) / k**0.5
    bias = torch.randn(n, generator=generator, device=device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config) -> torch.Tensor:
    y = op.skinny_gemm(x, weight, bias, config=config)
    expected = op.skinny_gemm_reference(x, weight, bias)
    assert y.dtype == x.dtype and y.shape == expected.shape
    # One unit in the last place of bf16 or fp16: sums differ in their order only.
    ulp = torch.finfo(x.dtype).eps
    torch.testing.assert_close(y.float(), expected.float(), rtol=1.01 * ulp, atol=1e-3)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "m, config",
    [
        (1, VECTOR),
        (1, SkinnyConfig(1, 4, 256, num_warps=1, evict_first=False)),
        (1, SkinnyConfig(1, 4, 256, split_k=2, num_warps=1)),
        (2, SkinnyConfig(2, 4, 256, num_warps=1, vector=True)),
        (3, ROWS),
        (7, SkinnyConfig(8, 2, 256, split_k=2, num_warps=1, evict_first=False, vector=True)),
        (3, MATRIX),
        (16, SkinnyConfig(16, 16, 32, split_k=4, num_stages=3)),
        (64, SkinnyConfig(64, 16, 128, split_k=2, num_stages=3)),
    ],
)
def test_equals_the_reference(device, dtype, m, config):
    x, weight, bias = tensors(device, m, 32, 512, dtype=dtype)
    check(x, weight, None, config)
    check(x, weight, bias, config)


@pytest.mark.parametrize(
    "m, n, k, config",
    [
        (1, 10, 512, VECTOR),
        (1, 8, 624, VECTOR),
        (1, 10, 624, SkinnyConfig(1, 4, 256, split_k=3, num_warps=1)),
        (1, 10, 624, SkinnyConfig(1, 4, 256, split_k=2, num_warps=1)),
        (1, 1, 16, VECTOR),
        (3, 10, 624, ROWS),
        (4, 10, 624, SkinnyConfig(4, 4, 256, split_k=3, num_warps=1, vector=True)),
        (2, 1, 16, ROWS),
        (5, 24, 80, MATRIX),
        (17, 24, 80, SkinnyConfig(32, 16, 32, split_k=3, num_stages=2)),
        (2, 40, 144, SkinnyConfig(16, 32, 64, split_k=2, num_stages=2)),
    ],
)
def test_sizes_that_are_no_multiples_of_the_tiles(device, m, n, k, config):
    x, weight, bias = tensors(device, m, n, k)
    check(x, weight, bias, config)


@pytest.mark.parametrize(
    "m, config",
    [
        (1, SkinnyConfig(1, 4, 256, split_k=4, num_warps=1)),
        (3, SkinnyConfig(4, 4, 256, split_k=4, num_warps=1, vector=True)),
        (9, SkinnyConfig(16, 16, 64, split_k=4, num_stages=2)),
        (9, SkinnyConfig(16, 16, 64, split_k=4, num_stages=2, waits=True)),
    ],
)
def test_split_products_repeat_exactly(device, m, config):
    x, weight, bias = tensors(device, m, 16, 1024)
    """The first one leaves its arrival counters at zero: the next one starts with them."""
    first = check(x, weight, bias, config)
    for _ in range(2):
        assert torch.equal(op.skinny_gemm(x, weight, bias, config=config), first)


@pytest.mark.parametrize("config", [MATRIX, ROWS])
def test_rows_and_weights_may_be_parts_of_larger_tensors(device, config):
    x, weight, _ = tensors(device, 4, 48, 128)
    y = op.skinny_gemm(x[1:3, 32:96], weight[16:48, :].view(64, 64), config=config)
    expected = op.skinny_gemm_reference(x[1:3, 32:96], weight[16:48, :].reshape(64, 64))
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("config", [MATRIX, ROWS])
def test_nothing_is_written_beside_the_output(device, config):
    x, weight, _ = tensors(device, 3, 20, 64)
    frame = torch.full((5, 20), 7.0, dtype=x.dtype, device=device)
    op.plan_launch(x, weight, None, y=frame[1:4], config=config)()
    assert (frame[0] == 7).all() and (frame[4] == 7).all()
    torch.testing.assert_close(
        frame[1:4].float(), op.skinny_gemm_reference(x, weight).float(), rtol=0.01, atol=1e-3
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_choice_fits(model):
    hidden, inner, qkv, vocabulary = MODELS[model]
    shapes = [
        *((qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)),
        (vocabulary, hidden),
    ]
    for n, k in shapes:
        for m in range(1, op.MAX_ROWS + 1):
            config = op.choose(m, n, k)
            assert config is None or config.fits(m, n, k), (m, n, k, config)
    assert op.choose(1, hidden, hidden) is not None
    assert op.choose(op.MAX_ROWS + 1, hidden, hidden) is None


def test_what_fits():
    config = SkinnyConfig(16, 32, 64, split_k=3, num_stages=3, prefetch=64)
    assert config.fits(16, 100, 192)
    assert not config.fits(17, 100, 192)
    assert not config.fits(16, 100, 128)  # the third split would be empty
    assert not config.fits(16, 100, 144)  # its prefetch would leave the row
    assert not config.fits(16, 100, 200)  # K is no multiple of 16
    early = SkinnyConfig(1, 8, 256, num_warps=1, prefetch=256)
    assert early.fits(1, 8, 512) and not early.fits(1, 8, 384)


def test_linear_serves_what_the_kernels_cannot(device):
    x, weight, bias = tensors(device, 2, 16, 64)
    for a, w, b in [
        (x.float(), weight.float(), bias.float()),
        (x[:, :40], weight[:, :40], None),  # K no multiple of 16, a weight with gaps
        (x[:, None], weight, bias),
        (x[:0], weight, bias),
        (x.expand(2, 64)[:1].expand(op.MAX_ROWS + 1, 64), weight, None),
    ]:
        assert not op.serves(a, w, b)
        assert torch.equal(op.linear(a, w, b), F.linear(a, w, b))


@pytest.mark.parametrize("m, config", [(1, VECTOR), (3, MATRIX), (3, None)])
def test_linear_does_what_was_chosen(device, monkeypatch, m, config):
    monkeypatch.setattr(op, "choose", lambda *sizes: config if sizes == (m, 16, 512) else 1 / 0)
    x, weight, bias = tensors(device, m, 16, 512)
    y = op.linear(x, weight, bias)
    if config is None:
        assert torch.equal(y, F.linear(x, weight, bias))
    else:
        assert torch.equal(y, op.skinny_gemm(x, weight, bias, config=config))
        assert torch.equal(y, op.skinny_gemm(x, weight, bias))


def test_a_configuration_that_does_not_fit_is_refused(device):
    x, weight, _ = tensors(device, 2, 16, 64)
    with pytest.raises(AssertionError, match="does not fit m=2"):
        op.skinny_gemm(x, weight, config=VECTOR)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_in_a_cuda_graph(device):
    configs = [
        SkinnyConfig(1, 8, 1024, prefetch=1024),
        SkinnyConfig(1, 8, 512, split_k=2, num_warps=2),
        SkinnyConfig(16, 32, 128, split_k=2, num_stages=4, prefetch=256),
    ]
    x, weight, _ = tensors(device, 1, 4096, 4096)

    def chain() -> torch.Tensor:
        y = x
        for config in configs:
            y = op.skinny_gemm(y, weight, config=config)
        return y

    eager = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, eager)
