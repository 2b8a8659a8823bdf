"""`hetero-llm chat` and `hetero-llm complete`: talk to a model behind a server or in this
process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from hetero_llm.bench_client.errors import ServerError
from hetero_llm.commands.console import EXIT_INTERRUPTED, Finish, llm_class, write
from hetero_llm.commands.options import (
    SERVER_FLAGS,
    add_model_word,
    add_rows,
    chosen_model,
    server_of,
    values_of,
)
from hetero_llm.config.args import add_engine_arguments, add_flags, engine_args_from_namespace
from hetero_llm.config.args_sampling import SAMPLING_ARGS
from hetero_llm.config.args_spec import ArgSpec, Kind, effective, grouped
from hetero_llm.config.args_table import ENGINE_ARGS
from hetero_llm.core.errors import ConfigError, HeteroLLMError
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.utils.files import MIB, read_text

if TYPE_CHECKING:
    from hetero_llm.bench_client.client import Server

Write = Callable[[str], None]
Messages = list[dict[str, str]]

HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C stops an answer"

_COMPLETE_TOKENS = 256
_SAMPLING_NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "ignore_eos",
)
_SAMPLING_ROWS = tuple(row for row in SAMPLING_ARGS if row.name in _SAMPLING_NAMES)
CHAT_SAMPLING: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
"""How `chat` samples from a model in this process that states none of these fields itself. Sampling
from the whole distribution, vLLM's default, lets small models say things that make no sense."""

_WHERE_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Server",
    effective("model_name", Kind.STR, None, "Model to ask the server for (default: its first)."),
)
_SHOW_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Output",
    effective("stats", Kind.BOOL, False, "Say on standard error how fast each answer came."),
)
_CHAT_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Conversation",
    effective("system", Kind.STR, None, "System prompt.", aliases=("system_prompt",)),
    effective("chat_template", Kind.PATH, None, "File with a chat template, for --model."),
    effective("quick", Kind.STR, None, "Message to answer, and to end after.", short=("-q",)),
)
_COMPLETE_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Prompt",
    effective(
        "prompt",
        Kind.STR,
        None,
        "The prompt (default: the argument, or standard input).",
        aliases=("quick",),
        short=("-q",),
    ),
)
_ENGINE_ROWS = tuple(
    replace(row, short=tuple(flag for flag in row.short if flag != "-q")) for row in ENGINE_ARGS
)
"""The engine's, but -q is --quick here, as in vLLM's `chat` and `complete`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. `first` and `seconds`: from sending the request to the first and
    the last text; `tokens` None: number of tokens unknown."""

    text: str
    interrupted: bool
    tokens: int | None
    first: float
    seconds: float

    def stats(self) -> str:
        """One line with times and speed."""
        parts = [f"first text after {self.first * 1e3:.0f} ms"]
        if self.tokens is not None:
            parts.append(f"{self.tokens} tokens")
            if self.tokens > 1 and self.seconds > self.first:
                parts.append(f"{(self.tokens - 1) / (self.seconds - self.first):.1f} tokens/s")
        return ", ".join(parts)


class Model(Protocol):
    """Answers prompts (text) and conversations (messages). Ctrl-C ends an answer, not the
    program."""

    def connect(self) -> None:
        """Raises ServerError if no server answers."""

    def answer(self, request: str | Messages, write: Write) -> Answer: ...


# the commands


