"""The channel through which the engine's process announces steps to the ranks.

One writer, the engine's process; ranks 1 to N-1 read. Every call of the runner there is one message
here (`step_codec`), so that all ranks make the same calls in the same order.
"""

from __future__ import annotations

from hetero_llm.bridge.ipc.broadcast import (
    Broadcast,
    BroadcastReader,
    BroadcastWriter,
    attach_broadcast,
    create_broadcast,
)


class StepWriter(BroadcastWriter):
    """The engine's side of a channel, which it creates.

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
        super().__init__(self.channel, ranks - 1)

    def close(self) -> None:
        """Let the ranks end, and release the memory."""
        self.end()
        self.free()
        self.channel.close()


class StepReader(BroadcastReader):
    """A rank's side of a channel. At first no wait spins.

    Args:
        handle: of the writer's channel.
        rank: 1 to N-1.
    """

    def __init__(self, handle: str, rank: int) -> None:
        """Raises:
        RingError: the handle leads to no channel.
        """
        self._channel = attach_broadcast(handle)
        super().__init__(self._channel, rank - 1, spin_us=0)

    def close(self) -> None:
        """Release the memory."""
        self.free()
        self._channel.close()
