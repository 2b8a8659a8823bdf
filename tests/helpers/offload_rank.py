"""A rank process of which a test wants something: a device that is played on host memory, faults.

OFFLOAD_RANK_DRIVER: the library of a fake driver; without it the rank has the machine's device.
OFFLOAD_RANK_FAULT: what goes wrong in this rank, one of `_FAULTS`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hetero_llm.bridge.kv_offload.copier import NativeCopier
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.engine.builders.build_host_tier import HostPlatform
from hetero_llm.engine.processes import rank_process
from tests.bridge.kv_offload.conftest import FakeCuda
from tests.helpers.polled_gates import PolledGates

_COPIES_IN = (
    b"cuMemcpyBatchAsync", b"cuMemcpy2DAsync", b"cuMemcpyHtoDAsync", b"cuLaunchKernel",
)  # fmt: skip
_DELAY_US = 2000


class Impatient(PolledGates):
    """Steps do not wait at all, and say so: what they compute may be wrong."""

    def wait(self, layer: int) -> None:
        if not all(self.landed(flag, layer) for flag in self.armed):
            self.gave_up.add(self.turn)


def _fail_copies(driver: FakeCuda) -> PolledGates:
    """Every third load fails on its way, and every fourth store. Blocks hold noise before they are
    loaded, so that a step that reads them too early computes something else."""
    load, store = NativeCopier.load, NativeCopier.store
    counts = [0, 0]

    def bad_load(self: NativeCopier, order: TransferOrder) -> None:
        size = self.device.num_blocks * self.device.block_bytes
        memory = np.ctypeslib.as_array(
            (ctypes.c_float * (size // 4)).from_address(self.device.address)
        )
        memory.reshape(self.device.num_blocks, -1)[order.blocks] = 3.0
        counts[0] += 1
        if counts[0] % 3 == 0:
            for name in _COPIES_IN:
                driver.fail(name, 1, 1, 1)
        load(self, order)

    def bad_store(self: NativeCopier, order: TransferOrder) -> None:
        counts[1] += 1
        if counts[1] % 4 == 0:
            driver.fail(b"cuMemcpyDtoHAsync", 0, 1, 1)
        store(self, order)

    NativeCopier.load = bad_load  # type: ignore[method-assign]
    NativeCopier.store = bad_store  # type: ignore[method-assign]
    return Impatient()


def _poison_loads(driver: FakeCuda | None) -> PolledGates:
    """Loads bring other host blocks than those asked for and say that all is well."""
    load = NativeCopier.load

    def wrong(self: NativeCopier, order: TransferOrder) -> None:
        load(self, replace(order, host_blocks=(order.host_blocks + 1) % self.num_host_blocks))

    NativeCopier.load = wrong  # type: ignore[method-assign]
    return PolledGates()


_FAULTS: dict[str, Callable[[Any], PolledGates]] = {
    "": lambda driver: PolledGates(),
    "failures": _fail_copies,
    "poison": _poison_loads,
}


def main() -> int:
    fault = _FAULTS[os.environ.get("OFFLOAD_RANK_FAULT", "")]
    path = os.environ.get("OFFLOAD_RANK_DRIVER")
    if path is None:
        fault(None)
        return rank_process.main(sys.argv[1:])
    driver = FakeCuda(Path(path))
    driver.reset(0, _DELAY_US)
    compute = driver.new_stream()
    gates = fault(driver)
    platform = HostPlatform(driver.path, lambda: compute, lambda: gates)
    rank_process.host_platform = lambda config, device, rank: platform  # type: ignore[assignment]
    return rank_process.main(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
