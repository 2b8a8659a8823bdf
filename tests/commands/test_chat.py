"""`hetero-llm chat` and `complete`, with injected input, with pipes and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hetero_llm import cli
from hetero_llm.bench_client.errors import ServerError
from hetero_llm.commands import chat
from hetero_llm.commands.chat import CHAT_SAMPLING, Answer, LocalModel, converse
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from hetero_llm.core.sampling_params import SamplingParams
from tests.bench_client.scripted_server import (
    Reply,
    Request,
    choice,
    model_script,
    serving_beside,
    words,
)


class Echo:
    """Answers with the number of messages; fails on "fail", is interrupted on "long"."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def answer(self, request: Any, write: chat.Write) -> Answer:
        self.requests.append([dict(message) for message in request])
        word = request[-1]["content"]
        if word == "fail":
            raise ServerError("HTTP 503:\nfull")
        text = "" if word == "nothing" else f"{len(request)}!"
        write(text)
        return Answer(text, word == "long", 3, 0.5, 1.5)


def conversation(*lines: str, interactive: bool = True, **options: Any) -> tuple[Echo, str, str]:
    """The model, what it wrote and what was noted."""
    model, written, noted = Echo(), io.StringIO(), io.StringIO()
    left = iter(lines)
    converse(
        model,
        system=options.pop("system", None),
        read=lambda: next(left, None),
        write=written.write,  # type: ignore[arg-type]
        note=lambda line: noted.write(line + "\n") and None,
        interactive=interactive,
        **options,
    )
    return model, written.getvalue(), noted.getvalue()


def roles(messages: list[dict[str, str]]) -> str:
    return " ".join(message["role"][0] + ":" + message["content"] for message in messages)


def test_history_grows() -> None:
    model, written, _ = conversation("hello", "  ", "more", system="be brief")
    assert [roles(request) for request in model.requests] == [
        "s:be brief u:hello",
        "s:be brief u:hello a:2! u:more",
    ]
    assert written == "2!\n4!\n"


def test_reset_keeps_the_system_prompt() -> None:
    model, _, noted = conversation("hello", "/reset", "again", system="be brief")
    assert roles(model.requests[1]) == "s:be brief u:again"
    assert "forgotten" in noted


@pytest.mark.parametrize("word", ["/quit", "/exit", " /quit "])
def test_quit(word: str) -> None:
    assert len(conversation("hello", word, "more")[0].requests) == 1


def test_help_unknown_commands_and_paths() -> None:
    model, _, noted = conversation("/help", "/restet now", "/usr/bin is what?")
    assert noted.splitlines()[0] == chat.HELP
    assert noted.splitlines()[1].startswith("no such command: /restet")
    assert roles(model.requests[0]) == "u:/usr/bin is what?"


def test_an_error_takes_its_question_back() -> None:
    model, _, noted = conversation("hello", "fail", "more")
    assert noted == "error: HTTP 503: full\n"
    assert roles(model.requests[2]) == "u:hello a:1! u:more"
    with pytest.raises(ServerError):
        conversation("fail", interactive=False)


def test_an_interrupted_answer_stays_in_the_conversation() -> None:
    model, _, _ = conversation("long", "nothing", "more")
    assert roles(model.requests[2]) == "u:long a:1! u:more"  # an empty answer leaves no turn
    with pytest.raises(KeyboardInterrupt):
        conversation("long", interactive=False)


def test_stats() -> None:
    assert conversation("hi", stats=True)[2] == (
        "first text after 500 ms, 3 tokens, 2.0 tokens/s\n"
    )
    assert Answer("x", False, None, 0.25, 0.25).stats() == "first text after 250 ms"
    assert Answer("x", False, 1, 0.25, 0.25).stats() == "first text after 250 ms, 1 tokens"


# over HTTP


def through_pipe(monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str = "") -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli.main(arguments)


def test_chat_with_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Request] = []
    with serving_beside(model_script(words, seen=seen)) as url:
        arguments = ["chat", "--url", url, "--system", "s", "--temperature", "0.5", "--seed", "3",
                     "--stop", "x", "--stop", "y", "--stats"]  # fmt: skip
        assert through_pipe(monkeypatch, arguments, "hello\n\nmore") == 0
    output = capsys.readouterr()
    assert output.out == "w0 w1 w2 \nw0 w1 w2 \n"
    assert output.err.count(" ms, 3 tokens") == 2
    assert [request.path for request in seen].count("/v1/models") == 1
    first, second = (request.body for request in seen if "chat" in request.path)
    assert roles(second["messages"]) == "s:s u:hello a:w0 w1 w2  u:more"
    assert (first["model"], first["temperature"], first["seed"]) == ("org/name", 0.5, 3)
    assert first["stop"] == ["x", "y"]
    assert "max_tokens" not in first


