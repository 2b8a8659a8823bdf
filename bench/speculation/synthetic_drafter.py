"""A drafter that knows the answer: chains whose first nodes are right and the others wrong.

It measures the verify path alone: the caller sets how many tokens a step accepts, and drafting
costs next to nothing. Its tokens were recorded in a run without drafts.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping

import numpy as np
from numba import njit

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.request import Request, Sequence


class SyntheticDrafter:
    """Drafts along recorded continuations; never idle.

    A draft is shorter where the length of the request or the end of the record is near, and there
    is none without a record of the prompt or for a sample other than the first. It does not
    compare the sequence with the record: after a difference its nodes are wrong.

    Args:
        continuations: a prompt's token ids to the tokens that follow it, by a run without drafts.
        right: first nodes of each draft that carry the true token.
        nodes: of each draft; those beyond `right` carry the true token + 1.
        vocab_size: of the model; the last token's successor is 0.
    """

    idle = False

    def __init__(
        self,
        continuations: Mapping[tuple[int, ...], abc.Sequence[int]],
        *,
        right: int,
        nodes: int,
        vocab_size: int,
    ) -> None:
        if not 0 <= right <= nodes <= MAX_NODES or nodes < 1:
            raise ValueError(f"right={right}, nodes={nodes}: 0 <= right <= nodes <= {MAX_NODES}")
        self._nodes = nodes
        self._open: dict[str, tuple[int, int]] = {}  # first row of the request's drafts, how many
        self._rows: dict[tuple[int, ...], tuple[int, int]] = {}
        tables = [np.zeros((1, nodes), np.int32)]
        first = 1
        for prompt, continuation in continuations.items():
            tables.append(_drafts(continuation, right, nodes, vocab_size))
            self._rows[prompt] = first, len(continuation)
            first += len(continuation)
        self._table = np.concatenate(tables)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        rows: list[int] = []
        counts: list[int] = []
        for sequence, limit in zip(sequences, limits, strict=True):
            request = sequence.request
            known = self._open.get(request.request_id)
            if known is None:
                known = self._rows.get(tuple(request.prompt_token_ids), (0, 0))
                self._open[request.request_id] = known
            first, length = known
            done = len(sequence.token_ids) - sequence.num_prompt_tokens
            if sequence.index or done >= length:
                rows.append(0)
                counts.append(0)
            else:
                rows.append(first + done)
                counts.append(min(limit, length - done, self._nodes))
        sizes = np.array(counts, np.int32)
        return DraftBatch(sizes, *_chains(self._table, np.array(rows), sizes))

    @property
    def num_open(self) -> int:
        """Requests that were drafted for and have not been closed."""
        return len(self._open)

    def close(self, request: Request) -> None:
        self._open.pop(request.request_id, None)

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        pass


@njit(cache=True)
def _chains(table: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Tokens and parents of the first `counts[i]` nodes of rows of the table."""
    total = counts.sum()
    token_ids, parents = np.empty(total, np.int32), np.empty(total, np.int32)
    at = 0
    for i in range(len(rows)):
        for node in range(counts[i]):
            token_ids[at], parents[at] = table[rows[i], node], node - 1
            at += 1
    return token_ids, parents


def _drafts(continuation: abc.Sequence[int], right: int, nodes: int, vocab_size: int) -> np.ndarray:
    """[L, nodes] int32: row i is the draft behind the first i of the L recorded tokens."""
    length = len(continuation)
    known = np.zeros(length + nodes, np.int32)
    known[:length] = continuation
    drafts = known[np.arange(length)[:, None] + np.arange(nodes)]
    drafts[:, right:] = (drafts[:, right:] + 1) % vocab_size
    return drafts
