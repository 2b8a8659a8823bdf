"""Anthropic's own client: the Messages API."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from cells import (
    Setup,
    equal,
    full,
    leaving,
    raises,
    refused_then_served,
    run_cells,
)


def client(setup: Setup, *, retries: int = 0, small: bool = False) -> anthropic.Anthropic:
    url = setup.small_url if small else setup.url
    return anthropic.Anthropic(base_url=url, api_key=setup.key, max_retries=retries)


def greedy(setup: Setup, **rest: Any) -> dict[str, Any]:
    wanted = setup.wanted
    system, *messages = wanted["messages"]
    common = {"model": setup.model, "system": system["content"], "messages": messages}
    # The client itself knows no temperature any more.
    return {
        **common, "max_tokens": wanted["max_tokens"], **rest,
        "extra_body": {"temperature": 0, **rest.get("extra_body", {})},
    }  # fmt: skip


def chat(setup: Setup) -> None:
    answer = client(setup).messages.create(**greedy(setup))
    equal((answer.type, answer.role, answer.model), ("message", "assistant", setup.model))
    equal([block.type for block in answer.content], ["text"])
    equal(answer.content[0].text, setup.wanted["chat"])
    equal(answer.stop_reason, "max_tokens")
    raw = client(setup).messages.with_raw_response.create(**greedy(setup))
    equal(raw.headers["request-id"], raw.headers["x-request-id"])
    blocks = [{"type": "text", "text": setup.wanted["messages"][0]["content"],
               "cache_control": {"type": "ephemeral"}}]  # fmt: skip
    again = client(setup).beta.messages.create(**greedy(setup, system=blocks), betas=["a-beta"])
    equal(again.content[0].text, setup.wanted["chat"])


def stream(setup: Setup) -> None:
    with client(setup).messages.stream(**greedy(setup)) as events:
        pieces = list(events.text_stream)
        message = events.get_final_message()
    equal("".join(pieces), setup.wanted["chat"])
    assert len(pieces) > 1
    equal((message.content[0].text, message.stop_reason), (setup.wanted["chat"], "max_tokens"))
    kinds = [event.type for event in client(setup).messages.create(**greedy(setup, stream=True))]
    equal(kinds[:2], ["message_start", "content_block_start"])
    equal(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"])


def usage(setup: Setup) -> None:
    counts = (setup.wanted["chat_prompt_tokens"], setup.wanted["max_tokens"])
    whole = client(setup).messages.create(**greedy(setup)).usage
    equal((read(whole), whole.output_tokens), counts)
    with client(setup).messages.stream(**greedy(setup)) as events:
        streamed = events.get_final_message().usage
    equal((read(streamed), streamed.output_tokens), counts)


def read(usage: Any) -> int:
    """Tokens of the prompt, those in the cache included."""
    cached: int = usage.cache_read_input_tokens
    return usage.input_tokens + cached


def count(setup: Setup) -> None:
    body = greedy(setup)
    given = {name: body[name] for name in ("model", "system", "messages")}
    counted = client(setup).messages.count_tokens(**given)
    equal(counted.input_tokens, setup.wanted["chat_prompt_tokens"])


def stop(setup: Setup) -> None:
    text, word = setup.wanted["chat"], setup.wanted["stop"]
    answer = client(setup).messages.create(**greedy(setup, stop_sequences=[word, "never"]))
    equal(answer.content[0].text, text[: text.index(word)])
    equal((answer.stop_reason, answer.stop_sequence), ("stop_sequence", word))


def parallel(setup: Setup) -> None:
    async def ask() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=setup.url, api_key=setup.key) as made:
            return await asyncio.gather(*(made.messages.create(**greedy(setup)) for _ in range(8)))

    texts = [answer.content[0].text for answer in asyncio.run(ask())]
    equal(texts, [setup.wanted["chat"]] * 8)


def errors(setup: Setup) -> None:
    create = client(setup).messages.create
    with raises(anthropic.BadRequestError, "temperature", "at most 2") as caught:
        create(**greedy(setup, extra_body={"temperature": 3}))
    equal(caught[0].body["error"]["type"], "invalid_request_error")
    with raises(anthropic.BadRequestError, "prompt is too long"):
        create(**greedy(setup, messages=[{"role": "user", "content": "word " * 5000}]))
    with raises(anthropic.BadRequestError, "messages"):
        create(**greedy(setup, messages=[], stream=True))
    with raises(anthropic.NotFoundError, "does not exist") as caught:
        create(**greedy(setup, model="claude-sonnet-4-5"))
    equal(caught[0].body["error"]["type"], "not_found_error")
    search = {"type": "web_search_20250305", "name": "web_search"}
    with raises(anthropic.BadRequestError, "web_search_20250305", "not available"):
        create(**greedy(setup, tools=[search]))


def wrong_key(setup: Setup) -> None:
    wrong = anthropic.Anthropic(base_url=setup.url, api_key="wrong", max_retries=0)
    for more in ({}, {"stream": True}):
        with raises(anthropic.AuthenticationError, "API key is not accepted") as caught:
            wrong.messages.create(**greedy(setup, **more))
        equal(caught[0].body["error"]["type"], "authentication_error")
    token = anthropic.Anthropic(base_url=setup.url, auth_token=setup.key, max_retries=0)
    equal(token.messages.create(**greedy(setup)).content[0].text, setup.wanted["chat"])


def retry(setup: Setup) -> None:
    body = greedy(setup, max_tokens=1)
    with full(setup), raises(anthropic.InternalServerError, "too many requests") as caught:
        client(setup, small=True).messages.create(**body)
    equal((caught[0].status_code, caught[0].body["error"]["type"]), (503, "overloaded_error"))
    patient = client(setup, small=True, retries=8)
    answer = refused_then_served(setup, lambda: patient.messages.create(**body))
    equal(answer.usage.output_tokens, 1)


def abort(setup: Setup) -> None:
    long = greedy(setup, max_tokens=1900, extra_body={"ignore_eos": True})
    with leaving(setup), client(setup).messages.stream(**long) as begun:
        next(iter(begun.text_stream))


CELLS = (chat, stream, usage, count, stop, parallel, errors, wrong_key, retry, abort)

if __name__ == "__main__":
    run_cells(CELLS, anthropic.__version__)
