"""The lookahead drafter with sequences written by the test: what it learns and drafts."""

from __future__ import annotations

import dataclasses
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.config.lookahead_config import Given, LookaheadConfig, lookahead_config
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.drafter import NUM_WRITABLE, SteadyStep, StepReport
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.request import Request, Sequence
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.kv_cache.prefix_cache import hash_root
from hetero_llm.spec_decode import hybrid_drafter
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.lookahead.global_cache import GlobalCache
from hetero_llm.spec_decode.lookahead.sequence_state import HITS, NAMESPACE, TokenBuffer
from hetero_llm.spec_decode.ngram.drafter import PromptLookupDrafter
from hetero_llm.spec_decode.proposals import Proposals
from tests.helpers.walks import Walk

RAW = LookaheadConfig(cache_mode=0, eos_token_id=(2,), max_seq_len=4096, voc_size=1000)
PHRASE = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]


def make_drafter(capacity: int = 1 << 14, **changes: Any) -> HybridDrafter:
    config = dataclasses.replace(RAW, **changes)
    return HybridDrafter(config, width=4096, capacity=capacity)


def make_sequence(name: str, prompt: list[int], salt: str | None = None, **params: Any) -> Sequence:
    request = Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=500, **params),
        seed=0,
        end_ids=frozenset({2}),
        eos_ids=frozenset({2}),
        max_total_tokens=len(prompt) + 500,
        root_hash=hash_root(() if salt is None else ("salt", salt)),
        metrics=RequestMetrics(arrival_time=0.0),
    )
    sequence = Sequence(request, 0, array("i", prompt), len(prompt))
    request.sequences.append(sequence)
    return sequence


def ask(drafter: Any, *sequences: Sequence, limit: int = 20) -> list[list[int]]:
    """Drafts for sequences as the scheduler asks, in order."""
    batch: DraftBatch = drafter.propose(list(sequences), [limit] * len(sequences), len(sequences))
    drafter.run_deferred()
    assert batch.counts.sum() == len(batch.token_ids) == len(batch.parents)
    parts = np.split(batch.token_ids, np.cumsum(batch.counts)[:-1])
    return [part.tolist() for part in parts]


def finish(drafter: HybridDrafter, sequence: Sequence) -> None:
    drafter.close(sequence.request)
    drafter.run_deferred()


def test_a_sequence_drafts_from_its_own_text() -> None:
    drafter = make_drafter(capacity=0)
    sequence = make_sequence("a", [*PHRASE, 7, 8])
    assert ask(drafter, sequence) == [[]]
    sequence.token_ids.extend(PHRASE[:3])
    assert ask(drafter, sequence) == [PHRASE[3:10]]
    sequence.token_ids.extend(PHRASE[3:8])
    assert ask(drafter, sequence) == [[48, 49, 7, 8, 40, 41, 42]]


def test_it_drafts_from_what_others_were_told() -> None:
    drafter = make_drafter()
    first = make_sequence("a", [5, 6, 7])
    ask(drafter, first)
    first.token_ids.extend(PHRASE)
    finish(drafter, first)
    second = make_sequence("b", [9, 9, 40, 41])
    assert ask(drafter, second) == [PHRASE[2:9]]
    assert ask(make_drafter(capacity=0), second) == [[]]


def test_outputs_are_shared_before_they_end() -> None:
    drafter = make_drafter()
    first = make_sequence("a", [5, 6, 7])
    ask(drafter, first)
    first.token_ids.extend([*range(100, 180)])
    ask(drafter, first)
    assert ask(drafter, make_sequence("b", [9, 120, 121])) == [[*range(122, 129)]]


def test_prompts_of_others_are_not_shared() -> None:
    drafter = make_drafter()
    first = make_sequence("a", [*PHRASE, *PHRASE, 60, 61, 62])
    ask(drafter, first)
    first.token_ids.extend([70, 71])
    finish(drafter, first)
    assert ask(drafter, make_sequence("b", [9, 40, 41])) == [[]]
    # The last tokens of a prompt show which kind of text follows them.
    assert ask(drafter, make_sequence("c", [9, 60, 61])) == [[]]
    long = make_sequence("d", [*PHRASE, 60, 61, 62])
    ask(drafter, long)
    long.token_ids.extend([70, 71, 72, 73])
    finish(drafter, long)
    assert ask(drafter, make_sequence("e", [9, 61, 62])) == [[70, 71, 72, 73]]