def test_one_quick_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Request] = []
    with serving_beside(model_script(words, seen=seen)) as url:
        assert through_pipe(monkeypatch, ["chat", "--url", url, "--quick", "hi"], "unread") == 0
        assert through_pipe(monkeypatch, ["complete", "--url", url, "--quick", "once"]) == 0
    assert capsys.readouterr().out.startswith("w0 w1 w2 \nw0 ")
    chat, complete = (request.body for request in seen if "completions" in request.path)
    assert roles(chat["messages"]) == "u:hi"
    assert complete["prompt"] == "once"
    assert cli.main(["chat", "--quick", " "]) == 2


def test_the_short_flag_of_a_quick_message_is_vllms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Request] = []
    with serving_beside(model_script(words, seen=seen)) as url:
        assert through_pipe(monkeypatch, ["chat", "--url", url, "-q", "hi"], "unread") == 0
        assert through_pipe(monkeypatch, ["complete", "--url", url, "-q", "once"]) == 0
    chat, complete = (request.body for request in seen if "completions" in request.path)
    assert (roles(chat["messages"]), complete["prompt"]) == ("u:hi", "once")
    assert cli.main(["chat", "--url", url, "--quantization", "int4"]) == 2
    assert "quantization='int4': needs --model" in capsys.readouterr().err


def test_complete_with_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Request] = []
    with serving_beside(model_script(words, seen=seen)) as url:
        common = ["complete", "--url", url, "--model-name", "mine"]
        assert through_pipe(monkeypatch, [*common, "Once upon", "--max-tokens", "2"]) == 0
        assert through_pipe(monkeypatch, [*common, "--max-tokens", "1"], "from a pipe\n") == 0
        assert through_pipe(monkeypatch, [*common, "--prompt", "flag"]) == 0
    assert capsys.readouterr().out.startswith("w0 w1 \nw0 \nw0 ")
    assert [request.body["prompt"] for request in seen] == ["Once upon", "from a pipe\n", "flag"]
    assert [request.body["max_tokens"] for request in seen] == [2, 1, 256]
    assert {request.body["model"] for request in seen} == {"mine"}


def test_an_error_in_the_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(request: Request, reply: Reply) -> None:
        reply.head()
        reply.event({"choices": [choice("text", "half", None)]})
        reply.event({"error": {"message": "the engine died"}})
        reply.end()

    with serving_beside(model_script(broken)) as url:
        assert through_pipe(monkeypatch, ["complete", "--url", url, "x"]) == 1
    output = capsys.readouterr()
    assert output.out == "half"
    assert "the engine died" in output.err


