"""OpenAI's own client, 2.x and 3.x: the same script for both."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from answers import Structure, Weather
from cells import (
    Setup,
    check_call,
    close,
    equal,
    full,
    leaving,
    raises,
    refused_then_served,
    run_cells,
)


def client(setup: Setup, *, retries: int = 0, small: bool = False) -> openai.OpenAI:
    url = setup.small_url if small else setup.url
    return openai.OpenAI(base_url=f"{url}/v1", api_key=setup.key, max_retries=retries)


def greedy_chat(setup: Setup, **rest: Any) -> dict[str, Any]:
    wanted = setup.wanted
    common = {"model": setup.model, "messages": wanted["messages"], "temperature": 0}
    return {**common, "max_completion_tokens": wanted["max_tokens"], **rest}


def greedy_completion(setup: Setup, **rest: Any) -> dict[str, Any]:
    wanted = setup.wanted
    common = {"model": setup.model, "prompt": wanted["prompt"], "temperature": 0}
    return {**common, "max_tokens": wanted["max_tokens"], **rest}


def models(setup: Setup) -> None:
    equal(openai.__version__.split(".")[0], setup.options["major"])
    listed = client(setup).models.list()
    equal([one.id for one in listed], [setup.model])
    equal(client(setup).models.retrieve(setup.model).object, "model")


def chat(setup: Setup) -> None:
    answer = client(setup).chat.completions.create(**greedy_chat(setup))
    equal(answer.object, "chat.completion")
    equal(answer.choices[0].message.role, "assistant")
    equal(answer.choices[0].message.content, setup.wanted["chat"])
    equal(answer.choices[0].finish_reason, "length")


def stream(setup: Setup) -> None:
    chunks = list(client(setup).chat.completions.create(**greedy_chat(setup, stream=True)))
    equal(chunks[0].choices[0].delta.role, "assistant")
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    equal("".join(pieces), setup.wanted["chat"])
    assert len(list(filter(None, pieces))) > 1
    equal(chunks[-1].choices[0].finish_reason, "length")
    word = setup.wanted["stop"]  # the helper takes an answer that was cut for an error
    with client(setup).chat.completions.stream(**greedy_chat(setup, stop=word)) as helper:
        message = helper.get_final_completion().choices[0].message
    equal(message.content, setup.wanted["chat"].partition(word)[0])
    parts = client(setup).completions.create(**greedy_completion(setup, stream=True))
    equal("".join(part.choices[0].text for part in parts), setup.wanted["completion"])


def usage(setup: Setup) -> None:
    counts = (setup.wanted["chat_prompt_tokens"], setup.wanted["max_tokens"])
    create = client(setup).chat.completions.create
    whole = create(**greedy_chat(setup)).usage
    assert whole is not None
    equal((whole.prompt_tokens, whole.completion_tokens), counts)
    equal(whole.total_tokens, sum(counts))
    options = {"include_usage": True}
    *chunks, last = create(**greedy_chat(setup, stream=True, stream_options=options))
    equal(last.choices, [])
    equal((last.usage.prompt_tokens, last.usage.completion_tokens), counts)
    equal({chunk.usage for chunk in chunks}, {None})
    options["continuous_usage_stats"] = True
    *chunks, last = create(**greedy_chat(setup, stream=True, stream_options=options))
    so_far = [chunk.usage.completion_tokens for chunk in chunks]
    equal((so_far, so_far[-1]), (sorted(so_far), counts[1]))


def completions(setup: Setup) -> None:
    answer = client(setup).completions.create(**greedy_completion(setup))
    equal(answer.object, "text_completion")
    equal(answer.choices[0].text, setup.wanted["completion"])
    equal((answer.choices[0].finish_reason, answer.choices[0].index), ("length", 0))


def logprobs(setup: Setup) -> None:
    wanted = setup.wanted
    body = greedy_completion(setup, prompt=wanted["prompt_ids"], max_tokens=1, logprobs=1)
    (scored,) = client(setup).completions.create(**body, echo=True).choices
    first, *rest = scored.logprobs.token_logprobs
    equal(first, None)
    close(rest[:-1], wanted["prompt_logprobs"])
    equal("".join(scored.logprobs.tokens), scored.text)
    content = (
        client(setup)
        .chat.completions.create(**greedy_chat(setup, logprobs=True, top_logprobs=3))
        .choices[0]
        .logprobs.content
    )
    close([one.logprob for one in content], wanted["chat_logprobs"])
    equal("".join(one.token for one in content), wanted["chat"])
    equal({len(one.top_logprobs) for one in content}, {3})
    for one in content:
        equal(one.top_logprobs[0].logprob, one.logprob)  # greedy


def token_ids(setup: Setup) -> None:
    ids, wanted = setup.wanted["prompt_ids"], setup.wanted["completion"]
    create = client(setup).completions.create
    equal(create(**greedy_completion(setup, prompt=ids)).choices[0].text, wanted)
    several = create(**greedy_completion(setup, prompt=[ids, ids[:3], ids])).choices
    equal([one.index for one in several], [0, 1, 2])
    equal([several[0].text, several[2].text], [wanted] * 2)


def n(setup: Setup) -> None:
    body = greedy_chat(setup, n=3, temperature=1.0, seed=7)
    twice = [client(setup).chat.completions.create(**body) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in twice]
    equal(texts[0], texts[1])
    equal(len(set(texts[0])), 3)
    joined = ["", "", ""]
    for chunk in client(setup).chat.completions.create(**body, stream=True):
        joined[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    equal(joined, texts[0])


def stop(setup: Setup) -> None:
    text, word = setup.wanted["chat"], setup.wanted["stop"]
    create = client(setup).chat.completions.create
    choice = create(**greedy_chat(setup, stop=[word, "never"])).choices[0]
    equal((choice.message.content, choice.finish_reason), (text[: text.index(word)], "stop"))
    chunks = list(create(**greedy_chat(setup, stop=word, stream=True)))
    equal("".join(c.choices[0].delta.content or "" for c in chunks), text[: text.index(word)])
    equal(chunks[-1].choices[0].finish_reason, "stop")


def parallel(setup: Setup) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{setup.url}/v1", api_key=setup.key) as made:
            calls = [made.chat.completions.create(**greedy_chat(setup)) for _ in range(8)]
            return await asyncio.gather(*calls)

    texts = [answer.choices[0].message.content for answer in asyncio.run(ask())]
    equal(texts, [setup.wanted["chat"]] * 8)


def errors(setup: Setup) -> None:
    made = client(setup)
    create = made.chat.completions.create
    with raises(openai.BadRequestError, "at most 2") as caught:
        create(**greedy_chat(setup, temperature=3))
    equal((caught[0].param, caught[0].code), ("temperature", "invalid_value"))
    equal(caught[0].body["type"], "invalid_request_error")
    with raises(openai.BadRequestError, "maximum context length") as caught:
        create(**greedy_chat(setup, max_completion_tokens=10**6))
    equal(caught[0].code, "context_length_exceeded")
    with raises(openai.BadRequestError, "messages"):
        create(**greedy_chat(setup, messages=[], stream=True))
    with raises(openai.NotFoundError, "does not exist") as caught:
        create(**greedy_chat(setup, model="nothing"))
    equal((caught[0].code, caught[0].param), ("model_not_found", "model"))
    with raises(openai.BadRequestError, "generates text and does not pool"):
        made.embeddings.create(model=setup.model, input="a")
    with raises(openai.NotFoundError):
        made.models.retrieve("nothing")


def wrong_key(setup: Setup) -> None:
    wrong = openai.OpenAI(base_url=f"{setup.url}/v1", api_key="wrong", max_retries=0)
    for call in (
        wrong.models.list,
        lambda: wrong.chat.completions.create(**greedy_chat(setup)),
        lambda: wrong.chat.completions.create(**greedy_chat(setup, stream=True)),
    ):
        with raises(openai.AuthenticationError, "API key is not accepted") as caught:
            call()
        equal(caught[0].code, "invalid_api_key")


def retry(setup: Setup) -> None:
    body = {"model": setup.model, "prompt": "a", "max_tokens": 1}
    with full(setup), raises(openai.InternalServerError, "too many requests") as caught:
        client(setup, small=True).completions.create(**body)
    equal((caught[0].status_code, caught[0].code), (503, "overloaded"))
    assert int(caught[0].response.headers["retry-after"]) >= 1
    patient = client(setup, small=True, retries=8)
    answer = refused_then_served(setup, lambda: patient.completions.create(**body))
    equal(answer.usage.completion_tokens, 1)


def abort(setup: Setup) -> None:
    long = greedy_chat(setup, max_completion_tokens=1900, stream=True)
    long["extra_body"] = {"ignore_eos": True}
    with leaving(setup), client(setup).chat.completions.create(**long) as begun:
        next(iter(begun))


def tools(setup: Setup) -> None:
    create = client(setup).chat.completions.create
    body = tool_chat(setup)
    choice = create(**body).choices[0]
    equal((choice.finish_reason, choice.message.content), ("tool_calls", None))
    (call,) = choice.message.tool_calls
    equal(call.type, "function")
    check_call(call.function.name, call.function.arguments)
    named = {"type": "function", "function": {"name": "now"}}
    (other,) = create(**{**body, "tool_choice": named}).choices[0].message.tool_calls
    equal((other.function.name, other.function.arguments), ("now", "{}"))
    chunks = list(create(**body, stream=True))
    pieces = [piece for c in chunks for piece in c.choices[0].delta.tool_calls or ()]
    equal({piece.index for piece in pieces}, {0})
    equal(pieces[0].function.name, call.function.name)
    equal("".join(piece.function.arguments for piece in pieces), call.function.arguments)
    equal(chunks[-1].choices[0].finish_reason, "tool_calls")
    turns = [*body["messages"], choice.message,
             {"role": "tool", "tool_call_id": call.id, "content": "18 °C"}]  # fmt: skip
    free = {**greedy_chat(setup, messages=turns), "tools": body["tools"]}
    answer = create(**free)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    before = create(**{**free, "messages": body["messages"]}).usage.prompt_tokens
    assert answer.usage.prompt_tokens > before
    with raises(openai.BadRequestError, "is none of the tools") as caught:
        create(**{**body, "tool_choice": {"type": "function", "function": {"name": "f"}}})
    equal(caught[0].param, "tool_choice.function.name")


def tool_chat(setup: Setup, **rest: Any) -> dict[str, Any]:
    """A chat that has to be answered with one call."""
    wanted = setup.wanted
    fields = {"tools": wanted["tools"], "tool_choice": "required", "parallel_tool_calls": False}
    return guided_chat(setup, **fields, **rest)


def guided_chat(setup: Setup, **rest: Any) -> dict[str, Any]:
    wanted = setup.wanted
    fields = {"messages": wanted["asking"], "max_completion_tokens": wanted["guided_tokens"]}
    return greedy_chat(setup, **fields, **rest)


def json_schema(setup: Setup) -> None:
    create = client(setup).chat.completions.create
    schema = {"name": "structure", "strict": True, "schema": setup.wanted["schema"]}
    body = guided_chat(setup, response_format={"type": "json_schema", "json_schema": schema})
    choice = create(**body).choices[0]
    equal((choice.message.content, choice.finish_reason), (setup.wanted["structure"], "stop"))
    pieces = [c.choices[0].delta.content or "" for c in create(**body, stream=True)]
    equal("".join(pieces), setup.wanted["structure"])
    text = create(**guided_chat(setup, response_format={"type": "json_object"})).choices[0]
    assert isinstance(json.loads(text.message.content), dict)
    bad = {
        "name": "s",
        "schema": {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
    }
    with raises(openai.BadRequestError, "not") as caught:
        create(**{**body, "response_format": {"type": "json_schema", "json_schema": bad}})
    assert caught[0].param.endswith("properties.a.not"), caught[0].param


def parse(setup: Setup) -> None:
    chats = client(setup).chat.completions
    message = chats.parse(**guided_chat(setup, response_format=Structure)).choices[0].message
    assert isinstance(message.parsed, Structure)
    with chats.stream(**guided_chat(setup, response_format=Structure)) as events:
        equal(events.get_final_completion().choices[0].message.parsed, message.parsed)
    tool = openai.pydantic_function_tool(Weather)
    body = {**tool_chat(setup), "tools": [tool]}
    (call,) = chats.parse(**body).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    with chats.stream(**body) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    equal([event.parsed_arguments for event in done], [call.function.parsed_arguments])
    # With both, the model is free to call the tool; what it says follows the type.
    both = {"response_format": Structure, "tools": [tool], "parallel_tool_calls": False}
    said = chats.parse(**guided_chat(setup, **both)).choices[0].message
    assert isinstance(said.parsed, Structure) or said.tool_calls, said


def reasoning(setup: Setup) -> None:
    create = client(setup).chat.completions.create
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    message = create(**greedy_chat(setup), extra_body=thinks).choices[0].message
    equal((message.reasoning.strip(), message.content), (setup.wanted["thought"], None))
    chunks = list(create(**greedy_chat(setup, stream=True), extra_body=thinks))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    equal("".join(pieces).strip(), setup.wanted["thought"])
    # Both parts follow an expression, so that this model ends its reasoning.
    thinks["structured_outputs"] = {"regex": "[a-z]{9}\n</think>\n\n(yes|no)"}
    message = create(**greedy_chat(setup), extra_body=thinks).choices[0].message
    equal(len(message.reasoning.strip()), 9)
    assert message.content in ("yes", "no"), message.content


def responses(setup: Setup) -> None:
    wanted = setup.wanted
    system, user = wanted["messages"]
    body = {"model": setup.model, "instructions": system["content"], "input": user["content"],
            "temperature": 0, "max_output_tokens": wanted["max_tokens"]}  # fmt: skip
    made = client(setup).responses
    answer = made.create(**body)
    equal((answer.output_text, answer.status), (wanted["chat"], "incomplete"))
    equal(answer.usage.input_tokens, wanted["chat_prompt_tokens"])
    equal(answer.usage.output_tokens, wanted["max_tokens"])
    kinds, pieces = [], []
    for event in made.create(**body, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
    equal("".join(pieces), wanted["chat"])
    equal((kinds[0], kinds[-1]), ("response.created", "response.incomplete"))
    again = {**body, "input": "and now?", "previous_response_id": answer.id}
    continued = made.create(**again)
    assert continued.usage.input_tokens > answer.usage.input_tokens + wanted["max_tokens"]
    turns = [*wanted["messages"][1:], {"role": "assistant", "content": answer.output_text},
             {"role": "user", "content": "and now?"}]  # fmt: skip
    equal(made.create(**{**body, "input": turns}).output_text, continued.output_text)
    equal(made.retrieve(continued.id).output_text, continued.output_text)
    equal(len(list(made.input_items.list(continued.id))), 3)
    made.delete(answer.id)
    with raises(openai.NotFoundError, "is stored"):
        made.retrieve(answer.id)
    with raises(openai.BadRequestError, "web_search", "not available"):
        made.create(**body, tools=[{"type": "web_search"}])


def responses_tools(setup: Setup) -> None:
    made, wanted = client(setup).responses, setup.wanted
    system, user = wanted["asking"]
    body = {"model": setup.model, "instructions": system["content"], "input": user["content"],
            "temperature": 0, "max_output_tokens": wanted["guided_tokens"]}  # fmt: skip
    tools = [{"type": "function", **one["function"]} for one in wanted["tools"]]
    calling = {**body, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    answer = made.create(**calling)
    (call,) = answer.output
    equal((answer.status, call.type), ("completed", "function_call"))
    check_call(call.name, call.arguments)
    events = list(made.create(**calling, stream=True))
    kind = "response.function_call_arguments"
    pieces = [event.delta for event in events if event.type == f"{kind}.delta"]
    (done,) = [event for event in events if event.type == f"{kind}.done"]
    equal(("".join(pieces), done.arguments), (call.arguments, call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"}
    short = {**body, "max_output_tokens": wanted["max_tokens"], "tools": tools}
    chained = made.create(**{**short, "input": [result], "previous_response_id": answer.id})
    turns = [{"role": "user", "content": user["content"]}, call, result]
    resent = made.create(**{**short, "input": turns})
    equal((resent.output_text, chained.output_text), (chained.output_text, resent.output_text))
    assert chained.output_text
    parsed = made.parse(**body, text_format=Structure)
    assert isinstance(parsed.output_parsed, Structure)
    with made.stream(**body, text_format=Structure) as events:
        equal(events.get_final_response().output_parsed, parsed.output_parsed)
    schema = {"type": "json_schema", "name": "structure", "schema": wanted["schema"]}
    equal(made.create(**body, text={"format": schema}).output_text, wanted["structure"])


CELLS = (models, chat, stream, usage, completions, logprobs, token_ids, n, stop, parallel, errors,
         wrong_key, retry, abort, tools, json_schema, parse, reasoning, responses,
         responses_tools)  # fmt: skip

if __name__ == "__main__":
    run_cells(CELLS, openai.__version__)
