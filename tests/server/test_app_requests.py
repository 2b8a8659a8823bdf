"""Requests and their answers: what reaches the engine, forms that clients use, and early ends."""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import Limits, ServerSettings
from tests.helpers.time_limits import growing_limits
from tests.helpers.walks import Walk
from tests.server.fake_engine import CONTEXT, EOS, VOCAB, FakeEngine
from tests.server.serving import LIMIT, Served, events, head, raw, raw_post, received, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a b"}]
FIELDS: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "seed": 7,
    "stop": ["x", "y"],
    "stop_token_ids": [9],
    "bad_words": ["no"],
    "allowed_token_ids": [66, 67, 68],
    "logit_bias": {"66": 1.5},
    "ignore_eos": True,
    "min_tokens": 1,
    "max_tokens": 5,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 4,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "num_speculative_tokens": 2,
}
BEAMS = {"use_beam_search": True, "best_of": 3, "temperature": 0, "length_penalty": 0.8,
         "early_stopping": "never"}  # fmt: skip


def last(served: Served) -> tuple[str, Any, SamplingParams]:
    return served.engine.seen[-1]


def test_a_chat_goes_through_at_most_twelve_files_of_the_server(tokenizer: Tokenizer) -> None:
    """The table of docs/architecture.md, for a chat behind others."""
    with Walk(threads=True) as walk, serving(FakeEngine(tokenizer)) as served:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        for _ in range(2):
            walk.functions.clear()
            assert served.post("/v1/chat/completions", body).status_code == 200
        files = {file for file in walk.files if file.startswith("server/")}
    assert "server/endpoints/chat.py" in files and len(files) <= 12, files