def add_chat(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `chat`."""
    add_model_word(parser, "folder or Hugging Face name of a model to run here")
    add_rows(parser, (*_CHAT_FLAGS, *_SHOW_FLAGS))
    stated = ", ".join(f"{name} {value}" for name, value in CHAT_SAMPLING.items())
    _add_common(
        parser,
        f"Defaults are the model's (generation_config.json, or a GGUF file's metadata). If it "
        f"states none of temperature, top_p, top_k and min_p, they are: {stated}. "
        "--generation-config vllm keeps to those below, and a server has its own. An answer ends "
        "with the context length unless --max-tokens says otherwise.",
    )
    parser.usage = "%(prog)s [MODEL | --base-url URL] [options]"
    parser.epilog = f"In the conversation: {HELP}. Without MODEL a server answers."
    finish(parser, run_chat)


def add_complete(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `complete`."""
    parser.add_argument(
        "words",
        metavar="[MODEL] PROMPT",
        nargs="*",
        help="the prompt; before it, or beside --prompt, a model to run here, as --model",
    )
    add_rows(parser, (*_COMPLETE_FLAGS, *_SHOW_FLAGS))
    _add_common(parser, "Defaults that the model states itself go before those below.")
    parser.usage = "%(prog)s [[MODEL] PROMPT] [--base-url URL] [options]"
    parser.epilog = (
        f"Without MODEL a server answers; at most {_COMPLETE_TOKENS} tokens unless --max-tokens "
        "says otherwise."
    )
    finish(parser, run_complete)


def _add_common(parser: argparse.ArgumentParser, sampling_note: str) -> None:
    add_rows(parser, (*SERVER_FLAGS, *_WHERE_FLAGS))
    note = f"{sampling_note} --seed, below, also goes to a server."
    sampling = parser.add_argument_group("Sampling", note)
    for row in _SAMPLING_ROWS:
        add_flags(sampling, row)
    add_engine_arguments(parser, _ENGINE_ROWS)


def run_chat(options: argparse.Namespace) -> int:
    """Runs a conversation until the end of the input or /quit."""
    values = values_of((*_CHAT_FLAGS, *_SHOW_FLAGS), options)
    quick = values["quick"]
    interactive = quick is None and sys.stdin.isatty()
    read = _read_prompted if interactive else _read_line
    if quick is not None:
        if not quick.strip():
            raise ConfigError("quick", quick, "is empty")
        read = partial(next, iter([quick]), None)
    with _open_model(options, {}, values["chat_template"], CHAT_SAMPLING) as model:
        model.connect()
        if interactive:
            write(f"({HELP})\n")
        converse(
            model,
            system=values["system"],
            read=read,
            write=write,
            note=_note,
            interactive=interactive,
            stats=values["stats"],
        )
    return 0


def run_complete(options: argparse.Namespace) -> int:
    """Streams the continuation of one prompt."""
    values = values_of((*_COMPLETE_FLAGS, *_SHOW_FLAGS), options)
    options.model_tag, prompt = _model_and_prompt(options.words, values["prompt"])
    with _open_model(options, {"max_tokens": _COMPLETE_TOKENS}, None) as model:
        answer = model.answer(prompt, write)
    write("\n")
    if values["stats"]:
        _note(answer.stats())
    return EXIT_INTERRUPTED if answer.interrupted else 0


def _model_and_prompt(words: Sequence[str], flag: str | None) -> tuple[str | None, str]:
    """The model, if one is named, and the prompt: the last word, `flag`, or standard input.

    Raises:
        HeteroLLMError: there are too many words, or there is no prompt.
    """
    given = [*words] if flag is None else [*words, flag]
    if not given and not sys.stdin.isatty():
        given = [sys.stdin.read()]
    if len(given) > 2:
        shown = ", ".join(map(repr, given))
        raise HeteroLLMError(f"expected [MODEL] PROMPT, got {shown}: quote a prompt of many words")
    if not given or not given[-1]:
        raise HeteroLLMError("no prompt: give an argument, --prompt or standard input")
    return (given[0] if len(given) > 1 else None), given[-1]


# the conversation


def converse(
    model: Model,
    *,
    system: str | None,
    read: Callable[[], str | None],
    write: Write,
    note: Write,
    interactive: bool,
    stats: bool = False,
) -> None:
    """Reads and answers lines until the end of the input or /quit.

    Args:
        read: returns the next line, None at the end.
        write: shows new text of an answer.
        note: shows a line that is not part of an answer.
        interactive: show an error, drop the question and continue; else raise the error.
    """
    start: Messages = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while (line := read()) is not None:
        word = line.strip()
        if word in ("/quit", "/exit"):
            return
        if word == "/reset":
            messages = list(start)
            note("the conversation is forgotten")
        elif word.startswith("/") and word.split()[0].count("/") == 1:
            note(HELP if word == "/help" else f"no such command: {word.split()[0]} ({HELP})")
        elif word:
            messages.append({"role": "user", "content": line})
            try:
                answer = model.answer(messages, write)
            except HeteroLLMError as error:
                if not interactive:
                    raise
                messages.pop()
                note(f"error: {' '.join(str(error).splitlines())}")
                continue
            write("\n")
            if answer.interrupted and not interactive:
                raise KeyboardInterrupt
            if answer.text:
                messages.append({"role": "assistant", "content": answer.text})
            else:
                messages.pop()  # servers refuse empty messages
            if stats:
                note(answer.stats())


def _read_prompted() -> str | None:
    with suppress(ModuleNotFoundError):
        import readline  # noqa: F401  (gives `input` its line editing)
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _read_line() -> str | None:
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def _note(line: str) -> None:
    sys.stdout.flush()
    print(f"({line})", file=sys.stderr, flush=True)


# models


@contextmanager
def _open_model(
    options: argparse.Namespace,
    defaults: Mapping[str, Any],
    template: str | None,
    unstated: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Model]:
    """The model that MODEL or --model names, in this process; without one that of a server.

    Args:
        defaults: sampling fields, unless the user gives them.
        unstated: sampling fields of a model in this process that states none of these itself.
    """
    given = vars(options)
    sampling = dict(defaults)
    sampling |= {row.name: given[row.name] for row in _SAMPLING_ROWS if row.name in given}
    engine_args = engine_args_from_namespace(options)
    engine_args.pop("model", None)
    name = chosen_model(options)
    rows = (*SERVER_FLAGS, *_WHERE_FLAGS)
    if name is not None:
        for row in rows:
            if row.name in given:
                raise ConfigError(row.name, given[row.name], "is for servers, not for --model")
        with llm_class()(model=name, **engine_args) as llm:
            from hetero_llm.engine.inputs.default_sampling import with_defaults

            own = {"max_tokens": None, **llm.default_sampling}
            if not own.keys() & unstated.keys() and not _keeps_to_vllm(engine_args):
                own |= unstated
            params = SamplingParams(**with_defaults(own, sampling))
            yield LocalModel(llm, params, None if template is None else _file(template))
        return
    if template is not None:
        raise ConfigError("chat_template", template, "needs --model: a server has its own")
    for field, value in engine_args.items():
        if field != "seed":
            raise ConfigError(field, value, "needs --model: without it a server answers")
        sampling["seed"] = value
    values = values_of(rows, options)
    yield ServedModel(server_of(values), values["model_name"], sampling)


def _keeps_to_vllm(engine_args: Mapping[str, Any]) -> bool:
    """Whether the user wants the defaults of `SamplingParams`."""
    return engine_args.get("generation_config") == "vllm"


def _file(name: str) -> str:
    try:
        return read_text(name, most=MIB, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", name, str(error)) from None


class LocalModel:
    """An `LLM` in this process."""

    def __init__(self, llm: Any, params: SamplingParams, template: str | None) -> None:
        self._llm = llm
        self._params = params
        self._template = template

    def connect(self) -> None:
        """The model is in this process."""

    def answer(self, request: str | Messages, write: Write) -> Answer:
        prompt: Any = request if isinstance(request, str) else self._rendered(request)
        begin = first = last = time.perf_counter()
        text, tokens = "", 0
        # Ctrl-C takes effect after a step: inside one it would leave scheduler and device in
        # different states.
        with (
            _collected_interrupts() as interrupts,
            closing(self._llm.stream(prompt, self._params)) as updates,
        ):
            for update in updates:
                grown = update.outputs[0]
                last = time.perf_counter()
                first = last if not tokens else first
                tokens = len(grown.token_ids)
                write(grown.text[len(text) :])
                text = grown.text
                if interrupts:
                    break
        return Answer(text, bool(interrupts), tokens, first - begin, last - begin)

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
        from hetero_llm.engine.text.tokenizer import Tokenizer

        hf_tokenizer = self._llm.get_tokenizer()
        if hf_tokenizer is None:
            raise ConfigError("skip_tokenizer_init", True, "a conversation needs a tokenizer")
        ids = Tokenizer(hf_tokenizer).apply_chat_template(
            messages, chat_template=self._template, add_generation_prompt=True
        )
        return {"prompt_token_ids": ids}


@contextmanager
def _collected_interrupts() -> Iterator[list[int]]:
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


class ServedModel:
    """A model behind an OpenAI-compatible server; `model` None: the first one it offers."""

    def __init__(self, server: Server, model: str | None, sampling: Mapping[str, Any]) -> None:
        self._server = server
        self._model = model
        self._sampling = sampling

    def connect(self) -> None:
        """Asks the server for its models, and takes the first one if none was named.

        Raises:
            ServerError: no server answers, or it names no model.
        """
        try:
            name = asyncio.run(self._first_model())
        except ServerError as error:
            if self._model is None or error.status is None:
                raise
            return  # it answers; whether it knows the model will be seen
        if self._model is None:
            self._model = name

    async def _first_model(self) -> str:
        from hetero_llm.bench_client.client import first_model, open_session

        async with open_session(self._server) as session:
            return await first_model(session, self._server)

    def answer(self, request: str | Messages, write: Write) -> Answer:
        texts: list[str] = []
        times: list[float] = [time.perf_counter()]
        tokens: int | None = None
        interrupted = False
        try:
            tokens = asyncio.run(self._stream(request, write, texts, times))
        except KeyboardInterrupt:
            interrupted = True
        begin, first, last = times[0], times[min(1, len(times) - 1)], times[-1]
        return Answer("".join(texts), interrupted, tokens, first - begin, last - begin)

    async def _stream(
        self, request: str | Messages, write: Write, texts: list[str], times: list[float]
    ) -> int | None:
        """Appends each new text and its time to `texts` and `times`. Returns the server's token
        count, None if it sends none."""
        from hetero_llm.bench_client.client import first_model, open_session, pieces
        from hetero_llm.bench_client.wire_format import (
            CHAT,
            COMPLETIONS,
            Sample,
            api_of,
            request_body,
        )

        if isinstance(request, str):
            path, sample = COMPLETIONS, Sample(request, None)
        else:
            path, sample = CHAT, Sample(None, None, tuple(request))
        tokens = None
        async with open_session(self._server) as session:
            if self._model is None:
                self._model = await first_model(session, self._server)
                times[0] = time.perf_counter()
            body = request_body(
                sample, api=api_of(path), model=self._model, stream=True, extra=self._sampling
            )
            async with aclosing(pieces(session, self._server, path, body)) as answer:
                async for piece in answer:
                    if piece.usage is not None:
                        tokens = piece.usage.completion_tokens
                    if piece.text:
                        times.append(time.perf_counter())
                        texts.append(piece.text)
                        write(piece.text)
        return tokens
