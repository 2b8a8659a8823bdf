"""OpenAI's own client against the server, as its users call it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, serving

openai = pytest.importorskip("openai")

MESSAGES: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "héllo 😀"}]
ANSWER = "# system: s\n# user: héllo 😀\n# assistant:"  # the echo of the rendered conversation


@pytest.fixture(scope="module")
def keyed(tokenizer: Tokenizer) -> Iterator[Served]:
    settings = ServerSettings(api_keys=("key-one",), served_names=("org/model",))
    with serving(FakeEngine(tokenizer), settings) as served:
        yield served


@pytest.fixture(scope="module")
def client(keyed: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="key-one", max_retries=0) as made:
        yield made


def unkeyed(served: Served, *, retries: int) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=retries)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["org/model"]
    assert client.models.retrieve("org/model").owned_by == "hetero_llm"


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="org/model", messages=MESSAGES, max_completion_tokens=31, n=2, temperature=0
    )
    assert len(answer.choices) == 2 and answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content.startswith(ANSWER)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 62
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    # vLLM's users read these without asking whether they are there.
    assert answer.prompt_logprobs is answer.system_fingerprint is answer.kv_transfer_params is None
    assert answer.choices[0].message.reasoning_content is answer.choices[0].token_ids is None


def test_chat_stream(client: Any) -> None:
    stream = client.chat.completions.create(
        model="org/model", messages=MESSAGES, max_tokens=60, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert text.startswith(ANSWER)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 60
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_the_stream_helper(client: Any) -> None:
    """It puts the chunks together by itself and is strict about their form."""
    with client.chat.completions.stream(
        model="org/model", messages=MESSAGES, logprobs=True, top_logprobs=2, stop=["never"],
        extra_body={"stop_token_ids": [27]},
    ) as stream:  # fmt: skip
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(deltas) != ""
    assert final.choices[0].finish_reason == "stop"
    assert len(final.choices[0].logprobs.content) == 3  # the stop token too, which has no text
    assert len(final.choices[0].logprobs.content[0].top_logprobs) == 2


def test_completions(client: Any) -> None:
    answer = client.completions.create(
        model="org/model", prompt=["a b", [66, 67]], max_tokens=3, logprobs=1, echo=True, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("a b")
    assert answer.choices[1].logprobs.token_logprobs[0] is None
    assert len(answer.choices[1].logprobs.tokens) == 5
    assert answer.choices[0].prompt_logprobs is answer.choices[0].prompt_token_ids is None
    stream = client.completions.create(model="org/model", prompt="a b", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "a ba"


def test_extra_fields(client: Any, keyed: Served) -> None:
    client.chat.completions.create(
        model="org/model", messages=MESSAGES, max_tokens=1,
        extra_body={"top_k": 5, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    )  # fmt: skip
    params = keyed.engine.seen[-1][2]
    assert (params.top_k, params.repetition_penalty, params.no_repeat_ngram_size) == (5, 1.2, 2)


def test_errors_become_the_clients_exceptions(client: Any, keyed: Served) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="org/model", messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    assert "at most 2" in bad.value.message
    with pytest.raises(openai.BadRequestError) as tools:
        create(model="org/model", messages=MESSAGES,
               tools=[{"type": "function", "function": {"name": "f"}}])  # fmt: skip
    assert tools.value.param == "tools" and tools.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as pools_not:
        client.embeddings.create(model="org/model", input="a")
    assert pools_not.value.param == "model" and pools_not.value.code == "unsupported_task"
    wrong = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="key-two", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError) as unknown:
        wrong.models.list()
    assert unknown.value.code == "invalid_api_key"


def test_an_error_in_mid_stream_is_raised(tokenizer: Tokenizer) -> None:
    for fault in ("fail", "die"):
        engine = FakeEngine(tokenizer)
        setattr(engine, f"{fault}_after", 2)
        with serving(engine) as served, unkeyed(served, retries=0) as client:
            stream = client.completions.create(model="demo", prompt="a b", stream=True)
            texts = []
            with pytest.raises(openai.APIError) as raised:
                for chunk in stream:
                    texts.append(chunk.choices[0].text)
            assert len(texts) == 2
            expected = "generation_failed" if fault == "fail" else "engine_dead"
            assert raised.value.code == expected


def test_retries_are_steered(tokenizer: Tokenizer) -> None:
    """A failure of the request itself is tried once, however patient the client is."""
    engine = FakeEngine(tokenizer, fail_after=0)
    with serving(engine) as served, unkeyed(served, retries=2) as client:
        create = client.completions.create
        pytest.raises(openai.InternalServerError, create, model="demo", prompt="a")
    assert len(engine.seen) == 1


def test_leaving_a_stream_aborts_it(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, delay=0.001)
    with serving(engine) as served, unkeyed(served, retries=0) as client:
        with client.completions.create(
            model="demo", prompt="a", max_tokens=2000, stream=True
        ) as stream:
            next(iter(stream))
        served.wait(lambda: engine.aborted and engine.num_live == 0)
