"""Drafts of sequences that follow a grammar: nodes that it refuses are cut, tokens that it forces
are drafted, with or without another drafter.

A forced token is the only one that sampling can yield, so its draft is always accepted. When that
pays is decided in `forced_token_pace.py`.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.grammar import DraftGrammar, OpenDraftGrammar
from hetero_llm.core.request import Request, Sequence
from hetero_llm.scheduler.forced_token_pace import ForcedTokenPace


class NoGrammarDrafts:
    """Stands for `GrammarDrafts` where steps have no drafts, or no request has a grammar."""

    idle = True
    most_tokens = 0

    def constrained(
        self, sequences: list[Sequence], limits: list[int], drafts: DraftBatch
    ) -> DraftBatch:
        return drafts

    def launched(self, num_running: int) -> None:
        pass

    def observe_step(
        self, num_sequences: int, seconds: float, num_sampled: int, *, looked: bool
    ) -> None:
        pass

    def close(self, request: Request) -> None:
        pass


class GrammarDrafts:
    """The grammars of running sequences as their drafts see them.

    Args:
        open_grammar: opens a grammar behind some output tokens.
        most_tokens: of a step whose drafts are forced tokens alone.
        pace: in which steps they are looked for.

    Attributes:
        most_tokens: see Args.
    """

    def __init__(
        self, open_grammar: OpenDraftGrammar, pace: ForcedTokenPace, *, most_tokens: int
    ) -> None:
        self.most_tokens = most_tokens
        self._open = open_grammar
        self._pace = pace
        self._grammars: dict[Sequence, tuple[DraftGrammar, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether forced tokens do not pay for being looked for."""
        return self._pace.paused

    def constrained(
        self, sequences: list[Sequence], limits: list[int], drafts: DraftBatch
    ) -> DraftBatch:
        """The drafts without refused nodes and with forced ones.

        Args:
            sequences: [S], all of whose tokens are known.
            limits: [S] maximum number of nodes of each draft.
            drafts: of these sequences, without regard to grammars.
        """
        counts, tokens, parents = [], [], []
        begin = num_forced = 0
        for sequence, limit, count in zip(sequences, limits, drafts.counts.tolist(), strict=True):
            own = slice(begin, begin + count)
            begin += count
            own_tokens, own_parents = drafts.token_ids[own].tolist(), drafts.parents[own].tolist()
            if sequence.request.grammar is not None:
                grammar = self._grammar_of(sequence)
                own_tokens, own_parents, forced = grammar.constrained(
                    own_tokens, own_parents, limit
                )
                num_forced += forced
            counts.append(len(own_tokens))
            tokens += own_tokens
            parents += own_parents
        self._pace.looked(len(sequences), num_forced)
        return DraftBatch(
            np.array(counts, np.int32), np.array(tokens, np.int32), np.array(parents, np.int32)
        )

    def launched(self, num_running: int) -> None:
        """See `ForcedTokenPace`."""
        self._pace.launched(num_running)

    def observe_step(
        self, num_sequences: int, seconds: float, num_sampled: int, *, looked: bool
    ) -> None:
        """See `ForcedTokenPace`."""
        self._pace.observe_step(num_sequences, seconds, num_sampled, looked=looked)

    def close(self, request: Request) -> None:
        """Drops the state of an ended request."""
        for sequence in request.sequences:
            self._grammars.pop(sequence, None)

    def _grammar_of(self, sequence: Sequence) -> DraftGrammar:
        """The sequence's grammar behind all of its output tokens."""
        found = self._grammars.get(sequence)
        num_known = len(sequence.token_ids)
        if found is None or found[1] > num_known:
            grammar = sequence.request.grammar
            assert grammar is not None
            opened = self._open(grammar, sequence.output_ids)
        else:
            opened, known = found
            for token in sequence.token_ids[known:]:
                opened.observe(token)
        self._grammars[sequence] = opened, num_known
        return opened
