"""Tools and reasoning through /v1/chat/completions, over an engine that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.app import build_app
from hetero_llm.server.settings import Limits, ServerSettings
from tests.server.fake_engine import EOS, FakeEngine, demo_tokenizer
from tests.server.serving import Served, events, raw_post, serving

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:"
    "{% if thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "Köln \\"am\\" Rhein", "days": 3}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nI should look.\n</think>\n\n"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Rain?"}],
    "tools": [WEATHER, NOW],
}


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """A tokenizer whose markers are tokens, as those of most models; one more token is special."""
    hf = demo_tokenizer().hf
    hf.add_tokens([AddedToken(one, special=False, normalized=False) for one in MARKERS])
    hf.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return Tokenizer(hf)


class Speaker:
    """A server whose model says `text`, or one text for each sequence; then it ends."""

    def __init__(self, served: Served, tokenizer: Tokenizer) -> None:
        self.served = served
        self._tokenizer = tokenizer
        self.ids: list[list[int]] = []
        served.engine.script = self._next

    def says(self, *texts: str) -> Speaker:
        self.ids = [self._tokenizer.encode(one, add_special_tokens=False) for one in texts]
        return self

    def _next(self, prompt: list[int], sequence: int, position: int) -> int:
        ids = self.ids[sequence % len(self.ids)]
        return ids[position] if position < len(ids) else EOS

    def post(self, **fields: Any) -> Any:
        response = self.served.post(CHAT, BODY | fields)
        assert response.status_code == 200, response.text
        return response.json()

    def choice(self, **fields: Any) -> Any:
        return self.post(**fields)["choices"][0]

    def chunks(self, **fields: Any) -> list[Any]:
        response = self.served.post(CHAT, BODY | fields | {"stream": True})
        assert response.status_code == 200, response.text
        found = events(response.text)
        assert found.pop() == "[DONE]"
        return found

    def joined(self, **fields: Any) -> dict[int, dict[str, Any]]:
        """The choices of a stream, joined as clients do it."""
        choices: dict[int, dict[str, Any]] = {}
        for chunk in self.chunks(**fields):
            for one in chunk["choices"]:
                joined = choices.setdefault(
                    one["index"], {"content": "", "reasoning": "", "calls": {}, "token_ids": []}
                )
                join(joined, one)
        return choices


def join(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    joined["content"] += delta.get("content", "")
    joined["reasoning"] += delta.get("reasoning", "")
    assert delta.get("reasoning") == delta.get("reasoning_content")
    joined["token_ids"] += choice.get("token_ids", [])
    joined["finish_reason"] = choice["finish_reason"]
    indices = [call["index"] for call in delta.get("tool_calls", [])]
    assert len(set(indices)) == len(indices)
    for call in delta.get("tool_calls", []):
        if "id" in call:
            assert call["index"] not in joined["calls"] and call["type"] == "function"
            joined["calls"][call["index"]] = [call["id"], call["function"]["name"], ""]
        joined["calls"][call["index"]][2] += call["function"]["arguments"]


def without_ids(calls: list[Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.fixture(scope="module")
def speakers(marked: Tokenizer) -> Iterator[dict[str, Speaker]]:
    """By what markers are for the model."""
    with ExitStack() as stack:
        found = {}
        for name, tokenizer in (("tokens", marked), ("text", demo_tokenizer())):
            engine = FakeEngine(tokenizer, vocab_size=len(tokenizer.hf))
            served = stack.enter_context(serving(engine, ServerSettings(chat_template=TEMPLATE)))
            found[name] = Speaker(served, tokenizer)
        yield found


@pytest.fixture(params=["tokens", "text"])
def speaker(request: pytest.FixtureRequest, speakers: dict[str, Speaker]) -> Speaker:
    """With markers that are tokens, and with markers that are text."""
    return speakers[request.param]


@pytest.fixture
def tokens(speakers: dict[str, Speaker]) -> Speaker:
    return speakers["tokens"]


# -- calls ------------------------------------------------------------------------------------


def test_a_whole_message(speaker: Speaker) -> None:
    choice = speaker.says(THOUGHT + "Let me look.\n" + CALL).choice()
    message = choice["message"]
    assert message["content"] == "Let me look."
    assert message["reasoning"] == message["reasoning_content"] == "I should look."
    assert without_ids(message["tool_calls"]) == [("get_weather", ARGUMENTS)]
    assert message["tool_calls"][0]["type"] == "function"
    assert message["tool_calls"][0]["id"].startswith("call_")
    assert choice["finish_reason"] == "tool_calls"


def test_tools_reach_the_template(speaker: Speaker) -> None:
    speaker.says("No.").choice()
    _, prompt, params = speaker.served.engine.seen[-1]
    assert prompt.text.splitlines()[:2] == [
        json.dumps(one, ensure_ascii=False) for one in (WEATHER, NOW)
    ]
    assert not params.skip_special_tokens


def test_only_calls(speaker: Speaker) -> None:
    message = speaker.says(CALL + "\n" + CALL_NOW).choice()["message"]
    assert message["content"] is None
    assert without_ids(message["tool_calls"]) == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_stream(speaker: Speaker) -> None:
    speaker.says(THOUGHT + "Let me look.\n" + CALL + CALL_NOW)
    (choice,) = speaker.joined().values()
    assert (choice["content"], choice["reasoning"]) == ("Let me look.", "I should look.")
    assert [call[1:] for call in choice["calls"].values()] == [
        ["get_weather", ARGUMENTS],
        ["now", "{}"],
    ]
    assert choice["finish_reason"] == "tool_calls"


def test_arguments_stream_as_they_come(speaker: Speaker) -> None:
    chunks = speaker.says(CALL).chunks()
    calls = [
        chunk["choices"][0]["delta"]["tool_calls"][0]
        for chunk in chunks
        if "tool_calls" in chunk["choices"][0]["delta"]
    ]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    pieces = [call["function"]["arguments"] for call in calls[1:]]
    assert len(pieces) > 8 and all(call.keys() == {"index", "function"} for call in calls[1:])
    # Each chunk has what the engine's last token added: nothing waits for the end.
    assert max(map(len, pieces)) < 16


def test_one_call_if_calls_may_not_be_parallel(speaker: Speaker) -> None:
    speaker.says(CALL + CALL_NOW)
    message = speaker.choice(parallel_tool_calls=False)["message"]
    assert without_ids(message["tool_calls"]) == [("get_weather", ARGUMENTS)]
    (choice,) = speaker.joined(parallel_tool_calls=False).values()
    assert len(choice["calls"]) == 1


def test_without_tools_nothing_is_cut_off(speaker: Speaker) -> None:
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = speaker.says("So " + CALL + " it is. ").choice(**fields)
        assert choice["message"]["content"] == "So " + CALL + " it is. "
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        (streamed,) = speaker.joined(**fields).values()
        assert streamed["content"] == "So " + CALL + " it is. "


def test_tools_are_in_the_prompt_of_tool_choice_none(speaker: Speaker) -> None:
    speaker.says("No.").choice(tool_choice="none")
    assert "get_weather" in speaker.served.engine.seen[-1][1].text


def test_prose_about_markers(tokens: Speaker) -> None:
    """Markers that the model spells with other tokens than theirs are text."""
    tokenizer = tokens.served.context.tokenizer
    text = 'Write <tool_call>{"name": "now", "arguments": {}}</tool_call> and <think>.'
    spelled = demo_tokenizer().encode(text, add_special_tokens=False)
    assert not set(spelled) & {tokenizer.added_tokens[one] for one in MARKERS}
    tokens.ids = [spelled]
    for fields in ({}, {"stream_options": {"include_usage": True}}):
        streamed = tokens.joined(**fields)[0]
        assert streamed["content"] == text and not streamed["calls"]
    assert tokens.choice()["message"]["content"] == text


def test_several_sequences(speaker: Speaker) -> None:
    speaker.says(CALL, "No call.", CALL_NOW)
    choices = speaker.post(n=3)["choices"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == ["tool_calls", "stop", "tool_calls"]
    assert choices[1]["message"]["content"] == "No call."
    streamed = speaker.joined(n=3)
    assert [len(streamed[index]["calls"]) for index in range(3)] == [1, 0, 1]
    assert [streamed[index]["finish_reason"] for index in range(3)] == reasons


# -- ends ---------------------------------------------------------------------------------------


def test_max_tokens_inside_of_a_call(speaker: Speaker) -> None:
    whole = len(speaker.says(CALL).ids[0])
    choice = speaker.choice(max_tokens=whole - 8)
    (call,) = without_ids(choice["message"]["tool_calls"])
    assert call[0] == "get_weather" and ARGUMENTS.startswith(call[1]) and call[1] != ARGUMENTS
    assert choice["finish_reason"] == "length"
    (streamed,) = speaker.joined(max_tokens=whole - 8).values()
    assert streamed["calls"][0][1:] == list(call) and streamed["finish_reason"] == "length"


def test_a_stop_string_inside_of_a_call(speaker: Speaker) -> None:
    speaker.says(CALL)
    choice = speaker.choice(stop=["Rhein"])
    assert without_ids(choice["message"]["tool_calls"]) == [
        ("get_weather", '{"city": "Köln \\"am\\" ')
    ]
    (streamed,) = speaker.joined(stop=["Rhein"]).values()
    assert streamed["calls"][0][2] == '{"city": "Köln \\"am\\" '


def test_a_client_that_leaves_inside_of_a_call(speaker: Speaker) -> None:
    engine = speaker.says(CALL).served.engine
    engine.delay = 0.01
    try:
        before = len(engine.aborted)
        with raw_post(speaker.served, CHAT, BODY | {"stream": True}) as connection:
            data = b""
            while b"tool_calls" not in data:
                data += connection.recv(1 << 16)
        speaker.served.wait(lambda: len(engine.aborted) > before)
    finally:
        engine.delay = 0.0
    assert speaker.choice()["finish_reason"] == "tool_calls"


# -- reasoning ----------------------------------------------------------------------------------


def test_reasoning_without_tools(speaker: Speaker) -> None:
    speaker.says(THOUGHT + "Yes.\n")
    message = speaker.choice(tools=None)["message"]
    assert (message["reasoning"], message["content"]) == ("I should look.", "Yes.\n")
    (streamed,) = speaker.joined(tools=None).values()
    assert (streamed["reasoning"], streamed["content"]) == ("I should look.", "Yes.\n")


def test_reasoning_that_the_prompt_opens(speaker: Speaker) -> None:
    speaker.says("Hm.\n</think>\n\nYes.")
    message = speaker.choice(chat_template_kwargs={"thinking": True})["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


def test_reasoning_that_the_prompt_closes(speaker: Speaker) -> None:
    message = speaker.says("Yes.").choice(chat_template_kwargs={"enable_thinking": False})[
        "message"
    ]
    assert (message["reasoning"], message["content"]) == (None, "Yes.")


def test_reasoning_is_left_out(speaker: Speaker) -> None:
    speaker.says(THOUGHT + "Yes.")
    message = speaker.choice(include_reasoning=False)["message"]
    assert (message["reasoning"], message["content"]) == (None, "Yes.")
    (streamed,) = speaker.joined(include_reasoning=False).values()
    assert (streamed["reasoning"], streamed["content"]) == ("", "Yes.")


def test_cut_off_in_reasoning(speaker: Speaker) -> None:
    choice = speaker.says(THOUGHT).choice(max_tokens=6 if len(speaker.ids[0]) < 14 else 10)
    assert choice["message"]["content"] is None
    assert "I should look.".startswith(choice["message"]["reasoning"].strip())
    assert choice["finish_reason"] == "length"


def test_reasoning_tokens(tokens: Speaker) -> None:
    tokenizer = tokens.served.context.tokenizer
    tokens.says(THOUGHT + "Yes.")
    ids = tokens.ids[0]
    first, last = (ids.index(tokenizer.added_tokens[one]) for one in MARKERS[:2])
    details = {"reasoning_tokens": last - first - 1}
    assert tokens.post()["usage"]["completion_tokens_details"] == details
    usage = tokens.chunks(stream_options={"include_usage": True})[-1]["usage"]
    assert usage["completion_tokens_details"] == details


# -- what stands beside texts -------------------------------------------------------------------


def test_token_ids_and_logprobs_are_those_of_all_tokens(speaker: Speaker) -> None:
    ids = speaker.says(THOUGHT + "Look.\n" + CALL).ids[0] + [EOS]
    fields = {"return_token_ids": True, "logprobs": True, "top_logprobs": 1}
    choice = speaker.choice(**fields)
    assert choice["token_ids"] == ids
    assert len(choice["logprobs"]["content"]) == len(ids)
    (streamed,) = speaker.joined(**fields).values()
    assert streamed["token_ids"] == ids
    counted = [
        one
        for chunk in speaker.chunks(**fields)
        for choice in chunk["choices"]
        if choice["logprobs"]
        for one in choice["logprobs"]["content"]
    ]
    assert len(counted) == len(ids)


def test_special_tokens_in_texts(tokens: Speaker) -> None:
    """They are left out, markers or not, unless the request wants them."""
    tokens.says("<think>a<|im_end|>b</think>Yes<|im_end|>.")
    message = tokens.choice()["message"]
    assert (message["reasoning"], message["content"]) == ("ab", "Yes.")
    kept = tokens.choice(skip_special_tokens=False)["message"]
    assert (kept["reasoning"], kept["content"]) == ("a<|im_end|>b", "Yes<|im_end|>.")
    (streamed,) = tokens.joined().values()
    assert (streamed["reasoning"], streamed["content"]) == ("ab", "Yes.")


# -- which format ---------------------------------------------------------------------------------


def test_flags_name_the_formats(marked: Tokenizer) -> None:
    settings = ServerSettings(
        chat_template=TEMPLATE, tool_call_parser="pythonic", reasoning_parser="none"
    )
    engine = FakeEngine(marked, vocab_size=len(marked.hf))
    with serving(engine, settings) as served:
        speaker = Speaker(served, marked).says('[get_weather(city="a"), now()]')
        calls = speaker.choice()["message"]["tool_calls"]
        assert without_ids(calls) == [("get_weather", '{"city": "a"}'), ("now", "{}")]
        message = speaker.says(THOUGHT + "Yes.").choice()["message"]
        assert (message["reasoning"], message["content"]) == (None, THOUGHT + "Yes.")


def test_a_parser_that_is_switched_off(marked: Tokenizer) -> None:
    settings = ServerSettings(chat_template=TEMPLATE, tool_call_parser="none")
    with serving(FakeEngine(marked, vocab_size=len(marked.hf)), settings) as served:
        refused = served.post(CHAT, BODY)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools"
        assert "--tool-call-parser" in refused.json()["error"]["message"]


def test_auto_tool_choice_needs_a_format(marked: Tokenizer) -> None:
    engine = FakeEngine(marked, vocab_size=len(marked.hf))
    with pytest.raises(ConfigError, match="enable_auto_tool_choice.*--tool-call-parser"):
        build_app(engine, ServerSettings(enable_auto_tool_choice=True))
    settings = ServerSettings(enable_auto_tool_choice=True, tool_call_parser="hermes")
    with serving(engine, settings):
        pass


def test_a_template_that_takes_no_tools(marked: Tokenizer) -> None:
    engine = FakeEngine(marked, vocab_size=len(marked.hf))
    with serving(engine, ServerSettings(tool_call_parser="hermes")) as served:
        error = served.post(CHAT, BODY).json()["error"]
    assert error["message"] == (
        "tools: this model's chat template has no place for tools, so the model would not see them"
    )


@pytest.mark.parametrize("field", ["tools", "tool_bytes"])
def test_limits(marked: Tokenizer, field: str) -> None:
    limits = Limits(**{field: 1})
    engine = FakeEngine(marked, vocab_size=len(marked.hf))
    with serving(engine, ServerSettings(chat_template=TEMPLATE, limits=limits)) as served:
        response = served.post(CHAT, BODY)
    assert response.status_code == 400 and "at most 1 are accepted" in response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        {"tools": [NOW, {**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
    ],
)
def test_what_needs_a_grammar_has_one(speaker: Speaker, fields: Any) -> None:
    speaker.says(CALL_NOW).post(**fields)
    constraint = speaker.served.engine.seen[-1][2].structured_outputs
    assert "now" in constraint.grammar
    speaker.says("free").post()
    assert speaker.served.engine.seen[-1][2].structured_outputs is None


BAD = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
WRONG_SCHEMAS = [
    (BAD, ".properties.tags.uniqueItems", 'True: Unimplemented keys: ["uniqueItems"]'),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, ".properties.a.$ref",
     "'#/$defs/b': Pointer '/$defs/b' does not exist"),
    ({"$defs": {"d": {"type": "foo"}}, "properties": {"a": {"$ref": "#/$defs/d"}}}, ".$defs.d.type",
     "'foo': Invalid type: foo"),
    ({"properties": {"a": {"const": 2**53 + 1}}}, ".properties.a.const",
     "9007199254740993: numbers beyond 2**53, such as 9007199254740993, are not supported"),
    ({"properties": {"a": {"pattern": "[^[]"}}}, ".properties.a.pattern",
     "'[^[]': a [ or a doubled &, - or ~ in a class of characters has to be escaped"),
    ({"properties": {"a": False}, "required": ["a"]}, "",
     "Unsatisfiable schema: required property 'a' is unsatisfiable"),
]  # fmt: skip
"""A function's parameters, the path of the mistake, and its value with the reason."""


