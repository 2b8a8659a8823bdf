"""Beam search equals transformers' `generate` on the same model, and survives preemption."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, CompletionOutput, SamplingParams
from hetero_llm.core.outputs import shared_ranks
from hetero_llm.core.request import Request, Sequence
from hetero_llm.scheduler import beam_search
from hetero_llm.scheduler.beam_search import (
    BeamGroup,
    Continuation,
    advance,
    advance_group,
    candidates_needed,
)
from tests.helpers.harness import make_request, make_sequence

PROMPTS = ["beam", "a longer prompt for it", "xyz"]


def beams(width: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        use_beam_search=True, n=width, best_of=width, temperature=0, max_tokens=14, **fields
    )


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("width", "early_stopping", "length_penalty"),
    [
        (2, False, 1.0),
        (4, False, 2.0),
        (4, False, -1.5),
        (3, True, 1.0),
        (4, True, 0.0),
        (4, "never", 1.0),
        (2, "never", -1.5),
        (3, "never", 2.0),
    ],
)
def test_equals_transformers(
    tiny: LLM, reference: Any, width: int, early_stopping: Any, length_penalty: float
) -> None:
    # An end token that is often likely makes beams finish at different lengths.
    end = 77
    params = beams(
        width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=[end],
        ignore_eos=True,
        logit_bias={end: 3.0},
    )
    for output in tiny.generate(PROMPTS, params, use_tqdm=False):
        ids = torch.tensor([output.prompt_token_ids])
        expected = reference.generate(
            ids,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=14,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            eos_token_id=end,
            pad_token_id=0,
            sequence_bias=[[[end], 3.0]],
            renormalize_logits=True,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert len(output.outputs) == width
        for completion, row in zip(output.outputs, expected.sequences, strict=True):
            tokens = row[ids.shape[1] :].tolist()
            if end in tokens:
                tokens = tokens[: tokens.index(end) + 1]
            assert completion.token_ids == tokens
            ended = tokens[-1] == end
            assert completion.finish_reason == ("stop" if ended else "length")
        scores = [c.cumulative_logprob / len(c.token_ids) ** length_penalty for c in output.outputs]
        torch.testing.assert_close(
            torch.tensor(scores), expected.sequences_scores, rtol=1e-4, atol=1e-4
        )


def test_n_of_best_of_are_the_first(tiny: LLM) -> None:
    params = SamplingParams(use_beam_search=True, n=2, best_of=4, temperature=0, max_tokens=10)
    (few,) = tiny.generate(PROMPTS[0], params, use_tqdm=False)
    (all_four,) = tiny.generate(
        PROMPTS[0],
        SamplingParams(use_beam_search=True, n=4, best_of=4, temperature=0, max_tokens=10),
        use_tqdm=False,
    )
    assert [c.token_ids for c in few.outputs] == [c.token_ids for c in all_four.outputs[:2]]
    assert few.outputs[0].text


def test_result_does_not_depend_on_preemption_or_batch(tiny_folder: Path, tiny: LLM) -> None:
    mixed = [beams(3), SamplingParams(temperature=0, max_tokens=14), beams(2)]
    expected = [tiny.generate(p, s, use_tqdm=False)[0] for p, s in zip(PROMPTS, mixed)]
    for prefix_caching in (True, False):
        with LLM(
            str(tiny_folder),
            dtype="float32",
            device="cpu",
            block_size=8,
            max_model_len=48,
            num_gpu_blocks_override=10,
            max_num_seqs=8,
            enable_prefix_caching=prefix_caching,
        ) as small:
            outputs = small.generate(PROMPTS, mixed, use_tqdm=False)
            assert small.metrics()["num_preemptions"] > 0
            assert small.metrics()["kv_cache_usage_perc"] == 0.0
        for got, wanted in zip(outputs, expected, strict=True):
            assert [c.token_ids for c in got.outputs] == [c.token_ids for c in wanted.outputs]


def test_min_tokens_and_penalties_apply_to_beams(tiny: LLM) -> None:
    (output,) = tiny.generate(
        PROMPTS[0], beams(3, min_tokens=6, logit_bias={2: 100.0}), use_tqdm=False
    )
    assert all(len(c.token_ids) >= 7 for c in output.outputs)
    (output,) = tiny.generate(
        PROMPTS[0], beams(3, no_repeat_ngram_size=1, ignore_eos=True), use_tqdm=False
    )
    for completion in output.outputs:
        assert len(set(completion.token_ids)) == len(completion.token_ids)


def test_advance_ranks_all_beams_together() -> None:
    group = BeamGroup(2, 1, 10, 1.0, False)
    chosen = advance(
        group,
        [([1, 5], -1.0), ([1, 6], -1.1)],
        [
            ((7, -2.0), (8, -3.0), (4, -4.0), (2, -5.0)),
            ((9, -0.1), (3, -0.2), (8, -5.0), (4, -6.0)),
        ],
        frozenset({3}),
        lambda item: False,
        lambda item: item.rank,
    )
    assert [(c.parent, c.token) for c in chosen] == [(1, 9), (0, 7)]
    assert [h.token_ids for h in group.hypotheses] == [[1, 6, 3]]
    assert group.hypotheses[0].logprobs == 2  # the second best continuation of its beam
    assert group.hypotheses[0].normalized_score == pytest.approx(-1.3 / 2)


@pytest.mark.parametrize("seed", range(20))
def test_advance_equals_the_sorted_pool(seed: int) -> None:
    """The definition, as transformers has it: all candidates of all beams in one sorted list."""
    rng = random.Random(seed)
    width, vocab = rng.choice((2, 3, 8)), 40
    end_ids = frozenset(rng.sample(range(vocab), rng.choice((0, 1, 5, 20))))
    beams = [([1, 5 + i], -rng.random()) for i in range(width)]
    tops = []
    for _ in range(width):
        bias = rng.choice((0.0, 0.9))  # end tokens may be the best
        values = [rng.choice((-1.0, -2.5, -rng.random() * 4)) for _ in range(vocab)]
        pairs = [(t, v + bias * (t in end_ids)) for t, v in enumerate(values)]
        tops.append(tuple(sorted(pairs, key=lambda pair: -pair[1])))
    needed = candidates_needed(width, len(end_ids))
    group = BeamGroup(width, 1, 10**9, 1.0, "never")
    asked: list[Continuation] = []

    def completes_stop(item: Continuation) -> bool:
        asked.append(item)
        return False

    chosen = advance(
        group, beams, [top[:needed] for top in tops], end_ids, completes_stop, lambda _: None
    )
    pool = [(-(beams[i][1] + v), i, r, t) for i, top in enumerate(tops)
            for (t, v), r in zip(top, shared_ranks(v for _, v in top), strict=True)]  # fmt: skip
    pool.sort(key=lambda one: one[0])
    going_on = [one for one in pool if one[3] not in end_ids][:width]
    assert [(c.parent, c.token, c.rank) for c in chosen] == [(i, t, r) for _, i, r, t in going_on]
    ended = [[*beams[i][0], t] for _, i, _, t in pool[:width] if t in end_ids]
    assert sorted(h.token_ids for h in group.hypotheses) == sorted(ended)
    assert len(asked) <= 3 * width


def test_a_step_makes_few_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide beams with a thousand end tokens, all of them the best: the work of a step is bounded by
    the width, not by the number of end tokens."""
    made = 0

    def counted(*fields: Any) -> Continuation:
        nonlocal made
        made += 1
        return Continuation(*fields)

    monkeypatch.setattr(beam_search, "Continuation", counted)
    width, ends = 64, 1000
    top = tuple((token, -0.001 * token) for token in range(candidates_needed(width, ends)))
    assert len(top) == 1064
    group = BeamGroup(width, 1, 10**9, 1.0, "never")
    beams = [([1, 2], -0.01 * i) for i in range(width)]
    never = lambda _: False  # noqa: E731
    chosen = advance(group, beams, [top] * width, frozenset(range(ends)), never, lambda _: None)
    assert len(chosen) == width and len(group.hypotheses) == width
    assert made <= 4 * width + 2


