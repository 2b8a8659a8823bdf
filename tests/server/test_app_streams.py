"""Streams on the wire: golden files, UTF-8, errors in mid-stream, comments, many at once."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server import responses
from hetero_llm.server.responses import EventStream, StreamWatch
from hetero_llm.server.settings import Limits, ServerSettings
from tests.server.fake_engine import EOS, FakeEngine
from tests.server.serving import Served, events, raw_post, received, serving

GOLDEN = Path(__file__).with_name("golden")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "héllo 😀"}]
USAGE = {"include_usage": True}
WITH_USAGE_EACH = {"include_usage": True, "continuous_usage_stats": True}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "def add(a, b):", "max_tokens": 3}),
    "completion_usage": (
        COMPLETIONS, {"prompt": "a b", "max_tokens": 2, "stream_options": USAGE}),
    "completion_usage_each": (
        COMPLETIONS, {"prompt": "a b", "max_tokens": 2, "stream_options": WITH_USAGE_EACH}),
    "completion_logprobs": (COMPLETIONS, {"prompt": "a b", "max_tokens": 2, "logprobs": 1}),
    "completion_echo_logprobs": (
        COMPLETIONS, {"prompt": "a b", "max_tokens": 2, "logprobs": 1, "echo": True}),
    "completion_echo_only": (
        COMPLETIONS, {"prompt": "a b", "max_tokens": 0, "logprobs": 0, "echo": True}),
    "completion_n2_echo": (COMPLETIONS, {"prompt": "a b", "max_tokens": 2, "n": 2, "echo": True}),
    "completion_token_ids": (
        COMPLETIONS,
        {"prompt": [66, 67], "max_tokens": 2, "return_token_ids": True, "logprobs": 1,
         "return_tokens_as_token_ids": True}),
    "completion_stop": (COMPLETIONS, {"prompt": [66, EOS, 67], "max_tokens": 9}),
    "completion_utf8": (COMPLETIONS, {"prompt": "é😀", "max_tokens": 6, "logprobs": 0}),
    "completion_stop_text": (
        COMPLETIONS, {"prompt": "one two three four", "max_tokens": 20, "stop": ["o th", "zz"]}),
    "completion_stop_text_kept": (
        COMPLETIONS,
        {"prompt": "one two three", "max_tokens": 20, "stop": ["o th"],
         "include_stop_str_in_output": True}),
    "completion_stop_text_unmet": (
        COMPLETIONS, {"prompt": "ab cd", "max_tokens": 4, "stop": ["cdcdcdcd"]}),
    "completion_stop_id": (COMPLETIONS, {"prompt": [66, 67, 68], "max_tokens": 9,
                                         "stop_token_ids": [68]}),
    "completion_prompts": (COMPLETIONS, {"prompt": [[66], [67]], "max_tokens": 1, "n": 2}),
    "chat": (CHAT, {"messages": USER, "max_tokens": 3}),
    "chat_stop_text": (CHAT, {"messages": USER, "max_tokens": 9, "stop": "ser:"}),
    "chat_usage": (CHAT, {"messages": USER, "max_tokens": 2, "stream_options": USAGE}),
    "chat_usage_each": (
        CHAT, {"messages": USER, "max_tokens": 2, "stream_options": WITH_USAGE_EACH}),
    "chat_logprobs": (
        CHAT, {"messages": USER, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
    "chat_n2": (CHAT, {"messages": USER, "max_tokens": 2, "n": 2}),
    "chat_utf8": (CHAT, {"messages": USER, "max_tokens": 18}),
    "chat_token_ids": (CHAT, {"messages": USER, "max_tokens": 1, "return_token_ids": True}),
    "chat_continued": (
        CHAT,
        {"messages": [*USER, {"role": "assistant", "content": "well,"}], "max_tokens": 1,
         "continue_final_message": True}),
}  # fmt: skip


def masked(text: str) -> str:
    text = re.sub(r"(cmpl|chatcmpl)-golden:1\b", r"\1-ID", text)
    text = re.sub(r"(: keep-alive\n\n)+", ": keep-alive\n\n", text)
    return re.sub(r'"created":\d+', '"created":0', text)


def check_golden(name: str, content: bytes) -> None:
    """Compares with the file; WRITE_GOLDEN=1 writes it first, after a change of the rules."""
    file, text = GOLDEN / f"{name}.sse", masked(content.decode())
    if os.environ.get("WRITE_GOLDEN"):
        file.write_bytes(text.encode())
    assert text == file.read_bytes().decode()


@pytest.mark.parametrize("name", STREAMS)
def test_golden_stream(server: Served, name: str) -> None:
    path, body = STREAMS[name]
    response = server.post(path, body | {"stream": True}, headers={"x-request-id": "golden:1"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "golden:1"
    check_golden(name, response.content)


# name: path, body, what the engine does, settings
UNUSUAL: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "completion_failed": (COMPLETIONS, {"prompt": "a b"}, {"fail_after": 2}, {}),
    "chat_failed": (CHAT, {"messages": USER, "n": 2}, {"fail_after": 2}, {}),
    "completion_died": (COMPLETIONS, {"prompt": "a b"}, {"die_after": 2}, {}),
    "chat_died": (CHAT, {"messages": USER}, {"die_after": 2}, {}),
    "completion_usage_forced": (
        COMPLETIONS, {"prompt": "a b", "max_tokens": 2}, {}, {"force_include_usage": True}),
    "completion_interval": (
        COMPLETIONS,
        {"prompt": "é😀 def add(a, b):", "max_tokens": 12, "logprobs": 0, "return_token_ids": True,
         "stream_options": WITH_USAGE_EACH},
        {}, {"stream_interval": 5}),
    "chat_interval": (
        CHAT, {"messages": USER, "max_tokens": 6, "n": 2}, {}, {"stream_interval": 4}),
    "completion_interval_failed": (
        COMPLETIONS, {"prompt": "a b", "max_tokens": 9}, {"fail_after": 4}, {"stream_interval": 5}),
    "completion_silent": (
        COMPLETIONS, {"prompt": "a b", "max_tokens": 1}, {}, {"keep_alive_seconds": 0.02}),
    "chat_silent": (CHAT, {"messages": USER, "max_tokens": 1}, {}, {"keep_alive_seconds": 0.02}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_golden_stream_of_an_unusual_server(tokenizer: Tokenizer, name: str) -> None:
    path, body, behaviour, settings = UNUSUAL[name]
    engine = FakeEngine(tokenizer)
    for attribute, value in behaviour.items():
        setattr(engine, attribute, value)
    if "keep_alive_seconds" in settings:
        engine.unpaused.clear()
    headers, received = {"x-request-id": "golden:1"}, b""
    with (
        serving(engine, ServerSettings(**settings)) as served,
        served.http.stream("POST", path, json=body | {"stream": True}, headers=headers) as response,
    ):
        assert response.status_code == 200
        try:
            for piece in response.iter_bytes():
                received += piece
                if b"keep-alive" in received:
                    served.call(engine.unpaused.set)
            cut_off = False
        except httpx.RemoteProtocolError:
            cut_off = True
    assert cut_off == ("die_after" in behaviour)
    check_golden(name, received)


def test_every_golden_file_is_of_a_test() -> None:
    assert {file.stem for file in GOLDEN.glob("*.sse")} == STREAMS.keys() | UNUSUAL.keys()


@pytest.mark.parametrize("interval", [2, 3, 7, 100])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_interval_changes_no_text(
    tokenizer: Tokenizer, server: Served, path: str, interval: int
) -> None:
    body = {"prompt": "naïve 東京 🇯🇵 ÿ", "messages": USER, "max_tokens": 23, "n": 2, "stream": True}

    def read(served: Served) -> tuple[dict[int, str], dict[int, int], list[str | None]]:
        texts, chunks, reasons = defaultdict[int, str](str), Counter[int](), []
        for chunk in events(served.post(path, body).text)[:-1]:
            for choice in chunk["choices"]:
                if "role" in choice.get("delta", ()):
                    continue
                texts[choice["index"]] += content(choice)
                chunks[choice["index"]] += 1
                reasons.append(choice["finish_reason"])
        return texts, chunks, reasons

    with serving(FakeEngine(tokenizer), ServerSettings(stream_interval=interval)) as served:
        texts, chunks, reasons = read(served)
    assert texts == read(server)[0] and "\ufffd" not in "".join(texts.values())
    # One token, then the interval, then the rest.
    assert set(chunks.values()) == {1 + math.ceil(22 / interval)}
    assert reasons.count("length") == 2 and set(reasons) == {None, "length"} and len(texts) == 2


@pytest.mark.parametrize(("seconds", "comments"), [(0.0, False), (0.001, True)])
def test_comments_can_be_turned_off(seconds: float, comments: bool) -> None:
    """After the watch has looked at a silent stream some times."""
    sent: list[Any] = []
    looks = 0

    async def send(message: Any) -> None:
        sent.append(message)

    class Counted(EventStream):
        def is_silent(self, now: float, seconds: float) -> bool:
            nonlocal looks
            looks += 1
            return super().is_silent(now, seconds)

    async def run() -> None:
        watch = StreamWatch(keep_alive_seconds=seconds, write_seconds=0.02)
        stream = Counted(send)
        watch.add(stream)
        while looks < 30:
            await asyncio.sleep(0.001)
        watch.remove(stream)

    asyncio.run(run())
    assert bool(sent) == comments


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_says_what_the_whole_answer_says(server: Served, name: str) -> None:
    path, body = STREAMS[name]
    streamed = events(server.post(path, body | {"stream": True}).text)
    assert streamed[-1] == "[DONE]"
    whole = server.post(path, {k: v for k, v in body.items() if k != "stream_options"}).json()
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in streamed[:-1]:
        assert chunk["id"] == streamed[0]["id"]
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "nothing comes after a finish reason"
            texts[index] = texts.get(index, "") + content(choice)
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    for choice in whole["choices"]:
        assert texts[choice["index"]] == content(choice)
        assert reasons[choice["index"]] == choice["finish_reason"]
    assert len(texts) == len(whole["choices"])
    if "stream_options" in body:
        assert streamed[-2]["choices"] == [] and streamed[-2]["usage"] == whole["usage"]


def content(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta")).get("content", "")


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(server: Served) -> None:
    body = {"prompt": "é😀 a", "max_tokens": 9, "logprobs": 2, "echo": True}
    whole = server.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in events(server.post(COMPLETIONS, body | {"stream": True}).text)[:-1]:
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == whole


def test_text_offsets_point_into_the_text(server: Served) -> None:
    prompt = "é😀 a<|endoftext|>b c"
    body = {"prompt": prompt, "max_tokens": 12, "logprobs": 0, "echo": True, "ignore_eos": True}
    choice = server.post(COMPLETIONS, body).json()["choices"][0]
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == len(offsets) and offsets == sorted(offsets)
    # The prompt is echoed as it was sent; in what follows special tokens are left out.
    assert text.startswith(prompt) and text.count("<|endoftext|>") == 1
    for token, offset in zip(tokens, offsets):
        if not token.startswith("bytes:") and (token != "<|endoftext|>" or offset < len(prompt)):
            assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fault", ["fail", "die"])
def test_error_in_mid_stream(tokenizer: Tokenizer, path: str, fault: str) -> None:
    body = {"prompt": "a b", "messages": USER, "stream": True}
    engine = FakeEngine(tokenizer)
    setattr(engine, f"{fault}_after", 2)
    with serving(engine) as served:
        text = ""
        try:
            with served.http.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                for piece in response.iter_text():
                    text += piece
            clean = True
        except httpx.RemoteProtocolError:
            clean = False
        frames = events(text)
        # A failed request ends as a stream does; a dead engine's streams are cut off.
        assert clean == (fault == "fail") == (frames[-1] == "[DONE]")
        error = frames[-2 if clean else -1]["error"]
        assert error["code"] == ("generation_failed" if clean else "engine_dead")
        assert error["type"] == ("server_error" if clean else "overloaded_error")
        assert "secret" not in text and "0x" not in text
        assert all(choice["finish_reason"] is None
                   for frame in frames if isinstance(frame, dict)
                   for choice in frame.get("choices", ()))  # fmt: skip
        assert served.context.load == 0
        assert served.http.get("/health").status_code == (200 if clean else 503)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", ["fail", "die"])
def test_error_before_the_first_token_has_a_status(
    tokenizer: Tokenizer, fault: str, stream: bool
) -> None:
    engine = FakeEngine(tokenizer)
    setattr(engine, f"{fault}_after", 0)
    with serving(engine) as served:
        answer = served.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        assert answer.status_code == (500 if fault == "fail" else 503)
        assert answer.json()["error"]["code"].startswith(("generation_failed", "engine_dead"))
        if fault == "fail":
            assert answer.headers["x-should-retry"] == "false"
        else:
            assert int(answer.headers["retry-after"]) >= 1
        assert len(answer.content) <= 4096 and "0x" not in answer.text


def test_silent_streams_get_comments(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    engine.unpaused.clear()
    settings = ServerSettings(keep_alive_seconds=0.02)
    body = {"prompt": "a b", "max_tokens": 2, "stream": True}
    with serving(engine, settings) as served:
        with served.http.stream("POST", COMPLETIONS, json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            seen = ""
            for piece in response.iter_text():
                seen += piece
                if seen.count(": keep-alive\n\n") == 2:
                    served.call(engine.unpaused.set)
        assert len(events(seen)) == 3 and seen.endswith("data: [DONE]\n\n")


def test_an_error_after_a_comment_is_a_frame(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, fail_after=0)
    engine.unpaused.clear()
    body = {"prompt": "a b", "stream": True}
    with serving(engine, ServerSettings(keep_alive_seconds=0.02)) as served:
        with served.http.stream("POST", COMPLETIONS, json=body) as response:
            seen = ""
            for piece in response.iter_text():
                seen += piece
                served.call(engine.unpaused.set)
        frames = events(seen)
        assert frames[0]["error"]["code"] == "generation_failed" and frames[1:] == ["[DONE]"]


def test_a_client_that_reads_nothing_is_dropped(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    settings = ServerSettings(limits=Limits(write_seconds=0.2))
    body = {"prompt": "word " * 100, "max_tokens": 1500, "stream": True, "logprobs": 5}
    with serving(engine, settings, send_buffer=4096) as served:
        with raw_post(served, COMPLETIONS, body, receive_buffer=4096):
            served.wait(lambda: engine.aborted and served.context.load == 0)
            metrics = served.http.get("/metrics").text
        assert 'hetero_llm:aborted_requests_total{cause="stalled"} 1.0' in metrics
        assert served.post(COMPLETIONS, {"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_leaves_no_garbage(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """What a request held is free when it has ended, not only after a collection of garbage."""
    engine = FakeEngine(tokenizer, silent_above=100)
    streams: list[weakref.ref[EventStream]] = []

    def noted(*args: Any) -> EventStream:
        stream = EventStream(*args)
        streams.append(weakref.ref(stream))
        return stream

    monkeypatch.setattr(responses, "EventStream", noted)
    body = {"prompt": "a b", "max_tokens": 1000 if leaves else 2, "stream": True}
    with serving(engine) as served:
        gc.disable()
        try:
            with raw_post(served, "/v1/completions", body) as connection:
                received(connection, b"\n\n" if leaves else b"[DONE]")
            served.wait(lambda: engine.finished and served.context.load == 0)
            served.wait(lambda: streams[0]() is None)
        finally:
            gc.enable()
    assert len(engine.aborted) == leaves


def test_characters_are_never_split(server: Served) -> None:
    text = "naïve 東京 🇯🇵 👩‍👩‍👧 ÿ"
    body = {"prompt": text, "max_tokens": 120, "stream": True}
    response = server.post(COMPLETIONS, body)
    chunks = events(response.content.decode("utf-8", "strict"))[:-1]
    joined = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert joined.startswith(text) and "\ufffd" not in joined.removesuffix("\ufffd")


def test_many_streams_at_once(tokenizer: Tokenizer) -> None:
    """200 streams side by side, each gets its own tokens."""
    engine = FakeEngine(tokenizer)
    engine.unpaused.clear()

    async def one(port: int, number: int) -> None:
        ids = [100 + number, 300 + number]
        body = {"prompt": ids, "max_tokens": 4, "stream": True, "return_token_ids": True}
        content = json.dumps(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n{content}".encode()
        )
        answer = (await reader.read()).decode()
        writer.close()
        frames = events(answer.partition("\r\n\r\n")[2])
        assert frames[-1] == "[DONE]"
        tokens = [token for frame in frames[:-1] for token in frame["choices"][0]["token_ids"]]
        assert tokens == ids * 2

    async def all_of_them(served: Served) -> None:
        tasks = [asyncio.ensure_future(one(served.port, number)) for number in range(200)]
        while engine.num_live < 200:
            await asyncio.sleep(0.01)
        assert served.context.load == 200
        served.loop.call_soon_threadsafe(engine.unpaused.set)
        await asyncio.gather(*tasks)

    with serving(engine) as served:
        asyncio.run(all_of_them(served))
        assert served.context.load == 0 and engine.num_live == 0 and not engine.aborted
