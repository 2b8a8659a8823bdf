"""The server over the real engine: its answers are those of `LLM` with the same model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.engine.async_engine import AsyncLLMEngine
from tests.helpers.time_limits import growing_limits
from tests.server.serving import Served, events, serving

pytestmark = pytest.mark.usefixtures("forked_engines")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ARGS: dict[str, Any] = {"model": "demo", "device": "cpu", "dtype": "float32"}
PROMPTS = ["def add(a, b):\n    return", "import os\n", "class Node:\n    def __init__(self"]
MESSAGES = [{"role": "user", "content": "sort a list"}]


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(**ARGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    with serving(AsyncLLMEngine(ARGS)) as served:
        yield served
        served.engine.process.kill()


def expected(offline: LLM, prompts: Any, **params: Any) -> list[RequestOutput]:
    return offline.generate(prompts, SamplingParams(temperature=0, **params), use_tqdm=False)


@pytest.mark.parametrize("stream", [True, False])
def test_greedy_texts_are_those_of_llm(offline: LLM, real: Served, stream: bool) -> None:
    wanted = expected(offline, PROMPTS, max_tokens=24)
    body = {"prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "stream": stream}
    answer = real.post(COMPLETIONS, body)
    if not stream:
        texts = [choice["text"] for choice in answer.json()["choices"]]
    else:
        texts = [""] * len(PROMPTS)
        for frame in events(answer.text)[:-1]:
            for choice in frame["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [output.outputs[0].text for output in wanted]


def test_scores_are_those_of_llm(offline: LLM, real: Served) -> None:
    """lm_eval's form of request, to 1e-4 as in its own comparison of back ends."""
    tokenizer = offline.get_tokenizer()
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts = [{"prompt_token_ids": one} for one in ids]
    wanted = expected(offline, prompts, max_tokens=1, prompt_logprobs=1, logprobs=1)
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    choices = real.post(COMPLETIONS, body).json()["choices"]
    for tokens, output, choice in zip(ids, wanted, choices):
        given = choice["logprobs"]["token_logprobs"]
        assert given[0] is None and len(given) == len(tokens) + 1
        theirs = [
            position[token].logprob
            for token, position in zip(tokens[1:], output.prompt_logprobs[1:])
        ]
        (last,) = output.outputs[0].token_ids
        theirs.append(output.outputs[0].logprobs[0][last].logprob)
        assert given[1:] == pytest.approx(theirs, abs=1e-4)
        tops = choice["logprobs"]["top_logprobs"][-1]
        assert max(tops.values()) == given[-1]  # greedy, by the comparison that lm_eval makes


def test_a_chat_is_that_of_llm(offline: LLM, real: Served) -> None:
    wanted = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    answer = real.post(CHAT, {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}).json()
    assert answer["choices"][0]["message"]["content"] == wanted[0].outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(wanted[0].prompt_token_ids)


def test_seeds_and_stops(offline: LLM, real: Served) -> None:
    params = SamplingParams(seed=5, n=2, max_tokens=20, stop=["\n"])
    (wanted,) = offline.generate(PROMPTS[0], params, use_tqdm=False)
    body = {"prompt": PROMPTS[0], "seed": 5, "n": 2, "max_tokens": 20, "stop": "\n"}
    for _ in range(2):
        choices = real.post(COMPLETIONS, body).json()["choices"]
        assert [choice["text"] for choice in choices] == [one.text for one in wanted.outputs]
        assert [c["stop_reason"] for c in choices] == [one.stop_reason for one in wanted.outputs]


def test_side_by_side(offline: LLM, real: Served) -> None:
    wanted = [output.outputs[0].text for output in expected(offline, PROMPTS, max_tokens=16)]
    bodies = [{"prompt": prompt, "max_tokens": 16, "temperature": 0} for prompt in PROMPTS * 6]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: real.post(COMPLETIONS, body).json(), bodies))
    assert [answer["choices"][0]["text"] for answer in answers] == wanted * 6


def test_what_only_the_engine_knows_is_a_400(real: Served) -> None:
    for body in ({"prompt": [99999]}, {"prompt": "a", "logit_bias": {"99999": 1}}):
        answer = real.post(COMPLETIONS, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in body
    assert real.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_parameters_that_forbid_what_the_grammar_allows_are_a_400(real: Served) -> None:
    """What cannot be continued is found while the request runs, and is its own mistake."""
    body = {"prompt": "a", "max_tokens": 4, "guided_choice": ["yes"], "allowed_token_ids": [0]}
    answer = real.post(COMPLETIONS, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "guided_choice")
    assert error["message"] == (
        "guided_choice=['yes']: no token can follow: other parameters forbid what the grammar "
        "allows"
    )
    assert real.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_deadline_returns_what_there_is(real: Served) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 2000, "ignore_eos": True}
    for limit in growing_limits(0.4):
        headers = {"x-request-timeout-ms": str(round(1000 * limit))}
        response = real.post(COMPLETIONS, body, headers=headers)
        if response.status_code == 200:  # else there was no token in time
            break
    answer = response.json()
    assert answer["choices"][0]["timeout"] is True
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] < 2000


def test_the_engines_death_is_told(real: Served) -> None:
    """The last of this file: it ends the engine that the others use."""
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    text = ""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        real.http.stream("POST", COMPLETIONS, json=body) as response,
    ):
        for piece in response.iter_text():
            if not text:
                os.kill(real.engine.process.popen.pid, signal.SIGKILL)
            text += piece
    assert events(text)[-1]["error"]["code"] == "engine_dead"
    answer = real.post(COMPLETIONS, {"prompt": "a"})
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert real.http.get("/health").status_code == 503
