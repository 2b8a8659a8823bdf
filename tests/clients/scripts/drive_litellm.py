"""litellm, with the prefix `openai/` or `hosted_vllm/`."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import; else it looks for a newer one

import litellm  # noqa: E402
from cells import (  # noqa: E402
    Setup,
    close,
    equal,
    leaving,
    raises,
    refused_then_served,
    run_cells,
)

litellm.suppress_debug_info = True


def common(setup: Setup, *, small: bool = False, **rest: Any) -> dict[str, Any]:
    return {
        "model": f"{setup.options['prefix']}/{setup.model}",
        "api_base": f"{setup.small_url if small else setup.url}/v1",
        "api_key": setup.key,
        "temperature": 0,
        "max_retries": 0,
        "max_tokens": setup.wanted["max_tokens"],
        **rest,
    }


def greedy_chat(setup: Setup, **rest: Any) -> dict[str, Any]:
    return common(setup, **{"messages": setup.wanted["messages"], **rest})


def chat(setup: Setup) -> None:
    answer = litellm.completion(**greedy_chat(setup))
    equal(answer.choices[0].message.content, setup.wanted["chat"])
    equal(answer.choices[0].finish_reason, "length")


def stream(setup: Setup) -> None:
    chunks = list(litellm.completion(**greedy_chat(setup, stream=True)))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    equal("".join(pieces), setup.wanted["chat"])
    assert len(list(filter(None, pieces))) > 1
    equal(chunks[-1].choices[0].finish_reason, "length")


def usage(setup: Setup) -> None:
    counts = (setup.wanted["chat_prompt_tokens"], setup.wanted["max_tokens"])
    whole = litellm.completion(**greedy_chat(setup)).usage
    equal((whole.prompt_tokens, whole.completion_tokens), counts)
    options = {"include_usage": True}
    chunks = litellm.completion(**greedy_chat(setup, stream=True, stream_options=options))
    (last,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    equal((last.prompt_tokens, last.completion_tokens), counts)


def completions(setup: Setup) -> None:
    body = common(setup, prompt=setup.wanted["prompt"])
    equal(litellm.text_completion(**body).choices[0].text, setup.wanted["completion"])
    pieces = litellm.text_completion(**body, stream=True)
    equal("".join(piece.choices[0].text or "" for piece in pieces), setup.wanted["completion"])


def logprobs(setup: Setup) -> None:
    answer = litellm.completion(**greedy_chat(setup, logprobs=True, top_logprobs=2))
    content = answer.choices[0].logprobs.content
    close([one.logprob for one in content], setup.wanted["chat_logprobs"])
    equal({len(one.top_logprobs) for one in content}, {2})


def n(setup: Setup) -> None:
    answer = litellm.completion(**greedy_chat(setup, n=3, temperature=1.0, seed=7))
    equal([choice.index for choice in answer.choices], [0, 1, 2])
    equal(len({choice.message.content for choice in answer.choices}), 3)


def stop(setup: Setup) -> None:
    text, word = setup.wanted["chat"], setup.wanted["stop"]
    choice = litellm.completion(**greedy_chat(setup, stop=[word])).choices[0]
    equal((choice.message.content, choice.finish_reason), (text[: text.index(word)], "stop"))
    chunks = litellm.completion(**greedy_chat(setup, stop=word, stream=True))
    equal("".join(c.choices[0].delta.content or "" for c in chunks), text[: text.index(word)])


def parallel(setup: Setup) -> None:
    async def ask() -> list[Any]:
        calls = [litellm.acompletion(**greedy_chat(setup)) for _ in range(8)]
        return await asyncio.gather(*calls)

    texts = [answer.choices[0].message.content for answer in asyncio.run(ask())]
    equal(texts, [setup.wanted["chat"]] * 8)


def errors(setup: Setup) -> None:
    with raises(litellm.BadRequestError, "at most 2"):
        litellm.completion(**greedy_chat(setup, temperature=3))
    with raises(litellm.ContextWindowExceededError, "maximum context length"):
        litellm.completion(**greedy_chat(setup, max_tokens=10**6))
    with raises(litellm.BadRequestError, "messages"):
        list(litellm.completion(**greedy_chat(setup, messages=[], stream=True)))
    with raises(litellm.NotFoundError, "does not exist"):
        nothing = f"{setup.options['prefix']}/nothing"
        litellm.completion(**greedy_chat(setup, model=nothing))


def wrong_key(setup: Setup) -> None:
    for streamed in (False, True):
        with raises(litellm.AuthenticationError, "API key is not accepted"):
            litellm.completion(**greedy_chat(setup, api_key="wrong", stream=streamed))


def retry(setup: Setup) -> None:
    # `max_retries` is for the prefix openai/ alone; without a strategy there is no pause.
    body = greedy_chat(setup, small=True, num_retries=8, retry_strategy="exponential_backoff_retry")
    answer = refused_then_served(setup, lambda: litellm.completion(**body))
    equal(answer.choices[0].message.content, setup.wanted["chat"])


def abort(setup: Setup) -> None:
    long = greedy_chat(setup, max_tokens=1900, stream=True, extra_body={"ignore_eos": True})

    async def begin_and_leave() -> None:
        begun = await litellm.acompletion(**long)
        await anext(begun)
        await begun.aclose()

    with leaving(setup):
        asyncio.run(begin_and_leave())


def tools(setup: Setup) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with raises(litellm.BadRequestError, "tool calling is not available"):
        litellm.completion(**greedy_chat(setup, tools=[tool]))


def json_schema(setup: Setup) -> None:
    schema = {"name": "s", "strict": True, "schema": {"type": "object"}}
    for wanted in ({"type": "json_schema", "json_schema": schema}, {"type": "json_object"}):
        with raises(litellm.BadRequestError, "structured output"):
            litellm.completion(**greedy_chat(setup, response_format=wanted))


CELLS = (chat, stream, usage, completions, logprobs, n, stop, parallel, errors, wrong_key, retry,
         abort, tools, json_schema)  # fmt: skip

if __name__ == "__main__":
    run_cells(CELLS, version("litellm"))
