"""One request against a server whose every byte and every tick is scripted."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from hetero_llm.bench_client.client import (
    RequestResult,
    Server,
    base_url,
    count_tokens,
    first_model,
    measure,
    open_session,
    pieces,
)
from hetero_llm.bench_client.errors import ServerError
from hetero_llm.bench_client.wire_format import Usage
from hetero_llm.core.errors import ConfigError
from tests.bench_client.scripted_server import (
    FakeClock,
    Reply,
    Request,
    Script,
    model_script,
    serving,
    words,
)

PATH = "/v1/completions"


def measured(
    make_script: Callable[[FakeClock], Script],
    *,
    timeout: float = 60.0,
    key: str | None = None,
    max_answer_bytes: int = 1 << 20,
) -> RequestResult:
    """The result of one request whose script moves the client's clock."""

    async def main() -> RequestResult:
        clock = FakeClock()
        async with serving(make_script(clock)) as url:
            server = Server(url, key, timeout, max_answer_bytes)
            async with open_session(server) as session:
                return await measure(session, server, PATH, {"stream": True}, clock=clock)

    return asyncio.run(main())


def scripted(act: Callable[[Reply], None], **options: Any) -> RequestResult:
    """The result of a request that `act` answers at once."""

    async def script(request: Request, reply: Reply) -> None:
        act(reply)

    return measured(lambda clock: script, **options)


def test_times_are_those_of_the_events() -> None:
    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            reply.head()
            role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
            await clock.advance(0.25, lambda: reply.event(role))  # no output yet
            await clock.advance(0.5, lambda: reply.text("a"))
            await clock.advance(0.625, lambda: reply.raw(b": keep-alive\n\n"))
            await clock.advance(0.75, lambda: reply.text("b c"))
            await clock.advance(1.75, lambda: reply.text("d"))
            await clock.advance(2.0, lambda: reply.text("", "stop"))
            await clock.advance(5.0, lambda: reply.usage(7, 4))
            reply.event("[DONE]")
            reply.end()

        return script

    result = measured(make)
    assert result == RequestResult(
        arrival=0.0,
        start=0.0,
        first=0.5,
        last=2.0,
        itls=(0.25, 1.0),
        text="ab cd",
        num_ids=0,
        usage=Usage(7, 4),
        finish_reason="stop",
        error=None,
    )


def test_times_of_a_response() -> None:
    """As those of a completion: what begins and ends parts is no output."""

    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            def delta(text: str) -> Any:
                return {"type": "response.output_text.delta", "delta": text}

            usage = {"input_tokens": 7, "output_tokens": 2}
            ended = {"type": "response.completed", "response": {"usage": usage}}
            reply.head()
            await clock.advance(0.25, lambda: reply.event({"type": "response.created"}))
            await clock.advance(0.5, lambda: reply.event(delta("a")))
            await clock.advance(0.75, lambda: reply.event(delta("b")))
            await clock.advance(1.0, lambda: reply.event({"type": "response.output_text.done"}))
            await clock.advance(2.0, lambda: reply.event(ended))
            reply.end()

        return script

    result = measured(make)
    assert (result.first, result.last, result.itls) == (0.5, 2.0, (0.25,))
    assert (result.text, result.usage, result.finish_reason) == ("ab", Usage(7, 2), "stop")
    assert result.ok


def test_times_and_counts_of_a_message() -> None:
    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            def delta(text: str) -> Any:
                return {"type": "content_block_delta", "delta": {"text": text}}

            usage = {"input_tokens": 7, "output_tokens": 0}
            start = {"type": "message_start", "message": {"usage": usage}}
            stopped = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
            reply.head()
            await clock.advance(0.25, lambda: reply.event(start))
            await clock.advance(0.5, lambda: reply.event(delta("a")))
            await clock.advance(0.75, lambda: reply.event(delta("b")))
            await clock.advance(
                2.0, lambda: reply.event({**stopped, "usage": {"output_tokens": 2}})
            )
            reply.end()

        return script

    result = measured(make)
    assert (result.first, result.last, result.itls) == (0.5, 2.0, (0.25,))
    assert (result.text, result.usage, result.finish_reason) == ("ab", Usage(7, 2), "stop")


