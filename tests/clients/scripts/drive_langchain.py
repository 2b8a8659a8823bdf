"""langchain-openai: its chat model, and its older completions model."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any, Literal

import openai
from answers import Structure, Weather
from cells import (
    Setup,
    check_call,
    close,
    equal,
    leaving,
    raises,
    refused_then_served,
    run_cells,
)
from langchain_core.messages import ToolMessage, convert_to_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


def model(setup: Setup, *, small: bool = False, **rest: Any) -> ChatOpenAI:
    url = setup.small_url if small else setup.url
    common = {"model": setup.model, "base_url": f"{url}/v1", "api_key": setup.key}
    settings = {"temperature": 0, "max_retries": 0, "max_tokens": setup.wanted["max_tokens"]}
    return ChatOpenAI(**{**common, **settings, **rest})


def messages(setup: Setup, which: str = "messages") -> list[tuple[str, str]]:
    names = {"user": "human"}
    return [(names.get(m["role"], m["role"]), m["content"]) for m in setup.wanted[which]]


def chat(setup: Setup) -> None:
    answer = model(setup).invoke(messages(setup))
    equal(answer.content, setup.wanted["chat"])
    equal(answer.response_metadata["finish_reason"], "length")
    equal(answer.response_metadata["model_name"], setup.model)


def stream(setup: Setup) -> None:
    pieces = [chunk.content for chunk in model(setup).stream(messages(setup))]
    equal("".join(pieces), setup.wanted["chat"])
    assert len(list(filter(None, pieces))) > 1


def usage(setup: Setup) -> None:
    counts = (setup.wanted["chat_prompt_tokens"], setup.wanted["max_tokens"])
    whole = model(setup).invoke(messages(setup)).usage_metadata
    assert whole is not None
    equal((whole["input_tokens"], whole["output_tokens"]), counts)
    total = None
    for chunk in model(setup, stream_usage=True).stream(messages(setup)):
        total = chunk if total is None else total + chunk
    assert total is not None and total.usage_metadata is not None
    equal((total.usage_metadata["input_tokens"], total.usage_metadata["output_tokens"]), counts)


def completions(setup: Setup) -> None:
    common = {"model": setup.model, "base_url": f"{setup.url}/v1", "api_key": setup.key}
    made = OpenAI(**common, temperature=0, max_tokens=setup.wanted["max_tokens"], max_retries=0)
    prompt, wanted = setup.wanted["prompt"], setup.wanted["completion"]
    equal(made.invoke(prompt), wanted)
    equal("".join(made.stream(prompt)), wanted)


def logprobs(setup: Setup) -> None:
    answer = model(setup, logprobs=True, top_logprobs=2).invoke(messages(setup))
    content = answer.response_metadata["logprobs"]["content"]
    close([one["logprob"] for one in content], setup.wanted["chat_logprobs"])
    equal({len(one["top_logprobs"]) for one in content}, {2})


def n(setup: Setup) -> None:
    made = model(setup, n=3, temperature=1.0, seed=7)
    (generations,) = made.generate([convert_to_messages(messages(setup))]).generations
    equal(len({one.text for one in generations}), 3)


def stop(setup: Setup) -> None:
    text, word = setup.wanted["chat"], setup.wanted["stop"]
    wanted = text[: text.index(word)]
    equal(model(setup).invoke(messages(setup), stop=[word]).content, wanted)
    pieces = model(setup, stop=[word]).stream(messages(setup))
    equal("".join(chunk.content for chunk in pieces), wanted)


def parallel(setup: Setup) -> None:
    answers = model(setup).batch([messages(setup)] * 8, config={"max_concurrency": 8})
    equal([answer.content for answer in answers], [setup.wanted["chat"]] * 8)


def errors(setup: Setup) -> None:
    with raises(openai.BadRequestError, "at most 2"):
        model(setup, temperature=3).invoke(messages(setup))
    with raises(openai.BadRequestError, "messages must not be empty"):
        list(model(setup).stream([]))
    with raises(openai.NotFoundError, "does not exist"):
        model(setup, model="nothing").invoke(messages(setup))


def wrong_key(setup: Setup) -> None:
    wrong = model(setup, api_key="wrong")
    with raises(openai.AuthenticationError, "API key is not accepted"):
        wrong.invoke(messages(setup))
    with raises(openai.AuthenticationError, "API key is not accepted"):
        list(wrong.stream(messages(setup)))


def retry(setup: Setup) -> None:
    patient = model(setup, small=True, max_retries=8)
    answer = refused_then_served(setup, lambda: patient.invoke(messages(setup)))
    equal(answer.content, setup.wanted["chat"])


def abort(setup: Setup) -> None:
    long = model(setup, max_tokens=1900, extra_body={"ignore_eos": True})
    with leaving(setup):
        begun = long.stream(messages(setup))
        next(begun)
        begun.close()


def guided(setup: Setup, **rest: Any) -> ChatOpenAI:
    return model(setup, max_tokens=setup.wanted["guided_tokens"], **rest)


def tools(setup: Setup) -> None:
    call_tools(setup)


def call_tools(setup: Setup, **rest: Any) -> None:
    """A call, the same in pieces, and an answer to its result."""
    given = [one["function"] for one in setup.wanted["tools"]]
    bound = guided(setup, **rest).bind_tools(given, tool_choice="any", parallel_tool_calls=False)
    said = bound.invoke(messages(setup, "asking"))
    (call,) = said.tool_calls
    check_call(call["name"], call["args"])
    total = None
    for chunk in bound.stream(messages(setup, "asking")):
        total = chunk if total is None else total + chunk
    assert total is not None
    equal([(c["name"], c["args"]) for c in total.tool_calls], [(call["name"], call["args"])])
    named = guided(setup, **rest).bind_tools(given, tool_choice="now")
    equal([one["name"] for one in named.invoke(messages(setup, "asking")).tool_calls], ["now"])

    @tool
    def get_weather(city: Literal["Köln", "Bonn"]) -> str:
        """The weather of a city."""
        return f"18 °C in {city}"

    made = guided(setup, **rest).bind_tools([get_weather], tool_choice="get_weather", strict=True)
    said = made.invoke(messages(setup, "asking"))
    result = get_weather.invoke(said.tool_calls[0])
    assert isinstance(result, ToolMessage) and result.content.startswith("18 °C in "), result
    free = model(setup, **rest).bind_tools([get_weather])
    answer = free.invoke([*messages(setup, "asking"), said, result])
    assert answer.text and not answer.tool_calls, answer


def json_schema(setup: Setup) -> None:
    schema = {"title": "structure", **setup.wanted["schema"]}
    made = guided(setup).with_structured_output(schema, method="json_schema", include_raw=True)
    found = made.invoke(messages(setup, "asking"))
    equal(found["raw"].content, setup.wanted["structure"])
    equal(found["parsed"], json.loads(setup.wanted["structure"]))
    *_, last = guided(setup).with_structured_output(schema).stream(messages(setup, "asking"))
    equal(last, found["parsed"])
    free = (
        guided(setup)
        .with_structured_output(schema, method="json_mode")
        .invoke(messages(setup, "asking"))
    )
    assert isinstance(free, dict), free


def parse(setup: Setup) -> None:
    for method in ("json_schema", "function_calling"):
        made = guided(setup).with_structured_output(Structure, method=method)
        assert isinstance(made.invoke(messages(setup, "asking")), Structure), method
    # With both, the model is free to call the tool; what it says follows the type.
    bound = guided(setup).bind_tools(
        [Weather], response_format=Structure, strict=True, parallel_tool_calls=False
    )
    said = bound.invoke(messages(setup, "asking"))
    assert isinstance(said.additional_kwargs.get("parsed"), Structure) or said.tool_calls, said


def responses(setup: Setup) -> None:
    made = model(setup, use_responses_api=True)
    answer = made.invoke(messages(setup))
    equal(str(answer.text), setup.wanted["chat"])
    assert answer.usage_metadata is not None
    equal(answer.usage_metadata["input_tokens"], setup.wanted["chat_prompt_tokens"])
    pieces = [str(chunk.text) for chunk in made.stream(messages(setup))]
    equal("".join(pieces), setup.wanted["chat"])
    chained = model(setup, use_responses_api=True, use_previous_response_id=True)
    first = chained.invoke(messages(setup))
    second = chained.invoke([*messages(setup), first, ("human", "and now?")])
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_tokens"] > setup.wanted["chat_prompt_tokens"]


def responses_tools(setup: Setup) -> None:
    call_tools(setup, use_responses_api=True)
    made = guided(setup, use_responses_api=True).with_structured_output(Structure)
    assert isinstance(made.invoke(messages(setup, "asking")), Structure)


CELLS = (chat, stream, usage, completions, logprobs, n, stop, parallel, errors, wrong_key, retry,
         abort, tools, json_schema, parse, responses, responses_tools)  # fmt: skip

if __name__ == "__main__":
    run_cells(CELLS, version("langchain-openai"))