# what reaches the engine


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields", [FIELDS, BEAMS], ids=["sampling", "beams"])
def test_every_sampling_field_reaches_the_engine(
    server: Served, path: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": "a b", "messages": USER} | {"max_tokens": 5} | fields
    assert server.post(path, body).status_code == 200
    params = last(server)[2]
    as_json = {"logit_bias": {66: 1.5}, "stop": ["x", "y"]}
    for name, value in fields.items():
        assert getattr(params, name) == as_json.get(name, value), name
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


def test_no_sampling_field_is_forgotten() -> None:
    elsewhere = {"logprobs", "logits_processors", "output_kind", "detokenize", "truncation_side"}
    elsewhere |= {"logprob_token_ids", "guided_decoding", "structured_outputs"}  # not yet
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == FIELDS.keys() | BEAMS.keys() | elsewhere


def test_detokenize_false_gives_ids_only(server: Served) -> None:
    body = {"prompt": [66, 67], "max_tokens": 2, "detokenize": False, "return_token_ids": True}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["text"] == "" and choice["token_ids"] == [66, 67]


def test_defaults(server: Served) -> None:
    assert server.post(COMPLETIONS, {"prompt": "a"}).json()["usage"]["completion_tokens"] == 16
    assert last(server)[2].max_tokens == 16
    server.post(CHAT, {"messages": USER, "max_completion_tokens": 3})
    assert last(server)[2].max_tokens == 3
    body = {"messages": USER, "stop_token_ids": [27]}  # ends at the first ":"
    assert server.post(CHAT, body).json()["choices"][0]["finish_reason"] == "stop"
    assert last(server)[2].max_tokens is None


def test_vllms_ways_to_write_values(server: Served) -> None:
    """Numbers as texts, and values that stand for all, for any and for as much as fits."""

    def params(path: str = COMPLETIONS, **fields: Any) -> SamplingParams:
        answer = server.post(path, {"prompt": "a b", "messages": USER, "max_tokens": 1} | fields)
        assert answer.status_code == 200, answer.text
        return last(server)[2]

    texts: dict[str, Any] = {
        "max_tokens": "3",
        "temperature": "0.5",
        "n": "2",
        "seed": "7",
        "top_k": "5.0",
        "ignore_eos": "true",
        "logprobs": "2",
        "stop": ["5"],
        "stop_token_ids": ["9"],
    }
    found = params(**texts)
    assert (found.max_tokens, found.temperature, found.n, found.seed) == (3, 0.5, 2, 7)
    assert found.top_k == 5 and found.ignore_eos is True and found.logprobs == 2
    assert list(found.stop or ()) == ["5"] and list(found.stop_token_ids or ()) == [9]
    assert params(seed=-1).seed is None
    assert params(logprobs=True).logprobs == 1 and params(logprobs=False).logprobs is None
    for path in (COMPLETIONS, CHAT):
        beams = params(path, use_beam_search=True, n=2)
        assert beams.use_beam_search and beams.temperature == 0


def test_prompts_are_cut_on_either_side(server: Served) -> None:
    ids = [token % 4000 + 1 for token in range(CONTEXT + 50)]
    cuts = {
        (3, None): ids[-3:],
        (3, "right"): ids[:3],
        (-1, None): ids[-(CONTEXT - 5) :],
        (-1, "right"): ids[: CONTEXT - 5],
    }
    for (count, side), kept in cuts.items():
        body = {"prompt": ids, "max_tokens": 5, "truncate_prompt_tokens": count,
                "truncation_side": side}  # fmt: skip
        answer = server.post(COMPLETIONS, body)
        assert answer.status_code == 200, answer.text
        assert last(server)[1].token_ids == kept
        assert answer.json()["usage"]["completion_tokens"] == 5
    long = [{"role": "user", "content": "a b " * CONTEXT}]
    answer = server.post(CHAT, {"messages": long, "truncate_prompt_tokens": -1})
    assert answer.json()["usage"]["prompt_tokens"] == CONTEXT - 1


@pytest.mark.parametrize("most", [50, VOCAB])
def test_the_engine_limits_logprobs(tokenizer: Tokenizer, most: int) -> None:
    with serving(FakeEngine(tokenizer, max_logprobs=most)) as served:
        answer = served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "logprobs": 30})
        assert len(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]) > 20
        chat = {"messages": USER, "max_tokens": 1, "logprobs": True, "top_logprobs": 50}
        (entry,) = served.post(CHAT, chat).json()["choices"][0]["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == 50
        for path, name in (
            (COMPLETIONS, "logprobs"),
            (CHAT, "top_logprobs"),
            (COMPLETIONS, "prompt_logprobs"),
            (CHAT, "prompt_logprobs"),
        ):
            body = {"prompt": "a b", "messages": USER, "max_tokens": 1, name: -1}
            if name == "top_logprobs":
                body["logprobs"] = True
            answer = served.post(path, body)
            if most == VOCAB:
                assert answer.status_code == 200, answer.text
                assert last(served)[2].logprobs == -1 or last(served)[2].prompt_logprobs == -1
            else:
                error = answer.json()["error"]
                assert error["param"] == name and "at most 50" in error["message"]


def test_an_omitted_max_tokens_is_cut_to_the_context(server: Served) -> None:
    answer = server.post(COMPLETIONS, {"prompt": [66] * (CONTEXT - 3)}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_forms_of_prompts(server: Served) -> None:
    for prompt, count in (("a", 1), ([66, 67], 1), (["a", "b c"], 2), ([[66], [67, 68]], 2)):
        answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "n": 2}).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
        assert answer["usage"]["completion_tokens"] == 2 * count


def test_a_text_and_its_ids_are_one_prompt(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": "def add(a, b):"}).json()["tokens"]
    answers = [
        server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 5}).json()["choices"]
        for prompt in ("def add(a, b):", ids)
    ]
    assert answers[0] == answers[1]


def test_names_of_the_model(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(served_names=("one", "org/two"))
    with serving(FakeEngine(tokenizer), settings) as served:
        listed = served.http.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["one", "org/two"]
        assert served.http.get("/v1/models/org/two").json()["id"] == "org/two"
        for model in (None, "one", "org/two"):
            for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
                answer = served.post(path, {**body, "model": model, "max_tokens": 1})
                assert answer.json()["model"] == "one"
        assert served.post(COMPLETIONS, {"prompt": "a", "model": "demo"}).status_code == 404


def test_fields_without_a_value_are_null(server: Served) -> None:
    """Where vLLM sends null: its users read the attribute without asking whether it is there."""
    whole = {"system_fingerprint", "service_tier", "kv_transfer_params"}
    answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).json()
    (choice,) = answer["choices"]
    assert {answer[name] for name in whole} == {None}
    names = {"prompt_logprobs", "token_ids", "prompt_token_ids", "stop_reason", "logprobs"}
    assert {choice[name] for name in names} == {None}
    answer = server.post(CHAT, {"messages": USER, "max_tokens": 1}).json()
    (choice,) = answer["choices"]
    assert {answer[name] for name in whole | {"prompt_logprobs", "prompt_token_ids"}} == {None}
    assert {choice[name] for name in ("token_ids", "stop_reason", "logprobs")} == {None}
    names = {"refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"}
    assert {choice["message"][name] for name in names} == {None}