def test_ignore_prompt() -> None:
    drafter = make_drafter(ignore_prompt=True)
    sequence = make_sequence("a", [*PHRASE, *PHRASE, 40, 41])
    assert ask(drafter, sequence) == [[]]
    sequence.token_ids.extend([50, 51, 52, 53, 54, 55, 40, 41])
    assert ask(drafter, sequence) == [[]], "the match of the prompt leads to the output"
    sequence.token_ids.extend([1, 51, 52])
    assert ask(drafter, sequence) == [[53, 54, 55, 40, 41, 1, 51]]


def test_a_salt_keeps_requests_apart() -> None:
    drafter = make_drafter()
    first = make_sequence("a", [5, 6, 7], salt="one")
    ask(drafter, first)
    first.token_ids.extend(PHRASE)
    finish(drafter, first)
    for salt, expected in ((None, []), ("two", []), ("one", PHRASE[2:9])):
        assert ask(drafter, make_sequence(f"b{salt}", [9, 40, 41], salt=salt)) == [expected]


def test_an_end_inside_a_text_parts_it() -> None:
    drafter = make_drafter()
    sequence = make_sequence("a", [40, 41, 42, 2, 43, 44, 45, 46, 40, 41])
    assert ask(drafter, sequence) == [[]]
    sequence.token_ids.extend([42, 43, 44])
    assert ask(drafter, sequence) == [[45, 46, 40, 41, 42, 43, 44]]


def test_a_request_may_want_fewer_tokens_or_none() -> None:
    drafter = make_drafter()
    prompt = [*PHRASE, 1, 40, 41]
    for wanted, expected in ((None, 7), (0, 0), (3, 3), (30, 7)):
        sequence = make_sequence(f"a{wanted}", prompt, num_speculative_tokens=wanted)
        ask(drafter, sequence)
        sequence.token_ids.extend([42])
        assert [len(d) for d in ask(drafter, sequence)] == [expected]


def test_tokens_beyond_the_vocabulary_leave_a_sequence_alone() -> None:
    drafter = make_drafter()
    good, bad = make_sequence("a", [*PHRASE, 1]), make_sequence("b", [*PHRASE, 1000])
    ask(drafter, good, bad)
    good.token_ids.extend([40, 41])
    bad.token_ids.extend([40, 41])
    assert ask(drafter, good, bad) == [[42, 43, 44, 45, 46, 47, 48], []]
    assert drafter.num_out_of_vocab == 1
    finish(drafter, bad)


def test_sequences_beyond_max_seq_len_are_left_alone() -> None:
    drafter = make_drafter(max_seq_len=17)
    sequence = make_sequence("a", [*PHRASE, 1, 40, 41])
    ask(drafter, sequence)
    sequence.token_ids.extend([42])
    assert ask(drafter, sequence) == [[43, 44, 45]]
    sequence.token_ids.extend([43, 44, 45])
    assert ask(drafter, sequence) == [[]]


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_target_parallelism_keeps_the_likeliest_nodes(mode: int) -> None:
    drafter = make_drafter(target_parallelism=12, capacity=0, cache_mode=mode)
    sure, unsure = make_sequence("a", PHRASE * 3), make_sequence("b", [*PHRASE, 1, *range(60, 70)])
    for _ in range(2):
        ask(drafter, sure, unsure)
        sure.token_ids.extend(PHRASE)
        unsure.token_ids.extend([40, 41])
    drafts = ask(drafter, sure, unsure, limit=60)
    assert sum(map(len, drafts)) == 10 and len(drafts[0]) > len(drafts[1])


def test_target_parallelism_favours_those_that_hit() -> None:
    drafter = make_drafter(target_parallelism=12, capacity=0)
    lucky, unlucky = make_sequence("a", [*PHRASE, 1]), make_sequence("b", [*PHRASE, 1])
    ask(drafter, lucky, unlucky)
    for sequence in (lucky, unlucky):
        sequence.token_ids.extend([40, 41])
    ask(drafter, lucky, unlucky)
    lucky.token_ids.extend([42, 43, 44, 45, 46])
    unlucky.token_ids.extend([42])
    drafts = ask(drafter, lucky, unlucky)
    assert len(drafts[0]) > len(drafts[1]) >= 1
    assert 2 + sum(map(len, drafts)) <= 12
    everyone = [make_sequence(f"c{i}", [*PHRASE, 1]) for i in range(13)]
    ask(drafter, *everyone)
    for sequence in everyone:
        sequence.token_ids.extend([40, 41])
    assert sum(map(len, ask(drafter, *everyone))) == 0


