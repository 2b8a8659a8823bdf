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

pytestmark = pytest.mark.usefixtures("forked_engines")

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


def _format(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    }


CYCLE = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}
LINES = {"properties": {f"f{number}": {"maxLength": 3} for number in range(10_000)}}
SCHEMA = "response_format.json_schema.schema"
LOOP_TOOL = {"type": "function", "function": {"name": "loop", "parameters": CYCLE}}
NO_END = "allows no output that ends: each value contains another one"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (_format(CYCLE), SCHEMA, NO_END),
        (_format({"allOf": [{"$ref": "#"}]}), SCHEMA, "allows no output at all"),
        (_format({"$ref": "#/$defs/nothing"}), f"{SCHEMA}.$ref", "does not exist"),
        (_format({"type": "string", "pattern": "^((a{100}){100}){100}$"}), SCHEMA, "too"),
        (_format(LINES), "response_format", "at most 131072"),
        ({"guided_regex": "((a{100}){100}){100}"}, "guided_regex", "too many expressions"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: a\na: b\nb: a"}, "guided_grammar", "allows no output at all"),
        ({"tools": [LOOP_TOOL], "tool_choice": "required"},
         "tools[0].function.parameters", NO_END),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}},
         "tool_choice.function.name", "rain"),
        ({"tool_choice": WEATHER}, "tool_choice.function.name", "tools"),
    ],
)  # fmt: skip
def test_a_constraint_that_nothing_can_follow_is_a_400(
    served: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"]
    assert error["param"] == param
    good = {"messages": MESSAGES, "max_tokens": 5, "guided_choice": ["yes"], "temperature": 0}
    after = served.post("/v1/chat/completions", good).json()
    assert after["choices"][0]["message"]["content"] == "yes"


def test_a_constraint_of_ten_thousand_lines_is_followed(served: Served) -> None:
    words = [f"w{number}" for number in range(10_000)]
    body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0} | _format({"enum": words})
    (choice,) = served.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]) in words


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_never_close_end_with_max_tokens(
    client: openai.OpenAI, stream: bool
) -> None:
    endless = {"type": "object", "properties": {"a": {"type": "string", "minLength": 10_000}},
               "required": ["a"], "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "say", "parameters": endless}}
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [tool], "tool_choice": "required",
             "max_tokens": 60, "temperature": 0}  # fmt: skip
    if stream:
        pieces = [one for chunk in client.chat.completions.create(**asked, stream=True)
                  for one in chunk.choices]  # fmt: skip
        calls = [call for one in pieces for call in one.delta.tool_calls or ()]
        reason = pieces[-1].finish_reason
    else:
        (answer,) = client.chat.completions.create(**asked).choices
        calls, reason = answer.message.tool_calls or [], answer.finish_reason
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert calls[0].function.name == "say" and reason == "length"
    assert arguments.startswith('{"a": "') and not arguments.endswith("}")