@pytest.mark.parametrize(("schema", "path", "reason"), WRONG_SCHEMAS)
@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
def test_a_mistake_in_a_tools_schema_is_named_as_the_client_wrote_it(
    tokens: Speaker, route: str, schema: Any, path: str, reason: str
) -> None:
    """The second tool has it; the keyword also stands, rightly used, in the first one."""
    good = {"properties": {"b": {"$ref": "#/$defs/b"}, "uniqueItems": {"const": 1}},
            "$defs": {"b": {"type": "integer"}}}  # fmt: skip
    functions = [{"name": "f", "parameters": good}, {"name": "g", "parameters": schema}]
    match route:
        case "chat":
            tools: list[Any] = [{"type": "function", "function": one} for one in functions]
            body = {**BODY, "tools": tools, "tool_choice": "required"}
            target, where = CHAT, "tools[1].function.parameters"
        case "responses":
            tools = [{"type": "function", **one} for one in functions]
            body = {"input": "Rain?", "tools": tools, "tool_choice": "required"}
            target, where = "/v1/responses", "tools[1].parameters"
        case _:
            tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
            messages = [{"role": "user", "content": "Rain?"}]
            body = {"messages": messages, "tools": tools, "max_tokens": 9}
            body["tool_choice"] = {"type": "any"}
            target, where = "/v1/messages", "tools[1].input_schema"
    response = tokens.served.post(target, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(f"{where}{path}=")
    assert error["message"].endswith(reason)
    assert route == "messages" or error["param"] == f"{where}{path}"


def test_a_mistake_in_an_allowed_tool_has_the_index_in_the_request(tokens: Speaker) -> None:
    tools = [{"type": "function", "name": name, "parameters": BAD} for name in ("f", "g")]
    choice = {
        "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]
    }  # fmt: skip
    body = {"input": "Rain?", "tools": tools, "tool_choice": choice}
    error = tokens.served.post("/v1/responses", body).json()["error"]
    assert error["param"] == "tools[1].parameters.properties.tags.uniqueItems"


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
         "response_format.json_schema.schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}},
                "tools": [NOW]}, "response_format.json_schema.schema"),
        (CHAT, {"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
        (CHAT, {"structured_outputs": {"json": BAD}, "tools": [NOW]}, "structured_outputs.json"),
        (CHAT, {"guided_json": BAD}, "guided_json"),
        ("/v1/responses",
         {"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}},
         "text.format.schema"),
        ("/v1/responses",
         {"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}},
          "tools": [{"type": "function", "name": "f", "parameters": {}}]}, "text.format.schema"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
         "output_config.format.schema"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": BAD}},
                          "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
         "output_config.format.schema"),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": BAD}},
         "output_format.schema"),
        ("/v1/completions", {"guided_json": BAD, "prompt": "a", "messages": None}, "guided_json"),
        ("/generate", {"structured_outputs": {"json": BAD}, "prompt": "a", "messages": None},
         "structured_outputs.json"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_schema_of_the_answer_is_named_as_the_client_wrote_it(
    tokens: Speaker, path: str, body: dict[str, Any], where: str
) -> None:
    said = {"input": "a"} if path == "/v1/responses" else {"messages": BODY["messages"]}
    limit = {} if path == "/v1/responses" else {"max_tokens": 9}
    sent = {name: value for name, value in {**said, **limit, **body}.items() if value is not None}
    response = tokens.served.post(path, sent)
    place = f"{where}.properties.tags.uniqueItems"
    message = f'{place}=True: Unimplemented keys: ["uniqueItems"]'
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


def test_a_mistake_in_a_strict_tool_beside_a_schema_of_the_answer(tokens: Speaker) -> None:
    strict = {"type": "function", "function": {"name": "g", "parameters": BAD, "strict": True}}
    body = {**BODY, "tools": [NOW, strict], "response_format": {"type": "json_object"}}
    error = tokens.served.post(CHAT, body).json()["error"]
    assert error["param"] == "tools[1].function.parameters.properties.tags.uniqueItems"


def test_a_schema_applies_behind_reasoning(speaker: Speaker) -> None:
    """Where the model may reason first, in tokens of its own, its reasoning is free."""
    form = {"response_format": {"type": "json_object"}, "tools": None}
    markers = speaker.served.engine.tokenizer.added_tokens
    ids = {text: index for index, text in markers.items()}
    speaker.says("{}").post(**form)
    constraint = speaker.served.engine.seen[-1][2].structured_outputs
    opens, closes = ids.get("<think>"), ids.get("</think>")
    if closes is None:
        assert not constraint.begins_after
        return
    assert (constraint.may_begin_with, tuple(constraint.begins_after)) == (opens, (closes,))
    speaker.says("a</think>{}").post(**form, chat_template_kwargs={"thinking": True})
    constraint = speaker.served.engine.seen[-1][2].structured_outputs
    assert (constraint.may_begin_with, tuple(constraint.begins_after)) == (None, (closes,))
    speaker.says("{}").post(**form, chat_template_kwargs={"enable_thinking": False})
    constraint = speaker.served.engine.seen[-1][2].structured_outputs
    assert constraint.may_begin_with is None and not constraint.begins_after


def test_tokenize_with_tools(speaker: Speaker) -> None:
    served = speaker.served
    with_tools = served.post("/tokenize", {"messages": BODY["messages"], "tools": [WEATHER]})
    without = served.post("/tokenize", {"messages": BODY["messages"]})
    assert with_tools.json()["count"] > without.json()["count"] + 20


# -- OpenAI's client ------------------------------------------------------------------------------


def test_a_loop_of_an_agent(speaker: Speaker) -> None:
    """A call, its result, and an answer, through the official client."""
    served = speaker.served
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Rain?"}]
    speaker.says(THOUGHT + CALL)
    answer = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments)["days"] == 3
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    speaker.says("It rains.")
    answer = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "It rains."
    text = served.engine.seen[-1][1].text
    assert '<tool_call>{"name": "get_weather"' in text and "# tool: rain" in text


def test_the_client_joins_a_stream(speaker: Speaker) -> None:
    client = openai.OpenAI(base_url=speaker.served.url + "/v1", api_key="none", max_retries=0)
    speaker.says(THOUGHT + "Look.\n" + CALL)
    with client.chat.completions.stream(
        model="demo",
        messages=[{"role": "user", "content": "Rain?"}],
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.message.content == "Look." and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments)["days"] == 3