def test_a_message_that_breaks_off_is_no_answer() -> None:
    def act(reply: Reply) -> None:
        reply.head()
        reply.event({"type": "content_block_delta", "delta": {"text": "a"}})
        reply.end()

    result = scripted(act)
    assert not result.ok and "ended before the answer did" in (result.error or "")


def test_events_in_one_piece_come_at_one_time() -> None:
    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            reply.head()
            events = [{"choices": [{"text": text}]} for text in "xy"]
            data = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            await clock.advance(1.0, lambda: reply.raw(data.encode()))
            await clock.advance(3.0, lambda: reply.text("z", "length"))
            reply.end()

        return script

    result = measured(make)
    assert (result.first, result.itls, result.error) == (1.0, (0.0, 2.0), None)


def test_a_character_in_two_pieces() -> None:
    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            reply.head()
            event = {"choices": [{"text": "é漢", "finish_reason": "stop"}]}
            data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
            cut = data.index("漢".encode()) + 1
            await clock.advance(1.0, lambda: reply.raw(data[:cut]))
            await clock.advance(2.0, lambda: reply.raw(data[cut:]))
            reply.end()

        return script

    result = measured(make)
    assert (result.text, result.first, result.error) == ("é漢", 2.0, None)


def test_output_without_text_has_times() -> None:
    """A stop token alone, or ids without text."""

    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            reply.head()
            ids = {"choices": [{"text": "", "token_ids": [3]}]}
            await clock.advance(1.0, lambda: reply.event(ids))
            await clock.advance(2.0, lambda: reply.text("", "stop"))
            reply.end()

        return script

    result = measured(make)
    assert (result.first, result.last, result.num_ids, result.itls) == (1.0, 2.0, 1, ())


def test_the_end_is_the_first_output_if_there_is_no_other() -> None:
    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            reply.head()
            await clock.advance(2.0, lambda: reply.text("", "stop"))
            reply.end()

        return script

    result = measured(make)
    assert (result.first, result.last, result.itls, result.error) == (2.0, 2.0, (), None)


