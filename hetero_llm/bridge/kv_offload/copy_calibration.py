"""Measures the copy methods of this machine at start; each load is then chosen by the rates.

Only loads are measured: no step waits for a store, and the whole rows that stores copy are large
enough for any method.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hetero_llm.bridge.kv_offload.copier import NUM_FLAGS, CopyOptions, DeviceRows, NativeCopier
from hetero_llm.bridge.kv_offload.copier_library import CopierError, Method
from hetero_llm.bridge.kv_offload.copy_rates import Calibration, Choice, Rate

logger = logging.getLogger(__name__)

GROUPS = (1, 2, 4, 8)
"""Measured group sizes, in layers."""

_SMALL_BYTES, _LARGE_BYTES = 64 << 20, 256 << 20  # sizes of the two loads measured
_REPEATS = 2
_BUDGET_S = 0.5
_MIN_SHARE_OF_BEST = 0.75
"""Methods below 75% of the best small-load rate are not measured on large loads."""


def prepare(copier: NativeCopier) -> Calibration:
    """Prepares a new copier for serving: adds the copy kernel if possible, calibrates (see
    `calibrate` for the conditions) and logs the rates."""
    try:
        copier.add_kernel()
    except CopierError as error:
        logger.info("%s; the copy engines remain", error)
    calibration = calibrate(copier)
    logger.info("%s", calibration.table())
    return calibration


def calibrate(copier: NativeCopier) -> Calibration:
    """Measures all methods of a copier and sets its rates.

    Overwrites device blocks with garbage, so it must run before they hold anything. Host rows are
    only read. Usually takes 0.5 s at most; sizes that there was no time for are left out, as are
    methods that fail. Does nothing with fewer than two device or host blocks.

    Returns:
        The copier's calibration.
    """
    deadline = time.monotonic() + _BUDGET_S
    most = min(copier.num_host_blocks, copier.device.num_blocks)
    if most < 2:
        return copier.calibration
    rng = np.random.default_rng(0)
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
    """Rates of one method and group size; None if copies fail. `best`: the highest rate so far."""
    sizes = (copier.num_host_blocks, copier.device.num_blocks)
    scattered = _fit(copier, Choice(method, group), [rng.permutation(n) for n in sizes], best)
    ascending = _fit(copier, Choice(method, group), [np.arange(n) for n in sizes], best)
    if scattered is None or ascending is None:
        return None
    rates, starts = zip(scattered, ascending, strict=True)
    return Rate(method, group, *rates, *starts)


def _fit(
    copier: NativeCopier, choice: Choice, orders: list[np.ndarray], best: float
) -> tuple[float, float] | None:
    """Bytes a second and additional seconds for each group: the line through a small and a large
    load, if there is room for that and the small one was fast enough.

    Args:
        orders: host and device blocks; the first ones are loaded.
    """
    layers = min(copier.device.num_layers, GROUPS[-1])
    block = layers * copier.layer_bytes
    room = min(map(len, orders))
    small, large = (min(max(2, most // block), room) for most in (_SMALL_BYTES, _LARGE_BYTES))
    short = _time(copier, choice, orders, small, layers)
    if short is None:
        return None
    rate = small * block / short
    if large < 2 * small or rate < _MIN_SHARE_OF_BEST * best:
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
    host_blocks, blocks = (order[:count] for order in orders)
    took = [
        copier.time_load(host_blocks, blocks, choice.method, choice.group, layers)
        for _ in range(_REPEATS)
    ]
    good = [seconds for seconds in took if seconds is not None]
    return min(good) if len(good) == _REPEATS else None


def calibrate_device() -> Calibration:
    """Measures the current CUDA device with temporary memory, 256 MiB on either side, for
    `hetero-llm doctor`. Its blocks are those of an 8B Llama in 16 bits.

    Raises:
        CopierError: there is no device, no memory or no driver.
    """
    import torch

    if not torch.cuda.is_available():
        raise CopierError("there is no CUDA device")
    num_layers, num_rows = 32, 128
    row_bytes = num_layers * (64 << 10)
    try:
        blocks = torch.empty(num_rows * row_bytes, dtype=torch.uint8, device="cuda")
        rows = torch.empty(num_rows * row_bytes, dtype=torch.uint8, pin_memory=True)
        flags = torch.zeros(NUM_FLAGS, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise CopierError(f"no memory to measure copies with: {error}") from error
    device = DeviceRows(blocks.data_ptr(), num_rows, row_bytes, num_layers, flags.data_ptr())
    copier = NativeCopier(
        device,
        FixedRows(rows.data_ptr(), row_bytes, num_rows),
        CopyOptions(),
        current_stream=lambda: torch.cuda.current_stream().cuda_stream,
    )
    try:
        with suppress(CopierError):  # then the table has no line for it
            copier.add_kernel()
        return calibrate(copier)
    finally:
        copier.close()


@dataclass(frozen=True, slots=True)
class FixedRows:
    """`copier.HostRows` of memory that was page-locked as a whole."""

    address: int
    row_bytes: int
    ready_rows: int

    @property
    def chunk_rows(self) -> int:
        return self.ready_rows
