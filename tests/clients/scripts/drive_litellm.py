"""litellm, with the prefix `openai/` or `hosted_vllm/`."""

from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import; else it looks for a newer one

import litellm  # noqa: E402
from answers import Structure  # noqa: E402
from cells import (  # noqa: E402
    Setup,
    check_call,
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


def guided(setup: Setup, **rest: Any) -> dict[str, Any]:
    wanted = setup.wanted
    fields = {"messages": wanted["asking"], "max_tokens": wanted["guided_tokens"]}
    return greedy_chat(setup, **{**fields, **rest})


def tools(setup: Setup) -> None:
    body = guided(setup, tools=setup.wanted["tools"], parallel_tool_calls=False)
    choice = litellm.completion(**body, tool_choice="required").choices[0]
    equal((choice.finish_reason, choice.message.content), ("tool_calls", None))
    (call,) = choice.message.tool_calls
    check_call(call.function.name, call.function.arguments)
    chunks = list(litellm.completion(**body, tool_choice="required", stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=body["messages"]).choices[0]
    equal(whole.finish_reason, "tool_calls")
    equal(whole.message.tool_calls[0].function, call.function)
    named = {"type": "function", "function": {"name": "now"}}
    (other,) = litellm.completion(**body, tool_choice=named).choices[0].message.tool_calls
    # For hosted_vllm/ it leaves "additionalProperties": false out of schemas.
    equal((other.function.name, type(json.loads(other.function.arguments))), ("now", dict))
    turns = [*body["messages"], choice.message,
             {"role": "tool", "tool_call_id": call.id, "content": "18 °C"}]  # fmt: skip
    said = litellm.completion(**greedy_chat(setup, messages=turns, tools=body["tools"]))
    assert said.choices[0].message.content and not said.choices[0].message.tool_calls, said


def json_schema(setup: Setup) -> None:
    schema = {"name": "structure", "strict": True, "schema": setup.wanted["schema"]}
    body = guided(setup, response_format={"type": "json_schema", "json_schema": schema})
    equal(litellm.completion(**body).choices[0].message.content, setup.wanted["structure"])
    chunks = litellm.completion(**body, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    equal(text, setup.wanted["structure"])
    free = litellm.completion(**guided(setup, response_format={"type": "json_object"}))
    assert isinstance(json.loads(free.choices[0].message.content), dict)


def parse(setup: Setup) -> None:
    answer = litellm.completion(**guided(setup, response_format=Structure))
    Structure.model_validate_json(answer.choices[0].message.content)


def reasoning(setup: Setup) -> None:
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = litellm.completion(**greedy_chat(setup, **thinks)).choices[0].message
    equal(message.reasoning_content.strip(), setup.wanted["thought"])
    assert not message.content, message
    chunks = litellm.completion(**greedy_chat(setup, **thinks, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    equal("".join(pieces).strip(), setup.wanted["thought"])


def responses(setup: Setup) -> None:
    system, user = setup.wanted["messages"]
    body = common(setup, instructions=system["content"], input=user["content"])
    body["max_output_tokens"] = body.pop("max_tokens")
    answer = litellm.responses(**body)
    equal(answer.output[0].content[0].text, setup.wanted["chat"])
    equal(answer.usage.input_tokens, setup.wanted["chat_prompt_tokens"])
    events = litellm.responses(**body, stream=True)
    kind = "response.output_text.delta"
    equal("".join(event.delta for event in events if event.type == kind), setup.wanted["chat"])
    again = {**body, "input": "and now?", "previous_response_id": answer.id}
    assert litellm.responses(**again).usage.input_tokens > answer.usage.input_tokens


CELLS = (chat, stream, usage, completions, logprobs, n, stop, parallel, errors, wrong_key, retry,
         abort, tools, json_schema, parse, reasoning, responses)  # fmt: skip

if __name__ == "__main__":
    run_cells(CELLS, version("litellm"))
