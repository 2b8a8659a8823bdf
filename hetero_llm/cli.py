"""The `hetero-llm` command: finds the chosen command in `commands` and runs it.

Nothing heavy is imported before a model runs, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from hetero_llm import __version__
from hetero_llm.commands.console import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    PROGRAM,
    add_command,
    common_flags,
)
from hetero_llm.commands.deferred import CommandParser, DeferredParser, later
from hetero_llm.config.args import foreign_flags, nearest
from hetero_llm.config.foreign_args import FOREIGN_ARGS
from hetero_llm.core.errors import ConfigError, HeteroLLMError
from hetero_llm.utils.dotted_flags import join_dotted_flags

_MODEL_FLAG = "--max-model-len"
"""Commands with this flag run a model, and know vLLM's flags, too."""

# Name, module in `commands`, function that adds the flags, one line of help.
_COMMANDS = (
    ("demo", "demo", "add_demo", "continue three Python snippets with the embedded model"),
    ("generate", "generate", "add_generate", "continue prompts with a model"),
    ("cache", "cache", "add_cache", "save and check the lookahead cache; show compiled code"),
    ("serve", "serve", "add_serve", "serve a model over HTTP, as OpenAI does"),
    ("run", "serve", "add_run", "serve, as Angel-vLLM's run is told to"),
    ("run-batch", "run_batch", "add_run_batch", "answer a file of requests, as OpenAI's batches"),
    ("route", "route", "add_route", "one address for several servers, by what their caches hold"),
    ("chat", "chat", "add_chat", "talk with a model, served or run here"),
    ("complete", "chat", "add_complete", "continue a prompt, served or here"),
    ("bench", "bench", "add_bench", "measure a server, or the engine here"),
    ("warmup", "warmup", "add_warmup", "compile everything that a first start would compile"),
    ("manifest", "manifest", "add_manifest", "write a model's checksums"),
    ("quantize", "quantize", "add_quantize", "write a quantized copy of a model"),
    ("completion", "completion", "add_completion", "write a completion script for a shell"),
    ("doctor", "doctor", "add_doctor", "show what this machine offers and what is missing"),
    ("collect-env", "doctor", "add_doctor", "the same as doctor, by vLLM's name"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 2 for a mistake of the user's."""
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
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left. What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `options.run` is the function of the chosen command,
    `options.program` this parser."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Run large language models on the CPU and the GPU together.",
        parents=[common_flags()],
        allow_abbrev=False,
    )
    parser.set_defaults(program=parser)
    parser.add_argument("-v", "--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=DeferredParser
    )
    for name, module, add, text in _COMMANDS:
        later(module, add)(add_command(commands, name, text))
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    try:
        words = join_dotted_flags(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        parser.error(str(error))
    options, unknown = parser.parse_known_args(words)
    if unknown:
        # A word after an unknown flag may have been its value: the flag is what went wrong.
        wrong = [word for word in unknown if word.startswith("-")] or unknown
        known = options.flags + (_flags_of_vllm() if _MODEL_FLAG in options.flags else [])
        guess = nearest(wrong[0].partition("=")[0].replace("_", "-"), known)
        hint = f" (did you mean {guess}?)" if guess else ""
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{hint}")
    return options


def _flags_of_vllm() -> list[str]:
    return [flag for arg in FOREIGN_ARGS for flag in foreign_flags(arg)]


if __name__ == "__main__":
    sys.exit(main())
