"""The router before servers that fail in every way, seen from clients."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.server.router.replicas import PATIENCE, Routed, Seen, answer, routed, until

LONG = "def add(a, b): return a + b\n" * 100


def run(test: object) -> None:
    asyncio.run(test)  # type: ignore[arg-type]


def test_a_request_passes_with_its_key_and_without_the_connections_own_headers() -> None:
    async def test() -> None:
        async with routed(1) as routed_:
            headers = {
                "authorization": "Bearer secret",
                "x-mine": "1",
                "connection": "keep-alive, x-mine",
                "te": "trailers",
                "x-forwarded-for": "10.0.0.9",
            }
            found = await routed_.post(headers=headers, params={"a": "b c"})
            assert (found.status_code, found.text) == (200, "r0")
            (seen,) = routed_.replicas[0].seen
            assert (seen.method, seen.target) == ("POST", "/v1/completions?a=b+c")
            assert json.loads(seen.body) == {"prompt": "x"}
            assert seen.header("authorization") == "Bearer secret"
            assert seen.header("host") == f"127.0.0.1:{routed_.replicas[0].port}"
            assert seen.header("x-forwarded-for") == "10.0.0.9, 127.0.0.1"
            assert seen.header("x-mine") is None and seen.header("te") is None
            assert seen.header("connection") is None

    run(test())


def test_status_headers_and_body_of_an_answer_pass() -> None:
    async def test() -> None:
        async with routed(1) as routed_:

            async def refuse(seen: Seen, writer: asyncio.StreamWriter) -> None:
                more = "x-request-id: 7\r\nretry-after: 3\r\nkeep-alive: timeout=5\r\n"
                writer.write(answer(b"no", status="429 Too Many Requests", headers=more))

            routed_.replicas[0].handler = refuse
            found = await routed_.post()
            assert (found.status_code, found.content) == (429, b"no")
            assert found.headers["x-request-id"] == "7" and found.headers["retry-after"] == "3"
            assert "keep-alive" not in found.headers
            assert routed_.metric("answers_total", 'status="4xx"') == 1

    run(test())


def test_events_of_a_stream_pass_as_they_come() -> None:
    async def test() -> None:
        async with routed(1) as routed_:
            go_on = asyncio.Event()

            async def stream(seen: Seen, writer: asyncio.StreamWriter) -> None:
                head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
                writer.write(b"9\r\ndata: 1\n\n\r\n")
                await go_on.wait()
                writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

            routed_.replicas[0].handler = stream
            async with routed_.http.stream("POST", "/v1/completions", json={}) as found:
                assert found.headers["content-type"] == "text/event-stream"
                pieces = found.aiter_raw()
                assert await anext(pieces) == b"data: 1\n\n"
                go_on.set()
                assert await anext(pieces) == b"data: 2\n\n"
                assert [piece async for piece in pieces] == []

    run(test())


def test_a_body_that_ends_with_the_connection() -> None:
    async def test() -> None:
        async with routed(1) as routed_:

            async def close(seen: Seen, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\nwhole")
                await writer.drain()
                writer.close()

            routed_.replicas[0].handler = close
            assert (await routed_.post()).text == "whole"
            assert (await routed_.post()).text == "whole"

    run(test())


def test_bodiless_answers() -> None:
    async def test() -> None:
        async with routed(1) as routed_:

            async def bodiless(seen: Seen, writer: asyncio.StreamWriter) -> None:
                if seen.method == "HEAD":
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n")
                else:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")

            routed_.replicas[0].handler = bodiless
            found = await routed_.http.head("/v1/models")
            assert (found.status_code, found.headers["content-length"]) == (200, "50")
            found = await routed_.http.delete("/v1/responses/1")
            assert (found.status_code, found.content) == (204, b"")

    run(test())


async def _die(seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def _full(seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b"full", status="503 Service Unavailable"))


async def _nonsense(seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SMTP ready\r\n\r\n")


@pytest.mark.parametrize("failing", [_die, _full, _nonsense])
def test_another_replica_is_asked_before_the_first_byte(failing: object) -> None:
    async def test() -> None:
        async with routed(2) as routed_:
            for replica in routed_.replicas:
                replica.handler = failing  # type: ignore[assignment]
            bad = await routed_.post(LONG)
            assert bad.status_code in (502, 503)
            assert [len(one.seen) for one in routed_.replicas] == [1, 1], "each once"
            routed_.replicas[1].handler = None
            for number in range(8):
                assert (await routed_.post(f"{number}" + LONG)).text == "r1"
            assert routed_.metric("retries_total") >= 1

    run(test())


def test_a_refused_connection_is_retried_elsewhere_and_then_left_out() -> None:
    async def test() -> None:
        async with routed(2, failures=2) as routed_:
            await routed_.replicas[0].stop()
            for number in range(6):
                assert (await routed_.post(f"{number}" + LONG)).text == "r1"
            assert not routed_.router.replicas[0].is_up
            assert routed_.metric("replica_failures_total") == 2, "no more were sent"
            assert routed_.metric("replica_up") == 1

    run(test())


def test_nothing_is_retried_after_the_first_byte() -> None:
    async def test() -> None:
        async with routed(2) as routed_:

            async def half(seen: Seen, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n")
                await writer.drain()
                writer.transport.abort()

            for replica in routed_.replicas:
                replica.handler = half
            with pytest.raises(httpx.RemoteProtocolError):
                await routed_.post()
            assert sum(len(one.seen) for one in routed_.replicas) == 1

    run(test())


def test_a_connection_that_ended_while_idle_is_no_failure() -> None:
    async def test() -> None:
        async with routed(1) as routed_:
            for _ in range(3):
                assert (await routed_.post()).text == "r0"

                async def drop(seen: Seen, writer: asyncio.StreamWriter) -> None:
                    routed_.replicas[0].handler = None  # the request reaches a closing server
                    writer.transport.abort()

                routed_.replicas[0].handler = drop
                assert (await routed_.post()).text == "r0"
            assert routed_.metric("replica_failures_total") == 0

    run(test())


def test_without_a_replica_clients_are_told_to_try_again() -> None:
    async def test() -> None:
        async with routed(1) as routed_:
            routed_.router.replicas[0].is_up = False
            found = await routed_.post()
            assert found.status_code == 503 and found.headers["retry-after"] == "1"
            assert found.json()["error"]["code"] == "no_replica"
            anthropic = await routed_.http.post("/v1/messages", json={})
            assert anthropic.json()["type"] == "error"
            assert (await routed_.http.get("/health")).status_code == 503
            assert (await routed_.http.get("/ready")).status_code == 503
            assert (await routed_.http.get("/live")).status_code == 200

    run(test())


def test_probes_leave_replicas_out_and_take_them_back() -> None:
    async def test() -> None:
        async with routed(2, health_seconds=0.2, failures=1) as routed_:

            async def check_answers(name: str) -> None:
                """This one and never the other; a late probe may leave both out for a while."""
                while (found := await routed_.post()).status_code == 503:
                    await asyncio.sleep(0.001)
                assert found.text == name

            watching = asyncio.create_task(routed_.router.watch())
            routed_.replicas[0].healthy = False
            await until(lambda: not routed_.router.replicas[0].is_up)
            await check_answers("r1")
            routed_.replicas[0].healthy = True
            await until(lambda: routed_.router.replicas[0].is_up)
            await routed_.replicas[1].stop()
            await until(lambda: not routed_.router.replicas[1].is_up)
            await check_answers("r0")
            await routed_.replicas[1].start()
            await until(lambda: routed_.router.replicas[1].is_up)
            watching.cancel()

    run(test())


def test_equal_beginnings_go_together_and_a_session_stays() -> None:
    async def test() -> None:
        async with routed(2) as routed_:
            home = {}
            for group in "ab":
                home[group] = (await routed_.post(group * 3000)).text
            assert set(home.values()) == {"r0", "r1"}
            for number in range(6):
                for group in "ab":
                    assert (await routed_.post(group * 3000 + str(number))).text == home[group]
            assert routed_.metric("prefix_pieces_matched_total") > 0
            first = (await routed_.post("short", headers={"x-session-id": "chat"})).text
            for number in range(4):
                again = await routed_.post(f"other {number}", headers={"x-session-id": "chat"})
                assert again.text == first

    run(test())


def test_a_client_that_leaves_ends_its_request() -> None:
    async def test() -> None:
        async with routed(1) as routed_:

            async def wait(seen: Seen, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
                await asyncio.Event().wait()

            async def silent(seen: Seen, writer: asyncio.StreamWriter) -> None:
                await asyncio.Event().wait()

            for count, handler in enumerate((wait, silent), 1):
                routed_.replicas[0].handler = handler
                _, writer = await asyncio.open_connection("127.0.0.1", routed_.port)
                writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
                await until(lambda count=count: len(routed_.replicas[0].seen) == count)
                writer.close()
                await until(lambda count=count: routed_.replicas[0].num_lost == count)
            assert routed_.metric("requests_running") == 0

    run(test())


def test_a_slow_client_holds_its_replica_back() -> None:
    async def test() -> None:
        async with routed(1) as routed_:
            sent = 0
            whole = 64 << 20

            async def much(seen: Seen, writer: asyncio.StreamWriter) -> None:
                nonlocal sent
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {whole}\r\n\r\n".encode())
                while sent < whole:
                    writer.write(bytes(1 << 16))
                    sent += 1 << 16
                    await writer.drain()

            routed_.replicas[0].handler = much
            reader, writer = await asyncio.open_connection("127.0.0.1", routed_.port)
            writer.write(b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            before = -1
            while before != sent:  # nobody reads: the flow comes to rest
                before = sent
                for _ in range(50):
                    await asyncio.sleep(0.001)
            assert sent < whole // 2
            got = 0
            while got < whole:
                got += len(await asyncio.wait_for(reader.read(1 << 20), PATIENCE))
            writer.close()
            assert got == sent == whole

    run(test())


def test_what_changes_a_server_reaches_all() -> None:
    async def test() -> None:
        async with routed(3) as routed_:
            found = await routed_.http.post("/v1/load_lora_adapter", json={"lora_name": "a"})
            assert found.status_code == 200
            assert [len(one.seen) for one in routed_.replicas] == [1, 1, 1]
            assert all(one.seen[0].body == found.request.content for one in routed_.replicas)

            async def refuse(seen: Seen, writer: asyncio.StreamWriter) -> None:
                writer.write(answer(b'{"error": 1}', status="400 Bad Request"))

            routed_.replicas[1].handler = refuse
            found = await routed_.http.post("/v1/load_lora_adapter", json={})
            assert (found.status_code, found.json()) == (400, {"error": 1})
            await routed_.replicas[2].stop()
            routed_.replicas[1].handler = None
            found = await routed_.http.post("/reset_prefix_cache")
            assert found.status_code == 502 and "others have done it" in found.text

    run(test())


def test_own_pages() -> None:
    async def test() -> None:
        async with routed(2) as routed_:
            await routed_.post()
            text = (await routed_.http.get("/metrics")).text
            assert 'hetero_llm:router_answers_total{replica="127.0.0.1:' in text
            shown = (await routed_.http.get("/router/replicas")).json()
            assert [one["up"] for one in shown] == [True, True]
            assert (await routed_.http.get("/v1/models")).text in ("r0", "r1")

    run(test())


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"GET http://other/ HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"CONNECT other:80 HTTP/1.1\r\nhost: a\r\n\r\n", 501),
        (b"BREW / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"TRACE / HTTP/1.1\r\nhost: a\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: 1\r\n folded\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 101\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n80\r\n" + bytes(128), 413),
        (b"GET / HTTP/1.1\r\n" + b"x: 1\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 431),
    ],
)  # fmt: skip
def test_what_is_no_request_reaches_no_replica(request_: bytes, status: int) -> None:
    async def test() -> None:
        async with routed(1, body_bytes=100) as routed_:
            found = await routed_.raw(request_)
            assert found.startswith(b"HTTP/1.1 %d " % status), found
            assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert not routed_.replicas[0].seen

    run(test())


def test_requests_sent_ahead_are_answered_in_order() -> None:
    async def test() -> None:
        async with routed(1) as routed_:

            async def echo(seen: Seen, writer: asyncio.StreamWriter) -> None:
                writer.write(answer(seen.body))

            routed_.replicas[0].handler = echo
            one = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n%d"
            last = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 1\r\n\r\n3"
            found = await routed_.raw(one % 1 + one % 2 + last + one % 4)
            assert [part[:1] for part in found.split(b"\r\n\r\n")[1:]] == [b"1", b"2", b"3"]

    run(test())


def test_an_offer_of_another_protocol_is_declined() -> None:
    async def test() -> None:
        async with routed(1) as routed_:
            found = await routed_.raw(
                b"GET /x HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
            )
            assert found.startswith(b"HTTP/1.1 200") and found.endswith(b"r0")
            assert routed_.replicas[0].seen[0].header("upgrade") is None

    run(test())


def test_older_clients_and_those_that_wait() -> None:
    async def test() -> None:
        async with routed(1) as routed_:

            async def chunked(seen: Seen, writer: asyncio.StreamWriter) -> None:
                head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
                writer.write(head + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")

            routed_.replicas[0].handler = chunked
            found = await routed_.raw(b"GET / HTTP/1.0\r\n\r\n")
            assert found.endswith(b"\r\n\r\nabc") and b"chunked" not in found
            reader, writer = await asyncio.open_connection("127.0.0.1", routed_.port)
            writer.write(
                b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
            )
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
            assert routed_.replicas[0].seen[-1].header("expect") is None

    run(test())


def test_draining_ends_idle_connections_now_and_others_with_their_answers() -> None:
    async def test() -> None:
        async with routed(1) as routed_:
            go_on = asyncio.Event()

            async def wait(seen: Seen, writer: asyncio.StreamWriter) -> None:
                await go_on.wait()
                writer.write(answer(b"late"))

            await _idle_and_busy(routed_, wait, go_on)

    run(test())


async def _idle_and_busy(routed_: Routed, wait: object, go_on: asyncio.Event) -> None:
    idle, _ = await asyncio.open_connection("127.0.0.1", routed_.port)
    routed_.replicas[0].handler = wait  # type: ignore[assignment]
    busy = asyncio.create_task(routed_.post())
    await until(lambda: routed_.router.num_busy == 1)
    routed_.router.start_draining()
    assert await asyncio.wait_for(idle.read(), PATIENCE) == b""
    assert not busy.done()
    go_on.set()
    found = await busy
    assert found.text == "late" and found.headers["connection"] == "close"
    await until(lambda: routed_.router.num_busy == 0)


def test_connections_have_a_limit() -> None:
    async def test() -> None:
        async with routed(1, connections=1) as routed_:
            assert (await routed_.post()).text == "r0"  # its connection stays open
            assert await routed_.raw(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n") == b""
            assert routed_.metric("refused_total") == 1

    run(test())
