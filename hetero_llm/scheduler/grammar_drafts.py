"""Drafts of sequences that follow a grammar: nodes that it refuses are cut, tokens that it forces
are drafted, with or without another drafter.

A forced token is the only one that sampling can yield, so its draft is always accepted. It still
costs that the host knows all tokens before the step is launched, so the forced tokens have to be a
share of all tokens that pays for it.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.grammar import DraftGrammar, OpenDraftGrammar
from hetero_llm.core.request import Request, Sequence

_LEAST_SHARE = 0.1
"""Forced tokens among those generated, below which none are drafted for a while. A step that is
not launched ahead costs up to a tenth of its time."""
_TRIED_STEPS = 32
_PAUSED_STEPS = 256


class NoGrammarDrafts:
    """Stands for `GrammarDrafts` where steps have no drafts, or no request has a grammar."""

    idle = True
    most_tokens = 0

    def constrained(
        self, sequences: list[Sequence], limits: list[int], drafts: DraftBatch
    ) -> DraftBatch:
        return drafts

    def step_without_drafts(self) -> None:
        pass

    def close(self, request: Request) -> None:
        pass


class GrammarDrafts:
    """The grammars of running sequences as their drafts see them.

    Args:
        open_grammar: opens a grammar behind some output tokens.
        most_tokens: of a step whose drafts are forced tokens alone.

    Attributes:
        most_tokens: see Args.
    """

    def __init__(self, open_grammar: OpenDraftGrammar, *, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._open = open_grammar
        self._grammars: dict[Sequence, tuple[DraftGrammar, int]] = {}
        self._num_steps = self._num_forced = self._num_tokens = 0
        self._paused = 0

    @property
    def idle(self) -> bool:
        """Whether forced tokens are too rare to wait for."""
        return self._paused > 0

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
        begin = 0
        for sequence, limit, count in zip(sequences, limits, drafts.counts.tolist(), strict=True):
            own = slice(begin, begin + count)
            begin += count
            own_tokens, own_parents = drafts.token_ids[own].tolist(), drafts.parents[own].tolist()
            if sequence.request.grammar is not None:
                grammar = self._grammar_of(sequence)
                own_tokens, own_parents, forced = grammar.constrained(
                    own_tokens, own_parents, limit
                )
                self._num_forced += forced
            counts.append(len(own_tokens))
            tokens += own_tokens
            parents += own_parents
        self._count(len(sequences))
        return DraftBatch(
            np.array(counts, np.int32), np.array(tokens, np.int32), np.array(parents, np.int32)
        )

    def step_without_drafts(self) -> None:
        """Counts a step of a pause."""
        if self._paused:
            self._paused -= 1

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

    def _count(self, num_sequences: int) -> None:
        """Counts a step for which forced tokens were looked for; begins a pause if they were rare
        among the tokens of all its sequences, each of which waits."""
        self._num_steps += 1
        self._num_tokens += num_sequences
        if self._num_steps < _TRIED_STEPS:
            return
        share = self._num_forced / (self._num_tokens + self._num_forced)
        if share < _LEAST_SHARE:
            self._paused = _PAUSED_STEPS
        self._num_steps = self._num_forced = self._num_tokens = 0
