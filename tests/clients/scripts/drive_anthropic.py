"""Anthropic's own client: the Messages API."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
from answers import Structure
from cells import (
    Setup,
    check_call,
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


def guided(setup: Setup, **rest: Any) -> dict[str, Any]:
    wanted = setup.wanted
    return greedy(setup, **rest) | {
        "messages": wanted["asking"][1:], "max_tokens": wanted["guided_tokens"]
    }  # fmt: skip


def tool_body(setup: Setup, **rest: Any) -> dict[str, Any]:
    """A message that has to be answered with one call."""
    given = [one["function"] for one in setup.wanted["tools"]]
    tools = [{"name": one["name"], "description": one["description"],
              "input_schema": one["parameters"]} for one in given]  # fmt: skip
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return guided(setup, tools=tools, tool_choice=choice) | rest


def tools(setup: Setup) -> None:
    made = client(setup).messages
    body = tool_body(setup)
    answer = made.create(**body)
    (call,) = answer.content
    equal((answer.stop_reason, call.type), ("tool_use", "tool_use"))
    check_call(call.name, call.input)
    named = made.create(**tool_body(setup, tool_choice={"type": "tool", "name": "now"}))
    equal([(one.name, one.input) for one in named.content], [("now", {})])
    with made.stream(**body) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        (streamed,) = events.get_final_message().content
    equal((json.loads("".join(pieces)), streamed.input), (call.input, call.input))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 °C"}
    turns = [*body["messages"], {"role": "assistant", "content": answer.content},
             {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]  # fmt: skip
    free = {"messages": turns, "tool_choice": {"type": "auto"},
            "max_tokens": setup.wanted["max_tokens"]}  # fmt: skip
    said = made.create(**tool_body(setup, **free))
    equal([block.type for block in said.content], ["text"])
    given = {name: body[name] for name in ("model", "system", "tools")}
    counted = made.count_tokens(**given, messages=turns)
    equal(read(said.usage), counted.input_tokens)


def json_schema(setup: Setup) -> None:
    made, wanted = client(setup).messages, setup.wanted
    form = {"type": "json_schema", "schema": wanted["schema"]}
    body = guided(setup, output_config={"format": form})
    answer = made.create(**body)
    equal((answer.content[0].text, answer.stop_reason), (wanted["structure"], "end_turn"))
    with made.stream(**body) as events:
        equal("".join(events.text_stream), wanted["structure"])


def parse(setup: Setup) -> None:
    body = guided(setup)
    answer = client(setup).messages.parse(**body, output_format=Structure)
    assert isinstance(answer.parsed_output, Structure)
    with client(setup).messages.stream(**body, output_format=Structure) as events:
        equal(events.get_final_message().parsed_output, answer.parsed_output)


def agent(setup: Setup) -> None:
    asked = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Köln", "Bonn"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "18 °C"

    # The choice holds in each turn, so the loop ends with its last one.
    turns = list(
        client(setup).beta.messages.tool_runner(
            **tool_body(setup, tools=[get_weather]), max_iterations=3
        )
    )
    equal([turn.stop_reason for turn in turns], ["tool_use"] * 3)
    assert len(asked) >= 2 and set(asked) <= {"Köln", "Bonn"}, asked


def reasoning(setup: Setup) -> None:
    thinks = greedy(setup, thinking={"type": "enabled", "budget_tokens": 1024})
    answer = client(setup).messages.create(**thinks)
    equal([block.type for block in answer.content], ["thinking"])
    equal(answer.content[0].thinking.strip(), setup.wanted["thought"])
    with client(setup).messages.stream(**thinks) as events:
        pieces = [event.thinking for event in events if event.type == "thinking"]
    equal("".join(pieces).strip(), setup.wanted["thought"])


CELLS = (chat, stream, usage, count, stop, parallel, errors, wrong_key, retry, abort, tools,
         json_schema, parse, agent, reasoning)  # fmt: skip

if __name__ == "__main__":
    run_cells(CELLS, anthropic.__version__)
