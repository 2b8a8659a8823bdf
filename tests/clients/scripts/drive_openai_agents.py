"""openai-agents, through the Responses API."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    set_tracing_disabled,
)
from cells import Setup, equal, run_cells
from openai import AsyncOpenAI


def agent(setup: Setup, *stops: str) -> Agent[Any]:
    system = setup.wanted["messages"][0]["content"]
    made = AsyncOpenAI(base_url=f"{setup.url}/v1", api_key=setup.key, max_retries=0)
    # To an agent a response that was cut off is an error.
    settings = ModelSettings(temperature=0, extra_body={"stop": [setup.wanted["stop"], *stops]})
    model = OpenAIResponsesModel(model=setup.model, openai_client=made)
    return Agent(name="writer", instructions=system, model=model, model_settings=settings)


def responses(setup: Setup) -> None:
    question = setup.wanted["messages"][1]["content"]
    wanted = setup.wanted["chat"].partition(setup.wanted["stop"])[0]

    async def run() -> None:
        found = await Runner.run(agent(setup), question)
        equal(found.final_output, wanted)
        usage = found.context_wrapper.usage
        equal(usage.input_tokens, setup.wanted["chat_prompt_tokens"])
        assert 0 < usage.output_tokens <= setup.wanted["max_tokens"]
        streamed = Runner.run_streamed(agent(setup), question)
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        equal(("".join(pieces), streamed.final_output), (wanted, wanted))
        # The agent sends the earlier items again.
        session = SQLiteSession("conversation")
        equal((await Runner.run(agent(setup), question, session=session)).final_output, wanted)
        soon = agent(setup, *"aeiou_")
        second = await Runner.run(soon, "and now?", session=session)
        assert second.context_wrapper.usage.input_tokens > usage.input_tokens

    asyncio.run(run())


if __name__ == "__main__":
    set_tracing_disabled(True)
    run_cells((responses,), version("openai-agents"))