def assert_forgotten(drafter: HybridDrafter) -> None:
    """No row is in use and nothing is in the local indexes."""
    drafter.check_integrity()
    assert not drafter.states.sequences


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_nothing_is_left_of_ended_requests(mode: int) -> None:
    drafter = make_drafter(capacity=0, cache_mode=mode)
    rng = np.random.default_rng(0)
    for round_ in range(3):
        sequences = [
            make_sequence(f"{round_}-{i}", rng.integers(3, 30, 50).tolist()) for i in range(20)
        ]
        for _ in range(20):
            ask(drafter, *sequences)
            for sequence in sequences:
                sequence.token_ids.extend(rng.integers(2, 30, int(rng.integers(1, 5))).tolist())
        for sequence in sequences:
            finish(drafter, sequence)
    assert_forgotten(drafter)


def test_requests_that_were_never_asked_about_may_end() -> None:
    drafter = make_drafter()
    finish(drafter, make_sequence("a", [1, 2, 3]))
    assert ask(drafter, make_sequence("b", [1, 2, 3])) == [[]]


def test_tokens_that_were_taken_back_do_not_disturb_others() -> None:
    """A stop string ends a sequence inside what the drafter has seen of it."""
    drafter = make_drafter()
    stopped, other = make_sequence("a", [5, 6, 7]), make_sequence("b", [15, 16, 17])
    ask(drafter, stopped, other)
    stopped.token_ids.extend([100, 101, 102])
    ask(drafter, stopped, other)
    del stopped.token_ids[-2:]
    other.token_ids.extend(PHRASE)
    drafter.close(stopped.request)
    finish(drafter, other)
    assert ask(drafter, make_sequence("c", [9, 16, 17])) == [PHRASE[:7]]


def test_prompt_lookup() -> None:
    drafter = PromptLookupDrafter(width=64, smallest=2, largest=4, num_tokens=5)
    sequence = make_sequence("a", [*PHRASE, 1, 40, 41])
    other = make_sequence("b", [1, 2, 3], num_speculative_tokens=1)
    assert ask(drafter, sequence, other) == [PHRASE[2:7], []]
    other.token_ids.extend([9, 1, 2])
    sequence.token_ids.extend([9])
    assert ask(drafter, other, sequence) == [[3], []]
    drafter.close(other.request)
    assert drafter.num_requests == 1


# -- texts and history --------------------------------------------------------------------------


def test_rows_are_used_again_and_grow_in_number() -> None:
    texts = TokenBuffer(8)
    rows = [texts.open() for _ in range(40)]
    for i, text in enumerate(rows):
        texts.extend(text, [i] * 8)
    assert all((texts.tokens[t.start : t.end] == i).all() for i, t in enumerate(rows))
    assert len({t.salt for t in rows}) == 40
    texts.close(rows[7].row)
    again = texts.open()
    assert again.start == rows[7].start and again.salt not in {t.salt for t in rows}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(0, 100))
def test_the_history_keeps_to_its_capacity(sizes: list[int], capacity: int) -> None:
    history = GlobalCache(RAW, capacity, uses_ngrams=True, uses_trie=True)
    for tick, size in enumerate(sizes):
        history.add(np.arange(size, dtype=np.int32), 0, 5, tick)
        texts = [part.text[: part.end] for part in history.generations]
        assert sum(map(len, texts)) <= capacity
        if size + 1 <= capacity // 2:
            assert texts[0][-size:].tolist() == [*range(size)]


@pytest.mark.parametrize("mode", [1, 2])
def test_turbo_drafts_from_both(mode: int) -> None:
    drafter = make_drafter(cache_mode=mode)
    first = make_sequence("a", [*PHRASE, 7, 8, 9])
    ask(drafter, first)
    first.token_ids.extend([40, 41])
    assert ask(drafter, first) == [PHRASE[2:9]]
    first.token_ids.extend([50, 51, 52, 53, 54, 55, 56, 57, 58, 59])
    finish(drafter, first)
    assert_forgotten(drafter)
    second = make_sequence("b", [9, 9, 50, 51])
    assert ask(drafter, second) == [[52, 53, 54, 55, 56, 57, 58]]
    assert ask(drafter, make_sequence("c", [9, 50, 51], salt="other")) == [[]]


