"""Answering the requests of a batch file through the application, without a socket.

A line is OpenAI's: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {}}.
Its request passes through the whole application, so every POST route works, and a mistake in it is
the error of that line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec
from starlette.types import ASGIApp, Message

from hetero_llm.core.errors import ConfigError
from hetero_llm.server.request_parsing import type_mistake
from hetero_llm.utils.files import MIB, as_config_errors, check_regular

_MOST_SHOWN = 3
_MOST_CUSTOM_ID = 512
_MOST_LINE = 64 * MIB
_NOT_STREAMED = {
    "message": "stream: a batch cannot stream; leave it out",
    "type": "invalid_request_error",
    "param": "stream",
    "code": "unsupported_parameter",
}


class BatchLine(msgspec.Struct):
    """A line of the input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct):
    """`body` is the route's answer, that of an error too."""

    status_code: int
    request_id: str
    body: Any


class BatchError(msgspec.Struct):
    code: str | None
    message: str


class BatchResult(msgspec.Struct):
    """A line of the output file. `error` is None for a status of 200."""

    id: str
    custom_id: str
    response: BatchAnswer
    error: BatchError | None


class _Streams(msgspec.Struct):
    stream: Any = None


_LINE = msgspec.json.Decoder(BatchLine)
_STREAMS = msgspec.json.Decoder(_Streams)


@dataclass(slots=True)
class BatchCounts:
    """Lines that were answered, and those of them that were answered with an error."""

    answered: int = 0
    failed: int = 0


def check_batch_file(path: Path) -> int:
    """Checks every line but for its body's fields; returns the number of requests.

    Raises:
        ConfigError: the file cannot be read, or has lines that are no requests; it names them by
            their numbers.
    """
    seen: dict[str, int] = {}
    wrong: list[str] = []
    num_wrong = 0
    for number, text in _numbered_lines(path):
        reason = _mistake(text, number, seen)
        if reason is not None:
            num_wrong += 1
            if len(wrong) < _MOST_SHOWN:
                wrong.append(f"line {number}: {reason}")
    if num_wrong > len(wrong):
        wrong.append(f"{num_wrong - len(wrong)} more lines are wrong")
    if wrong:
        raise ConfigError("input_file", str(path), "; ".join(wrong))
    if not seen:
        raise ConfigError("input_file", str(path), "has no requests")
    return len(seen)


async def run_batch(
    app: ASGIApp,
    path: Path,
    output: BinaryIO,
    *,
    concurrency: int,
    answered: Callable[[], None],
    check_health: Callable[[], object],
) -> BatchCounts:
    """Answers all lines of a file that `check_batch_file` has found right.

    Results are written as they come, so their order is not that of the requests.

    Args:
        output: where each result becomes a line.
        concurrency: requests that run at once.
        answered: called after each result.
        check_health: raises EngineDeadError, which ends the batch, if the engine cannot go on.

    Raises:
        EngineDeadError: the results of the lines before are in `output`.
    """
    counts = BatchCounts()
    lines = _requests(path)

    async def work() -> None:
        for line in lines:
            result = await _result(app, line)
            if result.error is not None:
                check_health()
                counts.failed += 1
            counts.answered += 1
            output.write(msgspec.json.encode(result) + b"\n")
            output.flush()
            answered()

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return counts


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers.

    Raises:
        ConfigError: it cannot be read, is a pipe or a device, or has a line that is too long.
    """
    with as_config_errors("input_file", path):
        check_regular(path)  # it is read twice
        with path.open("rb") as file:
            number = 0
            while text := file.readline(_MOST_LINE + 1):
                number += 1
                if len(text) > _MOST_LINE:
                    reason = f"line {number}: is longer than {_MOST_LINE} bytes"
                    raise ConfigError("input_file", str(path), reason)
                if text.strip():
                    yield number, text


def _mistake(text: bytes, number: int, seen: dict[str, int]) -> str | None:
    """What is wrong with a line, None if nothing is. `seen`: lines by their custom_id."""
    try:
        line = _LINE.decode(text)
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text (byte {error.start})"
    except msgspec.ValidationError as error:
        return type_mistake(str(error)).message
    except (msgspec.DecodeError, RecursionError) as error:
        return f"is not JSON: {str(error)[:200]}"
    if not 0 < len(line.custom_id) <= _MOST_CUSTOM_ID:
        return f"custom_id: must have 1 to {_MOST_CUSTOM_ID} characters"
    if line.custom_id in seen:
        return f"custom_id {line.custom_id[:64]!r} is that of line {seen[line.custom_id]}, too"
    seen[line.custom_id] = number
    if line.method != "POST":
        return f"method={line.method[:16]!r}: must be 'POST'"
    if not line.url.startswith("/"):
        return f"url={line.url[:64]!r}: must be a path, such as '/v1/chat/completions'"
    if not bytes(line.body).lstrip().startswith(b"{"):
        return "body: must be an object"
    return None


def _requests(path: Path) -> Iterator[BatchLine]:
    for _, text in _numbered_lines(path):
        yield _LINE.decode(text)


async def _result(app: ASGIApp, line: BatchLine) -> BatchResult:
    body = bytes(line.body)
    if _wants_stream(body):
        status, request_id, answer = 400, uuid4().hex, {"error": _NOT_STREAMED}
    else:
        status, request_id, content = await _post(app, line.url, body)
        answer = _content(content)
    error = None if status == 200 else _error(answer, status)
    response = BatchAnswer(status, request_id, answer)
    return BatchResult(f"batch_req_{uuid4().hex}", line.custom_id, response, error)


def _wants_stream(body: bytes) -> bool:
    try:
        return _STREAMS.decode(body).stream not in (None, False, "false")
    except (msgspec.MsgspecError, RecursionError):
        return False  # the route will say what is wrong


def _content(content: bytes) -> Any:
    """The body of an answer: JSON as it is, all else as a text."""
    with suppress(msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(content)
    return content.decode("utf-8", "replace")


def _error(answer: Any, status: int) -> BatchError:
    found = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(found, dict):
        return BatchError(None, f"status {status}")
    return BatchError(found.get("code", found.get("type")), str(found.get("message")))


async def _post(app: ASGIApp, url: str, body: bytes) -> tuple[int, str, bytes]:
    """Sends one request through the application; returns status, request id and body."""
    path, _, query = url.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (b"host", b"batch"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
    }
    bodies = iter([body])
    status, headers = 0, {}
    chunks: list[bytes] = []

    async def receive() -> Message:
        for part in bodies:
            return {"type": "http.request", "body": part, "more_body": False}
        # The application waits here for a client that hangs up: this one never does.
        await asyncio.Event().wait()
        raise AssertionError("an event that is never set was set")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers.get(b"x-request-id", b"").decode(), b"".join(chunks)
