"""The `hetero-llm` command: `demo`, `generate`, `cache` and `doctor`.

Nothing heavy is imported before a model runs, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm import __version__, cache_cli
from hetero_llm.commands.deferred import DeferredParser, later
from hetero_llm.core.args import (
    ENGINE_ARGS,
    add_engine_arguments,
    add_flags,
    engine_args_from_namespace,
    nearest,
)
from hetero_llm.core.args_sampling import SAMPLING_ARGS
from hetero_llm.core.args_spec import Kind
from hetero_llm.core.errors import ConfigError, HeteroLLMError, SnapshotError
from hetero_llm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hetero_llm.core.outputs import RequestOutput, TokenLogprobs

PROGRAM = "hetero-llm"
DEMO_MODEL = "demo"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DEMO_PROMPTS = (
    "import os\nimport sys\n\n\n"
    'def read_file(path):\n    """Return the contents of the file at path."""\n    with open(',
    "class Node:\n"
    "    def __init__(self, value, next=None):\n"
    "        self.value = value\n"
    "        self.next = next\n\n"
    "    def __repr__(self):\n"
    "        return",
    'def is_prime(n):\n    """Return True if n is a prime number."""\n    for i in range(',
)
"""Beginnings that end within a line, which leaves a small model the least room to wander off."""

_EARLY_STOPPING_WORDS: dict[str, bool | str] = {"true": True, "false": False}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for a mistake of the user's."""
    parser = build_parser()
    options = _parse(parser, argv)
    verbose = getattr(options, "verbose", False)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format=f"{PROGRAM}: %(levelname)s: %(message)s",
    )
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except HeteroLLMError as error:
        if verbose:
            traceback.print_exc()
        print(f"{PROGRAM}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left. What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `options.run` is the function of the chosen command."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--verbose",
        action="store_true",
        default=argparse.SUPPRESS,
        help="log more, and show the traceback of errors",
    )
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Run large language models on the CPU and the GPU together.",
        parents=[common],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=DeferredParser
    )
    for name, add, text in (
        ("demo", _add_demo, "continue three Python snippets with the embedded model"),
        ("generate", _add_generate, "continue prompts with a model"),
        ("cache", partial(_add_cache, common=common), "save and check the lookahead cache"),
        ("serve", later("serve", "add_serve", _finish), "serve a model over HTTP, as OpenAI does"),
        ("run", later("serve", "add_run", _finish), "serve, as Angel-vLLM's run is told to"),
        ("chat", later("chat", "add_chat", _finish), "talk with a model, served or run here"),
        ("complete", later("chat", "add_complete", _finish), "continue a prompt, served or here"),
        ("bench", later("bench", "add_bench", _finish), "measure a server, or the engine here"),
        ("manifest", later("manifest", "add_manifest", _finish), "write a model's checksums"),
        ("doctor", _add_doctor, "show what this machine offers and what is missing"),
    ):
        add(
            commands.add_parser(
                name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=[common],
                allow_abbrev=False,
            )
        )  # fmt: skip
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # A word after an unknown flag may have been its value: the flag is what went wrong.
        wrong = [word for word in unknown if word.startswith("-")] or unknown
        guess = nearest(wrong[0].partition("=")[0].replace("_", "-"), options.flags)
        hint = f" (did you mean {guess}?)" if guess else ""
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{hint}")
    return options


# demo


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="model to use (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=96, help="tokens for each snippet (default: %(default)s)"
    )
    _finish(parser, run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Stream the demo model's continuations, then show how fast they were."""
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    dim, undim = (_DIM, _PLAIN) if sys.stdout.isatty() else ("", "")
    finished: list[RequestOutput] = []
    with _llm_class()(options.model) as llm:
        for prompt in DEMO_PROMPTS:
            _write(f"{dim}{prompt}{undim}")
            finished.append(_stream_text(llm.stream(prompt, params)))
            _write("\n\n")
        backend = llm.backend
    _write(speed_table(finished))
    if backend == "native":
        with _llm_class()(options.model, cpu_backend="torch") as llm:
            plain = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in DEMO_PROMPTS]
        _write(backend_line(finished, plain))
    with _llm_class()(options.model, use_lookahead=True) as llm:
        line = "with the lookahead cache"
        for when in ("", ", then, as it knows them,"):
            before = llm.get_metrics()
            again = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in DEMO_PROMPTS]
            line += when + lookahead_words(finished, again, before, llm.get_metrics())
    _write(f"{line}\n")
    return 0


