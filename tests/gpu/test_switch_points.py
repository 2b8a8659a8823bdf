"""Where quantized products switch: what measured times decide, and what they do not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hetero_llm.gpu import switch_points
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, prepare
from hetero_llm.gpu.kernels.quantized_product import FEW_ROWS, TWO_PARTS, QuantizedProduct
from hetero_llm.gpu.switch_points import Body, agree_on_switch_points, measure_switch_points
from tests.quantization.matrices import random_matrix

BF16 = torch.bfloat16


@dataclass
class Clock:
    """Time of simulated products."""

    few: Callable[[int], float]
    eight: Callable[[int], float]
    sixteen: Callable[[int], float]
    fp8: Callable[[int], float] = lambda rows: 9.0
    now: float = 0.0
    timings: int = 0

    def seconds(self, bodies: Sequence[Body]) -> list[float]:
        times = []
        for body in bodies:
            begin = self.now
            body()
            times.append(self.now - begin)
        self.timings += 1
        return times


class SimulatedProduct(QuantizedProduct):
    def __init__(self, matrix: PreparedMatrix, clock: Clock) -> None:
        super().__init__(matrix)
        self.clock = clock

    def of_few_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self.clock.now += self.clock.few(len(x))
        return x

    def of_many_rows(self, x: Tensor, bias: Tensor | None, *, in_8_bits: bool) -> Tensor:
        eight = in_8_bits and self.can_quantize(x)
        self.clock.now += (self.clock.eight if eight else self.clock.sixteen)(len(x))
        return x

    def by_library(self, rows: QuantizedRows, bias: Tensor | None) -> Tensor:
        self.clock.now += self.clock.eight(rows.num_rows)
        return rows.codes

    def by_fp8(self, rows: QuantizedRows, bias: Tensor | None) -> Tensor:
        assert rows.parts == (2 if rows.num_rows <= TWO_PARTS else 1)
        self.clock.now += self.clock.fp8(rows.num_rows)
        return rows.codes


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = prepare(random_matrix("fp8", 32, 64, device=DEVICE))
INT4 = prepare(random_matrix("int4", 32, 64, group=32, device=DEVICE))


def measured(
    matrix: PreparedMatrix,
    few: Callable[[int], float],
    library: Callable[[int], float],
    sixteen: Callable[[int], float] | None = None,
) -> tuple[int, bool, int]:
    """few_rows, in_8_bits and the number of timings."""
    clock = Clock(few, library, sixteen or library)
    products = [SimulatedProduct(matrix, clock) for _ in range(3)]
    measure_switch_points(products, BF16, seconds=clock.seconds)
    ((few_rows, in_8_bits),) = {(p.few_rows, p.in_8_bits) for p in products}
    return few_rows, in_8_bits, clock.timings


@pytest.mark.parametrize(
    "few_at_64, few_rows, timings",
    [
        (1.0, 64, 2),  # equal: the default, and one look beyond it
        (1.04, 64, 2),  # the library is ahead by less than 5%
        (1.06, 32, 2),
        (2.5, 16, 2),
        (50.0, 16, 2),  # the least
        (0.49, 64, 2),  # at 128 rows the kernels are ahead by less than 5%
        (0.45, 128, 3),
        (0.1, 256, 3),  # the most
    ],
)
def test_the_default_changes_where_one_way_is_clearly_ahead(few_at_64, few_rows, timings):
    """Kernels of few rows take time by the row, the library the same for all."""
    found = measured(INT4, lambda rows: few_at_64 * rows / 64, lambda rows: 1.0)
    assert found == (few_rows, False, timings)


@pytest.mark.parametrize(
    "eight, few_rows, taken", [(0.7, 16, True), (1.04, 64, True), (1.06, 64, False)]
)
def test_rows_stay_in_16_bits_where_8_are_slower(eight, few_rows, taken, caplog):
    """What is measured at the switch is then the way that is taken."""
    with caplog.at_level(logging.INFO, switch_points.__name__):
        found = measured(FP8, lambda rows: 1.02, lambda rows: eight, lambda rows: 1.0)
    assert found[:2] == (few_rows, taken)
    (record,) = caplog.records
    assert f"fp8 32 x 64 switch at {found[0]} rows to {8 if taken else 16} bits" in record.message


@pytest.mark.parametrize(
    "fp8, expected",
    [
        (lambda rows: 9.0, range(0)),
        (lambda rows: 0.9, range(2, 257)),
        (lambda rows: 0.9 if rows < 256 else 1.0, range(2, 129)),
        (lambda rows: 0.97, range(0)),  # ahead by less than 5%
        (lambda rows: 0.9 if 16 < rows <= 32 or rows == 128 else 1.0, range(17, 33)),
        (lambda rows: {16: 0.9, 64: 0.5, 128: 0.5}.get(rows, 2.0), range(33, 129)),
    ],
)
@pytest.mark.parametrize("comes_quantized", [True, False])
def test_fp8_products_take_the_longest_run_where_they_are_ahead(fp8, expected, comes_quantized):
    clock = Clock(lambda rows: 1.0, lambda rows: 1.0, lambda rows: 9.0, fp8)
    product = SimulatedProduct(FP8, clock)
    product.comes_quantized = comes_quantized
    measure_switch_points([product], BF16, seconds=clock.seconds)
    assert product.fp8_rows == expected
    assert product.quantizes(torch.zeros(40, 64, dtype=BF16, device=DEVICE)) == (40 in expected)


def test_fp8_rows_beyond_those_in_two_parts_need_8_bits():
    clock = Clock(lambda rows: 1.0, lambda rows: 2.0, lambda rows: 1.0, lambda rows: 0.5)
    product = SimulatedProduct(FP8, clock)
    measure_switch_points([product], BF16, seconds=clock.seconds)
    assert (product.in_8_bits, product.fp8_rows) == (False, range(2, TWO_PARTS + 1))


def test_ranks_agree():
    """What the first one has measured is what all use."""
    first, second = QuantizedProduct(FP8), QuantizedProduct(FP8)
    first.few_rows, first.in_8_bits, first.fp8_rows = 32, False, range(2, 65)
    sent: list[int] = []
    agree_on_switch_points([first], lambda numbers: sent.extend(numbers) or list(numbers))
    agree_on_switch_points([second], lambda _: sent)
    assert (second.few_rows, second.in_8_bits, second.fp8_rows) == (32, False, range(2, 65))


def test_each_kind_and_shape_decides_for_itself():
    clock = Clock(lambda rows: rows / 64, lambda rows: 0.1, lambda rows: 9.0)
    products = [SimulatedProduct(matrix, clock) for matrix in (FP8, INT4, FP8)]
    measure_switch_points(products, BF16, seconds=clock.seconds)
    assert [p.few_rows for p in products] == [16, 256, 16]


def test_what_is_not_measured_keeps_the_default():
    """Float32, which only dequantized matrices serve, and more shapes than are worth the time."""
    clock = Clock(lambda rows: 9.0, lambda rows: 1.0, lambda rows: 1.0)
    product = SimulatedProduct(INT4, clock)
    measure_switch_points([product], torch.float32, seconds=clock.seconds)
    assert product.few_rows == FEW_ROWS and clock.timings == 0
    products = [
        SimulatedProduct(prepare(random_matrix("int8", 16 * n, 64, device=DEVICE)), clock)
        for n in range(1, 13)
    ]
    measure_switch_points(products, BF16, seconds=clock.seconds)
    assert [p.few_rows for p in products] == [FEW_ROWS] * 4 + [16] * 8


def test_without_memory_the_default_stays(caplog):
    def fails(_: Sequence[Body]) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    product = QuantizedProduct(INT4)
    measure_switch_points([product], BF16, seconds=fails)
    assert product.few_rows == FEW_ROWS and product.in_8_bits
    assert "no memory" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times graphs on a device")
def test_on_a_device():
    matrices = [random_matrix("int4", 4096, 4096, group=128, device="cuda") for _ in range(4)]
    products = [QuantizedProduct(prepare(matrix)) for matrix in matrices]
    measure_switch_points(products, BF16)
    assert {p.few_rows for p in products} <= set(switch_points.POINTS)
    assert len({p.few_rows for p in products}) == 1
