"""/v1/responses, through OpenAI's client and on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.helpers.time_limits import growing_limits
from tests.server.endpoints.golden_files import check_golden, named_events
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.scripted_parser import AGENT, CUT, LEFT_OPEN, use_script
from tests.server.serving import LIMIT, Served, raw_post, received, serving

PATH = "/v1/responses"
KEYS = ("key-one", "key-two")
KEEPS = ServerSettings(stored_responses=4)
ENDS_AFTER = 5


def ends_soon(prompt: list[int], sequence: int, position: int) -> int:
    return EOS if position == ENDS_AFTER else prompt[position % len(prompt)]


@pytest.fixture(scope="module")
def keeper(tokenizer: Tokenizer) -> Iterator[Served]:
    """A server that stores four responses; its answers end by themselves."""
    with serving(FakeEngine(tokenizer, script=ends_soon), KEEPS) as served:
        yield served


def client(served: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=0,
        http_client=httpx.Client(trust_env=False, timeout=LIMIT),
    )  # fmt: skip


def error_of(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.post(PATH, body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


# whole responses


def test_a_text_is_answered(keeper: Served) -> None:
    answer = client(keeper).responses.create(
        model="demo", input="hello", instructions="be kind", temperature=0.5, top_p=0.9,
        metadata={"a": "b"}, user="me",
    )  # fmt: skip
    prompt = keeper.engine.seen[-1][1].text
    assert prompt == "# system: be kind\n# user: hello\n# assistant:"
    assert answer.status == "completed" and answer.object == "response"
    assert answer.id.startswith("resp_") and answer.error is None
    assert answer.output_text == prompt[: len(answer.output_text)] != ""
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.9, {"a": "b"})
    assert (answer.tool_choice, answer.tools, answer.truncation) == ("auto", [], "disabled")
    assert answer.completed_at is not None and answer.incomplete_details is None
    usage = answer.usage
    assert usage is not None
    assert usage.input_tokens == len(keeper.engine.seen[-1][1].token_ids)
    assert usage.output_tokens == ENDS_AFTER + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_limit_makes_it_incomplete(server: Served) -> None:
    answer = client(server).responses.create(model="demo", input="hello", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.completed_at is None
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.max_output_tokens == 3 and answer.usage.output_tokens == 3


def test_a_deadline_makes_it_incomplete_and_says_so(moody: Served) -> None:
    moody.engine.silent_above = 0
    for limit in growing_limits(0.1):
        headers = {"x-request-timeout-ms": str(round(1000 * limit))}
        response = moody.post(PATH, {"input": "hello"}, headers=headers)
        if response.status_code == 200:  # else there was no token in time
            break
    answer = response.json()
    assert answer["status"] == "incomplete" and answer["usage"]["output_tokens"] == 1
    assert answer["incomplete_details"] == {"reason": "max_output_tokens", "timeout": True}


def test_log_probabilities(server: Served) -> None:
    ask = client(server).responses.create
    include: list[Any] = ["message.output_text.logprobs"]
    answer = ask(model="demo", input="a b", max_output_tokens=3, include=include, top_logprobs=2)
    (part,) = answer.output[0].content
    assert "".join(one.token for one in part.logprobs) == part.text
    assert [len(one.top_logprobs) for one in part.logprobs] == [2, 2, 2]
    answer = ask(model="demo", input="a b", max_output_tokens=3, include=include)
    assert [len(one.top_logprobs) for one in answer.output[0].content[0].logprobs] == [0, 0, 0]
    answer = ask(model="demo", input="a b", max_output_tokens=3)
    assert answer.output[0].content[0].logprobs == []


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls(keeper: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    use_script(monkeypatch, AGENT)
    ask = client(keeper).responses
    if stream:
        with ask.stream(model="demo", input="hello there, you two") as events:
            answer = events.get_final_response()
    else:
        answer = ask.create(model="demo", input="hello there, you two")
    thoughts, message, first = answer.output
    assert thoughts.type == "reasoning" and thoughts.content[0].text == "I look."
    assert message.content[0].text == "Two calls"
    assert (first.type, first.call_id, first.name) == ("function_call", "call_a", "weather")
    # The engine ended the sequence while the parser was inside of the first call.
    assert (first.arguments, first.status) == ('{"city": ', "incomplete")
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    assert answer.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_cut_off(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    use_script(monkeypatch, CUT)
    body = {"input": "a b c", "max_output_tokens": 3, "stream": stream}
    answer = server.post(PATH, body)
    found = json.loads(named_events(answer.text)[-1][1])["response"] if stream else answer.json()
    assert found["status"] == "incomplete"
    message, call = found["output"]
    assert message["status"] == "completed" and message["content"][0]["text"] == "a"
    assert (call["status"], call["arguments"]) == ("incomplete", '{"x": [1,')


def test_an_item_ends_before_the_next_one_begins(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, LEFT_OPEN)
    answer = server.post(PATH, {"input": "a b", "max_output_tokens": 4, "stream": True})
    found = [json.loads(data) for _, data in named_events(answer.text)]
    items = [one for one in found if one["type"].startswith("response.output_item")]
    assert [one["output_index"] for one in items] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [one["item"]["status"] for one in items[1::2]] == [
        "incomplete",
        "completed",
        "incomplete",
        "completed",
    ]
    assert [one["item"] for one in items[1::2]] == found[-1]["response"]["output"]


# streams

STREAMS: dict[str, tuple[dict[str, Any], Any]] = {
    "responses.sse": ({"input": "héllo 😀", "max_output_tokens": 3}, None),
    "responses_logprobs.sse": ({"input": "a b", "max_output_tokens": 2, "top_logprobs": 1}, None),
    "responses_agent.sse": ({"input": "a b", "max_output_tokens": 8}, AGENT),
    "responses_cut.sse": ({"input": "a b", "max_output_tokens": 3}, CUT),
}


@pytest.mark.parametrize("name", STREAMS)
def test_golden_stream(server: Served, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    body, script = STREAMS[name]
    if script is not None:
        use_script(monkeypatch, script)
    streamed = server.post(PATH, {**body, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    check_golden(name, streamed.text)
    events = [json.loads(data) for _, data in named_events(streamed.text)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events] == [name for name, _ in named_events(streamed.text)]
    # The last event is what a request without a stream is answered with.
    last, whole = events[-1]["response"], server.post(PATH, body).json()
    suffix, other = last["id"].removeprefix("resp_"), whole["id"].removeprefix("resp_")
    found = json.loads(json.dumps(last).replace(suffix, other))
    assert found | {"created_at": 0} == whole | {"created_at": 0}


def test_the_clients_stream(keeper: Served) -> None:
    with client(keeper).responses.stream(model="demo", input="hello") as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-1] == "response.completed" and answer.output_text


@pytest.mark.parametrize("fault", ["fail", "die"])
def test_an_error_in_mid_stream(moody: Served, fault: str) -> None:
    setattr(moody.engine, f"{fault}_after", 2)
    text, clean = "", True
    try:
        with moody.http.stream("POST", PATH, json={"input": "a", "stream": True}) as answer:
            for piece in answer.iter_text():
                text += piece
    except httpx.RemoteProtocolError:
        clean = False
    assert clean == (fault == "fail")
    name, data = named_events(text)[-1]
    failed = json.loads(data)["response"]
    assert name == "response.failed" and failed["status"] == "failed"
    code = "generation_failed" if fault == "fail" else "engine_dead"
    assert failed["error"]["code"] == code and failed["error"]["message"]
    assert moody.context.load == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_status(moody: Served, stream: bool) -> None:
    moody.engine.fail_after = 0
    answer = moody.post(PATH, {"input": "a", "stream": stream})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"


def test_an_error_after_a_comment_is_an_event(moody: Served) -> None:
    moody.engine.fail_after = 0
    moody.call(moody.engine.unpaused.clear)
    text = ""
    with moody.http.stream("POST", PATH, json={"input": "a", "stream": True}) as answer:
        for piece in answer.iter_text():
            text += piece
            moody.call(moody.engine.unpaused.set)
    ((name, data),) = named_events(text)
    assert name == "error" and json.loads(data)["code"] == "generation_failed"


def test_leaving_a_stream_aborts_the_request(moody: Served) -> None:
    moody.engine.delay = 0.01
    with raw_post(moody, PATH, {"input": "a", "stream": True}) as connection:
        received(connection, b"output_text.delta")
    moody.wait(lambda: moody.engine.aborted and not moody.context.load)
    assert moody.engine.num_live == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_server_ends_is_an_error(moody: Served, stream: bool) -> None:
    async def abort() -> None:
        await moody.engine.abort("resp_mine-0")

    def ends(prompt: list[int], sequence: int, position: int) -> int:
        asyncio.ensure_future(abort())
        return prompt[position]

    moody.engine.script = ends
    body = {"input": "a", "stream": stream, "request_id": "mine"}
    answer = moody.post(PATH, body)
    if not stream:
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted"
        return
    name, data = named_events(answer.text)[-1]
    assert name == "response.failed" and json.loads(data)["response"]["error"]["code"] == "aborted"


# the conversation


def test_items_become_messages(tool_server: Served) -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "A", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "V"},
    ]  # fmt: skip
    body = {"input": items, "instructions": "I", "max_output_tokens": 1}
    answer = tool_server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    assert tool_server.engine.seen[-1][1].text == (
        '<system>I;<system>D;<user>U;<assistant>(hm)A[c1 f {"x": 1}][c2 g {}];<tool>one#c1;'
        "<tool>two#c2;<assistant>(so)[c3 f {}];<tool>#c3;<assistant>B;<user>V;"
    )


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "input is required"),
    ({"input": 3}, "input", "input: must be a string or a list, not an integer"),
    ({"input": []}, "input", "input must not be empty"),
    ({"input": ["a"]}, "input[0]", "input[0]: must be an object"),
    ({"input": [{}]}, "input[0].type", "input[0].type is required"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role",
     "input[0].role='robot': must be one of user, assistant, system, developer"),
    ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is required"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content",
     "input[0].content is required"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
     "input[0].content[0].text", "input[0].content[0].text: must be a string, not an integer"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
     "input[0].content[0].type", "input[0].content[0].type='input_audio': such parts are not "
     "available, only 'input_text', 'output_text', 'refusal' and 'input_image' are"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
     "input[0].content[0]", "input[0].content[0]: an image for this model is not available"),
    ({"input": [{"type": "mcp_call", "id": "a"}]}, "input[0].type",
     "input[0].type='mcp_call': such items are not available, only 'message', 'function_call', "
     "'function_call_output' and 'reasoning' are"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type",
     "input[0].type: 'item_reference', to a stored response (--max-stored-responses), is not "
     "available"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id",
     "input[0].call_id is required"),
    ({"input": [CALL]}, "input[0]",
     "input[0]: this model's chat template has no place for calls of tools"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
     "input[0].call_id", "input[0].call_id='c': no 'function_call' before it has this id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content",
     "input[0].encrypted_content: reading reasoning that another server encrypted is not "
     "available"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type",
     "tools[0].type='web_search': built-in and MCP tools are not available, only 'function' is"),
    ({"input": "a", "tools": [FUNCTION, {"type": "mcp", "server_label": "s"}]}, "tools[1].type",
     "tools[1].type='mcp': built-in and MCP tools are not available, only 'function' is"),
    ({"input": "a", "tools": [{"name": "f"}]}, "tools[0].type", "tools[0].type is required"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is required"),
    ({"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "file_search"}},
     "tool_choice.type", "tool_choice.type='file_search': built-in and MCP tools are not "
     "available, only 'function' is"),
    ({"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
     "tool_choice.name", "tool_choice.name='g': is none of the tools"),
    ({"input": "a", "tools": [FUNCTION], "tool_choice": "some"}, "tool_choice",
     "tool_choice='some': must be one of none, auto, required, or an object"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "tool_choice: needs tools"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type",
     "text.format.type='xml': must be one of text, json_object, json_schema"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "n"}}},
     "text.format.schema", "text.format.schema is required"),
    ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort",
     "reasoning.effort='huge': must be one of none, minimal, low, medium, high, xhigh, max"),
    ({"input": "a", "include": ["file_search_call.results"]}, "include[0]",
     "include[0]: file_search_call.results: a built-in tool is not available"),
    ({"input": "a", "include": ["x"]}, "include[0]",
     "include[0]='x': must be one of message.output_text.logprobs, reasoning.encrypted_content, "
     "message.input_image.image_url"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens",
     "max_output_tokens=0: must be at least 1"),
    ({"input": "a", "max_output_tokens": 4000}, "max_output_tokens",
     "this model's maximum context length is 2048 tokens, but 4010 were requested (10 in the "
     "prompt, 4000 to generate); shorten the prompt or lower max_tokens"),
    ({"input": "a", "temperature": 3}, "temperature", "temperature=3.0: must be at most 2"),
    ({"input": "a", "top_p": 0}, "top_p", "top_p=0.0: must be above 0"),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", "top_logprobs=21: must be at most 20"),
    ({"input": "a", "truncation": "auto"}, "truncation",
     "truncation: leaving out items that do not fit ('auto') is not available"),
    ({"input": "a", "truncation": "x"}, "truncation", "truncation='x': must be 'disabled'"),
    ({"input": "a", "background": True}, "background",
     "background: running in the background is not available"),
    ({"input": "a", "conversation": "conv_1"}, "conversation",
     "conversation: a conversation that the server keeps is not available"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt",
     "prompt: a prompt that the server keeps is not available"),
    ({"input": "a", "store": True}, "store",
     "store: storing responses (--max-stored-responses) is not available"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id",
     "previous_response_id: continuing a stored response (--max-stored-responses) is not "
     "available"),
    ({"input": "a", "stream_options": {}}, "stream_options", "stream_options: needs stream=true"),
    ({"input": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation",
     "stream_options.include_obfuscation: obfuscation of streams is not available"),
    ({"input": "a", "metadata": {"x" * 65: ""}}, "metadata",
     "metadata: a name of 65 characters, at most 64 are accepted"),
    ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata",
     "metadata: 17 entries, at most 16 are accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), WRONG)
def test_a_mistake_is_named(server: Served, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(server, **body)
    assert (error["param"], error["message"]) == (param, message)


def test_fields_of_vllm_mean_what_they_mean_in_a_chat(server: Served) -> None:
    body = {"input": "a", "max_output_tokens": 1, "include_stop_str_in_output": True}
    body |= {"logit_bias": {"66": 1.5}, "structured_outputs": {"regex": "a+"}, "stop": "x"}
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    params = server.engine.seen[-1][2]
    assert params.structured_outputs.regex == "a+"
    assert params.logit_bias == {66: 1.5} and params.include_stop_str_in_output
    both = {"text": {"format": {"type": "json_object"}}}
    assert "structured_outputs" in error_of(server, **body | both)["message"]


def test_what_changes_nothing_is_accepted(server: Served) -> None:
    body = {
        "input": "a", "max_output_tokens": 1, "store": False, "background": False, "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled",
        "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
        "include": ["reasoning.encrypted_content"], 
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "max_tool_calls": 3,
        "stream_options": None,
    }  # fmt: skip
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["store"] is False and found["reasoning"]["effort"] == "low"
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}


# the store


def test_a_conversation_continues(keeper: Served) -> None:
    ask = client(keeper).responses.create
    first = ask(model="demo", input="one", instructions="be brief")
    assert first.to_dict()["store"] is True
    second = ask(model="demo", input="two", previous_response_id=first.id)
    # Instructions are those of each request.
    assert keeper.engine.seen[-1][1].text == (
        f"# user: one\n# assistant: {first.output_text}\n# user: two\n# assistant:"
    )
    third = ask(model="demo", input="three", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    assert keeper.engine.seen[-1][1].text.count("# user: ") >= 3


def test_stored_responses_are_found_listed_and_deleted(keeper: Served) -> None:
    made = client(keeper)
    first = made.responses.create(model="demo", input="one")
    answer = made.responses.create(model="demo", input="two", previous_response_id=first.id)
    assert made.responses.retrieve(answer.id) == answer
    listed = list(made.responses.input_items.list(answer.id, order="asc"))
    texts = [item.content[0].text for item in listed]
    assert texts == ["one", first.output_text, "two"]
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    pages = list(made.responses.input_items.list(answer.id, limit=1))
    assert [item.id for item in pages] == [item.id for item in reversed(listed)]
    page = keeper.http.get(f"{PATH}/{answer.id}/input_items?limit=2").json()
    assert page["has_more"] and page["object"] == "list"
    assert (page["first_id"], page["last_id"]) == (listed[2].id, listed[1].id)
    made.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="is stored"):
        made.responses.retrieve(answer.id)


def test_items_of_stored_responses_are_referred_to(keeper: Served) -> None:
    first = client(keeper).responses.create(model="demo", input="one").output[0]
    reference = {"type": "item_reference", "id": first.id}
    body = {"input": [{"role": "user", "content": "one"}, reference]}
    body["input"].append({"role": "user", "content": "two"})
    assert keeper.post(PATH, body).status_code == 200
    assert keeper.engine.seen[-1][1].text == (
        f"# user: one\n# assistant: {first.content[0].text}\n# user: two\n# assistant:"
    )
    for wrong in (f"{first.id}9", "msg_1", "x", ""):
        error = error_of(keeper, input=[{"type": "item_reference", "id": wrong}])
        assert error["param"] == "input[0].id"
        assert error["message"].endswith("no such item is stored, or no longer")
    error = error_of(keeper, input=[{"type": "item_reference"}])
    assert error["message"] == "input[0].id is required"


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"),
     ("after=nothing", "after")],
)  # fmt: skip
def test_wrong_parameters_of_a_list(keeper: Served, query: str, param: str) -> None:
    answer = client(keeper).responses.create(model="demo", input="one")
    found = keeper.http.get(f"{PATH}/{answer.id}/input_items?{query}")
    assert found.status_code == 400 and found.json()["error"]["param"] == param


def test_what_is_not_stored(keeper: Served) -> None:
    made = client(keeper)
    answer = made.responses.create(model="demo", input="one", store=False)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        made.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as caught:
        made.responses.create(model="demo", input="two", previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"
    assert keeper.http.get(f"{PATH}/{answer.id}?stream=true").status_code == 400


def test_streams_are_stored_and_old_ones_dropped(keeper: Served) -> None:
    made = client(keeper)
    with made.responses.stream(model="demo", input="streamed") as stream:
        answer = stream.get_final_response()
    assert made.responses.retrieve(answer.id).output_text == answer.output_text
    for _ in range(KEEPS.stored_responses):
        made.responses.create(model="demo", input="another")
    with pytest.raises(openai.NotFoundError):
        made.responses.retrieve(answer.id)


@pytest.fixture(scope="module")
def keyed(tokenizer: Tokenizer) -> Iterator[Served]:
    settings = ServerSettings(api_keys=KEYS, stored_responses=4, stored_response_bytes=3000)
    with serving(FakeEngine(tokenizer, script=ends_soon), settings) as served:
        yield served


def test_keys_do_not_see_each_others_responses(keyed: Served) -> None:
    mine, yours = (client(keyed, key) for key in KEYS)
    answer = mine.responses.create(model="demo", input="secret")
    assert mine.responses.retrieve(answer.id).id == answer.id
    for call in (
        lambda: yours.responses.retrieve(answer.id),
        lambda: yours.responses.delete(answer.id),
        lambda: yours.responses.input_items.list(answer.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError):
        yours.responses.create(model="demo", input="a", previous_response_id=answer.id)
    assert mine.responses.retrieve(answer.id).id == answer.id


def test_keys_do_not_share_cached_prefixes(keyed: Served) -> None:
    salts = []
    for key in KEYS:
        client(keyed, key).responses.create(model="demo", input="a")
        salts.append(keyed.engine.seen[-1][1].cache_salt)
    assert None not in salts and salts[0] != salts[1]


def test_one_that_is_too_large_says_that_it_is_not_stored(keyed: Served) -> None:
    made = client(keyed, KEYS[0])
    for size, stored in ((100, True), (3000, False)):
        answer = made.responses.create(model="demo", input="a", instructions="x" * size)
        assert answer.to_dict()["store"] is stored
        found = keyed.http.get(
            f"{PATH}/{answer.id}", headers={"authorization": f"Bearer {KEYS[0]}"}
        )
        assert found.status_code == (200 if stored else 404)


# counting and cancelling


def test_tokens_of_an_input_are_counted(keeper: Served) -> None:
    counted = client(keeper).responses.input_tokens.count(model="demo", input="hello")
    answer = client(keeper).responses.create(model="demo", input="hello")
    assert counted.object == "response.input_tokens"
    assert answer.usage is not None and counted.input_tokens == answer.usage.input_tokens
    more = client(keeper).responses.input_tokens.count(
        model="demo", input="hello", previous_response_id=answer.id
    )
    assert more.input_tokens > counted.input_tokens
    refused = keeper.post(f"{PATH}/input_tokens", {})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


def test_no_response_can_be_cancelled(keeper: Served) -> None:
    answer = client(keeper).responses.create(model="demo", input="hello")
    with pytest.raises(openai.BadRequestError, match="only responses in the background"):
        client(keeper).responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError, match="is stored"):
        client(keeper).responses.cancel("resp_none")
