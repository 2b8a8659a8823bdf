"""A drafter that knows the answer: chains whose first nodes are right and the others wrong.

It prices the verify path: how many tokens a step accepts is set by the caller, and drafting costs
next to nothing. What it knows was recorded in a run without drafts.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping

import numpy as np

from hetero_llm.core.draft import MAX_NODES, DraftTree, chain
from hetero_llm.engine.drafting import DraftRequest


class SyntheticDrafter:
    """Drafts along recorded continuations; never idle.

    A draft is shorter where the length of the request or the end of the record is near, and there
    is none without a record of the prompt or for a sample other than the first. It trusts that
    the sequence went as recorded: behind a difference all its nodes are as good as wrong.

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
        self._drafts = {
            prompt: _drafts(continuation, right, nodes, vocab_size)
            for prompt, continuation in continuations.items()
        }
        self._open: dict[str, np.ndarray | None] = {}

    def propose(self, wanted: abc.Sequence[DraftRequest]) -> list[DraftTree | None]:
        return [self._draft(asked) for asked in wanted]

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def _draft(self, asked: DraftRequest) -> DraftTree | None:
        if asked.sample_index:
            return None
        if asked.request_id not in self._open:
            prompt = tuple(asked.token_ids[: asked.num_prompt])
            self._open[asked.request_id] = self._drafts.get(prompt)
        drafts = self._open[asked.request_id]
        done = len(asked.token_ids) - asked.num_prompt
        if drafts is None or done >= len(drafts):
            return None
        return chain(drafts[done, : min(asked.max_nodes, len(drafts) - done)])


def _drafts(continuation: abc.Sequence[int], right: int, nodes: int, vocab_size: int) -> np.ndarray:
    """[L, nodes] int32: row i is the draft behind the first i of the L recorded tokens."""
    length = len(continuation)
    known = np.zeros(length + nodes, np.int32)
    known[:length] = continuation
    drafts = known[np.arange(length)[:, None] + np.arange(nodes)]
    drafts[:, right:] = (drafts[:, right:] + 1) % vocab_size
    return drafts
