"""Each SamplingParams field by its behaviour, through `LLM.generate` on a tiny random model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_llm import LLM, CompletionOutput, RequestError, SamplingParams
from hetero_llm.core.sampling_params import RequestOutputKind

PROMPT = "hello, tiny model"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> list[CompletionOutput]:
    params = dataclasses.replace(GREEDY, **fields)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs


def one(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> CompletionOutput:
    return run(llm, prompt, **fields)[0]


def test_max_tokens_ends_with_length(tiny: LLM) -> None:
    output = one(tiny)
    assert len(output.token_ids) == 12
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.finished()


def test_max_tokens_none_runs_to_the_context_limit(tiny: LLM) -> None:
    output = one(tiny, max_tokens=None)
    assert len(output.token_ids) + len(PROMPT) == 64
    assert output.finish_reason == "length"


def test_greedy_repeats_and_sampling_follows_the_seed(tiny: LLM) -> None:
    assert one(tiny).token_ids == one(tiny).token_ids
    seeded = {"temperature": 1.0, "seed": 7}
    assert one(tiny, **seeded).token_ids == one(tiny, **seeded).token_ids
    assert one(tiny, **seeded).token_ids != one(tiny, temperature=1.0, seed=8).token_ids
    first, second = one(tiny, temperature=1.0), one(tiny, temperature=1.0)
    assert first.token_ids != second.token_ids  # unseeded requests differ


def test_n_samples_differ_and_do_not_depend_on_the_batch(tiny: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    (alone,) = tiny.generate(PROMPT, params, use_tqdm=False)
    samples = [tuple(c.token_ids) for c in alone.outputs]
    assert len(set(samples)) == 4
    assert [c.index for c in alone.outputs] == [0, 1, 2, 3]
    crowd = tiny.generate(["x" * 20, PROMPT, "yy"], params, use_tqdm=False)
    assert [tuple(c.token_ids) for c in crowd[1].outputs] == samples


def test_unseeded_requests_are_reproducible_by_the_engines_seed(tiny_folder: Path) -> None:
    texts = []
    for seed in (1, 1, 2):
        with LLM(str(tiny_folder), dtype="float32", device="cpu", seed=seed) as llm:
            texts.append(one(llm, temperature=1.0).token_ids)
    assert texts[0] == texts[1] != texts[2]


def test_best_of_returns_the_most_likely(tiny: LLM) -> None:
    fields = {"temperature": 1.0, "seed": 5, "logprobs": 0}
    everything = run(tiny, n=6, **fields)
    best = run(tiny, n=2, best_of=6, **fields)
    ranked = sorted(everything, key=lambda c: -c.cumulative_logprob)[:2]
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked]
    assert [c.index for c in best] == [0, 1]
    total = sum(entry[t].logprob for entry, t in zip(best[0].logprobs, best[0].token_ids))
    assert best[0].cumulative_logprob == pytest.approx(total)


def test_top_k_one_and_tiny_top_p_are_greedy(tiny: LLM) -> None:
    expected = one(tiny).token_ids
    assert one(tiny, temperature=1.5, top_k=1).token_ids == expected
    assert one(tiny, temperature=1.5, top_p=1e-7).token_ids == expected
    assert one(tiny, temperature=1.5, min_p=1.0).token_ids == expected


def test_stop_strings_cut_the_text(tiny: LLM) -> None:
    text = one(tiny, max_tokens=30).text
    stop = text[6:9]
    at = text.index(stop)
    output = one(tiny, max_tokens=30, stop=[stop])
    assert output.text == text[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = one(tiny, max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert kept.text == text[: at + len(stop)]


def test_stop_token_ids_and_eos(tiny: LLM) -> None:
    tokens = one(tiny).token_ids
    stop = next(t for t in tokens if tokens.index(t) > 2)
    output = one(tiny, stop_token_ids=[stop])
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    forced = one(tiny, ignore_eos=False, logit_bias={2: 100.0})
    assert forced.token_ids == [2]
    assert (forced.text, forced.finish_reason, forced.stop_reason) == ("", "stop", None)
    ignored = one(tiny, logit_bias={2: 100.0})
    assert ignored.token_ids == [2] * 12
    assert ignored.text == ""  # special tokens are skipped


def test_min_tokens_holds_back_every_end(tiny: LLM) -> None:
    output = one(tiny, ignore_eos=False, min_tokens=5, logit_bias={2: 100.0})
    assert len(output.token_ids) == 6
    assert output.token_ids[5] == 2 and 2 not in output.token_ids[:5]
    stop = one(tiny, max_tokens=30).text[1:3]
    late = one(tiny, max_tokens=30, stop=stop, min_tokens=10)
    assert len(late.token_ids) > 10


def test_special_tokens_in_the_text(tiny: LLM) -> None:
    fields = {"allowed_token_ids": [1], "max_tokens": 3}
    assert one(tiny, **fields).text == ""
    assert one(tiny, skip_special_tokens=False, **fields).text == "<s><s><s>"


def test_the_text_of_a_stop_token_is_kept_on_demand(tiny: LLM) -> None:
    tokens = one(tiny).token_ids
    stop = next(t for t in tokens if tokens.index(t) > 2)
    end = tokens.index(stop)
    before = one(tiny, max_tokens=end).text
    fields = {"stop_token_ids": [stop]}
    assert one(tiny, **fields).text == before
    kept = one(tiny, include_stop_str_in_output=True, **fields)
    assert kept.text == one(tiny, max_tokens=end + 1).text != before
    special = {"ignore_eos": False, "logit_bias": {2: 100.0}, "include_stop_str_in_output": True}
    assert one(tiny, **special).text == ""
    assert one(tiny, skip_special_tokens=False, **special).text == "</s>"


def test_detokenize_off_gives_no_text(tiny: LLM) -> None:
    output = one(tiny, detokenize=False, logprobs=1)
    assert output.text == "" and len(output.token_ids) == 12
    decoded = [entry.decoded_token for at in output.logprobs for entry in at.values()]
    assert decoded == [None] * len(decoded)


def test_without_a_tokenizer_default_parameters_give_ids(tiny_folder: Path) -> None:
    folder, kind = str(tiny_folder), RequestOutputKind.DELTA
    with LLM(folder, dtype="float32", device="cpu", skip_tokenizer_init=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 16
        scored = one(llm, {"prompt_token_ids": [5, 6, 7]}, logprobs=1, prompt_logprobs=1)
        assert all(e.decoded_token is None for at in scored.logprobs for e in at.values())
        params = dataclasses.replace(GREEDY, output_kind=kind)
        pieces = list(llm.stream({"prompt_token_ids": [5, 6, 7]}, params))
        assert sum((piece.outputs[0].token_ids for piece in pieces), []) == scored.token_ids
        for field in ("stop", "bad_words"):
            with pytest.raises(RequestError, match=f"{field}.*needs a tokenizer"):
                one(llm, {"prompt_token_ids": [5, 6, 7]}, **{field: ["x"]})


def test_logprobs_hold_the_drawn_token_and_the_best(tiny: LLM) -> None:
    output = one(tiny, temperature=1.0, seed=1, logprobs=3)
    assert len(output.logprobs) == 12
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token in entry and 3 <= len(entry) <= 4
        ranks = sorted(e.rank for e in entry.values())
        assert ranks[:3] == [1, 2, 3]
        assert next(iter(entry)) == token
        assert entry[token].decoded_token is not None
    assert one(tiny).logprobs is None and one(tiny).cumulative_logprob is None
    assert len(one(tiny, logprobs=0).logprobs[0]) == 1


def forced(tokens: list[int]) -> Any:
    """A logits processor that lets only these tokens be sampled, one after another."""

    def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[:] = -100.0
        logits[tokens[len(output_ids)]] = 100.0
        return logits

    return force


def test_a_token_inside_a_character_is_decoded_with_those_before(tiny: LLM) -> None:
    tokens = tiny.get_tokenizer().encode("é中a", add_special_tokens=False)
    assert len(tokens) == 6
    fields = {"logits_processors": [forced(tokens)], "max_tokens": 6, "logprobs": 0}
    output = one(tiny, **fields)
    decoded = [at[token].decoded_token for token, at in zip(output.token_ids, output.logprobs)]
    assert decoded == ["", "é", "", "", "中", "a"] and output.text == "é中a"
    (scored,) = tiny.generate("é中a", dataclasses.replace(GREEDY, prompt_logprobs=0))
    pairs = zip(scored.prompt_token_ids[1:], scored.prompt_logprobs[1:])
    assert [at[token].decoded_token for token, at in pairs] == ["é", "", "", "中", "a"]


def test_a_prompt_that_ends_inside_a_character_stays_out_of_the_text(tiny: LLM) -> None:
    tokenizer = tiny.get_tokenizer()
    prompt = tokenizer.encode("SECRET prompt texté", add_special_tokens=False)[:-1]
    tokens = tokenizer.encode("XYZ", add_special_tokens=False)
    fields = {"logits_processors": [forced(tokens)], "max_tokens": 3}
    assert one(tiny, {"prompt_token_ids": prompt}, **fields).text == "XYZ"
    params = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA, **fields)
    pieces = tiny.stream({"prompt_token_ids": prompt}, params)
    assert [piece.outputs[0].text for piece in pieces] == ["X", "Y", "Z"]


def test_prompt_logprobs_align_with_the_prompt(tiny: LLM) -> None:
    params = dataclasses.replace(GREEDY, prompt_logprobs=1)
    for _ in range(2):  # the second time the prompt is cached, and must still be scored
        (output,) = tiny.generate(PROMPT, params, use_tqdm=False)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert output.prompt_logprobs[0] is None
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
            assert token in entry and 1 in [e.rank for e in entry.values()]


def test_truncate_prompt_tokens_keeps_the_end(tiny: LLM) -> None:
    params = dataclasses.replace(GREEDY, truncate_prompt_tokens=5)
    (output,) = tiny.generate(PROMPT, params, use_tqdm=False)
    assert len(output.prompt_token_ids) == 5
    assert output.outputs[0].token_ids == one(tiny, PROMPT[-5:]).token_ids


def test_logit_bias_allowed_tokens_and_bad_words(tiny: LLM) -> None:
    assert one(tiny, logit_bias={70: 100.0}).token_ids == [70] * 12
    assert set(one(tiny, allowed_token_ids=[40, 41]).token_ids) <= {40, 41}
    text = one(tiny, max_tokens=30).text
    word = next(c for c in text if c.isascii() and c.isprintable() and c != " ")
    assert word not in one(tiny, max_tokens=30, bad_words=[word]).text


def test_repetition_and_frequency_penalties(tiny: LLM) -> None:
    looping = {"logit_bias": {70: 20.0}, "max_tokens": 20}
    assert one(tiny, **looping).token_ids == [70] * 20
    assert one(tiny, frequency_penalty=2.0, **looping).token_ids.count(70) < 20
    pushed = one(tiny, repetition_penalty=50.0, max_tokens=30).token_ids
    assert len(set(pushed)) == 30
    (prompt,) = tiny.generate(PROMPT, GREEDY, use_tqdm=False)
    assert not set(pushed) & set(prompt.prompt_token_ids)  # the prompt counts as well
    presence = {"logit_bias": {70: 20.0, 71: 19.0}, "max_tokens": 4, "presence_penalty": 2.0}
    assert one(tiny, **presence).token_ids[:2] == [70, 71]


def test_no_repeat_ngram_size(tiny: LLM) -> None:
    tokens = one(tiny, no_repeat_ngram_size=2, allowed_token_ids=[40, 41, 42], max_tokens=9)
    pairs = list(zip(tokens.token_ids, tokens.token_ids[1:]))
    assert len(pairs) == len(set(pairs))
    assert one(tiny, no_repeat_ngram_size=1, max_tokens=40).token_ids
    assert len(set(one(tiny, no_repeat_ngram_size=1, max_tokens=40).token_ids)) == 40


def test_logits_processors_of_two_and_three_arguments(tiny: LLM) -> None:
    seen: list[tuple] = []

    def only_after(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[:] = -100.0
        logits[50 + len(output_ids)] = 100.0
        return logits

    def with_prompt(
        prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        seen.append((len(prompt_ids), len(output_ids)))
        return logits

    output = one(tiny, logits_processors=[only_after, with_prompt])
    assert output.token_ids == list(range(50, 62))
    assert seen == [(len(PROMPT), i) for i in range(12)]


def test_what_a_processor_does_to_its_lists_changes_nothing(tiny: LLM) -> None:
    def spoil(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        output_ids += [0] * 50
        return logits

    def spoil_both(
        prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        assert len(prompt_ids) == len(PROMPT) and len(output_ids) < 6
        prompt_ids.clear()
        output_ids.clear()
        return logits

    fields = {"ignore_eos": False, "min_tokens": 5, "logit_bias": {2: 100.0}}
    spoiled = one(tiny, logits_processors=[spoil, spoil_both, spoil_both], **fields)
    assert spoiled.token_ids == one(tiny, **fields).token_ids
    assert spoiled.token_ids.index(2) == 5


def test_a_raising_processor_fails_its_request_and_the_engine_lives(tiny: LLM) -> None:
    def broken(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")

    bad = dataclasses.replace(GREEDY, logits_processors=[broken])
    with pytest.raises(RequestError, match="prompt 1: logits_processors.*boom"):
        tiny.generate([PROMPT, PROMPT], [GREEDY, bad], use_tqdm=False)
    assert tiny.metrics()["num_requests_running"] == 0
    assert len(one(tiny).token_ids) == 12


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_streams_add_up_to_the_final_text(tiny: LLM, kind: RequestOutputKind) -> None:
    text = one(tiny, max_tokens=30).text
    params = dataclasses.replace(GREEDY, max_tokens=30, stop=text[20:22], output_kind=kind)
    whole = one(tiny, max_tokens=30, stop=text[20:22])
    outputs = list(tiny.stream(PROMPT, params))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    texts = [o.outputs[0].text for o in outputs]
    if kind is RequestOutputKind.DELTA:
        assert "".join(texts) == whole.text
        assert sum((o.outputs[0].token_ids for o in outputs), []) == whole.token_ids
    else:
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:]))
        assert texts[-1] == whole.text


@pytest.mark.parametrize("stop", ["<|im_end|>", "never" * 8, "\ufffd\ufffd\ufffd\ufffd"])
def test_a_long_stop_string_repeats_nothing_in_a_stream(tiny: LLM, stop: str) -> None:
    text = one(tiny, max_tokens=12).text
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        params = dataclasses.replace(GREEDY, stop=stop, output_kind=kind)
        texts = [output.outputs[0].text for output in tiny.stream(PROMPT, params)]
        assert ("".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]) == text
        assert kind is RequestOutputKind.DELTA or all(map(text.startswith, texts))


def test_closing_a_stream_aborts_the_request(tiny: LLM) -> None:
    stream = tiny.stream(PROMPT, GREEDY)
    next(stream)
    assert tiny.metrics()["num_requests_running"] == 1
    stream.close()
    assert tiny.metrics()["num_requests_running"] == 0
    assert tiny.metrics()["kv_cache_usage_perc"] == 0.0


def test_generate_beside_an_open_stream_swallows_nothing(tiny: LLM) -> None:
    expected = one(tiny, max_tokens=30)
    stream = tiny.stream(PROMPT, dataclasses.replace(GREEDY, max_tokens=30))
    outputs = [next(stream)]
    assert len(one(tiny, "other").token_ids) == 12
    outputs += stream
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 31))
    assert outputs[-1].outputs[0].text == expected.text


def test_all_logprobs_need_the_limit_lifted(tiny_folder: Path, tiny: LLM) -> None:
    with pytest.raises(RequestError, match="logprobs=-1: exceeds max_logprobs"):
        one(tiny, logprobs=-1)
    with LLM(str(tiny_folder), dtype="float32", device="cpu", max_logprobs=-1) as llm:
        entry = one(llm, logprobs=-1, max_tokens=1).logprobs[0]
    assert sum(math.exp(e.logprob) for e in entry.values()) == pytest.approx(1.0, abs=1e-5)
