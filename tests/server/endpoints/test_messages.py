"""/v1/messages and /v1/messages/count_tokens on the wire, as Anthropic's clients use them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import ServerSettings
from tests.helpers.time_limits import growing_limits
from tests.server.endpoints.golden_files import check_golden, named_events
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.scripted_parser import AGENT, CUT, use_script
from tests.server.serving import Served, raw_post, received, serving

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: list[Any] = [{"role": "user", "content": "héllo 😀"}]
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "input_json_delta": ("partial_json", "json"),
}
"""Kinds of deltas: their field, and that of the block it is added to."""
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def ask(served: Served, **more: Any) -> dict[str, Any]:
    answer = served.post(PATH, {"messages": USER, "max_tokens": 4, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt_of(served: Served) -> str:
    """The prompt of the last request."""
    text: str = served.engine.seen[-1][1].text
    return text


# whole messages


def test_a_whole_message(server: Served) -> None:
    answer = server.post(
        f"{PATH}?beta=true",
        {"messages": USER, "max_tokens": 4, "system": "be kind", "model": "demo"},
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
    )
    found = answer.json()
    assert found["id"].startswith("msg_")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert prompt_of(server) == "# system: be kind\n# user: héllo 😀\n# assistant:"
    assert found | {"id": ""} == {
        "type": "message",
        "id": "",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "# system: be"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(server.engine.seen[-1][1].token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


def test_stop_reasons(server: Served, moody: Served) -> None:
    found = ask(server, stop_sequences=["ser:", "zz"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "ser:")
    assert found["content"] == [{"type": "text", "text": "# u"}]
    moody.engine.script = lambda prompt, sequence, position: EOS if position == 2 else prompt[0]
    found = ask(moody)
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    # Clients such as Claude Code ask for more than small contexts have room for.
    found = ask(server, max_tokens=32000)
    assert found["stop_reason"] == "model_context_window_exceeded"
    assert found["usage"]["input_tokens"] + found["usage"]["output_tokens"] == 2048
    exact = ask(server, max_tokens=found["usage"]["output_tokens"])
    assert exact["stop_reason"] == "max_tokens"


def test_a_deadline_says_so(moody: Served) -> None:
    moody.engine.silent_above = 0
    body = {"messages": USER, "max_tokens": 9}
    for limit in growing_limits(0.1):
        headers = {"x-request-timeout-ms": str(round(1000 * limit))}
        response = moody.post(PATH, body, headers=headers)
        if response.status_code == 200:  # else there was no token in time
            break
    found = response.json()
    assert (found["stop_reason"], found["timeout"]) == ("max_tokens", True)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_calls(
    moody: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    moody.engine.script = lambda prompt, sequence, position: EOS if position == 7 else prompt[0]
    use_script(monkeypatch, AGENT)
    body = {"messages": USER, "max_tokens": 20, "stream": stream}
    answer = moody.post(PATH, body)
    found = joined(answer.text) if stream else answer.json()
    assert found["content"] == [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "text", "text": "Two calls"},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Ulm"}},
        {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
    ]
    assert found["stop_reason"] == "tool_use"
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


def joined(stream: str) -> dict[str, Any]:
    """The message that a stream's events make, as Anthropic's client joins them."""
    message: dict[str, Any] = {}
    for name, data in named_events(stream):
        event = json.loads(data)
        assert event["type"] == name
        if name == "message_start":
            message = event["message"]
        elif name == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "json": ""})
        elif name == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            assert event["index"] == len(message["content"]) - 1
            field, into = DELTAS[delta["type"]]
            block[into] += delta[field]
        elif name == "content_block_stop":
            block = message["content"][event["index"]]
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text or "{}")
        elif name == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
        else:
            assert name in ("message_stop", "ping")
    return message


def test_thinking_may_be_left_out(moody: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, AGENT)
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    body = {"messages": USER, "max_tokens": 4, "thinking": thinking}
    empty = {"type": "thinking", "thinking": "", "signature": ""}
    assert moody.post(PATH, body).json()["content"][0] == empty
    streamed = moody.post(PATH, {**body, "stream": True}).text
    assert joined(streamed)["content"][0] == empty and "thinking_delta" not in streamed


def test_a_call_that_was_cut_off_is_left_out(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, CUT)
    found = ask(server, max_tokens=3)
    assert found["stop_reason"] == "max_tokens"
    assert found["content"] == [{"type": "text", "text": "a"}]


def test_a_message_without_a_complete_call_does_not_wait_for_its_result(
    moody: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody.engine.script = lambda prompt, sequence, position: EOS if position == 3 else prompt[0]
    use_script(monkeypatch, CUT)
    found = ask(moody, max_tokens=20)
    assert found["stop_reason"] == "end_turn"
    assert found["content"] == [{"type": "text", "text": "a"}]


# streams

STREAMS: dict[str, tuple[dict[str, Any], Any]] = {
    "messages.sse": ({"max_tokens": 3}, None),
    "messages_stop.sse": ({"max_tokens": 9, "stop_sequences": ["ser:"]}, None),
    "messages_agent.sse": ({"max_tokens": 8}, AGENT),
    "messages_cut.sse": ({"max_tokens": 3}, CUT),
}


@pytest.mark.parametrize("name", STREAMS)
def test_golden_stream(server: Served, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    body, script = STREAMS[name]
    if script is not None:
        use_script(monkeypatch, script)
    body = {"messages": USER, **body}
    streamed = server.post(PATH, {**body, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    check_golden(name, streamed.text)
    if name != "messages_cut.sse":  # whose arguments are no JSON
        assert joined(streamed.text) | {"id": ""} == server.post(PATH, body).json() | {"id": ""}


@pytest.mark.parametrize("fault", ["fail", "die"])
def test_an_error_in_mid_stream(moody: Served, fault: str) -> None:
    setattr(moody.engine, f"{fault}_after", 2)
    body = {"messages": USER, "max_tokens": 9, "stream": True}
    text, clean = "", True
    try:
        with moody.http.stream("POST", PATH, json=body) as answer:
            for piece in answer.iter_text():
                text += piece
    except httpx.RemoteProtocolError:
        clean = False
    assert clean == (fault == "fail")
    name, data = named_events(text)[-1]
    error = json.loads(data)
    kind = "api_error" if fault == "fail" else "overloaded_error"
    assert name == error["type"] == "error" and error["error"]["type"] == kind
    assert "message_stop" not in text and moody.context.load == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_status(moody: Served, stream: bool) -> None:
    moody.engine.fail_after = 0
    answer = moody.post(PATH, {"messages": USER, "max_tokens": 2, "stream": stream})
    assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "api_error"


def test_silent_streams_get_pings(moody: Served) -> None:
    moody.call(moody.engine.unpaused.clear)
    body = {"messages": USER, "max_tokens": 1, "stream": True}
    text = ""
    with moody.http.stream("POST", PATH, json=body) as answer:
        for piece in answer.iter_text():
            text += piece
            moody.call(moody.engine.unpaused.set)
    assert text.startswith('event: ping\ndata: {"type":"ping"}\n\n')
    assert joined(text)["stop_reason"] == "max_tokens"


def test_leaving_a_stream_aborts_the_request(moody: Served) -> None:
    moody.engine.delay = 0.01
    body = {"messages": USER, "max_tokens": 500, "stream": True}
    with raw_post(moody, PATH, body) as connection:
        received(connection, b"text_delta")
    moody.wait(lambda: moody.engine.aborted and not moody.context.load)
    assert moody.engine.num_live == 0


# the conversation


def test_blocks_become_messages(tool_server: Served) -> None:
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=8f3;"},
            {"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "text", "text": "T"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "U"},
                                         {"type": "text", "text": "V"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                {"type": "text", "text": "A", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t2",
                 "content": [{"type": "text", "text": "two"}], "cache_control": None},
                {"type": "text", "text": "W"}]},
            {"role": "system", "content": "R"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t3", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
        ],
        "max_tokens": 1,
    }  # fmt: skip
    answer = tool_server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    assert prompt_of(tool_server) == (
        '<system>S\nT;<user>U\nV;<assistant>(hm)A[t1 f {"x": 1}][t2 g {}];<tool>one#t1;'
        "<tool>two#t2;<user>W;<system>R;<assistant>[t3 f {}];<tool>#t3;"
    )


def test_the_beginning_of_an_answer_is_continued(server: Served) -> None:
    ask(server, messages=[*USER, {"role": "assistant", "content": "well,"}])
    assert prompt_of(server) == "# user: héllo 😀\n# assistant: well,"


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, "thinks=True"),
        ({"type": "disabled"}, "thinks=False"),
        ({"type": "adaptive"}, ""),
        ({"type": "between_tools"}, ""),
    ],
)
def test_thinking_is_switched_where_the_template_can(
    tool_server: Served, server: Served, thinking: dict[str, Any], shown: str
) -> None:
    ask(tool_server, thinking=thinking)
    assert prompt_of(tool_server) == f"<user>héllo 😀;{shown}"
    ask(server, thinking=thinking)
    assert prompt_of(server) == "# user: héllo 😀\n# assistant:"


def test_what_claude_code_sends_is_accepted(tokenizer: Tokenizer, server: Served) -> None:
    found = ask(
        server, model="demo", temperature=1, top_k=5, top_p=0.9, metadata={"user_id": "u"},
        tools=[], tool_choice={"type": "auto"}, service_tier="auto", stream=False,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "max"}, thinking={"type": "adaptive", "display": "summarized"},
        cache_control={"type": "ephemeral"},
    )  # fmt: skip
    assert found["stop_reason"] == "max_tokens"
    params = server.engine.seen[-1][2]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1, 5, 0.9, 4)


def test_tokens_are_counted(server: Served) -> None:
    body = {"messages": USER, "system": "be kind"}
    counted = server.post(COUNT, body).json()
    assert counted == {"input_tokens": ask(server, system="be kind")["usage"]["input_tokens"]}
    seen = len(server.engine.seen)
    long = [{"role": "user", "content": "word " * 3000}]
    assert server.post(COUNT, {"messages": long}).json()["input_tokens"] > 3000
    assert len(server.engine.seen) == seen, "nothing is generated"


# errors

CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is required"),
    ({"max_tokens": None}, "max_tokens is required"),
    ({"messages": []}, "messages must not be empty"),
    ({"messages": "a"}, "messages: must be a list, not a string"),
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"max_tokens": "many"}, "max_tokens: must be an integer, not a string"),
    ({"messages": [{"role": "tool", "content": "a"}]},
     "messages[0].role='tool': must be one of user, assistant, system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content must not be empty"),
    ({"messages": [{"role": "user", "content": ["a"]}]},
     "messages[0].content[0]: must be an object"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]},
     "messages[0].content[0].type is required"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text is required"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
     "messages[0].content[0].type='document': such blocks are not available here, only 'text', "
     "'image' and 'tool_result' are"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
     "messages[0].content[0]: an image for this model is not available"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
     "messages[0].content[0].tool_use_id='x': no 'tool_use' before it has this id"),
    ({"messages": [*USER, {"role": "assistant", "content": [CALL]}]},
     "messages[1]: after a 'tool_use' its 'tool_result' has to come"),
    ({"messages": [{"role": "assistant", "content": [CALL]}, *USER]},
     "messages[0].content[0]: this model's chat template has no place for calls of tools"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
     "messages[0].content[0]: reading 'redacted_thinking', which is encrypted, is not available"),
    ({"system": [{"type": "image"}]},
     "system[0].type='image': such blocks are not available here, only 'text' is"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools[0].type='web_search_20250305': Anthropic's own tools are not available, only 'custom' "
     "ones are"),
    ({"tools": [TOOL, {"name": "g"}]}, "tools[1].input_schema is required"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name is required"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}},
     "tool_choice.type='some': must be one of auto, any, none, tool"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: an MCP server is not available"),
    ({"container": "c"}, "container: a container is not available"),
    ({"thinking": {"type": "much"}},
     "thinking.type='much': must be one of enabled, disabled, adaptive, between_tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}},
     "thinking.budget_tokens=0: must be at least 1"),
    ({"output_config": {"effort": "huge"}},
     "output_config.effort='huge': must be one of none, minimal, low, medium, high, xhigh, max"),
    ({"output_config": {"format": {"type": "xml"}}},
     "output_config.format.type='xml': must be 'json_schema'"),
    ({"stop_sequences": ["a"] * 33}, "stop_sequences: 33 entries, at most 32 are accepted"),
    ({"stop_sequences": [""]}, "stop_sequences='': must be non-empty strings"),
    ({"temperature": 3}, "temperature=3.0: must be at most 2"),
    ({"top_k": -2}, "top_k=-2: must be at least -1"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]},
     "prompt is too long: this model's maximum context length is 2048 tokens, but 6011 were "
     "requested (6010 in the prompt, 1 to generate); shorten the prompt or lower max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_a_mistake_is_named(server: Served, body: dict[str, Any], message: str) -> None:
    answer = server.post(PATH, {"messages": USER, "max_tokens": 2, **body})
    assert answer.status_code == 400
    error = {"type": "invalid_request_error", "message": message}
    assert answer.json() == {"type": "error", "error": error}


def test_a_thread_is_refused_as_the_client_expects(server: Served) -> None:
    """The tool runner of Anthropic's client sends whole conversations after this error."""
    body = {"messages": USER, "max_tokens": 2}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = server.post(PATH, {**body, "thread": thread})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == ("thread: a conversation that the server keeps is not available")
        code = "thread_unsupported_request"
        assert error["details"] == {"error_code": code, "unsupported": ["thread"]}
    for thread in (None, False):
        assert server.post(PATH, {**body, "thread": thread}).status_code == 200


