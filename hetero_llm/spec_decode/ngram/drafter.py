"""vLLM's "[ngram]" as the scheduler sees it: each sequence drafts from its own tokens."""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.request import Request, Sequence
from hetero_llm.spec_decode.lookahead.token_buffer import Text, Texts
from hetero_llm.spec_decode.ngram.prompt_lookup import propose_ngrams
from hetero_llm.spec_decode.proposals import Proposals

_REST = 8  # steps after one with too many sequences


class PromptLookupDrafter:
    """See `scheduler.draft_admission.Drafter`. One thread at a time.

    Args:
        width: tokens of the longest sequence.
        smallest, largest: tokens of an n-gram that must have occurred before.
        num_tokens: most tokens of a draft.
        most_sequences: larger steps get no drafts.
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
        self._resting = 0  # steps
        self._texts = Texts(width)
        self._known: dict[str, dict[int, Text]] = {}
        self._ngrams = smallest, largest
        self._num_tokens = min(num_tokens, MAX_NODES)
        self._proposals = Proposals.empty(1)

    @property
    def idle(self) -> bool:
        return self._resting > 0

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        if self._most_sequences is not None and len(sequences) > self._most_sequences:
            self._resting = _REST
            return Proposals.empty(len(sequences)).batch()
        texts = [self._follow(sequence) for sequence in sequences]
        if len(self._proposals.counts) < len(texts):
            self._proposals = Proposals.empty(len(texts))
        found = self._proposals.some(slice(len(texts)))
        most = [
            limit if asked is None else min(limit, asked)
            for limit, asked in (
                (limit, sequence.request.params.num_speculative_tokens)
                for sequence, limit in zip(sequences, limits, strict=True)
            )
        ]
        propose_ngrams(
            self._texts.tokens,
            np.array([text.first for text in texts], np.int64),
            np.array([text.end for text in texts], np.int64),
            np.array(most, np.int32),
            *self._ngrams,
            self._num_tokens,
            *found,
        )
        return found.batch()

    def close(self, request: Request) -> None:
        for text in self._known.pop(request.request_id, {}).values():
            self._texts.close(text)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        pass

    def run_deferred(self) -> None:
        self._resting = max(self._resting - 1, 0)

    def _follow(self, sequence: Sequence) -> Text:
        of_request = self._known.setdefault(sequence.request.request_id, {})
        text = of_request.get(sequence.index)
        if text is None:
            text = of_request[sequence.index] = self._texts.open(space=0)
        self._texts.extend(text, sequence.token_ids[text.end - text.first :].tolist())
        return text
