"""What the stages before the last one do after a step with drafts: the last stage alone knows which
nodes were accepted, and leaves no gaps in its own KV (`SchedulerOutput.drafts`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.draft_tree import DraftBatch, accepted_nodes
from hetero_llm.core.step import ModelRunnerOutput
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.scheduler.step_builder import InFlight

NO_MOVES: NDArray[np.int64] = np.zeros((2, 0), np.int64)
NO_MOVES.setflags(write=False)


def moves_of_accepted(
    flight: InFlight, drafts: DraftBatch, output: ModelRunnerOutput, blocks: BlockManager
) -> NDArray[np.int64]:
    """[2, M] KV slots (block * block size + offset) to read and to write, so that the KV of the
    accepted nodes lies behind the root's without gaps. All are read before one is written.

    Args:
        flight: a step whose results no sequence has yet. One that has lost its blocks since has no
            moves: another may have been given them.
        drafts: of the step.
        output: of the step.
    """
    assert output.num_tokens is not None
    size = blocks.block_size
    sources: list[int] = []
    targets: list[int] = []
    paths = accepted_nodes(drafts, output.token_ids, output.num_tokens)
    for sequence, epoch, start, path in zip(
        flight.sequences, flight.epochs, flight.num_computed_tokens, paths, strict=True
    ):
        if sequence.epoch != epoch or not path or path[-1] == len(path) - 1:
            continue
        table = blocks.block_ids(sequence.request_slot)
        for depth, node in enumerate(path):
            if node == depth:
                continue
            for slots, place in ((sources, start + 1 + node), (targets, start + 1 + depth)):
                slots.append(table[place // size] * size + place % size)
    return np.array((sources, targets), np.int64) if sources else NO_MOVES
