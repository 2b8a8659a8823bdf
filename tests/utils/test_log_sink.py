"""Log lines: one for each record whatever is in them, no secrets, and nobody waits."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import threading

import pytest

from hetero_llm.utils.log_sink import FORMATS, REQUEST_ID, LineFormatter, Pump, Sink, lost_notice

EVIL = 'a\n2026-01-01T00:00:00.000Z ERROR api: forged\r\x1b[31m "quoted" \u2028 \x85 \ud800 \x00'
LIMIT = 120.0  # seconds; only a hang comes near


def record(message: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("hetero_llm.x", level, "x.py", 1, message, args, None)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_record_is_one_line_whatever_a_user_wrote(kind: str) -> None:
    line = LineFormatter(kind, "api").format(record("request %s", EVIL))
    assert len(line.splitlines()) == 1 and "\x1b" not in line and "\x00" not in line
    if kind == "json":
        found = json.loads(line)
        assert found["message"] == f"request {EVIL}"
        assert found.keys() == {"ts", "level", "logger", "process", "message"}
        assert (found["level"], found["logger"]) == ("INFO", "hetero_llm.x")
        assert found["ts"].endswith("Z") and len(found["ts"]) == len("2026-11-22T00:00:00.000Z")
    else:
        assert r"a\n2026" in line and r"\u2028" in line and r"\x1b[31m" in line


def test_an_exception_is_in_the_line_or_indented_below_it() -> None:
    try:
        raise ValueError(f"bad {EVIL}")
    except ValueError:
        one = record("failed")
        one.exc_info = sys.exc_info()
    head, *rest = LineFormatter("text", "engine").format(one).split("\n")
    assert head.endswith("INFO engine: failed")
    assert len(rest) > 2 and all(line.startswith("    ") for line in rest)
    line = LineFormatter("json", "engine").format(one)
    assert "\n" not in line and "ValueError: bad a\n2026" in json.loads(line)["exception"]


def test_the_request_is_named() -> None:
    token = REQUEST_ID.set("id-7")
    try:
        assert json.loads(LineFormatter("json", "api").format(record("a")))["request_id"] == "id-7"
        text = LineFormatter("text", "api")
        assert text.format(record("a")).endswith("api: a (request id-7)")
        assert text.format(record("request id-7: a")).endswith("api: request id-7: a")
    finally:
        REQUEST_ID.reset(token)
    assert "request_id" not in json.loads(LineFormatter("json", "api").format(record("a")))
    given = record("a")
    given.request_id = "id-8"
    assert json.loads(LineFormatter("json", "api").format(given))["request_id"] == "id-8"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "GET /v1/models?api_key=hidden1&x=1",
        "Authorization: Bearer hidden1",
        "authorization=hidden1",
        "{'api-key': 'hidden1'}",
        "the key sk-known, sk-known-and-longer and 'a+b'",
    ],
)
def test_keys_are_not_shown(kind: str, text: str) -> None:
    formatter = LineFormatter(kind, "api", ["sk-known", "sk-known-and-longer", "a+b", ""])
    line = formatter.format(record("%s", text))
    assert "***" in line
    for secret in ("hidden1", "known", "a+b", "longer"):
        assert secret not in line


def test_words_that_hold_a_key_stay() -> None:
    line = LineFormatter("text", "api", ["key"]).format(record("keys of a monkey, key"))
    assert line.endswith("keys of a monkey, ***")


def test_nobody_waits_for_a_reader_that_does_not_read() -> None:
    """The pipe is full at once; later everything that was kept comes out, and how much was not."""
    reader, writer = os.pipe()
    pump = Pump(writer, lambda lost: f"lost {lost}", most_bytes=100_000)
    sent = 5000
    for number in range(sent):
        pump.put(f"{number} " + "x" * 95)
    assert not pump.flush(0.01)
    data = b""
    while b"lost" not in data:
        data += os.read(reader, 1 << 16)
    while not data.endswith(b"\n"):
        data += os.read(reader, 1 << 16)
    done = threading.Event()

    def drain() -> None:
        nonlocal data
        while piece := os.read(reader, 1 << 16):
            data += piece
        done.set()

    threading.Thread(target=drain, daemon=True).start()
    assert pump.flush(LIMIT)
    pump.put("afterwards")
    pump.close(LIMIT)
    os.close(writer)
    assert done.wait(LIMIT)
    lines = data.decode().splitlines()
    lost = sum(int(line.split()[1]) for line in lines if line.startswith("lost"))
    kept = [int(line.split()[0]) for line in lines if line.endswith("x")]
    assert len(kept) + lost == sent and lost > 0 and len(kept) >= 900
    assert kept == sorted(kept)
    assert lines[-1] == "afterwards"
    os.close(reader)


def test_a_closed_pipe_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    sink = Sink(writer, LineFormatter("text", "api"))
    for number in range(100):
        sink.handle(record("line %d", number))
    sink.flush()
    sink.stop()
    os.close(writer)


def test_a_pipe_that_does_not_block_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    pump = Pump(writer, str)
    for _ in range(3000):
        pump.put("y" * 99)
    data = b""
    while len(data) < 300_000:
        data += os.read(reader, 1 << 16)
    assert data == (b"y" * 99 + b"\n") * 3000
    pump.close()
    os.close(writer)
    os.close(reader)


def test_logging_config_does_not_end_it() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer, LineFormatter("text", "api"))
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    sink.handle(record("still here"))
    sink.flush()
    assert os.read(reader, 4096).endswith(b"still here\n")
    sink.stop()
    os.close(writer)
    os.close(reader)


def test_a_wrong_record_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    sink = Sink(writer, LineFormatter("json", "api"))
    sink.handle(record("%d", "no number"))
    sink.flush()
    found = json.loads(os.read(reader, 4096))
    assert found["level"] == "ERROR" and "cannot be shown" in found["message"]
    assert capfd.readouterr().err == ""
    sink.stop()
    os.close(writer)
    os.close(reader)


def test_the_notice_of_lost_lines_has_the_logs_form() -> None:
    found = json.loads(lost_notice(LineFormatter("json", "api"), 12))
    assert found["level"] == "WARNING" and found["message"].startswith("12 lines were lost")