def test_the_role_of_an_answer(tokenizer: Tokenizer) -> None:
    """An answer for which no message is opened goes on with the last one."""
    settings = ServerSettings(response_role="sage")
    messages = [*USER, {"role": "critic", "content": "well,"}]
    with serving(FakeEngine(tokenizer), settings) as served:
        for fields, role in (
            ({}, "sage"),
            ({"add_generation_prompt": False}, "critic"),
            ({"continue_final_message": True}, "critic"),
        ):
            body: dict[str, Any] = {"messages": messages, "max_tokens": 1, **fields}
            answer = served.post(CHAT, body).json()
            assert answer["choices"][0]["message"]["role"] == role
            first = events(served.post(CHAT, body | {"stream": True}).text)[0]
            assert first["choices"][0]["delta"]["role"] == role


# scoring


def test_lm_eval_scores_lists_of_ids(server: Served) -> None:
    """lm_eval's request: the log-probabilities must stand beside the given ids, one by one."""
    prompts = [[66, 67, 68, 69], [70, 71]]
    body = {
        "model": "demo",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = server.post(COMPLETIONS, body).json()
    assert len(answer["choices"]) == 2
    texts = server.context.tokenizer
    for ids, choice in zip(prompts, answer["choices"]):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 1
        assert logprobs["tokens"][:-1] == [texts.token(token)[0] for token in ids]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        for position in range(1, len(ids) + 1):
            tops = logprobs["top_logprobs"][position]
            value = logprobs["token_logprobs"][position]
            # The fake's tokens are its second choice: one alternative, and the token itself.
            assert len(tops) == 2 and tops[logprobs["tokens"][position]] == value
            assert max(tops.values()) > value
    assert answer["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_max_tokens_0_scores_the_prompt_alone(server: Served) -> None:
    body = {"prompt": [66, 67, 68], "max_tokens": 0, "logprobs": 1, "echo": True}
    answer = server.post(COMPLETIONS, body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == server.context.tokenizer.decode([66, 67, 68], skip_special_tokens=True)
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_in_vllms_form(server: Served) -> None:
    body = {"prompt": [66, 67], "max_tokens": 1, "prompt_logprobs": 1}
    given = server.post(COMPLETIONS, body).json()["choices"][0]["prompt_logprobs"]
    assert given[0] is None and given[1]["67"]["rank"] == 2 and len(given[1]) == 2
    body = {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0}
    answer = server.post(CHAT, body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_the_echo_of_token_ids_has_their_special_tokens(server: Served) -> None:
    name, special = next(iter(server.context.tokenizer.special_tokens.items()))
    body = {"prompt": [66, special, 67], "max_tokens": 1, "echo": True, "logprobs": 0}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["text"].startswith(f"a{name}b")
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    for token, offset in zip(tokens, offsets, strict=True):
        assert choice["text"].startswith(token, offset)


def test_top_logprobs_start_with_the_token_itself(server: Served) -> None:
    body = {"prompt": [66, 67], "max_tokens": 2, "logprobs": 3}
    logprobs = server.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    for token, value, tops in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert list(tops.items())[0] == (token, value)
        others = list(tops.values())[1:]
        assert others == sorted(others, reverse=True)


def test_parts_of_characters_are_shown_by_their_bytes(server: Served) -> None:
    body = {"prompt": "é", "max_tokens": 2, "logprobs": 0, "prompt_logprobs": 0}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    body = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 6, "logprobs": True}
    entries = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert ["\\xc3", [0xC3]] in [[entry["token"], entry["bytes"]] for entry in entries]


def test_chat_logprobs_name_bytes(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 8, "logprobs": True}
    entries = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode() == "# user: é\n#"


# conversations


def test_users_cannot_write_special_tokens(server: Served, tokenizer: Tokenizer) -> None:
    text = "a<|endoftext|>b <|pad|>"
    server.post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
    prompt = last(server)[1]
    assert EOS not in prompt.token_ids and 1 not in prompt.token_ids
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
    assert text in prompt.text
    # A completion is the model's raw text, special tokens included.
    server.post(COMPLETIONS, {"prompt": text, "max_tokens": 1})
    assert EOS in last(server)[1].token_ids


def test_template_of_the_settings(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}<|endoftext|>{{ m.role }}={{ m.content }}{% endfor %}"
        "{% if enable_thinking %}!{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}"
        "{% endif %}{% if add_generation_prompt %}?{% endif %}"
    )
    messages = [
        {"role": "developer", "content": "x<|endoftext|>"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1}
    with serving(FakeEngine(tokenizer), ServerSettings(chat_template=template)) as served:

        def rendered(**more: Any) -> str:
            assert served.post(CHAT, body | more).status_code == 200
            return last(served)[1].text

        base = "<|endoftext|>system=x<|endoftext|><|endoftext|>user=a\nb"
        assert rendered() == base + "?"
        assert last(served)[1].token_ids.count(EOS) == 2  # the template's, not the user's
        assert rendered(chat_template_kwargs={"enable_thinking": True}) == base + "!?"
        assert rendered(reasoning_effort="low") == base + "low?"
        assert rendered(add_generation_prompt=False) == base
        assert rendered(continue_final_message=True) == base
        ids = served.post("/tokenize", {"messages": messages}).json()["tokens"]
        rendered()
        assert ids == last(served)[1].token_ids
        messages[:] = [
            {"role": "critic", "content": ["bad", {"type": "input_text", "text": "worse"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, "never"]},
            {"role": "assistant", "content": None, "refusal": "not I"},
            {"role": "assistant"},
            {"role": "<|endoftext|>", "content": []},
        ]
        eos = "<|endoftext|>"
        assert rendered() == (
            f"{eos}critic=bad\nworse{eos}assistant=no\nnever{eos}assistant=not I{eos}assistant="
            f"{eos}{eos}=?"
        )
        assert last(served)[1].token_ids.count(EOS) == 5  # a role is a user's text, too


def test_a_template_may_refuse(tokenizer: Tokenizer) -> None:
    template = "{{ raise_exception('roles must alternate, see /srv/models/x.jinja') }}"
    with serving(FakeEngine(tokenizer), ServerSettings(chat_template=template)) as served:
        error = served.post(CHAT, {"messages": USER}).json()["error"]
        assert error["param"] == "messages" and "roles must alternate" in error["message"]
        assert "/srv" not in error["message"]


def test_templates_are_sandboxed(tokenizer: Tokenizer) -> None:
    template = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    with serving(FakeEngine(tokenizer), ServerSettings(chat_template=template)) as served:
        answer = served.post(CHAT, {"messages": USER})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


def test_without_a_tokenizer() -> None:
    with serving(FakeEngine(None)) as served:
        body = {"prompt": [66, 67], "max_tokens": 2, "logprobs": 0}
        for more in ({}, {"detokenize": False}):
            choice = served.post(COMPLETIONS, body | more).json()["choices"][0]
            assert choice["text"] == ""
            assert choice["logprobs"]["tokens"] == ["token_id:66", "token_id:67"]
        refused = served.post(COMPLETIONS, body | {"stop": "x"})
        assert refused.status_code == 400 and "needs a tokenizer" in refused.text
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
            answer = served.post(path, body)
            assert answer.status_code == 400 and "without a tokenizer" in answer.text


# early ends


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("running", [True, False])
def test_a_vanished_client_is_aborted(
    tokenizer: Tokenizer, stream: bool, prompts: int, running: bool
) -> None:
    engine = FakeEngine(tokenizer, delay=0.001)
    if not running:
        engine.unpaused.clear()
    body = {"prompt": [[66, 67]] * prompts, "max_tokens": 2000, "stream": stream}
    with serving(engine) as served:
        with raw_post(served, COMPLETIONS, body):
            served.wait(lambda: engine.num_live == prompts and (engine.num_steps or not running))
        served.wait(lambda: engine.num_live == 0 and served.context.load == 0)
        assert len(engine.aborted) == prompts
        metrics = served.http.get("/metrics").text
        assert 'hetero_llm:aborted_requests_total{cause="client_gone"} 1.0' in metrics


def test_a_client_that_leaves_before_its_body_has_come(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer)) as served:
        with raw(served, head(COMPLETIONS, 100) + b"{"):
            served.wait(lambda: b"in_flight 1.0" in served.context.metrics.text())
        served.wait(lambda: b"client_gone" in served.context.metrics.text())
        assert not served.engine.seen


def test_request_ids(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.unpaused.clear()
    body = {"prompt": "a", "request_id": "mine", "max_tokens": 1}
    with serving(engine) as served:
        with raw_post(served, COMPLETIONS, body) as first:
            served.wait(lambda: engine.num_live == 1)
            again = served.post(COMPLETIONS, body)
            assert again.status_code == 409
            assert again.json()["error"]["code"] == "duplicate_request_id"
            assert again.json()["error"]["param"] == "request_id"
            assert again.headers["x-should-retry"] == "false"
            served.call(engine.unpaused.set)
            assert b'"id":"cmpl-mine"' in received(first, b'"kv_transfer_params":null}')
        assert served.post(COMPLETIONS, body).json()["id"] == "cmpl-mine"
        assert (
            served.post(CHAT, {"messages": USER, "request_id": "mine", "max_tokens": 1}).json()[
                "id"
            ]
            == "chatcmpl-mine"
        )
        for given, kept in (("abc-1", True), ("a b", False), ("x" * 129, False)):
            answer = served.http.get("/version", headers={"x-request-id": given})
            assert (answer.headers["x-request-id"] == given) == kept


def test_the_clients_header_names_the_answer(tokenizer: Tokenizer) -> None:
    """Several requests may carry one header at the same time, as those of one trace."""
    engine = FakeEngine(tokenizer)
    engine.unpaused.clear()
    headers = {"x-request-id": "trace-1"}
    with serving(engine) as served, ThreadPoolExecutor(3) as pool:
        bodies = [
            (COMPLETIONS, {"prompt": "a"}),
            (CHAT, {"messages": USER}),
            (COMPLETIONS, {"prompt": "b"}),
        ]
        sent = [
            pool.submit(
                served.post, path, body | {"max_tokens": 1, "request_id": "mine"}, headers=headers
            )
            for path, body in bodies
        ]
        served.wait(lambda: engine.num_live == 3)
        served.call(engine.unpaused.set)
        ids = [one.result().json()["id"] for one in sent]
        assert ids == ["cmpl-trace-1", "chatcmpl-trace-1", "cmpl-trace-1"]
        answer = served.post(
            "/v1/responses", {"input": "a", "max_output_tokens": 1}, headers=headers
        )
        assert "trace-1" not in answer.json()["id"]


def test_a_full_queue(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, max_queue=1)
    engine.unpaused.clear()
    body = {"prompt": "a", "max_tokens": 1}
    with serving(engine) as served:
        with raw_post(served, COMPLETIONS, body):
            served.wait(lambda: engine.num_live == 1)
            for stream in (False, True):
                answer = served.post(COMPLETIONS, body | {"stream": stream})
                assert answer.status_code == 503 and answer.headers["retry-after"] == "3"
                assert answer.json()["error"]["code"] == "overloaded"
                assert answer.json()["error"]["type"] == "overloaded_error"
            served.call(engine.unpaused.set)
        metrics = served.http.get("/metrics").text
        assert re.search(r'admission_rejections_total\{.*reason="overloaded"\} 2\.0', metrics)


def test_one_refused_prompt_ends_the_others(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, max_queue=2)
    engine.unpaused.clear()
    with serving(engine) as served:
        answer = served.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
        assert answer.status_code == 503 and engine.num_live == 0
        answer = served.post(COMPLETIONS, {"prompt": [[66], [4096]]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
        assert engine.num_live == 0


def test_too_many_requests_at_once(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.unpaused.clear()
    settings = ServerSettings(limits=Limits(concurrent_requests=1))
    body = {"prompt": "a", "max_tokens": 1}
    with serving(engine, settings) as served, raw_post(served, COMPLETIONS, body):
        served.wait(lambda: engine.num_live == 1)
        answer = served.post(COMPLETIONS, body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "too_many_requests"
        assert served.http.get("/health").status_code == 200
        served.call(engine.unpaused.set)


# deadlines


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_a_running_request(tokenizer: Tokenizer, path: str, stream: bool) -> None:
    """Three tokens come at once, the fourth never."""

    def three(ids: list[int], sequence: int, position: int) -> int:
        if position == 2:
            engine.unpaused.clear()
        return 66

    body = {"prompt": "a b", "messages": USER, "max_tokens": 1500, "stream": stream}
    for limit in growing_limits(0.2):
        engine = FakeEngine(tokenizer, script=three)
        with serving(engine) as served:
            headers = {"x-request-timeout-ms": str(round(1000 * limit))}
            answer = served.post(path, body, headers=headers)
            metrics = served.http.get("/metrics").text
        if engine.generated == 3:
            break
    assert answer.status_code == 200
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    choice = chunks[-1]["choices"][0]
    assert choice["finish_reason"] == "length" and choice["timeout"] is True
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == 3
    assert 'hetero_llm:aborted_requests_total{cause="timeout"} 1.0' in metrics
    assert engine.num_live == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_in_the_queue(tokenizer: Tokenizer, stream: bool) -> None:
    engine = FakeEngine(tokenizer)
    engine.unpaused.clear()
    settings = ServerSettings(request_timeout=0.02)
    with serving(engine, settings) as served:
        for body in ({"prompt": "a"}, {"prompt": ["a", "b"]}):
            answer = served.post(COMPLETIONS, body | {"stream": stream})
            assert answer.status_code == 408
            assert answer.json()["error"]["code"] == "request_timeout"
            assert answer.json()["error"]["type"] == "timeout_error"
        assert engine.num_live == 0


def test_a_deadline_before_the_first_token(tokenizer: Tokenizer) -> None:
    """Scheduled, but its prompt takes too long."""
    engine = FakeEngine(tokenizer, delay=LIMIT)
    with serving(engine) as served:
        slow = served.post(
            COMPLETIONS, {"prompt": "a"}, headers={"x-request-timeout-ms": "1"}
        )  # the fake begins a token before it looks whether it was aborted
        assert slow.status_code in (408, 504)


def test_a_deadline_that_is_not_reached(server: Served) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-timeout-ms": "60000"})
    assert answer.status_code == 200 and "timeout" not in answer.json()["choices"][0]


# bodies


def test_a_slow_body(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(limits=Limits(body_seconds=0.05))
    with serving(FakeEngine(tokenizer), settings) as served:
        with raw(served, head(COMPLETIONS, 100) + b"{") as connection:
            answer = b""
            while piece := connection.recv(1 << 16):  # and the connection is closed
                answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer


@pytest.mark.parametrize("chunked", [True, False])
def test_a_large_body(tokenizer: Tokenizer, chunked: bool) -> None:
    settings = ServerSettings(limits=Limits(body_bytes=100_000))
    content = json.dumps({"prompt": "a " * 100_000}).encode()
    with serving(FakeEngine(tokenizer), settings) as served:
        answer = served.http.post(
            COMPLETIONS,
            content=iter([content]) if chunked else content,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert served.post(COMPLETIONS, {"prompt": "a"}).status_code == 200


def test_the_default_limit_of_a_body_is_32_mib(server: Served) -> None:
    with raw(server, head(COMPLETIONS, (32 << 20) + 1)) as connection:  # no byte of it is awaited
        assert received(connection, b"}}").startswith(b"HTTP/1.1 413 ")


def test_unknown_fields(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "frobnicate": 1, "zeta\n": 2}
    with serving(FakeEngine(tokenizer)) as served:
        with caplog.at_level("WARNING", "hetero_llm.server"):
            assert served.post(COMPLETIONS, body).status_code == 200
        (record,) = [r for r in caplog.records if "unknown fields" in r.getMessage()]
        assert "frobnicate" in record.getMessage() and "\n" not in record.getMessage()
        assert "hetero_llm:unknown_fields_total 2.0" in served.http.get("/metrics").text
    with serving(FakeEngine(tokenizer), ServerSettings(strict_fields=True)) as served:
        answer = served.post(COMPLETIONS, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unknown_parameter"
        assert answer.json()["error"]["param"] == "frobnicate"


def test_an_internal_error_shows_nothing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(ids: list[int], sequence: int, position: int) -> int:
        raise RuntimeError("secret at /srv/models")

    with serving(FakeEngine(tokenizer, script=broken)) as served:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
            for stream in (False, True):
                answer = served.post(path, body | {"stream": stream})
                assert answer.status_code == 500 and "secret" not in answer.text
                assert answer.headers["x-should-retry"] == "false"
                assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
        served.engine.script = lambda ids, sequence, position: 66
        assert served.post(COMPLETIONS, {"prompt": "a"}).status_code == 200
    assert sum("secret" in str(record.exc_info) for record in caplog.records) == 4


def test_http_client_is_kept_alive(server: Served) -> None:
    """Errors leave the connection usable: the next request comes over the same one."""
    limits = httpx.Limits(max_connections=1)
    with httpx.Client(base_url=server.url, limits=limits, timeout=LIMIT, trust_env=False) as one:
        for body in ({}, {"prompt": "a"}, {"prompt": ""}, {"prompt": "a", "stream": True}):
            assert one.post(COMPLETIONS, json=body).status_code in (200, 400)
