"""instructor, over OpenAI's client and over Anthropic's."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import anthropic
import instructor
import openai
from answers import Structure
from cells import Setup, equal, run_cells
from instructor import Mode
from pydantic import field_validator


def maker(setup: Setup, mode: Mode) -> Any:
    made = openai.OpenAI(base_url=f"{setup.url}/v1", api_key=setup.key, max_retries=0)
    return instructor.from_openai(made, mode=mode)


def greedy(setup: Setup, **rest: Any) -> dict[str, Any]:
    wanted = setup.wanted
    return {"model": setup.model, "messages": wanted["asking"], "temperature": 0,
            "max_tokens": wanted["guided_tokens"], "max_retries": 0, **rest}  # fmt: skip


def tools(setup: Setup) -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        made = maker(setup, mode)
        found, answer = made.create_with_completion(response_model=Structure, **greedy(setup))
        assert isinstance(found, Structure), found
        (call,) = answer.choices[0].message.tool_calls
        equal((call.function.name, answer.choices[0].finish_reason), ("Structure", "tool_calls"))


def json_schema(setup: Setup) -> None:
    made = maker(setup, Mode.JSON_SCHEMA)
    found, answer = made.create_with_completion(response_model=Structure, **greedy(setup))
    assert isinstance(found, Structure), found
    equal(json.loads(answer.choices[0].message.content), found.model_dump())


def parse(setup: Setup) -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        partial = maker(setup, mode).create_partial(response_model=Structure, **greedy(setup))
        steps = [one.model_dump() for one in partial]
        Structure.model_validate(steps[-1])
        assert None in steps[0].values(), steps
    refused = []

    class Second(Structure):
        """Takes no first answer: instructor sends the mistake back, and asks again."""

        @field_validator("kind")
        @classmethod
        def first_is_refused(cls, kind: str) -> str:
            if not refused:
                refused.append(kind)
                raise ValueError("say it again")
            return kind

    asked = greedy(setup, max_retries=2)
    assert isinstance(maker(setup, Mode.TOOLS).create(response_model=Second, **asked), Second)
    equal(len(refused), 1)
    native = anthropic.Anthropic(base_url=setup.url, api_key=setup.key, max_retries=0)
    by_message = greedy(setup, extra_body={"temperature": 0})
    del by_message["temperature"]  # Anthropic's client itself knows none any more
    found = instructor.from_anthropic(native).create(response_model=Structure, **by_message)
    assert isinstance(found, Structure), found


def responses_tools(setup: Setup) -> None:
    asked = greedy(setup)
    asked["max_output_tokens"] = asked.pop("max_tokens")
    found = maker(setup, Mode.RESPONSES_TOOLS).create(response_model=Structure, **asked)
    assert isinstance(found, Structure), found


CELLS = (tools, json_schema, parse, responses_tools)

if __name__ == "__main__":
    run_cells(CELLS, version("instructor"))