def lookahead_words(
    plain: Sequence[RequestOutput],
    drafted: Sequence[RequestOutput],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> str:
    """What drafts made of the same prompts, one after another: speed and tokens of each step."""
    tokens, accepted = (
        after[name] - before[name]
        for name in ("generation_tokens", "spec_decode_num_accepted_tokens")
    )
    ours, theirs = _rate(drafted), _rate(plain)
    times = f", {ours / theirs:.1f}x" if theirs else ""
    return f" {ours:.0f} tokens/s{times}, {tokens / max(tokens - accepted, 1):.1f} tokens a step"


def backend_line(native: Sequence[RequestOutput], torch: Sequence[RequestOutput]) -> str:
    """How much faster the native executor is than torch on the same prompts, one after another."""
    ours, theirs = _rate(native), _rate(torch)
    if not ours or not theirs:
        return ""
    return (
        f"native executor {ours:.0f} tokens/s, torch on this CPU {theirs:.0f}: "
        f"{ours / theirs:.1f}x\n"
    )


def _rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens/s after the first token of each output; 0 if there are none."""
    tokens, seconds = 0, 0.0
    for output in outputs:
        metrics = output.metrics
        if metrics is None or metrics.first_token_time is None or metrics.last_token_time is None:
            continue
        tokens += sum(len(one.token_ids) for one in output.outputs) - 1
        seconds += metrics.last_token_time - metrics.first_token_time
    return tokens / seconds if seconds > 0 else 0.0


def speed_table(outputs: Sequence[RequestOutput]) -> str:
    """One line for each output: prompt, tokens, tokens/s after the first, time to the first."""
    rows = [("prompt", "tokens", "tokens/s", "first token, ms")]
    for output in outputs:
        tokens = sum(len(one.token_ids) for one in output.outputs)
        rate, first = _speed(output, tokens)
        rows.append((_shortened(output.prompt or ""), str(tokens), rate, first))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0])]
                  + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    ]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n(tokens/s counts the tokens after the first)\n"


def _speed(output: RequestOutput, tokens: int) -> tuple[str, str]:
    metrics = output.metrics
    if metrics is None or metrics.first_token_time is None:
        return "-", "-"
    first = f"{(metrics.first_token_time - metrics.arrival_time) * 1e3:.1f}"
    seconds = (metrics.last_token_time or metrics.first_token_time) - metrics.first_token_time
    return (f"{(tokens - 1) / seconds:.1f}" if tokens > 1 and seconds > 0 else "-"), first


def _shortened(text: str, width: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


# generate


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag",
        metavar="MODEL",
        nargs="?",
        help=f"folder or Hugging Face name of the model, as --model (default: {DEMO_MODEL})",
    )
    prompts = parser.add_argument_group("Prompts")
    prompts.add_argument("--prompt", action="append", default=[], help="a prompt; repeatable")
    prompts.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file that is one prompt, '-' for standard input; repeatable",
    )
    output = parser.add_argument_group("Output").add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object a line")
    output.add_argument("--stream", action="store_true", help="show the text as it is produced")
    sampling = parser.add_argument_group(
        "Sampling", "--seed and --num-speculative-tokens, below, also hold for every request."
    )
    of_engine = {spec.name for spec in ENGINE_ARGS}  # one flag for the engine and its requests
    for spec in SAMPLING_ARGS:
        if spec.kind is not Kind.PYTHON and spec.name not in of_engine:
            add_flags(sampling, spec)
    add_engine_arguments(parser)
    parser.epilog = (
        "More flags of the manual are accepted without effect, or wait for their feature: "
        "docs/flags.md lists them all."
    )
    parser.usage = "%(prog)s [MODEL] [--prompt PROMPT] [options]"
    _finish(parser, run_generate)


def run_generate(options: argparse.Namespace) -> int:
    """Generate for the prompts of the command line and print the results."""
    engine_args = engine_args_from_namespace(options)
    model = _chosen_model(options.model_tag, engine_args.pop("model", None))
    params = _sampling_params(options)
    _check_output(options, params)
    prompts = _prompts(options)
    with _llm_class()(model, **engine_args) as llm:
        if options.stream:
            for index, prompt in enumerate(prompts):
                _write(_heading(prompts, index))
                _stream_text(llm.stream(prompt, params))
                _write("\n")
            return 0
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for index, output in enumerate(outputs):
        if options.json:
            _write(json.dumps(_as_json(output)) + "\n")
            continue
        for one in output.outputs:
            _write(f"{_heading(prompts, index)}{one.text}\n")
    return EXIT_INTERRUPTED if any(map(_was_interrupted, outputs)) else 0


def _was_interrupted(output: RequestOutput) -> bool:
    """After Ctrl-C, `generate` returns what there is so far."""
    return any(one.finish_reason == "abort" for one in output.outputs)


def _chosen_model(positional: str | None, flag: str | None) -> str:
    if positional is not None and flag is not None and positional != flag:
        raise ConfigError("model", flag, f"contradicts the first argument, {positional!r}")
    return positional or flag or DEMO_MODEL


def _sampling_params(options: argparse.Namespace) -> SamplingParams:
    given = {
        spec.name: getattr(options, spec.name)
        for spec in SAMPLING_ARGS
        if hasattr(options, spec.name)
    }
    word = given.get("early_stopping")
    if word is not None:
        given["early_stopping"] = _EARLY_STOPPING_WORDS.get(word, word)
    return SamplingParams(**given)


def _check_output(options: argparse.Namespace, params: SamplingParams) -> None:
    """Refuse to compute what the chosen form of output would not show."""
    if options.stream and params.width > 1:
        raise ConfigError("stream", True, "shows one sequence for each prompt, so n must be 1")
    if options.json:
        return
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise ConfigError(name, getattr(params, name), "is shown with --json only")
    if not params.detokenize:
        raise ConfigError("detokenize", False, "token ids are shown with --json only")


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts = [*options.prompt, *(_prompt_in(name) for name in options.prompt_file)]
    if not prompts and not sys.stdin.isatty():
        prompts = [_prompt_in("-")]
    if not prompts:
        raise ConfigError("prompt", None, "give --prompt, --prompt-file or standard input")
    return prompts


def _prompt_in(name: str) -> str:
    """The whole text of a file, its last newline included."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError("prompt_file", name, error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError("prompt_file", name, f"is not UTF-8 text: {error}") from None


def _heading(prompts: Sequence[str], index: int) -> str:
    """What goes above a result where there are several; one result is printed alone."""
    return f"--- {_shortened(prompts[index], 60)}\n" if len(prompts) > 1 else ""


def _as_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": _logprobs_as_json(output.prompt_logprobs),
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": list(one.token_ids),
                "logprobs": _logprobs_as_json(one.logprobs),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            for one in output.outputs
        ],
    }


