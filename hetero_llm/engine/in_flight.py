"""A step from its making to its update: the arrays for the runner, and what was scheduled.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_llm.core.draft import DraftTree
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import LAST_DRAWN, PromptRows, SchedulerOutput, SlotState
from hetero_llm.engine.block_manager import TableChanges


@dataclass(slots=True)
class InFlight:
    """A step in flight: what was scheduled, whatever became of it since.

    One entry per scheduled sequence. A sequence whose epoch moved on has left its slot: its
    results are void, and the slot may belong to another. `counts` are rows of known or drawn
    tokens, `nodes` the rows of draft nodes that follow.
    """

    step: SchedulerOutput
    sequences: list[Sequence]
    epochs: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[int]
    nodes: list[int]


def pack(
    sequences: list[Sequence],
    counts: list[int],
    admitted: tuple[SlotState, ...],
    changes: TableChanges,
    *,
    trees: list[DraftTree | None] | None = None,
) -> InFlight:
    """Makes a step of the next `counts[i]` rows of each sequence, and takes them as computed:
    rows of a later step come after these.

    Args:
        trees: draft of each sequence, rows after its one row, which are not taken as computed.
    """
    token_ids: list[int] = []
    starts: list[int] = []
    slots: list[int] = []
    epochs: list[int] = []
    samples: list[int] = []
    prompt_rows: list[PromptRows] = []
    for index, sequence in enumerate(sequences):
        start = sequence.num_computed
        count = counts[index]
        end = start + count
        tokens = sequence.token_ids
        starts.append(start)
        slots.append(sequence.slot)
        epochs.append(sequence.epoch)
        if count == 1:
            token_ids.append(tokens[start] if start < len(tokens) else LAST_DRAWN)
        else:
            token_ids.extend(tokens[start:end])
        request = sequence.request
        if end < len(tokens):
            drawn = 0
        elif len(request.sequences) == 1 and not request.params.use_beam_search:
            drawn = request.params.width
        else:
            drawn = 1
        samples.append(drawn)
        sequence.num_computed = end
        sequence.num_unknown += drawn
        if request.prompt_logprobs is not None and start < sequence.num_prompt:
            first = max(start, len(request.prompt_logprobs) - 1)
            last = min(end, sequence.num_prompt - 1)
            if first < last:
                prompt_rows.append(PromptRows(index, first - start, last - first))
    rows = np.array(counts, np.int32)
    inputs = np.array(token_ids, np.int32)
    nodes = [0] * len(sequences)
    parents = None
    if trees is not None:
        nodes = [0 if tree is None else len(tree.token_ids) for tree in trees]
        sizes = np.array(nodes, np.int32)
        rows += sizes
        inputs, parents = _with_nodes(inputs, rows, sizes, [t for t in trees if t is not None])
    step = SchedulerOutput(
        slots=np.array(slots, np.int32),
        starts=np.array(starts, np.int32),
        counts=rows,
        token_ids=inputs,
        num_samples=np.array(samples, np.int32),
        prompt_rows=tuple(prompt_rows),
        admitted=admitted,
        table_writes=np.array((changes.tables, changes.columns, changes.blocks), np.int32),
        block_copies=np.array((changes.copy_from, changes.copy_to), np.int32),
        parents=parents,
    )
    return InFlight(step, sequences, epochs, starts, counts, samples, nodes)


def _with_nodes(
    inputs: np.ndarray, rows: np.ndarray, nodes: np.ndarray, trees: list[DraftTree]
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the nodes of draft trees behind the rows of their sequences.

    Args:
        inputs: [T - nodes] int32 tokens of all other rows.
        rows: [S] int32 rows of each sequence, nodes included; nodes: [S] int32 nodes alone.
        trees: of those sequences that have nodes, in order.

    Returns:
        [T] int32 tokens of all rows; [T] int32, see `SchedulerOutput.parents`.
    """
    first_nodes = np.repeat(np.cumsum(rows) - nodes, rows)
    is_node = np.arange(len(first_nodes)) >= first_nodes
    parents = np.full(len(is_node), -1, np.int32)
    parents[is_node] = np.concatenate([tree.parents for tree in trees]) + 1
    token_ids = np.empty(len(is_node), np.int32)
    token_ids[~is_node] = inputs
    token_ids[is_node] = np.concatenate([tree.token_ids for tree in trees])
    return token_ids, parents