def test_raw_helps_where_turbo_has_nothing() -> None:
    """A single token that matches is below Turbo's shortest context."""
    for mode, expected in ((1, []), (2, [41, 42])):
        drafter = make_drafter(cache_mode=mode, capacity=0)
        sequence = make_sequence("a", [*PHRASE, 7, 8, 9])
        ask(drafter, sequence)
        sequence.token_ids.extend([40])
        assert ask(drafter, sequence) == [expected]


def test_a_merged_tree_holds_drafts_of_both() -> None:
    drafter = make_drafter(cache_mode=3, capacity=0, token_paths_top_k=2, match_length=1, top_k=3)
    sequence = make_sequence("a", [40, 41, 5, 6, 41, 7, 8, 41, 9, 1, 41, 5, 3, 40])
    ask(drafter, sequence)
    sequence.token_ids.extend([41])
    batch = drafter.propose([sequence], [60], 1)
    first = batch.token_ids[batch.parents == -1].tolist()
    assert first[0] == 5, "what has followed both tokens, and followed the last one twice"
    assert set(first) == {5, 7, 9}
    drafter.run_deferred()
    sequence.token_ids.extend([9])
    before = drafter.acceptance.copy()
    ask(drafter, sequence)
    assert (drafter.acceptance != before).any(), "what came of it is learned"


@pytest.mark.parametrize("hybrid", [True, False])
def test_merged_trees_match_single_tokens_if_raw_may(hybrid: bool) -> None:
    drafter = make_drafter(cache_mode=3, capacity=0, is_hybrid=hybrid)
    sequence = make_sequence("a", [*PHRASE, 7, 8, 9])
    ask(drafter, sequence)
    sequence.token_ids.extend([40])
    (draft,) = ask(drafter, sequence)
    assert draft[:3] == ([41, 42, 43] if hybrid else [])


def test_loops_are_drafted_as_often_as_is_likely() -> None:
    drafter = make_drafter(cache_mode=1, capacity=0)
    sequence = make_sequence("a", [*range(60, 80), *[50, 51, 52] * 3])
    for _ in range(12):
        (draft,) = ask(drafter, sequence, limit=63)
        sequence.token_ids.extend([50, 51, 52])
    assert draft == [50, 51, 52] * 5, "15 deep: sure_copy_length"


@pytest.mark.parametrize("given", [{"copy_length": 2}, {"copy_length": 7}])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_a_copy_length_that_is_given_is_the_longest_draft(given: dict[str, int], mode: int) -> None:
    settings = {"cache_mode": mode, "token_paths_top_k": 1, **given}
    config = lookahead_config({key: Given(key, value) for key, value in settings.items()})
    own = {"max_seq_len": RAW.max_seq_len, "eos_token_id": RAW.eos_token_id}
    drafter = HybridDrafter(dataclasses.replace(config, **own), width=4096, capacity=0)
    sequence = make_sequence("a", [*range(60, 80), *[50, 51, 52] * 3])
    longest = 0
    for _ in range(12):
        (draft,) = ask(drafter, sequence, limit=63)
        longest = max(longest, len(draft))
        sequence.token_ids.extend([50, 51, 52])
    assert longest == given["copy_length"]


def test_a_drafter_pauses_where_drafts_do_not_pay_for_the_idle_device() -> None:
    drafter = make_drafter(cache_mode=1, capacity=0)
    sequence = make_sequence("a", [*PHRASE, 1, *PHRASE[:6]])
    drafter.set_step_times([(1, 5e-3), (64, 5.1e-3)])
    num_paused = {}
    for idle in (0.0, 0.1):
        num_paused[idle] = 0
        for _ in range(200):
            asks = not drafter.idle
            drafter.observe_step(StepReport(1, 1, 5e-3, idle if asks else 0.0, asks))
            drafter.run_deferred()
            num_paused[idle] += drafter.idle
            if not drafter.idle:
                drafter.propose([sequence], [8], 1)
    assert num_paused[0.0] == 0 and num_paused[0.1] > 100


def test_branches_are_drafted_where_a_text_went_on_in_two_ways() -> None:
    drafter = make_drafter(cache_mode=1, capacity=0)
    sequence = make_sequence("a", [20, 21, 22, 5, 20, 21, 23, 6, 20, 21, 22, 7, 20, 21, 23, 8])
    ask(drafter, sequence)
    sequence.token_ids.extend([20, 21])
    batch = drafter.propose([sequence], [16], 1)
    assert {22, 23} <= set(batch.token_ids[batch.parents == -1].tolist())


