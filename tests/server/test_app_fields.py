"""Every field that clients of OpenAI, vLLM and TACO-LLM send: it works, changes nothing as it
should, or is refused by name. None is unknown, and what is unknown is counted and said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a b"}]
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a b", "max_tokens": 2},
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
}
BEAMS = {"use_beam_search": True, "n": 2, "temperature": 0}
SCHEMA = {"type": "object"}
TAG = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "best_of": {"best_of": 2},
    "use_beam_search": BEAMS,
    "length_penalty": BEAMS | {"length_penalty": 0.5},
    "early_stopping": BEAMS | {"early_stopping": True},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 1},
    "truncate_prompt_tokens -1": {"truncate_prompt_tokens": -1},
    "beams without a temperature": {"use_beam_search": True, "n": 2},
    "seed -1": {"seed": -1},
    "numbers as texts": {
        "max_tokens": "2",
        "temperature": "0.5",
        "ignore_eos": "true",
        "logit_bias": {"66": "1"},
        "stop_token_ids": ["9"],
    },
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 1},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 5},
    "bad_words": {"bad_words": ["no"]},
    "allowed_token_ids": {"allowed_token_ids": [66]},
    "cache_salt": {"cache_salt": "s"},
    "priority": {"priority": 0},
    "request_id": {"request_id": "r"},
    "session_id": {"session_id": "s"},
    "return_token_ids": {"return_token_ids": True},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "stream_options": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    "response_format": {"response_format": {"type": "text"}},
    "stream_interval": {"stream_interval": 2},
    "a signed seed": {"seed": -(1 << 63)},
    "empty": {"vllm_xargs": {}, "kv_transfer_params": {}, "watermarking": False},
}
CHAT_ONLY: dict[str, dict[str, Any]] = {
    "no functions": {"function_call": "none", "functions": [], "mm_processor_kwargs": {}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "the most reasoning": {"reasoning_effort": "max"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 2},
    "tool_choice": {"tool_choice": "none", "tools": []},
    "tool_choice auto": {"tool_choice": "auto", "tools": None},
    "include_reasoning": {"include_reasoning": False},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "name": {"messages": [{"role": "user", "content": "a", "name": "me"}]},
    "a role of one's own": {"messages": [{"role": "critic", "content": "a"}]},
    "nothing said": {"messages": [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]},
    "an answer sent back": {
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": "c",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
                "reasoning_content": None,
            },
            *MESSAGES,
        ]
    },
}
CONSTRAINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "structured_outputs": ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    "guided_json": ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    "guided_json as text": ({"guided_json": "{}"}, {"json": "{}"}),
    "guided_regex": ({"guided_regex": "a"}, {"regex": "a"}),
    "guided_choice": ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    "guided_whitespace_pattern": (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        {"json": SCHEMA, "whitespace_pattern": " ?"},
    ),
    "guided_decoding_backend": (
        {"guided_regex": "a", "guided_decoding_backend": "outlines"},
        {"regex": "a"},
    ),
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            }
        },
        {"json": SCHEMA},
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "structural_tag": (
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structural_tag": {"type": "structural_tag", **TAG}},
    ),
    "structural_tag as text": (
        {"structural_tag": json.dumps(TAG)},
        {"structural_tag": json.dumps(TAG)},
    ),
}
CHAT_REFUSED: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 4},
    "watermarking": True,
    "return_prompt_text": True,
    "media_io_kwargs": {"image": {}},
}


@pytest.fixture(scope="module")
def strict(tokenizer: Tokenizer) -> Any:
    with serving(FakeEngine(tokenizer), ServerSettings(strict_fields=True)) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "fields"),
    [(path, fields) for path in GOOD for fields in ACCEPTED.values()]
    + [(CHAT, fields) for fields in CHAT_ONLY.values()]
    + [(COMPLETIONS, {"suffix": ""})],
    ids=[f"{path}-{name}" for path in GOOD for name in ACCEPTED]
    + [f"{CHAT}-{name}" for name in CHAT_ONLY]
    + [f"{COMPLETIONS}-an empty suffix"],
)
def test_accepted(strict: Any, path: str, fields: dict[str, Any]) -> None:
    answer = strict.post(path, GOOD[path] | fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(("fields", "wanted"), CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_constraints_reach_the_engine(
    strict: Any, path: str, fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    answer = strict.post(path, GOOD[path] | fields)
    assert answer.status_code == 200, answer.text
    params = strict.engine.seen[-1][2]
    assert params.structured_outputs == StructuredOutputsParams(**wanted)


@pytest.mark.parametrize(("name", "value"), CHAT_REFUSED.items())
def test_refused_by_name(strict: Any, name: str, value: Any) -> None:
    answer = strict.post(CHAT, GOOD[CHAT] | {name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert "is not available" in error["message"]


def test_signed_seeds_are_seeds_of_their_own(strict: Any) -> None:
    seeds = []
    for seed in (-2, -1 - (1 << 62), 2):
        assert strict.post(CHAT, GOOD[CHAT] | {"seed": seed}).status_code == 200
        seeds.append(strict.engine.seen[-1][2].seed)
    assert seeds == [(1 << 64) - 2, (1 << 64) - 1 - (1 << 62), 2]
    refused = strict.post(CHAT, GOOD[CHAT] | {"seed": -1 - (1 << 63)})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")


def test_a_request_may_want_fewer_chunks(strict: Any) -> None:
    """At least as many tokens as it says in each, but for the first and the last."""
    body = {"prompt": "a b c", "max_tokens": 8, "stream": True, "return_token_ids": True}

    def sizes(interval: int | None) -> list[int]:
        text = strict.post(COMPLETIONS, {**body, "stream_interval": interval}).text
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line[6:7] == "{"]
        return [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]

    assert sizes(None) == [1] * 8
    assert sizes(3) == [1, 3, 3, 1]
    refused = strict.post(COMPLETIONS, {**body, "stream_interval": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_interval")


def test_unknown_names_inside_of_objects(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "c", "mood": 1, "tone\n": 2}],
        "stream": True,
        "stream_options": {"include_usage": True, "novelty": {}},
        "frobnicate": None,
        "max_tokens": 1,
    }
    with serving(FakeEngine(tokenizer)) as served:
        with caplog.at_level("WARNING", "hetero_llm.server"):
            assert served.post(CHAT, body).status_code == 200
        assert "hetero_llm:unknown_fields_total 4.0" in served.http.get("/metrics").text
    (line,) = [r.getMessage() for r in caplog.records if "unknown fields" in r.getMessage()]
    assert "\n" not in line
    for name in ("frobnicate", "messages[1].mood", "messages[1].tone", "stream_options.novelty"):
        assert name in line


def test_fields_left_out_have_the_models_defaults(tokenizer: Tokenizer) -> None:
    """generation_config.json's: what a request states counts, and beams are no sampling."""
    engine = FakeEngine(tokenizer)
    defaults = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 3}
    engine.info = replace(engine.info, default_sampling=defaults)

    def params(path: str, **more: Any) -> dict[str, Any]:
        body = {**GOOD[path], "max_tokens": None, **more}
        assert served.post(path, body).status_code == 200
        return {name: getattr(engine.seen[-1][2], name) for name in defaults}

    with serving(engine) as served:
        for path in (COMPLETIONS, CHAT):
            assert params(path) == defaults
            assert params(path, temperature=0, max_tokens=5) == {
                **defaults,
                "temperature": 0,
                "max_tokens": 5,
            }
            assert params(path, **BEAMS) == {**defaults, "temperature": 0, "top_p": 1.0}


@pytest.mark.parametrize(("most", "accepted"), [(20, (20, 21)), (30, (30, 31))])
def test_as_many_log_probabilities_as_the_engine_allows(
    tokenizer: Tokenizer, most: int, accepted: tuple[int, int]
) -> None:
    engine = FakeEngine(tokenizer, max_logprobs=most)
    within, beyond = accepted
    with serving(engine) as served:
        for path, name in ((COMPLETIONS, "logprobs"), (CHAT, "top_logprobs")):
            more = {"logprobs": True} if path == CHAT else {}
            refused = served.post(path, {**GOOD[path], **more, name: beyond})
            assert f"{name}={beyond}: must be at most {most}" in refused.text
            served.post(path, {**GOOD[path], **more, name: within})
            assert engine.seen[-1][2].logprobs == within


def test_the_role_of_an_answer(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer), ServerSettings(response_role="bot")) as served:
        for fields, role in (
            ({}, "bot"),
            ({"add_generation_prompt": True}, "bot"),
            ({"add_generation_prompt": False}, "user"),
            ({"continue_final_message": True}, "user"),
        ):
            answer = served.post(CHAT, {**GOOD[CHAT], **fields})
            assert answer.json()["choices"][0]["message"]["role"] == role