def _logprobs_as_json(positions: Sequence[TokenLogprobs | None] | None) -> list[Any] | None:
    if positions is None:
        return None
    return [
        tokens and {token: dataclasses.asdict(logprob) for token, logprob in tokens.items()}
        for tokens in positions
    ]


# cache


def _add_cache(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add, run, text in cache_cli.COMMANDS:
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=[common],
            allow_abbrev=False,
        )  # fmt: skip
        add(command)
        _finish(command, partial(run_cache, run))


def run_cache(command: Callable[[argparse.Namespace], str], options: argparse.Namespace) -> int:
    """Print what a command of `cache_cli` says; 1 if a snapshot is at fault."""
    try:
        _write(command(options))
    except SnapshotError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1
    return 0


# doctor


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    _finish(parser, run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Print the report; 0 if the engine can run on this machine, else 1."""
    from hetero_llm import doctor

    report = doctor.examine()
    _write(doctor.as_json(report) if options.json else doctor.as_text(report))
    return 0 if report.can_run else 1


# shared


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    """Name the command's function, and its flags for the hint after a misspelt one."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(run=run, flags=flags)


def _llm_class() -> Any:
    try:
        from hetero_llm.engine.llm import LLM
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hetero_llm"):
            raise
        raise HeteroLLMError(
            f"module {error.name!r} is not installed; `{PROGRAM} doctor` shows what is missing"
        ) from error
    return LLM


def _stream_text(updates: Iterator[RequestOutput]) -> RequestOutput:
    """Write a request's text as it grows; returns the last update."""
    shown = 0
    last: RequestOutput | None = None
    for last in updates:
        text = last.outputs[0].text
        _write(text[shown:])
        shown = max(shown, len(text))
    assert last is not None, "a stream ends with the finished request"
    return last


def _write(text: str) -> None:
    """Print at once; characters that the terminal cannot show are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