@pytest.mark.parametrize("mode", [2, 3])
def test_threads_share_large_batches_without_changing_drafts(
    mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many cores as threads, whatever this machine has.
    monkeypatch.setattr(hybrid_drafter, "read_topology", lambda: SimpleNamespace(usable_cores=8))
    drafts = []
    for threads in (1, 8):
        drafter = make_drafter(cache_mode=mode, num_threads=threads)
        rng = np.random.default_rng(0)
        sequences = [make_sequence(str(i), rng.integers(3, 20, 60).tolist()) for i in range(130)]
        ask(drafter, *sequences)
        for sequence in sequences:
            sequence.token_ids.extend(rng.integers(3, 20, 4).tolist())
        drafts.append(ask(drafter, *sequences))
    assert drafts[0] == drafts[1] and sum(map(len, drafts[0])) > 100


def numbers_of(sequences: list[Sequence], rows: np.ndarray) -> np.ndarray:
    """A steady batch's numbers, with many KV blocks for all sequences."""
    return np.array(
        [
            [row, len(sequence.token_ids), sequence.request.max_total_tokens, 1000, 2, -1]
            for row, sequence in zip(rows.tolist(), sequences, strict=True)
        ]
    )


def propose_next(
    drafter: HybridDrafter, sequences: list[Sequence], new: list[list[int]], room: int
) -> SteadyStep | None:
    """With many KV blocks for all sequences but the first one, which has `room` more positions."""
    rows = drafter.rows_of(sequences)
    assert rows is not None
    numbers = numbers_of(sequences, rows)
    numbers[0, NUM_WRITABLE] = len(sequences[0].token_ids) + room
    token_ids = np.array([token for fresh in new for token in fresh], np.int64)
    sizes = np.array([len(fresh) for fresh in new], np.int64)
    return drafter.propose_next(sequences, numbers, token_ids, sizes, 40)


def test_a_steady_proposal_has_at_most_eight_stops() -> None:
    """The table of docs/architecture.md. `rows_of` asks the account while the device works."""
    drafter = make_drafter()
    text = np.tile(np.arange(3, 30), 12).tolist()
    sequences = [make_sequence(str(i), text[: 40 + i]) for i in range(3)]
    ask(drafter, *sequences)
    for _ in range(3):
        new = [text[len(each.token_ids) :][:2] for each in sequences]
        drafter.run_deferred()
        rows = drafter.rows_of(sequences)
        assert rows is not None
        arrays = numbers_of(sequences, rows), np.array(sum(new, [])), np.full(3, 2)
        with Walk() as walk:
            following = drafter.propose_next(sequences, *arrays, 40)
        assert following is not None and len(following.drafts.token_ids)
        assert walk.num_stops <= 8, walk.functions
        for sequence, fresh in zip(sequences, new, strict=True):
            sequence.token_ids.extend(fresh)


def nodes_of(batch: DraftBatch) -> list[list[int]]:
    return [part.tolist() for part in (batch.counts, batch.token_ids, batch.parents)]


@pytest.mark.parametrize("mode", range(4))
def test_results_in_arrays_give_the_drafts_that_the_sequences_give(mode: int) -> None:
    """Six sequences get a few tokens a step; one ends by a token, one by its length."""
    rng = np.random.default_rng(mode)
    drafters = [make_drafter(cache_mode=mode) for _ in range(2)]
    texts = [np.tile(rng.integers(3, 40, 25), 12).tolist() for _ in range(6)]
    runs = [[make_sequence(str(i), text[:30]) for i, text in enumerate(texts)] for _ in drafters]
    for sequences in runs:
        sequences[4].request.max_total_tokens = 60
    for drafter, sequences in zip(drafters, runs, strict=True):
        drafter.prompts_started(sequences)
        drafter.run_deferred()
    num_drafted = 0
    lacked_blocks = set()
    for step in range(30):
        going_on: list[int] = []
        new: list[list[int]] = []
        for index, sequence in enumerate(runs[0]):
            known, text = len(sequence.token_ids), texts[int(sequence.request.request_id)]
            fresh = text[known : known + int(rng.integers(1, 6))]
            if step == 20 and sequence.request.request_id == "2":
                fresh[0] = 2
            new.append(fresh)
            if 2 not in fresh and known + len(fresh) < sequence.request.max_total_tokens:
                going_on.append(index)
        room = int(rng.integers(5, 22))
        following = propose_next(drafters[1], runs[1], new, room)
        for sequences in runs:
            for sequence, fresh in zip(sequences, new, strict=True):
                sequence.token_ids.extend(fresh)
        left = [runs[0][index] for index in going_on]
        limits = [min(s.request.max_total_tokens - len(s.token_ids) - 1, 40) for s in left]
        asked = drafters[0].propose(left, limits, len(left))
        assert following is not None and nodes_of(following.drafts) == nodes_of(asked)
        assert following.token_ids.tolist() == [sequence.token_ids[-1] for sequence in left]
        computed = [len(sequence.token_ids) - 1 for sequence in left]
        assert following.num_computed_tokens.tolist() == computed
        assert (following.going_on is None) == (len(left) == len(runs[0]))
        assert following.going_on is None or following.going_on.tolist() == going_on
        assert following.has_blocks == (len(new[0]) + asked.counts[0] <= room)
        lacked_blocks.add(following.has_blocks)
        num_drafted += int(asked.counts.sum())
        for drafter, sequences in zip(drafters, runs, strict=True):
            for index in sorted(set(range(len(sequences))) - set(going_on), reverse=True):
                drafter.close(sequences.pop(index).request)
            drafter.run_deferred()
            drafter.check_integrity()
        np.testing.assert_array_equal(drafters[0].acceptance, drafters[1].acceptance)
        averages = [drafter.states.arrays.averages for drafter in drafters]
        np.testing.assert_array_equal(*averages)
    assert len(runs[0]) == 4 and num_drafted > 200
    assert lacked_blocks == {False, True}


def test_nothing_is_taken_in_where_a_sequence_lacks_its_next_block() -> None:
    drafter = make_drafter()
    sequences = [make_sequence(name, [*PHRASE, *PHRASE[:3]]) for name in "ab"]
    drafter.prompts_started(sequences)
    drafter.run_deferred()
    assert propose_next(drafter, sequences, [[*PHRASE[3:10], 60], PHRASE[3:4]], 7) is None
    assert propose_next(drafter, sequences, [[2], [2]], 7) is None  # both have ended
    following = propose_next(drafter, sequences, [PHRASE[3:4], PHRASE[3:4]], 7)
    assert following is not None
    assert following.drafts.token_ids.tolist() == [*PHRASE[4:10], PHRASE[0]] * 2


def test_drafts_that_no_token_followed_are_not_judged() -> None:
    drafter = make_drafter(cache_mode=0, capacity=0)
    sequence = make_sequence("a", [*PHRASE, 7, 8])
    ask(drafter, sequence)
    sequence.token_ids.extend(PHRASE[:3])
    (draft,) = ask(drafter, sequence)
    hits = drafter.states.arrays.averages.copy()
    assert draft and ask(drafter, sequence) == [draft]
    row = drafter.states.row_of(sequence)
    assert drafter.states.arrays.averages[row, HITS] == hits[row, HITS]


def test_the_record_learns_what_comes_of_drafts() -> None:
    drafter = make_drafter(cache_mode=0, capacity=0)
    before = drafter.acceptance.copy()
    sequence = make_sequence("a", [*PHRASE, 7, 8, 9])
    ask(drafter, sequence)
    sequence.token_ids.extend([40, 41])
    ask(drafter, sequence)
    sequence.token_ids.extend([42, 43, 99])
    ask(drafter, sequence)
    changed = drafter.acceptance - before
    assert changed[:, 1].sum() == 3 and changed[:, 0].sum() == 2


def test_steps_without_drafts_do_not_count_as_hits() -> None:
    drafter = make_drafter(cache_mode=0, capacity=0)
    sequence = make_sequence("a", [*PHRASE, 7, 8, 9])
    ask(drafter, sequence)
    sequence.token_ids.extend([40, 41])
    (draft,) = ask(drafter, sequence)
    assert draft[:2] == [42, 43]
    averages = drafter.states.arrays.averages[drafter.states.row_of(sequence)]
    hits = averages[HITS]
    sequence.token_ids.extend([42, 99, *range(200, 230)])
    ask(drafter, sequence)
    assert averages[HITS] == pytest.approx(0.8 * hits + 0.2 * 1)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_a_request_that_ends_before_anything_is_learned_leaves_nothing(mode: int) -> None:
    drafter = make_drafter(cache_mode=mode, capacity=0, ignore_prompt=True)
    sequence = make_sequence("a", [*PHRASE, 7])
    for _ in range(2):
        sequence.token_ids.extend([40])
        ask(drafter, sequence)
    finish(drafter, sequence)
    assert_forgotten(drafter)


@pytest.mark.parametrize("capacity", [0, 64])
def test_a_document_larger_than_a_generation_is_left_out(capacity: int) -> None:
    history = GlobalCache(RAW, capacity, uses_ngrams=True, uses_trie=True)
    history.add(np.arange(capacity // 2, dtype=np.int32), 0, 5, 0)
    assert all(part.end == 0 for part in history.generations)


def test_drafts_are_judged_although_the_next_batch_is_much_larger() -> None:
    drafter = make_drafter(cache_mode=0, capacity=0)
    sequence = make_sequence("a", [*PHRASE, 7, 8, 9])
    others = [make_sequence(f"{i}", [500 + i] * 3) for i in range(50)]
    ask(drafter, sequence)
    sequence.token_ids.extend([40, 41])
    (draft,) = ask(drafter, sequence)
    before = drafter.acceptance.copy()
    sequence.token_ids.extend(draft[:3])
    ask(drafter, *others, sequence)
    changed = drafter.acceptance - before
    assert changed[:, 0].sum() == changed[:, 1].sum() == 3


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_what_changes_between_two_steps_is_looked_up_at_once(mode: int) -> None:
    """Also with arrays that are larger than those of the step before."""
    drafter = make_drafter(cache_mode=mode)
    sequence = make_sequence("a", [900, 901])
    sequence.token_ids.extend([40])
    ask(drafter, sequence)
    space = drafter.states.arrays.numbers[drafter.states.row_of(sequence), NAMESPACE]
    static = drafter.global_cache.new_static()
    static.add(np.arange(300, 800, dtype=np.int32), 0, int(space), 0)
    drafter.global_cache.use(static)
    sequence.token_ids.extend([600, 601])
    assert ask(drafter, sequence)[0][:2] == [602, 603]
    drafter.global_cache.add(np.arange(100, 200, dtype=np.int32), 0, int(space), 0)
    sequence.token_ids.extend([150, 151])
    assert ask(drafter, sequence)[0][:2] == [152, 153]


# -- rests --------------------------------------------------------------------------------------

_LEVELS = 3  # of the trees of `Stepwise`


class Stepwise:
    """In the place of a `DraftModelProposer` that never waits. Its worker drafts while a step runs,
    for sequences as they were sent before; it is always right: sequences count up.

    Attributes:
        stands: nothing is drafted. tellings: how often new tokens were sent.
    """

    def __init__(self) -> None:
        self.drafts = Proposals.empty(16)
        self.stands, self.tellings = False, 0
        self._lengths: dict[int, int] = {}
        self._drafted: dict[int, int] = {}

    def run(self) -> None:
        """A step of the target."""
        if not self.stands:
            self._drafted = dict(self._lengths)

    def commit(self, rows: Any, fresh: Any, sizes: Any, sequences: list[Sequence]) -> None:
        self.tellings += len(fresh) > 0
        for row, size in zip(rows.tolist(), sizes.tolist()):
            self._lengths[row] = self._lengths.get(row, 0) + size

    def propose(self, rows: Any, most: Any, *_: Any, may_wait: bool) -> None:
        for index, row in enumerate(rows.tolist()):
            known = self._lengths[row]
            left = max(self._drafted.get(row, -_LEVELS) + _LEVELS - known, 0)
            self.drafts.tokens[index, :left] = known + np.arange(left)
            self.drafts.parents[index, :left] = np.arange(left) - 1
            self.drafts.path_probs[index, :left], self.drafts.buckets[index, :left] = 0.9, -1
            self.drafts.counts[index] = left

    def add_external_nodes(self, rows: Any, found: Proposals, kept: Any) -> None:
        pass

    def run_deferred(self) -> None:
        pass


class Stepping:
    """Steps of one sequence that counts up, in the order of `Engine.step`."""

    def __init__(self, *, asynchronous: bool, **settings: Any) -> None:
        self.source = Stepwise()
        config = dataclasses.replace(RAW, cache_mode=0)
        self.drafter = HybridDrafter(
            config, width=4096, capacity=0, uses_cache=False, model=self.source, **settings
        )  # type: ignore[arg-type]
        self.sequence = make_sequence("a", [*range(5)])
        self._asynchronous = asynchronous
        self._drafts, self._is_ahead = 0, False
        self.drafter.prompts_started([self.sequence])

    def steps(self, count: int) -> int:
        """Runs them; how many nodes were drafted, which all come true."""
        drafted = 0
        for _ in range(count):
            if not self._asynchronous:
                self._propose()
            next_is_ahead = self._asynchronous and self.drafter.idle and not self._drafts
            if self._asynchronous:
                self.drafter.run_deferred()
            self.source.run()
            drafted += self._drafts
            end = len(self.sequence.token_ids)
            self.sequence.token_ids.extend(range(end, end + 1 + self._drafts))
            self._drafts = 0
            if not self._asynchronous:
                self.drafter.run_deferred()
            elif not next_is_ahead:
                self._propose()
        return drafted

    def _propose(self) -> None:
        if not self.drafter.idle:
            self._drafts = int(self.drafter.propose([self.sequence], [20], 1).counts[0])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_come_again_after_a_rest(asynchronous: bool) -> None:
    """Also from a worker that no proposal waits for: it gets the text before the proposal."""
    stepping = Stepping(asynchronous=asynchronous)
    assert stepping.steps(8) >= 8
    stepping.source.stands = True
    stepping.steps(5)
    assert stepping.steps(40) == 0
    stepping.source.stands = False
    stepping.steps(20)
    assert stepping.steps(8) >= 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_is_never_right_is_rarely_asked_and_told(asynchronous: bool) -> None:
    stepping = Stepping(asynchronous=asynchronous)
    stepping.source.stands = True
    stepping.steps(60)
    tellings, idle = stepping.source.tellings, 0
    for _ in range(90):
        stepping.steps(1)
        idle += stepping.drafter.idle
    assert 75 <= idle < 90
    assert 5 <= stepping.source.tellings - tellings <= 25


def test_what_is_too_many_is_not_told_either() -> None:
    stepping = Stepping(asynchronous=True, most_sequences=0)
    stepping.steps(30)
    assert stepping.source.tellings == 1, "the prompt"


class Plainly:
    """Steps of one sequence in a synchronous engine whose times are what the profile says. Drafts
    are verified by the tokens that come."""

    def __init__(self, mode: int) -> None:
        config = dataclasses.replace(RAW, cache_mode=mode)
        self.drafter = HybridDrafter(config, width=4096, capacity=0)
        self._times = {1: 3e-4, 2: 3.6e-4, 8: 6e-4, 16: 1e-3, 64: 4e-3}
        self.drafter.set_step_times(list(self._times.items()), False)
        self.sequence = make_sequence("a", [*range(500, 540)])
        self.drafter.prompts_started([self.sequence])
        self.num_proposals = self.num_steps = 0

    def run(self, tokens: list[int]) -> None:
        """Adds tokens, as many a step as drafts allow."""
        steps, end = 0, len(self.sequence.token_ids) + len(tokens)
        while tokens:
            asks = not self.drafter.idle
            draft: list[int] = []
            if asks:
                self.num_proposals += 1
                batch = self.drafter.propose([self.sequence], [min(20, len(tokens))], 1)
                draft = batch.token_ids.tolist()
            hits = 0
            while hits < min(len(draft), len(tokens) - 1) and draft[hits] == tokens[hits]:
                hits += 1
            self.sequence.token_ids.extend(tokens[: hits + 1])
            tokens = tokens[hits + 1 :]
            size = next(size for size in self._times if size > len(draft))
            seconds, idle = self._times[size], 5e-5 + 5e-5 * asks
            report = StepReport(1, 1 + len(draft), seconds, idle, asks, hits + 1)
            self.drafter.observe_step(report)
            self.drafter.run_deferred()
            steps += 1
        assert len(self.sequence.token_ids) == end
        self.num_steps += steps


@pytest.mark.parametrize("mode", [0, 2])
def test_a_pause_ends_soon_where_the_text_begins_to_repeat(mode: int) -> None:
    stepping = Plainly(mode)
    rng = np.random.default_rng(0)
    stepping.run(rng.integers(3, 999, 400).tolist())
    assert stepping.num_proposals <= 24, "nothing repeats"
    before = stepping.num_steps
    stepping.run(PHRASE * 12)
    assert stepping.num_steps - before < 80, "of 120 tokens"
    before = stepping.num_steps
    stepping.run(PHRASE * 12)
    assert stepping.num_steps - before < 40


def test_a_paused_drafter_takes_in_what_it_has_missed() -> None:
    stepping = Plainly(0)
    rng = np.random.default_rng(1)
    stepping.run(rng.integers(3, 999, 500).tolist())
    finish(stepping.drafter, stepping.sequence)
    assert_forgotten(stepping.drafter)
