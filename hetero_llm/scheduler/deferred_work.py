"""What the scheduler does for the KV blocks while the device works, so that no step waits for it.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from hetero_llm.core.request import Sequence
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.scheduler.step_builder import InFlight

FEW_BLOCKS, MANY_BLOCKS = 128, 4096
"""Blocks to look at for host memory beside a short step, and while nothing runs."""
ROWS_PER_BLOCK = 4
"""Looking at one takes some 5 microseconds, computing so many rows of an 8B model 100."""
_MOST_RESTS = 2
_PLENTY = 4
"""Free blocks per sequence from which on some are handed out before they are needed."""


class OffloadThrottle:
    """How many blocks are looked at for host memory beside a step."""

    def __init__(self) -> None:
        self._rested = 0

    def most(self, rows: int, *, begun: bool) -> int:
        """
        Args:
            rows: of prompts in the step.
            begun: loads have begun beside it, which took most of the time there is. None are looked
                at then, but not three times in a row: stores have to go on.
        """
        self._rested = self._rested + 1 if begun and self._rested < _MOST_RESTS else 0
        return 0 if self._rested else max(FEW_BLOCKS, rows // ROWS_PER_BLOCK)


class Publisher:
    """Publishes blocks that are full of confirmed tokens, some time after they were."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._full: dict[Sequence, int] = {}

    def note(self, sequence: Sequence, num_confirmed: int) -> None:
        """The first `num_confirmed` tokens of a running sequence will stay, and have their KV."""
        self._full[sequence] = num_confirmed

    def cap(self, sequence: Sequence) -> None:
        """Tokens at the end of a sequence were taken back."""
        if sequence in self._full:
            self._full[sequence] = min(self._full[sequence], len(sequence.token_ids))

    def publish(self) -> None:
        """To be called before anyone looks for a prefix, and before a sequence leaves its slot."""
        for sequence, num_confirmed in self._full.items():
            self._blocks.cache_blocks(sequence.request_slot, sequence.token_ids, num_confirmed)
        self._full.clear()


def grow_ahead(flight: InFlight, blocks: BlockManager) -> None:
    """Takes blocks that drafted sequences may need in the step behind the one in flight: for as
    many nodes again, should all of these be accepted. Only while blocks are plenty."""
    if blocks.num_free < _PLENTY * len(flight.sequences):
        return
    room = blocks.num_writable
    for sequence, epoch, start, nodes in zip(
        flight.sequences, flight.epochs, flight.starts, flight.nodes, strict=True
    ):
        if not nodes or sequence.epoch != epoch:
            continue
        end = min(start + 2 * (nodes + 1), sequence.request.max_total_tokens)
        if room[sequence.request_slot] < end:
            blocks.allocate(sequence.request_slot, start, end)
