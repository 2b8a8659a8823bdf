"""langchain-openai: its chat model, and its older completions model."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import openai
from cells import Setup, close, equal, leaving, raises, refused_then_served, run_cells
from langchain_core.messages import convert_to_messages
from langchain_openai import ChatOpenAI, OpenAI


def model(setup: Setup, *, small: bool = False, **rest: Any) -> ChatOpenAI:
    url = setup.small_url if small else setup.url
    common = {"model": setup.model, "base_url": f"{url}/v1", "api_key": setup.key}
    settings = {"temperature": 0, "max_retries": 0, "max_tokens": setup.wanted["max_tokens"]}
    return ChatOpenAI(**{**common, **settings, **rest})


def messages(setup: Setup) -> list[tuple[str, str]]:
    names = {"user": "human"}
    return [(names.get(m["role"], m["role"]), m["content"]) for m in setup.wanted["messages"]]


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


def tools(setup: Setup) -> None:
    def search(query: str) -> str:
        """Searches."""
        return query

    with raises(openai.BadRequestError, "tool calling is not available"):
        model(setup).bind_tools([search]).invoke(messages(setup))


def json_schema(setup: Setup) -> None:
    schema = {"title": "Answer", "type": "object", "properties": {"a": {"type": "string"}}}
    for method in ("json_schema", "json_mode"):
        made = model(setup).with_structured_output(schema, method=method)
        with raises(openai.BadRequestError, "structured output"):
            made.invoke(messages(setup))


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


CELLS = (chat, stream, usage, completions, logprobs, n, stop, parallel, errors, wrong_key, retry,
         abort, tools, json_schema, responses)  # fmt: skip

if __name__ == "__main__":
    run_cells(CELLS, version("langchain-openai"))
