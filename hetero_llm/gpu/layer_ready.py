"""Gates on a device: steps wait there, layer by layer, for KV on its way from host memory.

Arming is a kernel that reads page-locked memory, not a copy: small copies to the device would queue
behind the loads that they are about. Waiting is a kernel, too, so a step, even one captured graph,
is launched as a whole while its loads go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetero_llm.bridge.kv_offload.copier_protocol import Gate
from hetero_llm.gpu.kernels.exchange import fetch_packet
from hetero_llm.gpu.kernels.layer_ready import (
    ARMED_WORDS,
    MOST_LOOKS,
    PLACES,
    TURN,
    wait_for_loads,
)

_TURNS = 8
"""Steps with loads that may be under way, and a few more."""


class DeviceGates:
    """See `runner.model_runner.TimedLayerReadyFlags`. One thread arms, waits and asks.

    Args:
        device: where the flags live.
        gate_of: the gate of a load, None if it is over (`Copier.gate` of `copier_protocol`).
        most_looks: see `kernels.layer_ready.wait_for_loads`.

    Attributes:
        gate_of: may be set later, before the first step with loads: whoever loads has to know
            `flags_address` first.
        turn: names the step armed last.
    """

    def __init__(
        self,
        device: torch.device,
        gate_of: Callable[[int], Gate | None],
        *,
        most_looks: int = MOST_LOOKS,
    ) -> None:
        pin = device.type == "cuda"  # else Triton's interpreter: for tests
        self.gate_of = gate_of
        self.turn = 0
        self._most_looks = most_looks
        self._flags = torch.zeros(PLACES, dtype=torch.int32, device=device)
        self._armed = torch.zeros(ARMED_WORDS, dtype=torch.int32, device=device)
        self._first = torch.zeros(1, dtype=torch.int32, device=device)
        self._ring = torch.zeros(_TURNS, ARMED_WORDS, dtype=torch.int32, pin_memory=pin)
        self._rows = self._ring.numpy()
        self._errors = torch.zeros(_TURNS, dtype=torch.int32, pin_memory=pin)
        self._gave_up = self._errors.numpy()
        self.arm(())  # compiles and loads both kernels, so that no request waits for that
        self.wait(0)

    @property
    def flags_address(self) -> int:
        """Of the flags on the device, [PLACES] int32."""
        return self._flags.data_ptr()

    def arm(self, tickets: Sequence[int]) -> None:
        """See `runner.layer_ready.Gates`; begins a new turn."""
        self.turn = turn = (self.turn + 1) % _TURNS
        row = self._rows[turn]
        row[:] = 0
        row[TURN] = turn
        for ticket in tickets:
            gate = self.gate_of(ticket)
            if gate is not None:
                assert not row[PLACES + gate.place], "two loads at one place"
                row[gate.place] = (gate.base + 2**31) % 2**32 - 2**31
                row[PLACES + gate.place] = 1
        self._gave_up[turn] = 0
        fetch_packet(self._ring[turn : turn + 1], self._first, out=self._armed)

    def wait(self, layer: int) -> None:
        """See `runner.layer_ready.Gates`."""
        wait_for_loads(
            self._flags, self._armed, self._errors, layer=layer, most_looks=self._most_looks
        )

    def take_error(self, turn: int) -> bool:
        """See `runner.model_runner.TimedLayerReadyFlags`."""
        gave_up = bool(self._gave_up[turn])
        self._gave_up[turn] = 0
        return gave_up
