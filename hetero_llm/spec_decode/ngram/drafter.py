"""The drafter of vLLM's "[ngram]": each sequence drafts from its own tokens."""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.request import Request, Sequence
from hetero_llm.spec_decode.lookahead.sequence_state import TokenBuffer, TokenSpan
from hetero_llm.spec_decode.ngram.prompt_lookup import propose_ngrams
from hetero_llm.spec_decode.proposals import Proposals

_PAUSE = 8  # steps after one with too many sequences


class PromptLookupDrafter:
    """A `core.drafter.Drafter`. One thread at a time.

    Args:
        width: tokens of the longest sequence.
        smallest, largest: tokens of an n-gram that must have occurred before.
        num_tokens: most tokens of a draft.
        most_sequences: larger steps get no drafts; None: no limit.
    """

    def __init__(
        self,
        *,
        width: int,
        smallest: int,
        largest: int,
        num_tokens: int,
        most_sequences: int | None = None,
    ) -> None:
        self._most_sequences = most_sequences
        self._paused_for = 0  # steps
        self._buffer = TokenBuffer(width)
        self._spans: dict[str, dict[int, TokenSpan]] = {}  # by request and index of the sequence
        self._ngrams = smallest, largest
        self._num_tokens = min(num_tokens, MAX_NODES)
        self._proposals = Proposals.empty(1)
        self.propose([], [], 0)  # compiles, so that no request waits for that

    @property
    def idle(self) -> bool:
        return self._paused_for > 0

    @property
    def num_requests(self) -> int:
        """Requests of which tokens are held."""
        return len(self._spans)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        if self._most_sequences is not None and len(sequences) > self._most_sequences:
            self._paused_for = _PAUSE
            return Proposals.empty(len(sequences)).batch()
        spans = [self._follow(sequence) for sequence in sequences]
        if len(self._proposals.counts) < len(spans):
            self._proposals = Proposals.empty(len(spans))
        found = self._proposals.some(slice(len(spans)))
        wanted = [sequence.request.params.num_speculative_tokens for sequence in sequences]
        most = [
            limit if own is None else min(limit, own)
            for limit, own in zip(limits, wanted, strict=True)
        ]
        propose_ngrams(
            self._buffer.tokens,
            np.array([span.start for span in spans], np.int64),
            np.array([span.end for span in spans], np.int64),
            np.array(most, np.int32),
            *self._ngrams,
            self._num_tokens,
            *found,
        )
        return found.batch()

    def close(self, request: Request) -> None:
        for span in self._spans.pop(request.request_id, {}).values():
            self._buffer.close(span.row)

    def observe_step(self, report: StepReport) -> None:
        pass

    def run_deferred(self) -> None:
        self._paused_for = max(self._paused_for - 1, 0)

    def _follow(self, sequence: Sequence) -> TokenSpan:
        """Appends what the sequence has got since the last call."""
        of_request = self._spans.setdefault(sequence.request.request_id, {})
        span = of_request.get(sequence.index)
        if span is None:
            span = of_request[sequence.index] = self._buffer.open()
        self._buffer.extend(span, sequence.token_ids[span.end - span.start :].tolist())
        return span
