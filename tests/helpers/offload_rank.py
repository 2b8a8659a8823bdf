"""A rank process whose device is played on host memory by a fake driver, for tests on a CPU.

OFFLOAD_RANK_DRIVER: the driver's library. OFFLOAD_RANK_FAULT: what goes wrong in this rank, see
`_FAULTS`; nothing unless given.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from hetero_llm.bridge.kv_offload.copier import NativeCopier
from hetero_llm.engine.builders.build_host_tier import HostPlatform
from hetero_llm.engine.processes import rank_process
from tests.bridge.kv_offload.conftest import FakeCuda
from tests.helpers.polled_gates import PolledGates


def _fail_copies(driver: FakeCuda, gates: PolledGates) -> None:
    """Some copies fail, loads and stores."""
    driver.fail(b"cuMemcpyHtoDAsync_v2", 400, 40, 1)
    driver.fail(b"cuMemcpyBatchAsync", 40, 12, 1)
    driver.fail(b"cuMemcpyDtoHAsync_v2", 30, 10, 1)


def _time_out(driver: FakeCuda, gates: PolledGates) -> None:
    """Each step with loads reports that it has given up; what it computed was right."""

    class Impatient(PolledGates):
        def take_error(self, turn: int) -> bool:
            return True

    gates.__class__ = Impatient


def _poison_loads(driver: FakeCuda, gates: PolledGates) -> None:
    """Loads bring other host blocks and say that all is well."""
    load = NativeCopier.load

    def wrong(
        self: NativeCopier, transfer_id: int, host_blocks: Any, blocks: Any, after_step: int,
        compute: float | None,
    ) -> None:  # fmt: skip
        load(self, transfer_id, (host_blocks + 1) % self.num_host_blocks, blocks, after_step, compute)

    NativeCopier.load = wrong  # type: ignore[method-assign]


_FAULTS = {"copies": _fail_copies, "timeout": _time_out, "poison": _poison_loads}


def main() -> int:
    driver = FakeCuda(os.environ["OFFLOAD_RANK_DRIVER"])  # type: ignore[arg-type]
    driver.reset(0, 0)
    compute = driver.new_stream()
    gates = PolledGates()
    fault = os.environ.get("OFFLOAD_RANK_FAULT")
    if fault:
        _FAULTS[fault](driver, gates)
    platform = HostPlatform(driver.path, lambda: compute, lambda: gates)
    rank_process.host_platform = lambda config, device, rank: platform  # type: ignore[assignment]
    return rank_process.main(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
