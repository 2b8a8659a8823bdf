"""Forced tokens as drafts: which steps hold how many of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens

import numpy as np
import pytest

from hetero_llm import SamplingParams
from hetero_llm.core.draft_tree import join_trees
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.request import Sequence
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.scheduler.draft_admission import choose_drafts
from hetero_llm.scheduler.forced_token_pace import TRIED_STEPS, PaceByShare
from hetero_llm.scheduler.grammar_drafts import GrammarDrafts
from tests.helpers.harness import make_request

GUIDED = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)


class Forces:
    """A grammar's state that forces `count` tokens behind every token."""

    def __init__(self, count: int) -> None:
        self._count = count

    def observe(self, token_id: int) -> None:
        pass

    def constrained(
        self, token_ids: Tokens[int], parents: Tokens[int], most: int
    ) -> tuple[list[int], list[int], int]:
        count = min(self._count, most)
        return [7] * count, list(range(-1, count - 1)), count


def drafts_of(count: int, *, most_tokens: int = 128) -> GrammarDrafts:
    pace = PaceByShare()
    return GrammarDrafts(lambda grammar, output_ids: Forces(count), pace, most_tokens=most_tokens)


def running(number: int, *, guided: int) -> list[Sequence]:
    """Sequences that are about to decode, of which the first ones follow a grammar."""
    made = []
    for index in range(number):
        request = make_request(str(index), [3, 4, 5], GUIDED)
        request.grammar = Grammar("start: /x*/") if index < guided else None
        tokens = array("i", [3, 4, 5, 6])
        made.append(Sequence(request, 0, tokens, 3, request_slot=index, num_computed_tokens=3))
    return made


def test_idle_follows_the_pace() -> None:
    """One forced token a step among 17 sequences is 1 of 18 tokens."""
    for guided, idle in ((1, True), (17, False)):
        grammars, sequences = drafts_of(1), running(17, guided=guided)
        nothing = join_trees([None] * len(sequences))
        for _ in range(TRIED_STEPS):
            assert not grammars.idle
            drafts = grammars.constrained(sequences, [8] * len(sequences), nothing)
            assert drafts.counts.tolist() == [1] * guided + [0] * (17 - guided)
        assert grammars.idle == idle
        grammars.observe_step(17, 1.0, 17 + guided, looked=True)  # times change nothing here
        assert grammars.idle == idle


@pytest.mark.parametrize(("most_tokens", "nodes"), [(2, 0), (4, 2), (9, 6), (128, 6)])
def test_steps_of_forced_tokens_keep_their_limit(most_tokens: int, nodes: int) -> None:
    sequences = running(2, guided=2)
    blocks = BlockManager(16, 4, PrefixCache())
    for sequence in sequences:
        blocks.match_prefix(sequence.request_slot, sequence.token_ids[:1], b"")
        assert blocks.allocate(sequence.request_slot, 0, len(sequence.token_ids))
    drafts = choose_drafts(
        None, drafts_of(3, most_tokens=most_tokens), sequences, [1, 1], blocks, budget=64
    )
    assert (0 if drafts is None else len(drafts.token_ids)) == nodes
    if drafts is not None:
        assert drafts.counts.dtype == np.int32