def test_errors_outside_of_the_handler_have_anthropics_form(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_keys=("key-one",), max_requests_per_minute=2)
    body = {"messages": USER, "max_tokens": 1, "model": "other"}

    def kind(answer: httpx.Response) -> tuple[int, str]:
        found = answer.json()
        assert found["type"] == "error" and set(found["error"]) == {"type", "message"}
        return answer.status_code, found["error"]["type"]

    with serving(FakeEngine(tokenizer), settings) as served:
        key = {"x-api-key": "key-one"}
        bearer = {"authorization": "Bearer key-one"}
        assert kind(served.post(PATH, body)) == (401, "authentication_error")
        wrong = served.post(PATH, body, headers={"x-api-key": "wrong"})
        assert kind(wrong) == (401, "authentication_error")
        assert kind(served.post(PATH, body, headers=key)) == (404, "not_found_error")
        assert served.post(COUNT, {"messages": USER}, headers=bearer).status_code == 200
        assert kind(served.post(PATH, body, headers=key)) == (429, "rate_limit_error")
        assert kind(served.http.get(PATH, headers=key)) == (405, "invalid_request_error")
        # The key's header is taken on every route, whose errors keep their form.
        assert served.http.get("/v1/models", headers=key).status_code == 200
        assert "param" in served.http.get("/v1/models").json()["error"]
        served.context.draining = True
        refused = served.post(COUNT, {"messages": USER}, headers=bearer)
        assert refused.status_code in (429, 503) and kind(refused)
