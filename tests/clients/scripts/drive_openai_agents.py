"""openai-agents, through the Responses API and through chat completions."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Annotated, Any, Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from answers import Structure
from cells import Setup, equal, run_cells
from openai import AsyncOpenAI
from pydantic import Field

APIS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def model(setup: Setup, api: Any) -> Model:
    made = AsyncOpenAI(base_url=f"{setup.url}/v1", api_key=setup.key, max_retries=0)
    found: Model = api(model=setup.model, openai_client=made)
    return found


def writer(setup: Setup, api: Any, *stops: str) -> Agent[Any]:
    system = setup.wanted["messages"][0]["content"]
    # To an agent a response that was cut off is an error.
    settings = ModelSettings(temperature=0, extra_body={"stop": [setup.wanted["stop"], *stops]})
    return Agent(
        name="writer", instructions=system, model=model(setup, api), model_settings=settings
    )


async def write(setup: Setup, api: Any, kind: str) -> None:
    """The text whole, in pieces that come as events of this kind, and an answer after it."""
    question = setup.wanted["messages"][1]["content"]
    wanted = setup.wanted["chat"].partition(setup.wanted["stop"])[0]
    found = await Runner.run(writer(setup, api), question)
    equal(found.final_output, wanted)
    usage = found.context_wrapper.usage
    equal(usage.input_tokens, setup.wanted["chat_prompt_tokens"])
    assert 0 < usage.output_tokens <= setup.wanted["max_tokens"]
    streamed = Runner.run_streamed(writer(setup, api), question)
    pieces = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == kind
    ]
    equal(("".join(pieces), streamed.final_output), (wanted, wanted))
    # The agent sends the earlier items again.
    session = SQLiteSession("conversation")
    equal((await Runner.run(writer(setup, api), question, session=session)).final_output, wanted)
    soon = writer(setup, api, *"aeiou_")
    second = await Runner.run(soon, "and now?", session=session)
    assert second.context_wrapper.usage.input_tokens > usage.input_tokens


def chat(setup: Setup) -> None:
    asyncio.run(write(setup, OpenAIChatCompletionsModel, "response.output_text.delta"))


def responses(setup: Setup) -> None:
    asyncio.run(write(setup, OpenAIResponsesModel, "response.output_text.delta"))


def caller(setup: Setup, api: Any) -> tuple[Agent[Any], list[str]]:
    """An agent that has to call its tool, then has no tool and says what follows a type; and the
    list of its calls."""
    asked: list[str] = []
    system = setup.wanted["asking"][0]["content"]
    settings = ModelSettings(
        temperature=0, tool_choice="required", parallel_tool_calls=False,
        max_tokens=setup.wanted["guided_tokens"],
    )  # fmt: skip

    @function_tool(is_enabled=lambda context, agent: not asked)
    def get_weather(city: Literal["Köln", "Bonn"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
        """The weather of a city."""
        assert 1 <= days <= 9
        asked.append(city)
        return f"18 °C in {city}"

    made: Agent[Any] = Agent(
        name="caller", instructions=system, model=model(setup, api), model_settings=settings,
        tools=[get_weather], output_type=Structure,
    )  # fmt: skip
    return made, asked


def agent(setup: Setup) -> None:
    question = setup.wanted["asking"][1]["content"]

    async def run(api: Any) -> None:
        made, asked = caller(setup, api)
        found = await Runner.run(made, question, max_turns=3)
        kinds = [item.type for item in found.new_items]
        equal(kinds, ["tool_call_item", "tool_call_output_item", "message_output_item"])
        assert isinstance(found.final_output, Structure), found.final_output
        equal(found.new_items[1].output, f"18 °C in {asked[0]}")
        made, asked = caller(setup, api)
        streamed = Runner.run_streamed(made, question, max_turns=3)
        names = [event.name async for event in streamed.stream_events()
                 if event.type == "run_item_stream_event"]  # fmt: skip
        equal(names, ["tool_called", "tool_output", "message_output_created"])
        equal((streamed.final_output, len(asked)), (found.final_output, 1))

    for api in APIS:
        asyncio.run(run(api))


def parse(setup: Setup) -> None:
    async def run(api: Any) -> None:
        settings = ModelSettings(temperature=0, max_tokens=setup.wanted["guided_tokens"])
        system, user = setup.wanted["asking"]
        made: Agent[Any] = Agent(
            name="typed", instructions=system["content"], model=model(setup, api),
            model_settings=settings, output_type=Structure,
        )  # fmt: skip
        found = await Runner.run(made, user["content"])
        assert isinstance(found.final_output, Structure), found.final_output

    for api in APIS:
        asyncio.run(run(api))


if __name__ == "__main__":
    set_tracing_disabled(True)
    run_cells((chat, parse, agent, responses), version("openai-agents"))
