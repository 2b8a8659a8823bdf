"""Layer-ready flags on a device: steps wait, layer by layer, for KV on its way from host memory.

Arming is a kernel that reads page-locked memory, not a copy: small copies to the device would queue
behind the very loads that the step waits for. Waiting is a kernel, too, so a step, even one
captured graph, is launched as a whole while its loads still run. Adapters on their way into slots
have flags of their own, for pieces of several layers (`slot_loads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from hetero_llm.gpu.kernels.exchange import fetch_pinned
from hetero_llm.gpu.kernels.layer_ready import (
    ARMED_WORDS,
    MOST_LOOKS,
    PLACES,
    TURN,
    wait_for_loads,
)

_TURNS = 8
"""More than the steps with loads that can run at once."""


class DeviceLayerReadyFlags:
    """See `runner.model_runner.TimedLayerReadyFlags`. One thread arms, waits and reads errors.

    Args:
        device: of the flags.
        flag_of: the flag of a load by its transfer id, None if it has finished
            (`copier_protocol.Copier.layer_ready_flag`).
        most_looks: see `kernels.layer_ready.wait_for_loads`.

    Attributes:
        flag_of: may be set later, before the first step with loads: the copier has to know
            `flags_address` first.
        flags: [PLACES] int32 on the device; loads write them.
        turn: names the step armed last.
    """

    def __init__(
        self,
        device: torch.device,
        flag_of: Callable[[int], LayerReadyFlag | None],
        *,
        most_looks: int = MOST_LOOKS,
    ) -> None:
        pin = device.type == "cuda"  # else Triton's interpreter: for tests
        self.flag_of = flag_of
        self.flags = torch.zeros(PLACES, dtype=torch.int32, device=device)
        self.turn = 0
        self._most_looks = most_looks
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
        """Device address of `flags`."""
        return self.flags.data_ptr()

    @property
    def is_armed(self) -> bool:
        """Whether the step armed last waits for any load. Waits for the device: for tests."""
        return bool(self._armed[PLACES : 2 * PLACES].any())

    def arm(self, transfer_ids: Sequence[int]) -> None:
        """See `runner.layer_ready.LayerReadyFlags`; begins a new turn."""
        self.turn = turn = (self.turn + 1) % _TURNS
        row = self._rows[turn]
        row[:] = 0
        row[TURN] = turn
        for transfer_id in transfer_ids:
            flag = self.flag_of(transfer_id)
            if flag is not None:
                assert not row[PLACES + flag.place], "two loads at one place"
                row[flag.place] = (flag.base + 2**31) % 2**32 - 2**31
                row[PLACES + flag.place] = 1
        self._gave_up[turn] = 0
        fetch_pinned(self._ring[turn : turn + 1], self._first, out=self._armed)

    def wait(self, layer: int) -> None:
        """See `runner.layer_ready.LayerReadyFlags`."""
        wait_for_loads(
            self.flags, self._armed, self._errors, layer=layer, most_looks=self._most_looks
        )

    def take_error(self, turn: int) -> bool:
        """See `runner.model_runner.TimedLayerReadyFlags`."""
        gave_up = bool(self._gave_up[turn])
        self._gave_up[turn] = 0
        return gave_up
