"""Layer-ready flags in host memory, for a device that is played on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hetero_llm.bridge.kv_offload.copier import NUM_FLAGS
from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag

_PATIENCE_S = 60


class PolledGates:
    """Flags in host memory, looked at until they say what is waited for.

    Attributes:
        flag_of: see `runner.layer_ready`.
        armed: flags that the present step waits for.
        num_waits: flags that were not yet set when they were looked at.
        turn: names the step armed last.
        gave_up: turns of steps that gave up; see `take_error`. Several can be unfinished, as those
            of a stage are that runs ahead of the last one.
    """

    def __init__(self) -> None:
        self.flag_of: Callable[[int], LayerReadyFlag | None] = lambda transfer_id: None
        self.num_waits = 0
        self.turn = 0
        self.gave_up: set[int] = set()
        self._flags = np.zeros(NUM_FLAGS, np.int32)
        self.armed: list[LayerReadyFlag] = []

    @property
    def flags_address(self) -> int:
        return self._flags.ctypes.data

    def arm(self, transfer_ids: Sequence[int]) -> None:
        self.turn += 1
        flags = [self.flag_of(transfer_id) for transfer_id in transfer_ids]
        self.armed = [flag for flag in flags if flag is not None]

    def wait(self, layer: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        for flag in self.armed:
            while not self.landed(flag, layer):
                self.num_waits += 1
                assert time.monotonic() < deadline, "a flag that is never set"
                time.sleep(0)

    def take_error(self, turn: int) -> bool:
        found = turn in self.gave_up
        self.gave_up.discard(turn)
        return found

    def landed(self, flag: LayerReadyFlag, layer: int) -> bool:
        """Whether a layer of a load is there."""
        return int(self._flags[flag.place]) - (flag.base + layer + 1) >= 0
