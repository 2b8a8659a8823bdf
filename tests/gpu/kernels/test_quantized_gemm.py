"""Products of few rows with quantized weights against float64 products of the same matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero_llm.gpu.kernels import quantized_gemm as op
from hetero_llm.gpu.kernels.dequantize import dequantize_to
from hetero_llm.gpu.kernels.skinny_gemm import SkinnyConfig
from hetero_llm.quantization.matrix import BLOCK_ROWS, KINDS, Kind, QuantizedMatrix, dequantize
from tests.quantization.matrices import random_matrix

# Largest error over largest result. The interpreter cuts bits off bfloat16 instead of rounding.
ERRORS = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

MODELS = {
    "llama-3.1-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "qwen2.5-7b": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)],
    "smollm2-135m": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
}


def config_for(m: int, matrix: op.PreparedMatrix, **changes: int) -> SkinnyConfig:
    """A small one: few programs, so that the interpreter is quick."""
    if m == 1:
        small = SkinnyConfig(1, 16, 256 * matrix.parts, num_warps=1)
    else:
        block_m = next((size for size in (8, 16, 32, 64) if m <= size), 128)
        small = SkinnyConfig(block_m, 32, matrix.chunk, num_warps=2, num_stages=3)
    return replace(small, **changes)


def inputs(device, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] and bias [n]."""
    generator = torch.Generator().manual_seed(m * 1_000_003 + n * 1009 + k)
    x = torch.randn(m, k, generator=generator)
    bias = torch.randn(n, generator=generator)
    return x.to(device, dtype), bias.to(device, dtype)


def check(
    device,
    m: int,
    matrix: QuantizedMatrix,
    *,
    dtype: torch.dtype = torch.float16,
    with_bias: bool = False,
    **changes: int,
) -> torch.Tensor:
    x, bias = inputs(device, m, *matrix.shape, dtype)
    prepared = op.prepare(matrix.to(device))
    config = config_for(m, prepared, **changes)
    y = op.quantized_linear(x, prepared, bias if with_bias else None, config=config)
    expected = x.cpu().double() @ dequantize(matrix, torch.float64).t()
    if with_bias:
        expected += bias.cpu().double()
    assert y.dtype == dtype and y.shape == expected.shape
    error = (y.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < ERRORS[dtype]
    return y


@pytest.mark.parametrize("group", [None, 16, 32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3])
def test_every_kind_and_group(device, m: int, kind: Kind, group: int | None):
    check(device, m, random_matrix(kind, 16, 256, group=group))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3])
def test_bfloat16(device, m: int, kind: Kind):
    check(device, m, random_matrix(kind, 16, 256, group=128), dtype=torch.bfloat16, with_bias=True)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("m", [1, 3])
def test_scales_of_blocks(device, m: int, kind: Kind):
    matrix = random_matrix(kind, BLOCK_ROWS + 24, 256, group=128, rows=BLOCK_ROWS)
    check(device, m, matrix, block_n=16 if m == 1 else 128)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"zeros": "zero", "group": 32},
        {"zeros": "zero", "group": 128, "scale_dtype": torch.bfloat16},
        {"zeros": "zero", "group": 256},
        {"zeros": "offset", "group": 32, "row_scale": True},
        {"zeros": "offset", "group": 256, "scale_dtype": torch.float16},
        {"zeros": "zero", "group": 64, "order": True},
        {"row_scale": True, "order": True},
    ],
    ids=str,
)
def test_zero_points_offsets_and_orders(device, m, settings):
    check(device, m, random_matrix("int4", 16, 256, **settings))


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "kind, settings",
    [
        ("fp4", {"group": 16, "scale_dtype": torch.float8_e4m3fn, "row_scale": True}),
        ("fp8", {"order": True}),
        ("int8", {"group": 128, "order": True, "row_scale": True}),
        ("nf4", {"group": 64, "scale_dtype": torch.bfloat16}),
    ],
)
def test_scales_as_checkpoints_have_them(device, m, kind, settings):
    check(device, m, random_matrix(kind, 16, 256, **settings))


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize(
    "kind, n, k, settings",
    [
        ("fp8", 10, 144, {}),
        ("fp8", 130, 80, {"group": 128, "rows": BLOCK_ROWS}),
        ("int8", 1, 16, {}),
        ("int8", 21, 400, {"group": 128}),
        ("int4", 7, 48, {"group": 32, "zeros": "zero"}),
        ("int4", 18, 592, {"group": 128, "zeros": "offset", "order": True}),
        ("fp4", 33, 208, {"group": 16}),
        ("nf4", 20, 336, {"group": 64}),
    ],
)
def test_sizes_that_are_no_multiples_of_the_tiles(device, m, kind, n, k, settings):
    check(device, m, random_matrix(kind, n, k, **settings), with_bias=True)


