"""Where quantized products switch from kernels of few rows to the library, measured at start.

Both ways are right at every number of rows, so only time decides, and that depends on the kind of
the weights, their shape and the versions of card and library. For each kind and shape of a model
two ways are timed where the default switches, and at twice or half as many rows as long as one way
is clearly ahead. A difference of less than 5% changes nothing: one engine shall switch where the
one before did, since the ways differ in the last bits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hetero_llm.gpu.graph_set import GraphSet, replay_seconds
from hetero_llm.gpu.kernels.quantize_rows import QuantizedRows, quantize_rows
from hetero_llm.gpu.kernels.quantized_gemm import PreparedMatrix, serves
from hetero_llm.gpu.kernels.quantized_product import FEW_ROWS, QuantizedProduct, parts_of

logger = logging.getLogger(__name__)

Body = Callable[[], None]
AgreeOnNumbers = Callable[[Sequence[int]], list[int]]
"""Numbers that a rank has measured, to those that all ranks use."""

POINTS = (16, 32, FEW_ROWS, 128, 256)
"""Numbers of rows at which a product may switch."""

FP8_POINTS = (8, 16, 32, 64, 128, 256)
"""The most rows of the ranges that `fp8_linear` may take, the first one from 2 rows on."""

_MANY = 2048  # rows, with which the library's products in 8 and in 16 bits are compared
_AHEAD = 1.05  # how many times as fast one way must be to be taken instead of the default
_MOST_SHAPES = 8  # the largest are measured, all others switch where the default does
_BYTES = 150e6  # of weights read in one timing: three times what L2 holds


def graph_seconds(bodies: Sequence[Body]) -> list[float]:
    """Seconds of each body on the device, replayed as a graph: what runs in a step."""
    graphs = GraphSet[int]()
    for index, body in enumerate(bodies):
        graphs.capture(index, body)
    return replay_seconds(graphs, range(len(bodies)))


@torch.inference_mode()
def measure_switch_points(
    products: Iterable[QuantizedProduct],
    dtype: torch.dtype,
    *,
    seconds: Callable[[Sequence[Body]], Sequence[float]] = graph_seconds,
) -> None:
    """Sets `few_rows`, `in_8_bits` and `fp8_rows` of each product, alike for all of one kind and
    shape.

    Args:
        products: Of one model, on one device.
        dtype: Of its activations; in float32 there is nothing to choose.
        seconds: Times bodies, each in turn.
    """
    begin = time.perf_counter()
    alike: dict[tuple[object, ...], list[QuantizedProduct]] = {}
    for product in products:
        alike.setdefault(_form(product), []).append(product)
    largest = sorted(alike.values(), key=lambda same: -same[0].matrix.nbytes)[:_MOST_SHAPES]
    lines = []
    for same in largest:
        try:
            lines += _measure(same, dtype, seconds)
        except torch.OutOfMemoryError:
            logger.warning("no memory to measure where quantized products switch: default kept")
            break
    if lines:
        spent = time.perf_counter() - begin
        logger.info("quantized products, measured in %.1f s: %s", spent, "; ".join(lines))


def agree_on_switch_points(products: Sequence[QuantizedProduct], agree: AgreeOnNumbers) -> None:
    """Gives all ranks of a model the same switch points.

    Args:
        products: as measured; as many in each rank.
    """
    measured = [
        number
        for one in products
        for number in (one.few_rows, int(one.in_8_bits), one.fp8_rows.start, one.fp8_rows.stop)
    ]
    agreed = iter(agree(measured))
    for product in products:
        product.few_rows, product.in_8_bits = next(agreed), bool(next(agreed))
        product.fp8_rows = range(next(agreed), next(agreed))


def _form(product: QuantizedProduct) -> tuple[object, ...]:
    """What the time of a product depends on."""
    matrix = product.matrix
    extras = (matrix.zero, matrix.offset, matrix.row_scale, matrix.order, product.block_product)
    return (
        product.comes_quantized,
        *(matrix.kind, matrix.shape, matrix.group, matrix.rows, matrix.scale_dtype),
        *(extra is None for extra in extras),
    )


@dataclass(frozen=True, slots=True)
class _Ways:
    """What is timed: the ways to multiply with the matrices of products that are alike."""

    products: Sequence[QuantizedProduct]

    @property
    def matrix(self) -> PreparedMatrix:
        return self.products[0].matrix

    def rows(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(count, self.matrix.shape[1], device=self.matrix.device).to(dtype)

    def few(self, x: Tensor) -> Body:
        return self._each(lambda product: product.of_few_rows(x, None))

    def many(self, x: Tensor, in_8_bits: bool) -> Body:
        return self._each(lambda product: product.of_many_rows(x, None, in_8_bits=in_8_bits))

    def fp8(self, x: Tensor) -> Body:
        made = self._rows_made(x, parts_of(len(x)))
        return self._each(lambda product: product.by_fp8(made(), None))

    def without_fp8(self, x: Tensor, few_rows: int, in_8_bits: bool) -> Body:
        """What is taken where `fp8_linear` is not."""
        if len(x) <= few_rows:
            return self.few(x)
        if in_8_bits and self.products[0].can_quantize(x):
            made = self._rows_made(x, 1)
            return self._each(lambda product: product.by_library(made(), None))
        return self.many(x, False)

    def _rows_made(self, x: Tensor, parts: int) -> Callable[[], QuantizedRows]:
        """Norms and gates make the rows of some products; others have a pass of their own."""
        if self.products[0].comes_quantized:
            made = quantize_rows(x, self.matrix, parts=parts)
            return lambda: made
        return lambda: quantize_rows(x, self.matrix, parts=parts)

    def _each(self, multiply: Callable[[QuantizedProduct], Tensor]) -> Body:
        def run() -> None:
            for product in self.products:
                multiply(product)

        return run


def _measure(
    same: list[QuantizedProduct],
    dtype: torch.dtype,
    seconds: Callable[[Sequence[Body]], Sequence[float]],
) -> list[str]:
    """Decides for products of one kind and shape. Returns what to log."""
    first, matrix = same[0], same[0].matrix
    enough = sum(total < _BYTES for total in accumulate(p.matrix.nbytes for p in same))
    ways = _Ways(same[: enough + 1])

    def ratio(count: int) -> float:
        """Time by kernels of few rows over time by the library."""
        x = ways.rows(count, dtype)
        by_few, by_many = seconds([ways.few(x), ways.many(x, in_8_bits)])
        return by_few / by_many

    if not serves(ways.rows(1, dtype), matrix, None):
        return []
    x = ways.rows(_MANY, dtype)
    in_8_bits = first.in_8_bits and first.can_quantize(x)
    if in_8_bits:
        eight, sixteen = seconds([ways.many(x, True), ways.many(x, False)])
        in_8_bits = eight < sixteen * _AHEAD
    del x
    at = POINTS.index(FEW_ROWS)
    if ratio(POINTS[at]) > _AHEAD:
        at -= 1
        while at > 0 and ratio(POINTS[at]) > _AHEAD:
            at -= 1
    else:
        while at + 1 < len(POINTS) and ratio(POINTS[at + 1]) * _AHEAD < 1:
            at += 1
    for product in same:
        product.few_rows, product.in_8_bits = POINTS[at], in_8_bits
    gains = {}
    for count in FP8_POINTS:
        x = ways.rows(count, dtype)
        if first.can_be_fp8(x):
            by_fp8, before = seconds([ways.fp8(x), ways.without_fp8(x, POINTS[at], in_8_bits)])
            gains[count] = before / by_fp8
    fp8_rows = _where_ahead(gains)
    for product in same:
        product.fp8_rows = fp8_rows
    n, k = matrix.shape
    bits = 8 if in_8_bits else 16
    line = f"{matrix.kind} {n} x {k} switch at {POINTS[at]} rows to {bits} bits"
    if fp8_rows:
        line += f", {fp8_rows.start} to {fp8_rows[-1]} rows in fp8"
    return [line]


def _where_ahead(gains: dict[int, float]) -> range:
    """Numbers of rows of neighbouring points at which a way is clearly ahead, of several such runs
    of points the one with the largest gain; empty where there is none.

    Args:
        gains: how many times as fast the way is, by the point's rows, ascending.
    """
    best, most = range(0), 0.0
    begin, gained, before = 0, 0.0, 1
    for point, gain in gains.items():
        if gain > _AHEAD:
            begin, gained = begin or before + 1, gained + math.log(gain)
            if gained > most:
                best, most = range(begin, point + 1), gained
        else:
            begin, gained = 0, 0.0
        before = point
    return best
