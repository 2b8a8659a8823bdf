"""Which way of copying is the fastest here: measured at the start, chosen from at every load.

Loads only. Nothing is decided by how fast stores are: nobody waits for one, how many are under way
is limited by blocks, and there is no choice to make for whole rows, which are large.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hetero_llm.bridge.kv.native import CopierError, Method

if TYPE_CHECKING:
    from hetero_llm.bridge.kv.copier import NativeCopier

logger = logging.getLogger(__name__)

GROUPS = (1, 2, 4, 8)
"""Layers of a group that are measured."""

_ASSUMED_RATE = 20e9  # bytes a second, as long as nothing was measured
_LAYER_COMPUTE_S = 0.15e-3  # of a few rows, if nobody says more
# What a group costs besides its bytes: a few calls of the driver. It only keeps tiny loads from
# being cut into many groups for nothing.
_GROUP_S = 5e-6
# A kernel takes its turn on the processors behind the step's own, which idle measurements do not
# show: it has to be so much faster than the copy engines.
_KERNEL_HANDICAP = 1.25

_SMALL_BYTES, _LARGE_BYTES = 64 << 20, 256 << 20  # of one measurement
_REPEATS = 2
_BUDGET_S = 0.5
_HOPELESS = 0.75
"""Who copies a small load at less than so much of the best rate is not tried with a large one."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one method is at one size of pieces.

    Attributes:
        layers: of a group; its pieces are so many layers of a block.
        scattered, ascending: bytes a second with blocks that follow each other nowhere, or
            everywhere, of large loads.
        scattered_start, ascending_start: seconds that every group takes besides.
    """

    method: Method
    layers: int
    scattered: float
    ascending: float
    scattered_start: float = 0.0
    ascending_start: float = 0.0

    def seconds(self, num_bytes: int, num_groups: int, share: float) -> float:
        """Of a load of which a share of the blocks follows the one before."""
        scattered = num_groups * self.scattered_start + num_bytes / self.scattered
        ascending = num_groups * self.ascending_start + num_bytes / self.ascending
        return share * ascending + (1 - share) * scattered


@dataclass(frozen=True, slots=True)
class Choice:
    """How a load goes: by which method, how many layers at a time."""

    method: Method
    group: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured; see `calibrate`.

    Attributes:
        layer_bytes: of one layer of one block.
        rates: for each method one entry or more, by ascending size.
        measured: False: nothing was, all rates are one assumption.
    """

    layer_bytes: int
    rates: tuple[Rate, ...]
    measured: bool = True

    def choose(
        self, num_layers: int, num_blocks: int, share: float, compute: float | None
    ) -> Choice:
        """The method and the group that let a step of `compute` seconds end the soonest.

        Args:
            share: of the blocks that follow the one before on both sides.
            compute: of the step's rows; 0: unknown; None: what follows this load takes longer.
        """
        if compute == 0:
            compute = num_layers * _LAYER_COMPUTE_S
        num_bytes = num_blocks * num_layers * self.layer_bytes

        def seconds(method: Method, group: int) -> float:
            num_groups = -(-num_layers // group)
            load = self._rate(method, group).seconds(num_bytes, num_groups, share)
            if method == Method.KERNEL:
                load *= _KERNEL_HANDICAP
            load += num_groups * _GROUP_S
            if compute is None:
                return load
            # What is not hidden: the first group before the compute, or the last layers after it.
            return max(load, compute) + min(load, compute) * group / num_layers

        groups = [group for group in _powers_of_two() if group <= num_layers]
        every = [(method, group) for method in self.methods() for group in groups]
        return Choice(*min(every, key=lambda one: seconds(*one)))

    def methods(self) -> tuple[Method, ...]:
        return tuple(dict.fromkeys(rate.method for rate in self.rates))

    def best_rate(self) -> float:
        """Bytes a second, of the fastest method at its best."""
        return max(max(rate.scattered, rate.ascending) for rate in self.rates)

    def best(self) -> tuple[Rate, ...]:
        """The fastest with scattered blocks, for each size of pieces."""
        sizes = sorted({rate.layers for rate in self.rates})
        of_size = ([rate for rate in self.rates if rate.layers == size] for size in sizes)
        return tuple(max(rates, key=lambda rate: rate.scattered) for rates in of_size)

    def table(self) -> str:
        """For people: GB/s of each method at each size, scattered / ascending blocks."""
        if not self.measured:
            return "copies to the device: not measured"
        sizes = sorted({rate.layers for rate in self.rates})
        pieces = "".join(f"{_size(layers * self.layer_bytes):>16}" for layers in sizes)
        lines = [
            "copies to the device, GB/s, scattered / ascending blocks",
            f"{'piece':<8}{pieces}",
        ]
        best = self.best()
        for method in self.methods():
            own = {rate.layers: rate for rate in self.rates if rate.method == method}
            cells = [_cell(own[size], own[size] in best) if size in own else "-" for size in sizes]
            lines.append(f"{method.name.lower():<8}" + "".join(f"{cell:>16}" for cell in cells))
        return "\n".join([*lines, "* the fastest with scattered blocks"])

    def _rate(self, method: Method, group: int) -> Rate:
        """The entry of the nearest size that is not larger, else the smallest."""
        own = [rate for rate in self.rates if rate.method == method]
        return max((r for r in own if r.layers <= group), key=lambda r: r.layers, default=own[0])


def assumed(methods: Iterable[Method], layer_bytes: int) -> Calibration:
    """What is chosen from before anything is measured: the first of the methods, whatever it is."""
    rate = Rate(next(iter(methods)), 1, _ASSUMED_RATE, _ASSUMED_RATE)
    return Calibration(layer_bytes, (rate,), measured=False)


def prepare(copier: NativeCopier) -> Calibration:
    """What a server does with a new copier: adds the copy kernel if it can be had, calibrates (see
    there when it may), and logs the table."""
    try:
        copier.add_kernel()
    except CopierError as error:
        logger.info("%s; the copy engines remain", error)
    calibration = calibrate(copier)
    logger.info("%s", calibration.table())
    return calibration


def calibrate(copier: NativeCopier, *, seed: int = 0) -> Calibration:
    """Measures all methods that the copier has, through the copier itself, and makes it use them.

    Loads garbage: it must run before anything is in the device's blocks, whose content changes.
    Host rows are only read. Takes 0.5 s at most on a usual machine; sizes that there was no time
    for are left out, as are methods that fail. With less than two blocks or rows there is nothing
    to measure.

    Returns:
        What the copier chooses from, from now on.
    """
    deadline = time.monotonic() + _BUDGET_S
    most = min(copier.num_slots, copier.device.num_blocks)
    if most < 2:
        return copier.calibration
    rng = np.random.default_rng(seed)
    rates: list[Rate] = []
    for method in copier.methods():
        for group in GROUPS:
            if group > copier.device.num_layers or time.monotonic() > deadline:
                break
            best = max((max(rate.scattered, rate.ascending) for rate in rates), default=0.0)
            rate = _measure(copier, method, group, best, rng)
            if rate is None:
                break
            rates.append(rate)
    if rates:
        copier.use(Calibration(copier.layer_bytes, tuple(rates)))
    return copier.calibration


def _measure(
    copier: NativeCopier, method: Method, group: int, best: float, rng: np.random.Generator
) -> Rate | None:
    """None if copies fail. best: the highest rate so far."""
    sizes = (copier.num_slots, copier.device.num_blocks)
    scattered = _fit(copier, Choice(method, group), [rng.permutation(n) for n in sizes], best)
    ascending = _fit(copier, Choice(method, group), [np.arange(n) for n in sizes], best)
    if scattered is None or ascending is None:
        return None
    rates, starts = zip(scattered, ascending, strict=True)
    return Rate(method, group, *rates, *starts)


def _fit(
    copier: NativeCopier, choice: Choice, orders: list[np.ndarray], best: float
) -> tuple[float, float] | None:
    """Bytes a second and seconds of a group besides: the line through a small load and a large one,
    if there is room for it and the small one is not hopeless.

    Args:
        orders: host rows and blocks, of which the first are loaded.
    """
    layers = min(copier.device.num_layers, GROUPS[-1])
    block = layers * copier.layer_bytes
    room = min(map(len, orders))
    small, large = (min(max(2, most // block), room) for most in (_SMALL_BYTES, _LARGE_BYTES))
    short = _time(copier, choice, orders, small, layers)
    if short is None:
        return None
    rate = small * block / short
    if large < 2 * small or rate < _HOPELESS * best:
        return rate, 0.0
    long = _time(copier, choice, orders, large, layers)
    if long is None:
        return None
    if long > short:
        rate = (large - small) * block / (long - short)
    num_groups = -(-layers // choice.group)
    return rate, max(0.0, short - small * block / rate) / num_groups


def _time(
    copier: NativeCopier, choice: Choice, orders: list[np.ndarray], count: int, layers: int
) -> float | None:
    """Seconds of the faster of two loads; None if one fails."""
    slots, blocks = (order[:count] for order in orders)
    took = [
        copier.time_load(slots, blocks, choice.method, choice.group, layers)
        for _ in range(_REPEATS)
    ]
    good = [seconds for seconds in took if seconds is not None]
    return min(good) if len(good) == _REPEATS else None


def calibrate_device(libcuda: str = "libcuda.so.1", *, layer_bytes: int = 64 << 10) -> Calibration:
    """Measures the present CUDA device with memory of its own, 256 MiB on either side, for
    `hetero-llm doctor`.

    Args:
        layer_bytes: of one layer of a block; the default is that of an 8B Llama in 16 bits.

    Raises:
        CopierError: there is no device, no memory or no driver.
    """
    import torch

    from hetero_llm.bridge.kv.copier import PLACES, CopyOptions, DeviceRows, NativeCopier

    if not torch.cuda.is_available():
        raise CopierError("there is no CUDA device")
    num_layers, num_rows = 32, 128
    row_bytes = num_layers * layer_bytes
    try:
        blocks = torch.empty(num_rows * row_bytes, dtype=torch.uint8, device="cuda")
        rows = torch.empty(num_rows * row_bytes, dtype=torch.uint8, pin_memory=True)
        flags = torch.zeros(PLACES, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise CopierError(f"no memory to measure copies with: {error}") from error
    device = DeviceRows(blocks.data_ptr(), num_rows, row_bytes, num_layers, flags.data_ptr())
    copier = NativeCopier(
        device,
        FixedRows(rows.data_ptr(), row_bytes, num_rows),
        CopyOptions(libcuda=libcuda),
        current_stream=lambda: torch.cuda.current_stream().cuda_stream,
    )
    try:
        with suppress(CopierError):  # the table has no line for it then
            copier.add_kernel()
        return calibrate(copier)
    finally:
        copier.close()


@dataclass(frozen=True, slots=True)
class FixedRows:
    """`copier.HostRows` of memory that was page-locked at once."""

    address: int
    row_bytes: int
    ready_rows: int

    @property
    def chunk_rows(self) -> int:
        return self.ready_rows


def _powers_of_two() -> tuple[int, ...]:
    return tuple(1 << exponent for exponent in range(10))


def _cell(rate: Rate, is_best: bool) -> str:
    return f"{rate.scattered / 1e9:.1f} / {rate.ascending / 1e9:.1f}{'*' if is_best else ' '}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes >= 1 << 10 else f"{num_bytes} B"
