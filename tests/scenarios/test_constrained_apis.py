"""Required tools, strict tools and schemas through the three APIs of conversations, over the real
engine: a model that knows nothing of tools answers in their form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest

from hetero_llm.engine.async_engine import AsyncLLMEngine
from hetero_llm.server.settings import ServerSettings
from tests.server.serving import Served, serving
from tests.server.test_app_tools import TEMPLATE

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 1},
                 "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES = [{"role": "user", "content": "Rain?"}]
MODEL = "demo"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = AsyncLLMEngine({"model": "demo", "device": "cpu", "use_lookahead": True})
    settings = ServerSettings(
        chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="none"
    )
    with serving(engine, settings) as found:
        yield found
        found.engine.process.kill()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def check(call: Any) -> None:
    arguments = json.loads(call.arguments)
    if call.name == "get_weather":
        jsonschema.validate(arguments, PARAMETERS)
    else:
        assert (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_a_call_that_has_to_come(client: openai.OpenAI, choice: Any, seed: int) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=200,
        temperature=1.0, seed=seed, parallel_tool_calls=False,
    )  # fmt: skip
    (one,) = answer.choices
    assert one.finish_reason == "tool_calls" and one.message.tool_calls
    for call in one.message.tool_calls:
        check(call.function)
    if choice is WEATHER:
        assert [call.function.name for call in one.message.tool_calls] == ["get_weather"]


def test_a_streamed_call(client: openai.OpenAI) -> None:
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=WEATHER, max_tokens=200,
        temperature=0, stream=True,
    ):  # fmt: skip
        for one in chunk.choices:
            reason = one.finish_reason or reason
            for call in one.delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert (name, reason) == ("get_weather", "tool_calls")
    jsonschema.validate(json.loads(arguments), PARAMETERS)


def test_a_strict_tool_leaves_the_text_free(client: openai.OpenAI) -> None:
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=tools, max_tokens=20, temperature=0
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_schema_in_each_api(client: openai.OpenAI) -> None:
    schema = {"name": "weather", "schema": PARAMETERS, "strict": True}
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=480, temperature=0,
        response_format={"type": "json_schema", "json_schema": schema},
    )  # fmt: skip
    jsonschema.validate(json.loads(chat.choices[0].message.content or ""), PARAMETERS)
    response = client.responses.create(
        model=MODEL, input="Rain?", max_output_tokens=480, temperature=0,
        text={"format": {"type": "json_schema", **schema}},
    )  # fmt: skip
    jsonschema.validate(json.loads(response.output_text), PARAMETERS)


def test_required_tools_of_responses_and_messages(served: Served, client: openai.OpenAI) -> None:
    function = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
    response = client.responses.create(
        model=MODEL, input="Rain?", tools=[function], tool_choice="required", temperature=0,
        max_output_tokens=200, parallel_tool_calls=False,
    )  # fmt: skip
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls
    for call in calls:
        check(call)
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    message = served.post(
        "/v1/messages",
        {"model": MODEL, "max_tokens": 200, "messages": MESSAGES, "temperature": 0,
         "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ).json()  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    (block,) = [one for one in message["content"] if one["type"] == "tool_use"]
    jsonschema.validate(block["input"], PARAMETERS)


def test_a_call_that_has_to_come_leaves_no_answer_to_constrain(served: Served) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required",
            "parallel_tool_calls": False, "temperature": 0.0, "max_tokens": 900}  # fmt: skip
    answer = served.post("/v1/chat/completions", body | {"guided_regex": "a"})
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    check(SimpleNamespace(**call["function"]))
