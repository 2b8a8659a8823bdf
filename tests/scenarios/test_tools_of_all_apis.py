"""Tools and reasoning through /v1/responses and /v1/messages, over an engine that says what it is
told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import EOS, FakeEngine, demo_tokenizer
from tests.server.serving import Served, serving

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }};{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function | tojson }}]{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
THOUGHT = "<think>\nI should look.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
SAID = f"{THOUGHT}Let me see.{CALL}"


@pytest.fixture(scope="module")
def speaking() -> Iterator[Served]:
    """A model with reasoning and calls that says `SAID`; its answers are stored."""
    hf = demo_tokenizer().hf
    hf.add_tokens([AddedToken(one, special=False, normalized=False) for one in MARKERS])
    tokenizer = Tokenizer(hf)
    ids = tokenizer.encode(SAID, add_special_tokens=False)
    engine = FakeEngine(
        tokenizer,
        script=lambda prompt, sequence, position: ids[position] if position < len(ids) else EOS,
    )
    settings = ServerSettings(
        chat_template=TEMPLATE,
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
        stored_responses=4,
    )
    with serving(engine, settings) as served:
        yield served


def test_responses(speaking: Served) -> None:
    made = openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    whole = made.responses.create(model="demo", input="Rain?", tools=[tool])
    prompt = speaking.engine.seen[-1][1].text
    declared = {"name": "weather", "parameters": SCHEMA, "strict": False}
    assert json.loads(prompt.partition(";")[0])["function"] == declared
    with made.responses.stream(model="demo", input="Rain?", tools=[tool]) as stream:
        list(stream)
        streamed = stream.get_final_response()
    for answer in (whole, streamed):
        thoughts, message, call = answer.output
        assert thoughts.content[0].text.strip() == "I should look."
        assert message.content[0].text == "Let me see."
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments) == {"city": "Ulm"}
        assert answer.status == "completed"
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
    details = [one.usage.output_tokens_details for one in (whole, streamed)]
    assert details[0] == details[1]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    made.responses.create(
        model="demo", input=[output], tools=[tool], previous_response_id=streamed.id
    )
    assert "# tool: dry;" in speaking.engine.seen[-1][1].text


@pytest.mark.parametrize("stream", [False, True])
def test_messages(speaking: Served, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "Rain?"}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "max_tokens": 500,
        "stream": stream,
    }
    answer = speaking.post(MESSAGES, body)
    assert answer.status_code == 200, answer.text
    prompt = speaking.engine.seen[-1][1].token_ids
    assert speaking.post(COUNT, body | {"stream": False}).json() == {"input_tokens": len(prompt)}
    if stream:
        for part in ('"thinking_delta"', '"input_json_delta"', '"stop_reason":"tool_use"'):
            assert part in answer.text
        return
    thoughts, text, call = answer.json()["content"]
    assert thoughts["thinking"].strip() == "I should look."
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Ulm"})
    assert answer.json()["stop_reason"] == "tool_use"
    assert answer.json()["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_mistakes_have_the_words_of_their_api(speaking: Served) -> None:
    tools = [{"type": "function", "name": "a b", "parameters": SCHEMA}]
    error = speaking.post(RESPONSES, {"input": "a", "tools": tools}).json()["error"]
    assert error["param"] == "tools[0].name" and error["message"].startswith("tools[0].name='a b'")
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "tools": [{"name": "a b", "input_schema": SCHEMA}],
    }
    assert speaking.post(MESSAGES, body).json()["error"]["message"].startswith("tools[0].name=")
