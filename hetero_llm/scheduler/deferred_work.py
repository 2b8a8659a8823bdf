"""Work on KV blocks that no step waits for: the scheduler does it while the device computes."""

from __future__ import annotations

from hetero_llm.core.request import Sequence
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.scheduler.step_builder import InFlight

IDLE_BLOCKS = 4096
"""Blocks that one call examines for offloading while nothing runs."""
_STEP_BLOCKS = 128
"""The same beside a step without prompt tokens."""
_PROMPT_TOKENS_PER_BLOCK = 4
"""A block takes some 5 us to examine; 4 tokens of an 8B model take 100 us to compute."""
_MAX_SKIPS = 2
_NODES_AHEAD = 15
"""Nodes of a draft that seldom has more."""
_PLENTY = 4
"""Free blocks per scheduled sequence from which on blocks are allocated ahead."""


class OffloadThrottle:
    """Limits how many blocks are examined for offloading to host memory beside a step."""

    def __init__(self) -> None:
        self._num_skipped = 0

    def num_blocks(self, num_prompt_tokens: int, *, loads_began: bool) -> int:
        """Blocks to examine beside the step in flight.

        Args:
            num_prompt_tokens: of that step.
            loads_began: loads began beside it, which took most of the time there is. Then no block
                is examined, but not three times in a row, since stores have to go on.
        """
        skips = loads_began and self._num_skipped < _MAX_SKIPS
        self._num_skipped = self._num_skipped + 1 if skips else 0
        return 0 if skips else max(_STEP_BLOCKS, num_prompt_tokens // _PROMPT_TOKENS_PER_BLOCK)


class DeferredCaching:
    """Puts blocks that are full of confirmed tokens into the prefix cache, some time after `update`
    confirmed them."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._num_confirmed: dict[Sequence, int] = {}

    def defer(self, sequence: Sequence, num_confirmed: int) -> None:
        """Notes that the first `num_confirmed` tokens of a running sequence will stay and have
        their KV."""
        self._num_confirmed[sequence] = num_confirmed

    def truncate(self, sequence: Sequence) -> None:
        """Called when tokens at the end of a sequence were taken back."""
        if sequence in self._num_confirmed:
            num_confirmed = self._num_confirmed[sequence]
            self._num_confirmed[sequence] = min(num_confirmed, len(sequence.token_ids))

    def cache_blocks(self) -> None:
        """Caches what was deferred; due before anyone looks for a prefix, and before a sequence
        leaves its request slot or forks."""
        for sequence, num_confirmed in self._num_confirmed.items():
            self._blocks.cache_blocks(sequence.request_slot, sequence.token_ids, num_confirmed)
        self._num_confirmed.clear()


def allocate_ahead(flight: InFlight, blocks: BlockManager) -> None:
    """Allocates blocks that decoding sequences may need in the step after the one in flight, if
    that may have drafts: for as many nodes again, and at least `_NODES_AHEAD`, should all nodes be
    accepted. Only while free blocks are plenty."""
    if not flight.proposed or blocks.num_free < _PLENTY * len(flight.sequences):
        return
    num_writable = blocks.num_writable
    for sequence, epoch, num_computed, num_scheduled, num_nodes in zip(
        flight.sequences, flight.epochs, flight.num_computed_tokens, flight.num_scheduled_tokens,
        flight.num_nodes, strict=True,
    ):  # fmt: skip
        request, slot = sequence.request, sequence.request_slot
        if sequence.epoch != epoch or num_scheduled != 1 or not request.may_draft:
            continue
        end = num_computed + num_nodes + max(num_nodes, _NODES_AHEAD) + 2
        end = min(end, request.max_total_tokens)
        if num_writable[slot] < end:
            blocks.allocate(slot, num_computed, end)