def test_an_answer_that_is_not_streamed() -> None:
    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            answer = {
                "choices": [{"text": "all", "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 2},
            }
            await clock.advance(4.0, lambda: reply.json(answer))

        return script

    result = measured(make)
    assert (result.first, result.last, result.text, result.usage) == (4.0, 4.0, "all", Usage(1, 2))
    assert result.ok


def _half(reply: Reply) -> None:
    reply.head()
    reply.text("a")


def _silent_end(reply: Reply) -> None:
    _half(reply)
    reply.end()


def _hang_up(reply: Reply) -> None:
    _half(reply)
    reply.hang_up()


def _error_frame(reply: Reply) -> None:
    _half(reply)
    reply.event({"error": {"message": "the engine died", "code": 500}})
    reply.event("[DONE]")
    reply.end()


def _half_event(reply: Reply) -> None:
    reply.head()
    reply.text("a", "stop")
    reply.raw(b'data: {"choices"')
    reply.end()


def _garbage(reply: Reply) -> None:
    reply.head()
    reply.event("{not json")
    reply.end()


def _not_http(reply: Reply) -> None:
    reply.writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    reply.hang_up()


@pytest.mark.parametrize(
    ("act", "text", "message"),
    [
        (_silent_end, "a", "the stream ended before the answer did (no finish_reason, no [DONE])"),
        (_hang_up, "a", "the connection broke"),
        (_error_frame, "a", "error in the answer: the engine died"),
        (_half_event, "a", "the stream ended before the answer did"),
        (_garbage, "", "not JSON"),
        (_not_http, "", "the connection broke"),
        (lambda reply: reply.json({"error": {"message": "queue is full"}}, 503), "",
         "HTTP 503: queue is full"),
        (lambda reply: reply.json(b"nonsense"), "", "not JSON"),
        (lambda reply: reply.hang_up(), "", "the connection broke"),
    ],
)  # fmt: skip
def test_failures_are_in_the_result(act: Any, text: str, message: str) -> None:
    result = scripted(act)
    assert not result.ok
    assert result.error is not None and message in result.error
    assert result.text == text


def test_a_server_that_says_nothing() -> None:
    def make(clock: FakeClock) -> Script:
        async def script(request: Request, reply: Reply) -> None:
            _half(reply)
            await asyncio.Event().wait()

        return script

    result = measured(make, timeout=0.2)
    assert result.error is not None and "within the time limit" in result.error


def test_done_ends_an_answer_without_a_reason() -> None:
    def act(reply: Reply) -> None:
        _half(reply)
        reply.event("[DONE]")
        reply.end()

    assert scripted(act).ok


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def main() -> str:
            async with open_session(Server(url)) as session:
                return await first_model(session, Server(url))

        with pytest.raises(ServerError, match=f"cannot connect to {url}: Connection refused"):
            asyncio.run(main())


def test_the_key_is_sent() -> None:
    seen: list[Request] = []

    def make(clock: FakeClock) -> Script:
        return model_script(words, seen=seen)

    assert measured(make, key="secret").ok
    assert seen[0].headers["authorization"] == "bearer secret"


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ({"data": []}, 200, "names no model"),
        ({"data": [{"id": 5}]}, 200, "names no model"),
        ([], 200, "names no model"),
        (b"<html>", 200, "did not answer with JSON"),
        ({"error": {"message": "no key"}}, 401, "HTTP 401: no key"),
    ],
)
def test_servers_without_a_model(answer: Any, status: int, message: str) -> None:
    async def script(request: Request, reply: Reply) -> None:
        reply.json(answer, status)

    async def main() -> None:
        async with serving(script) as url, open_session(Server(url)) as session:
            await first_model(session, Server(url))

    with pytest.raises(ServerError, match=message):
        asyncio.run(main())


@pytest.mark.parametrize(("tokenize", "counts"), [(True, [3, 0, 1]), (False, None)])
def test_counting_by_the_server(tokenize: bool, counts: list[int] | None) -> None:
    async def main() -> list[int] | None:
        script = model_script(words, tokenize=tokenize)
        async with serving(script) as url, open_session(Server(url)) as session:
            return await count_tokens(session, Server(url), "m", ["a b c", "", "d"])

    assert asyncio.run(main()) == counts


def test_closing_the_answer_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def script(request: Request, reply: Reply) -> None:
        _half(reply)
        await reply.client_left()
        closed.set()

    async def main() -> None:
        async with serving(script) as url, open_session(Server(url)) as session:
            async with aclosing(pieces(session, Server(url), PATH, {})) as answer:
                assert (await anext(answer)).text == "a"
            await closed.wait()

    asyncio.run(main())


def test_the_longest_answer() -> None:
    answer = {"choices": ["x" * 20]}
    result = scripted(lambda reply: reply.json(answer), max_answer_bytes=10)
    assert result.error == "the answer is longer than 10 bytes"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("https://h/v1", "https://h"),
        ("https://h/v1/", "https://h"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://h/prefix/v1", "http://h/prefix"),
    ],
)
def test_base_urls(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "127.0.0.1:8000/v1"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="must be like http://127.0.0.1:8000"):
        base_url(url)


def test_many_streams_at_once() -> None:
    """More than the hundred connections that aiohttp would allow by itself."""
    waiting = 0
    all_here = asyncio.Event()

    async def script(request: Request, reply: Reply) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 150:
            all_here.set()
        await all_here.wait()
        await words(request, reply)

    async def main() -> list[RequestResult]:
        async with serving(script) as url, open_session(Server(url)) as session:
            body = {"stream": True, "prompt": "x"}
            one = [
                measure(session, Server(url), PATH, body, clock=time.perf_counter)
                for _ in range(150)
            ]
            return await asyncio.gather(*one)

    assert all(result.ok for result in asyncio.run(main()))