@pytest.mark.parametrize("m", [8, 9, 16, 31, 64, 65, 96, 128, 130, 255])
def test_numbers_of_rows(device, m):
    kind = KINDS[m % len(KINDS)]
    check(device, m, random_matrix(kind, 40, 128, group=64), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "kind, n, k, settings",
    [
        ("fp8", 130, 400, {"group": 128, "rows": BLOCK_ROWS}),
        ("int8", 21, 400, {"group": 128, "row_scale": True}),
        ("int4", 40, 384, {"group": 128, "zeros": "zero", "order": True}),
        ("int4", 18, 592, {"group": 128, "zeros": "offset"}),
        ("int4", 33, 80, {}),
        ("fp4", 33, 208, {"group": 16, "scale_dtype": torch.float8_e4m3fn, "row_scale": True}),
        ("fp4", 7, 96, {"group": 32, "scale_dtype": torch.bfloat16}),
        ("nf4", 20, 336, {"group": 64}),
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [65, 130])
def test_many_rows_of_odd_shapes(device, m, kind, n, k, settings):
    matrix = random_matrix(kind, n, k, **settings)
    assert op.folds(op.prepare(matrix), 128) == (bool(settings) and "offset" not in str(settings))
    check(device, m, matrix, dtype=torch.bfloat16, with_bias=True)


def test_scales_multiply_weights_as_soon_as_that_is_less():
    def of(kind, group, **settings):
        return op.prepare(random_matrix(kind, 4, 256, group=group, **settings))

    assert [op.folds(of("fp4", 16), m) for m in (1, 8, 16)] == [False, False, True]
    assert [op.folds(of("nf4", 64), m) for m in (32, 64)] == [False, True]
    assert not op.folds(of("int4", 256, zeros="zero"), 128)
    assert not op.folds(of("int4", 32, zeros="offset"), 128)
    assert not op.folds(of("fp8", None), 128)  # a scale for each row is applied to the sums


@pytest.mark.parametrize("fold", [False, True])
def test_both_places_of_scales(device, fold):
    matrix = random_matrix("int4", 40, 256, group=64, zeros="zero")
    x, _ = inputs(device, 9, *matrix.shape, torch.float16)
    prepared = op.prepare(matrix.to(device))
    y = torch.empty(9, 40, dtype=torch.float16, device=device)
    op.plan_launch(x, prepared, None, y=y, config=config_for(9, prepared), fold=fold)()
    expected = x.cpu().double() @ dequantize(matrix, torch.float64).t()
    error = (y.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < ERRORS[torch.float16]


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("zeros", [None, "zero", "offset"])
def test_chunks_within_a_group_have_a_word_for_each_scale(device, m, zeros):
    matrix = random_matrix("int4", 16, 512, group=128, zeros=zeros, scale_dtype=torch.float16)
    prepared = op.prepare(matrix, lanes=32)
    assert prepared.chunk == 128 and prepared.scale_dtype == torch.float32
    assert op.prepare(matrix).chunk == 256 and op.prepare(matrix).scale_dtype == torch.float16
    x, _ = inputs(device, m, *matrix.shape, torch.float16)
    prepared = op.prepare(matrix.to(device), lanes=32)
    whole = dequantize_to(prepared, torch.empty(16, 512, device=device))
    assert torch.equal(whole.cpu(), dequantize(matrix, torch.float32))
    y = op.quantized_linear(x, prepared, config=config_for(m, prepared))
    expected = x.cpu().double() @ dequantize(matrix, torch.float64).t()
    error = (y.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < ERRORS[torch.float16]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    "m, k, splits, waits",
    [(1, 2048, 2, False), (1, 2048, 2, True), (9, 640, 2, True), (2, 1024, 4, False),
     (2, 1024, 4, True), (130, 640, 2, False)],
)  # fmt: skip
def test_split_products_repeat_exactly(device, m, k, splits, kind, waits):
    """The first one leaves counters of zero, or no sum: the next one starts with them."""
    matrix = random_matrix(kind, 16, k, group=64)
    first = check(device, m, matrix, split_k=splits, waits=waits)
    assert torch.equal(check(device, m, matrix, split_k=splits, waits=waits), first)
    if waits:
        assert torch.equal(check(device, m, matrix, split_k=splits), first)


def test_sums_that_are_no_numbers_are_handed_over(device):
    """Whatever the sums of a share are, none looks like one that is still missing."""
    prepared = op.prepare(random_matrix("fp8", 16, 512, group=128, device=device))
    x = torch.zeros(2, 512, dtype=torch.float16, device=device)
    x[0, :256] = torch.nan
    config = config_for(2, prepared, split_k=2, waits=True)
    y = op.quantized_linear(x, prepared, config=config)
    assert y[0].isnan().all() and (y[1] == 0).all()


def test_a_tile_of_several_chunks(device):
    check(device, 4, random_matrix("int4", 16, 512, group=32, zeros="zero"), block_k=256)
    check(device, 4, random_matrix("fp8", 16, 512, group=128), block_k=512, split_k=1)


def test_no_rows(device):
    matrix = op.prepare(random_matrix("fp8", 24, 64, device=device))
    x = torch.zeros(0, 64, dtype=torch.bfloat16, device=device)
    assert op.quantized_linear(x, matrix).shape == (0, 24)


@pytest.mark.parametrize("m", [1, 3])
def test_nothing_is_written_beside_the_output(device, m):
    matrix = random_matrix("int4", 20, 64, group=32, device=device)
    x, _ = inputs(device, m, 20, 64, torch.float16)
    frame = torch.full((m + 2, 20), 7.0, dtype=x.dtype, device=device)
    prepared = op.prepare(matrix)
    op.plan_launch(x, prepared, None, y=frame[1:-1], config=config_for(m, prepared))()
    assert (frame[0] == 7).all() and (frame[-1] == 7).all()
    expected = x.double() @ dequantize(matrix, torch.float64).t()
    torch.testing.assert_close(frame[1:-1].double(), expected, rtol=0, atol=1e-2)


def test_rows_may_be_parts_of_larger_tensors(device):
    matrix = random_matrix("int8", 16, 64, device=device)
    x, _ = inputs(device, 6, 16, 160, torch.float16)
    prepared = op.prepare(matrix)
    for part in (x[2:5, 32:96], x[3:4, 64:128]):
        config = config_for(part.shape[0], prepared)
        y = op.quantized_linear(part, prepared, config=config)
        expected = part.double() @ dequantize(matrix, torch.float64).t()
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-2)


def test_prepare_leaves_the_matrix_as_it_is():
    for kind in KINDS:
        matrix = random_matrix(kind, 12, 96, group=32)
        before = dequantize(matrix, torch.float32).clone()
        op.prepare(matrix)
        assert torch.equal(dequantize(matrix, torch.float32), before)


def test_what_prepare_writes():
    """Lane l of a chunk: its columns l, l + lanes and so on, lowest bits first."""
    matrix = random_matrix("int4", 2, 128, group=32, scale_dtype=torch.float16)
    prepared = op.prepare(matrix)
    assert (prepared.lanes, prepared.chunk, prepared.padded_columns) == (32, 128, 128)
    codes = torch.stack((matrix.data & 15, matrix.data >> 4), dim=-1).flatten(1).int()
    lanes = prepared.data.int() & 65535
    for part in range(4):
        assert torch.equal(lanes >> 4 * part & 15, codes[:, 32 * part : 32 * (part + 1)])
    # Two groups in a word, features next to each other.
    assert prepared.scale is not None and prepared.scale.shape == (2, 16)
    pairs = prepared.scale[:, :2].t().contiguous().view(torch.float16)
    assert torch.equal(pairs, matrix.scale)
    assert prepared.nbytes == 2 * 64 + 2 * 16 * 4
    assert op.prepare(random_matrix("fp8", 4, 1024)).chunk == 256
    assert op.prepare(random_matrix("fp4", 4, 1024, group=16)).chunk == 64
    assert op.prepare(random_matrix("fp8", 4, 1024, group=128, rows=BLOCK_ROWS)).chunk == 128


def test_groups_that_have_no_prepared_form():
    matrix = random_matrix("int8", 4, 48, group=24)
    assert not op.prepares(matrix)
    with pytest.raises(AssertionError, match="groups of 24"):
        op.prepare(matrix)


def on_meta(kind: Kind, n: int, k: int, group: int) -> op.PreparedMatrix:
    """A matrix without memory."""
    small = random_matrix(kind, 1, k, group=group)
    return op.prepare(
        replace(
            small,
            data=torch.empty(n, small.data.shape[1], dtype=small.data.dtype, device="meta"),
            scale=torch.empty(n, small.scale.shape[1], device="meta"),
        )
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_choice_fits(model):
    for n, k in MODELS[model]:
        for kind, group in (("fp8", k), ("int8", 32), ("int4", 64), ("fp4", 16), ("nf4", 64)):
            matrix = on_meta(kind, n, k, group)
            for m in range(1, op.MAX_ROWS + 1):
                config = op.choose(m, matrix)
                assert op.fits(config, m, matrix), (m, n, k, kind, config)
                small = config.num_stages < 2 or op.shared_bytes(config, matrix) <= 227 << 10
                assert small, (m, kind, config)


def test_what_fits():
    matrix = op.prepare(random_matrix("int4", 16, 1024, group=64))
    vector = SkinnyConfig(1, 8, 1024, num_warps=1)
    assert op.fits(vector, 1, matrix) and not op.fits(vector, 2, matrix)
    assert not op.fits(replace(vector, num_warps=2), 1, matrix)
    assert not op.fits(replace(vector, block_n=32), 1, matrix)
    assert not op.fits(replace(vector, split_k=2), 1, matrix)  # the second part would be empty
    tiles = SkinnyConfig(16, 32, 256, num_stages=3)
    assert op.fits(tiles, 9, matrix) and op.fits(replace(tiles, split_k=4), 9, matrix)
    assert not op.fits(replace(tiles, block_k=128), 9, matrix)  # no whole chunk
    assert op.fits(replace(tiles, prefetch=256), 9, matrix)
    assert not op.fits(replace(tiles, prefetch=2048), 9, matrix)  # more than there are
    assert not op.fits(replace(vector, prefetch=64), 1, matrix)
    large = on_meta("int4", 1 << 18, 1024, 64)
    assert op.fits(replace(tiles, split_k=2), 9, large)
    assert not op.fits(replace(tiles, split_k=4, waits=True), 9, large)  # no room for the sums
    with pytest.raises(AssertionError, match="does not fit m=17"):
        x = torch.zeros(17, 1024, dtype=torch.float16)
        op.plan_launch(x, matrix, None, y=torch.empty(17, 16), config=tiles)


def test_what_is_served(device):
    matrix = op.prepare(random_matrix("int8", 8, 64, device=device))
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
    assert op.serves(x, matrix, None)
    assert not op.serves(x.float(), matrix, None)
    assert not op.serves(x, matrix, torch.zeros(8, device=device))
    assert not op.serves(x[:1].expand(op.MAX_ROWS + 1, 64), matrix, None)
    assert not op.serves(x[:, :48], matrix, None)
    odd = op.prepare(random_matrix("int8", 8, 40, device=device))
    assert not op.serves(x[:, :40], odd, None)
    with pytest.raises(AssertionError, match="cannot serve"):
        op.quantized_linear(x[:, :40], odd)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_cuda_graph(device, kind, m):
    matrix = op.prepare(random_matrix(kind, 4096, 4096, group=128, device=device))
    x, _ = inputs(device, m, 4096, 4096, torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(3):
            y = op.quantized_linear(y / y.abs().max(), matrix)
        return y

    eager = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, eager)
