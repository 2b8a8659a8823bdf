"""Batch files: their checks, and each line's answer by the whole application."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.core.errors import ConfigError, EngineDeadError
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.app import build_app
from hetero_llm.server.batch import BatchCounts, check_batch_file, run_batch
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def written(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(one if isinstance(one, bytes) else one.encode() for one in lines))
    return path


def answers(
    engine: FakeEngine, path: Path, *, concurrency: int = 4
) -> tuple[BatchCounts, dict[str, Any], int]:
    """The counts, the results by custom_id, and how often `answered` was called."""
    output, called = io.BytesIO(), []

    async def run() -> BatchCounts:
        app = build_app(engine, ServerSettings())
        try:
            return await run_batch(
                app, path, output, concurrency=concurrency, answered=lambda: called.append(1),
                check_health=engine.check_health,
            )  # fmt: skip
        finally:
            app.state.context.tokenizer.close()

    counts = asyncio.run(run())
    results = [json.loads(one) for one in output.getvalue().splitlines()]
    assert len({one["id"] for one in results}) == len(results)
    return counts, {one["custom_id"]: one for one in results}, len(called)


def test_every_route_and_every_mistake_is_a_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        line("completion", prompt="a b", max_tokens=2),
        "",
        line("responses", "/v1/responses", input="a", max_output_tokens=2),
        line("messages", "/v1/messages?beta=true", messages=[{"role": "user", "content": "a"}],
             max_tokens=2),
        line("tokens", "/tokenize", prompt="a b"),
        line("wrong", prompt="a b", temperature=9),
        line("wrong message", "/v1/messages", max_tokens=2),
        line("no route", "/v1/nothing"),
        line("model", prompt="a", model="other"),
        line("stream", prompt="a", stream=True),
    )  # fmt: skip
    assert check_batch_file(path) == 9
    counts, found, called = answers(FakeEngine(tokenizer), path)
    assert (counts.answered, counts.failed, called) == (9, 5, 9)
    for name in ("completion", "responses", "messages", "tokens"):
        assert found[name]["response"]["status_code"] == 200 and found[name]["error"] is None
        assert found[name]["response"]["request_id"]
    assert found["completion"]["response"]["body"]["choices"][0]["text"] == "a b"
    assert found["responses"]["response"]["body"]["object"] == "response"
    assert found["messages"]["response"]["body"]["role"] == "assistant"
    assert found["tokens"]["response"]["body"]["count"] == 2
    for name, status, code in (
        ("wrong", 400, "invalid_value"), ("wrong message", 400, "invalid_request_error"),
        ("no route", 404, "not_found"), ("model", 404, "model_not_found"),
        ("stream", 400, "unsupported_parameter"),
    ):  # fmt: skip
        one = found[name]
        assert (one["response"]["status_code"], one["error"]["code"]) == (status, code)
        assert one["error"]["message"] == one["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_run_at_once(tokenizer: Tokenizer, tmp_path: Path, concurrency: int) -> None:
    most = 0

    def script(prompt: list[int], sequence: int, position: int) -> int:
        nonlocal most
        most = max(most, engine.num_live)
        return prompt[0]

    engine = FakeEngine(tokenizer, script=script, delay=0.001)
    lines = [line(str(number), prompt="a", max_tokens=3) for number in range(12)]
    counts, found, _ = answers(engine, written(tmp_path, *lines), concurrency=concurrency)
    assert counts == BatchCounts(12, 0) and len(found) == 12
    assert most == concurrency


def test_a_request_that_fails_is_an_error_of_its_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, line("a", prompt="a"), line("b", prompt="b"))
    counts, found, _ = answers(FakeEngine(tokenizer, fail_after=1), path)
    assert counts == BatchCounts(2, 2)
    assert {one["error"]["code"] for one in found.values()} == {"generation_failed"}


def test_a_dead_engine_ends_the_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, *(line(str(number), prompt="a") for number in range(9)))
    engine = FakeEngine(tokenizer, die_after=2)
    with pytest.raises(EngineDeadError):
        answers(engine, path, concurrency=1)
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["nope"], "line 1: is not JSON: "),
        (["", line("a"), "[1]"], "line 3: the body: must be an object, not a list"),
        ([b"\xff\xfe"], "line 1: is not"),
        (['{"custom_id": "a"}'], "line 1: method is required"),
        ([line("a").replace("POST", "GET")], "line 1: method='GET': must be 'POST'"),
        ([line("a", url="v1")], "line 1: url='v1': must be a path"),
        ([line("")], "line 1: custom_id: must have 1 to 512 characters"),
        ([line("x" * 513)], "line 1: custom_id: must have 1 to 512 characters"),
        ([line("a"), line("b"), line("a")], "line 3: custom_id 'a' is that of line 1, too"),
        ([line("a").replace("{}", "[]")], "line 1: body: must be an object"),
        (['{"custom_id": 3, "method": "POST", "url": "/", "body": {}}'],
         "line 1: custom_id: must be a string, not an integer"),
        (["a", "b", "c", "d", "e"], "; 2 more lines are wrong"),
        ([""], "has no requests"),
    ],
)  # fmt: skip
def test_files_that_are_wrong(tmp_path: Path, lines: list[str | bytes], message: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        check_batch_file(path)
    assert message in str(caught.value) and str(path)[-20:] in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        check_batch_file(tmp_path / "nothing.jsonl")


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"input_file='/dev/zero': is a device"):
        check_batch_file(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a pipe, where a regular file is needed"):
        check_batch_file(tmp_path / "pipe")
    with (tmp_path / "long").open("wb") as file:
        file.write(line("a").encode() + b"\n")
        file.truncate(1 << 36)  # takes no room on the disk
    with pytest.raises(ConfigError, match="line 2: is longer than 67108864 bytes"):
        check_batch_file(tmp_path / "long")