def test_a_stop_string_is_looked_for_in_few_continuations() -> None:
    asked: list[list[int]] = []

    def holds_stop(request: Request, output_ids: list[int]) -> bool:
        asked.append(output_ids)
        return False

    params = SamplingParams(
        use_beam_search=True, n=2, best_of=2, temperature=0, stop=["abcd"], max_tokens=None
    )
    request = make_request("r", [5], params, max_model_len=4096)
    group = BeamGroup.of(request)
    beams = [make_sequence(request) for _ in range(2)]
    for index, beam in enumerate(beams):
        beam.index = index
        beam.token_ids.extend([7] * 3000)
        group.pending[index] = ((3, -1.0), (4, -2.0), (6, -3.0), (8, -4.0))
    assert advance_group(request, group, beams, holds_stop)
    assert 2 <= len(asked) <= 4


def test_candidates_leave_enough_after_every_end_token() -> None:
    assert candidates_needed(4, 0) == 8
    assert candidates_needed(4, 3) == 8
    assert candidates_needed(64, 1000) == 1064


def test_stop_strings_finish_beams_like_end_tokens(tiny: LLM) -> None:
    letters = tiny.get_tokenizer().encode("abcdefghij", add_special_tokens=False)

    def search(**fields: Any) -> list[CompletionOutput]:
        params = beams(3, ignore_eos=True, allowed_token_ids=letters, **fields)
        return tiny.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs

    stop = search()[0].text[3:5]
    outputs = search(stop=[stop], early_stopping=True)
    stopped = [c for c in outputs if c.finish_reason == "stop"]
    assert stopped
    assert all(stop not in c.text for c in outputs)
    for completion in stopped:
        assert completion.stop_reason == stop
        # One letter a token: the sequence ends where the stop string does.
        assert len(completion.token_ids) == len(completion.text) + len(stop)
    kept = search(stop=stop, early_stopping=True, include_stop_str_in_output=True)
    assert [c.text.endswith(stop) for c in kept] == [c.finish_reason == "stop" for c in kept]
    assert all(len(c.token_ids) > 10 for c in search(stop=stop, min_tokens=10))


def test_beams_that_were_given_up_leave_nothing_behind(tiny: LLM) -> None:
    def num_sequences() -> int:
        gc.collect()
        return sum(type(kept) is Sequence for kept in gc.get_objects())

    before = num_sequences()
    for prompt in PROMPTS:
        tiny.generate(prompt, beams(4, ignore_eos=True, stop="never found"), use_tqdm=False)
    assert num_sequences() == before


def test_beams_report_the_log_probabilities_they_are_ranked_by(tiny: LLM) -> None:
    params = beams(3, logprobs=2, stop_token_ids=[77], logit_bias={77: 3.0})
    (output,) = tiny.generate(PROMPTS[1], params, use_tqdm=False)
    (plain,) = tiny.generate(
        PROMPTS[1], beams(3, stop_token_ids=[77], logit_bias={77: 3.0}), use_tqdm=False
    )
    for completion, without in zip(output.outputs, plain.outputs, strict=True):
        assert completion.token_ids == without.token_ids and without.logprobs is None
        assert len(completion.logprobs) == len(completion.token_ids)
        total = 0.0
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert next(iter(entry)) == token
            assert {1, 2} <= {e.rank for e in entry.values()}
            total += entry[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
