"""The channel through which the engine's process announces steps to the ranks.

One writer, the engine's process; ranks 1 to N-1 read. Every call of the runner there is one message
here, so that all ranks make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetero_llm.bridge.ipc.broadcast import (
    Broadcast,
    BroadcastReader,
    BroadcastWriter,
    attach_broadcast,
    create_broadcast,
)
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.distributed.step_codec import (
    FINISH_MESSAGE,
    StepMessage,
    step_to_bytes,
    transfer_to_bytes,
    value_to_bytes,
)


class StepWriter:
    """The engine's side of a channel.

    Args:
        ranks: number of ranks, the writer's included.

    Attributes:
        channel: its memory.
    """

    def __init__(self, ranks: int) -> None:
        """Raises:
        RingError: no shared memory.
        """
        self.channel: Broadcast = create_broadcast(ranks - 1)
        self._writer = BroadcastWriter(self.channel, ranks - 1)

    def launch(self, step: SchedulerOutput, check: Callable[[], None]) -> None:
        """Announce a step. `check`: see `BroadcastWriter.write`."""
        self._writer.write(step_to_bytes(step), check)

    def finish(self, check: Callable[[], None]) -> None:
        """Announce that the oldest launched step is finished."""
        self._writer.write(FINISH_MESSAGE, check)

    def send(
        self, kind: StepMessage, value: Grammar | LoRARequest | str, check: Callable[[], None]
    ) -> None:
        """Send a message with one value; see `step_codec.value_to_bytes`."""
        self._writer.write(value_to_bytes(kind, value), check)

    def transfer(self, kind: StepMessage, order: TransferOrder, check: Callable[[], None]) -> None:
        """Announce a copy of KV; see `step_codec.transfer_to_bytes`."""
        self._writer.write(transfer_to_bytes(kind, order), check)

    def beats(self) -> tuple[list[int], list[int]]:
        """See `BroadcastWriter.beats`."""
        return self._writer.beats()

    def end(self) -> None:
        """Let the ranks end once they have read everything."""
        self._writer.end()

    def close(self) -> None:
        """Let the ranks end, and release the memory."""
        self._writer.end()
        self._writer.free()
        self.channel.close()


class StepReader:
    """A rank's side of a channel.

    Args:
        handle: of the writer's channel.
        rank: 1 to N-1.
    """

    def __init__(self, handle: str, rank: int) -> None:
        """Raises:
        RingError: the handle leads to no channel.
        """
        self._channel = attach_broadcast(handle)
        self._reader = BroadcastReader(self._channel, rank - 1, spin_us=0)

    def read(self, timeout_us: int) -> np.ndarray | None:
        """See `BroadcastReader.read`."""
        return self._reader.read(timeout_us)

    def set_spin(self, spin_us: int) -> None:
        """See `BroadcastReader.set_spin`; at first no wait spins."""
        self._reader.set_spin(spin_us)

    def live(self, parent: int) -> None:
        """See `BroadcastReader.live`."""
        self._reader.live(parent)

    def close(self) -> None:
        """Release the memory."""
        self._reader.free()
        self._channel.close()