@pytest.mark.parametrize("command", [["chat"], ["chat", "--model-name", "m"], ["complete", "x"]])
def test_nobody_answers(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound and not listening: a connection is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert through_pipe(monkeypatch, [*command, "--base-url", url]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert f"cannot connect to {url}: Connection refused" in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["complete"], "no prompt: give an argument, --prompt or standard input"),
        (["complete", "a", "b", "--prompt", "c"], "[MODEL] PROMPT, got 'a', 'b', 'c': quote"),
        (["chat", "a", "--model", "b"], "model='b': contradicts the first argument, 'a'"),
        (["complete", "a", "--dtype", "float32"], "dtype='float32': needs --model"),
        (["chat", "--chat-template", "x"], "chat_template='x': needs --model"),
        (["chat", "--model", "m", "--port", "80"], "port=80: is for servers, not for --model"),
        (["chat", "--model", "m", "--chat-template", "/nowhere"], "chat_template='/nowhere'"),
        (["complete", "a", "--url", "nowhere"], "must be like http://127.0.0.1:8000"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hetero_llm.engine.llm.LLM", FakeLLM)
    assert through_pipe(monkeypatch, arguments) == 2
    assert message in capsys.readouterr().err


# in this process


class FakeLLM:
    """Streams a text one character at a time."""

    text = "a é"
    default_sampling: dict[str, Any] = {"top_p": 0.5}

    def __init__(self, **engine_args: Any) -> None:
        self.args = resolve_engine_args(engine_args)
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.closed_streams = 0
        self.at: Any = lambda length: None

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def get_tokenizer(self) -> object:
        return object()

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params.append(params)
        try:
            for length in range(1, len(self.text) + 1):
                self.at(length)
                one = CompletionOutput(0, self.text[:length], list(range(length)))
                yield RequestOutput("0", None, [1], None, [one], False)
        finally:
            self.closed_streams += 1


@pytest.mark.parametrize(
    "words", [("hi", "--model", "m"), ("m", "hi"), ("m", "--prompt", "hi")], ids=" ".join
)
def test_complete_in_this_process(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[FakeLLM] = []

    def make(**args: Any) -> FakeLLM:
        made.append(FakeLLM(**args))
        return made[-1]

    monkeypatch.setattr("hetero_llm.engine.llm.LLM", make)
    arguments = ["complete", *words, "--dtype", "float32", "--top-k", "4", "--stats"]
    assert cli.main(arguments) == 0
    output = capsys.readouterr()
    assert output.out == "a é\n"
    assert "3 tokens" in output.err
    assert made[0].prompts == ["hi"]
    assert (made[0].params[0].max_tokens, made[0].params[0].top_k) == (256, 4)
    assert (made[0].args["model"], made[0].args["dtype"]) == ("m", "float32")


@pytest.mark.parametrize(
    ("stated", "flags", "expected"),
    [
        ({}, (), {**CHAT_SAMPLING, "max_tokens": None}),
        ({"max_tokens": 9}, (), {**CHAT_SAMPLING, "max_tokens": 9}),
        ({"top_p": 0.5}, (), {"top_p": 0.5, "temperature": 1.0, "top_k": -1, "min_p": 0.0}),
        ({}, ("--temperature", "1.5"), {**CHAT_SAMPLING, "temperature": 1.5}),
        ({"top_p": 0.5}, ("--top-k", "3"), {"top_p": 0.5, "top_k": 3, "temperature": 1.0}),
        ({}, ("--generation-config", "vllm"), {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}),
    ],
)
def test_a_conversation_samples_as_the_model_or_the_command_says(
    stated: dict[str, Any],
    flags: tuple[str, ...],
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[FakeLLM] = []

    def make(**args: Any) -> FakeLLM:
        made.append(FakeLLM(**args))
        made[0].default_sampling = stated
        return made[0]

    def rendered(tokenizer: Any, messages: Any, **rest: Any) -> list[int]:
        return [1]

    monkeypatch.setattr("hetero_llm.engine.llm.LLM", make)
    monkeypatch.setattr("hetero_llm.engine.text.tokenizer.Tokenizer.__init__", lambda *_: None)
    monkeypatch.setattr("hetero_llm.engine.text.tokenizer.Tokenizer.apply_chat_template", rendered)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert cli.main(["chat", "m", *flags]) == 0
    found = made[0].params[0]
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_help_says_how_a_conversation_samples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["chat", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for name, value in CHAT_SAMPLING.items():
        assert f"{name} {value}" in words


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_step() -> None:
    llm = FakeLLM(model="m")
    reached = []

    def at(length: int) -> None:
        if length == 2:
            signal.raise_signal(signal.SIGINT)
            reached.append(length)  # the step went on to its end

    llm.at = at
    answer = LocalModel(llm, SamplingParams(), None).answer("x", lambda text: None)
    assert (answer.text, answer.interrupted, answer.tokens) == ("a ", True, 2)
    assert (reached, llm.closed_streams) == ([2], 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_demo_model_talks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    common = [
        "--model",
        "demo",
        "--max-model-len",
        "128",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    ]
    question = "import os; import"
    assert cli.main(["complete", f"{question}\n", *common]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n"))
    assert cli.main(["chat", "demo", "--chat-template", str(template), *common[2:]]) == 0
    assert capsys.readouterr().out == expected != "\n"


# on a terminal


class Terminal:
    """A command on a pseudo-terminal; `until` reads on to an expected text."""

    def __init__(self, *arguments: str) -> None:
        self._main, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hetero_llm.cli", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(child)
        self._text = ""

    def until(self, expected: str) -> str:
        while expected not in self._text:
            self._text += os.read(self._main, 4096).decode()
        found, _, self._text = self._text.partition(expected)
        return found

    def type(self, line: str) -> None:
        os.write(self._main, f"{line}\n".encode())

    def close(self) -> int:
        try:
            return self.process.wait()
        finally:
            self.process.kill()
            os.close(self._main)


@pytest.mark.usefixtures("interruptible")
def test_a_terminal_shows_prompt_answer_and_stops_on_interrupt() -> None:
    gone = threading.Event()

    async def endless(request: Request, reply: Reply) -> None:
        if request.body["messages"][-1]["content"] != "forever":
            await words(request, reply)
            return
        reply.head()
        reply.event({"choices": [choice("delta", "on and", None)]})
        await reply.client_left()
        gone.set()

    seen: list[Request] = []
    with serving_beside(model_script(endless, seen=seen)) as url:
        terminal = Terminal("chat", "--url", url)
        try:
            terminal.until("> ")
            terminal.type("hello")
            terminal.until("w0 w1 w2")
            terminal.until("> ")
            terminal.type("forever")
            terminal.until("on and")
            terminal.process.send_signal(signal.SIGINT)
            terminal.until("> ")
            gone.wait()  # the server was told to stop
            terminal.type("still there?")
            terminal.until("w0 w1 w2")
            terminal.until("> ")
            terminal.type("/quit")
        finally:
            code = terminal.close()
    assert code == 0
    assert roles(seen[-1].body["messages"]) == (
        "u:hello a:w0 w1 w2  u:forever a:on and u:still there?"
    )
