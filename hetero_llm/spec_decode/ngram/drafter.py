"""The drafter of vLLM's "[ngram]": each sequence drafts from its own tokens."""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import MAX_NODES, DraftBatch
from hetero_llm.core.drafter import StepReport
from hetero_llm.core.request import Request, Sequence
from hetero_llm.spec_decode.budget import GUESSED_GAIN, GUESSED_LOSS, net_gain
from hetero_llm.spec_decode.lookahead.sequence_state import TokenBuffer, TokenSpan
from hetero_llm.spec_decode.ngram.prompt_lookup import propose_ngrams
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from hetero_llm.spec_decode.proposals import Proposals

_KEPT_WEIGHT = 0.05  # of a draft in the moving average of accepted nodes


class PromptLookupDrafter:
    """A `core.drafter.Drafter` that is `CostAware`. One thread at a time.

    Its drafts have no probabilities: what they are worth is the average of what came of the last
    ones. Where they lose, the drafter pauses.

    Args:
        width: tokens of the longest sequence.
        smallest, largest: tokens of an n-gram that must have occurred before.
        num_tokens: most tokens of a draft.
        most_sequences: larger steps get no drafts; None: no limit.

    Attributes:
        account: what proposals cost and gain.
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
        self._buffer = TokenBuffer(width)
        self._spans: dict[str, dict[int, TokenSpan]] = {}  # by request and index of the sequence
        self._ngrams = smallest, largest
        self._num_tokens = min(num_tokens, MAX_NODES)
        self._proposals = Proposals.empty(1)
        self._drafted: list[tuple[TokenSpan, int, int]] = []  # drafts: end of the text, and nodes
        self._accepted = 1.0  # nodes of a draft, moving average
        self.account = ProposalAccount()
        self.propose([], [], 0)  # compiles, so that no request waits for that
        self.account = ProposalAccount()

    @property
    def idle(self) -> bool:
        return self.account.paused

    @property
    def num_requests(self) -> int:
        """Requests of which tokens are held."""
        return len(self._spans)

    def propose(self, sequences: list[Sequence], limits: list[int], num_rows: int) -> DraftBatch:
        if self._most_sequences is not None and len(sequences) > self._most_sequences:
            self.account.pause()
            return Proposals.empty(len(sequences)).batch()
        spans = [self._follow(sequence) for sequence in sequences]
        self._learn()
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
        self._drafted = [
            (span, span.end, count)
            for span, count in zip(spans, found.counts.tolist(), strict=True)
            if count
        ]
        self._note_gain(len(spans), int(found.counts.sum()), num_rows)
        return found.batch()

    def set_step_times(self, profile: list[tuple[int, float]], launches_ahead: bool = True) -> None:
        self.account.set_step_times(profile, launches_ahead)

    def close(self, request: Request) -> None:
        for span in self._spans.pop(request.request_id, {}).values():
            self._buffer.close(span.row)

    def observe_step(self, report: StepReport) -> None:
        self.account.observe_step(report)

    def run_deferred(self) -> None:
        self.account.run_deferred()

    def _learn(self) -> None:
        """Takes in what came of the last drafts."""
        for span, end, count in self._drafted:
            num_new = span.end - end
            if num_new > 0:  # else the sequence has ended or was not in the step
                accepted = min(num_new - 1, count)
                self._accepted += _KEPT_WEIGHT * (accepted - self._accepted)

    def _note_gain(self, num_sequences: int, num_nodes: int, num_rows: int) -> None:
        if not num_sequences:
            return
        idle = self.account.idle_of(num_sequences)
        plain = self.account.step_times.predict(num_rows)
        gain = GUESSED_GAIN if num_nodes else GUESSED_LOSS
        if plain:
            verify = self.account.step_times.predict(num_rows + num_nodes)
            expected = num_sequences + len(self._drafted) * self._accepted
            slowdown = (verify + idle.proposed) / (plain + idle.plain)
            accepting = len(self._drafted) * min(self._accepted, 1.0)
            gain = net_gain(expected / num_sequences / slowdown, slowdown, num_sequences, accepting)
        self.account.note_gain(gain, num_rows, idle)
        if self.account.paused:  # the tokens of a pause say nothing about the drafts before it
            self._drafted = []

    def _follow(self, sequence: Sequence) -> TokenSpan:
        """Appends what the sequence has got since the last call."""
        of_request = self._spans.setdefault(sequence.request.request_id, {})
        span = of_request.get(sequence.index)
        if span is None:
            span = of_request[sequence.index] = self._buffer.open()
        self._buffer.extend(span, sequence.token_ids[span.end - span.start :].tolist())
        return span
