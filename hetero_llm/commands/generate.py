"""`hetero-llm generate`: a model in this process continues the prompts of the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetero_llm.commands.console import (
    DEMO_MODEL,
    EXIT_INTERRUPTED,
    Finish,
    llm_class,
    shortened,
    stream_text,
    write,
)
from hetero_llm.commands.options import add_model_word, chosen_model
from hetero_llm.config.args import (
    ENGINE_ARGS,
    add_engine_arguments,
    add_flags,
    engine_args_from_namespace,
)
from hetero_llm.config.args_sampling import SAMPLING_ARGS
from hetero_llm.config.args_spec import Kind
from hetero_llm.core.errors import ConfigError, HeteroLLMError
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.utils.files import MIB, as_config_errors, read_bytes

if TYPE_CHECKING:
    from hetero_llm.core.outputs import RequestOutput, TokenLogprobs

_MOST_PROMPT = 256 * MIB
_EARLY_STOPPING_WORDS: dict[str, bool | str] = {"true": True, "false": False}


def add_generate(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `generate`."""
    add_model_word(parser, f"folder or Hugging Face name of the model (default: {DEMO_MODEL})")
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
        "More flags of TACO-LLM and vLLM are accepted without effect, or wait for their feature: "
        "docs/flags.md lists them all."
    )
    parser.usage = "%(prog)s [MODEL] [--prompt PROMPT] [options]"
    finish(parser, run_generate)


def run_generate(options: argparse.Namespace) -> int:
    """Generate for the prompts of the command line and print the results."""
    from hetero_llm.engine.inputs.default_sampling import with_defaults

    engine_args = engine_args_from_namespace(options)
    engine_args["model"] = chosen_model(options) or DEMO_MODEL
    given = _sampling_given(options)
    _check_output(options, SamplingParams(**given))
    prompts = _prompts(options)
    with llm_class()(**engine_args) as llm:
        params = SamplingParams(**with_defaults(llm.default_sampling, given))
        if options.stream:
            for index, prompt in enumerate(prompts):
                write(_heading(prompts, index))
                stream_text(llm.stream(prompt, params))
                write("\n")
            return 0
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for index, output in enumerate(outputs):
        if options.json:
            write(json.dumps(_as_json(output)) + "\n")
            continue
        for one in output.outputs:
            write(f"{_heading(prompts, index)}{one.text}\n")
    return EXIT_INTERRUPTED if any(map(_was_interrupted, outputs)) else 0


def _was_interrupted(output: RequestOutput) -> bool:
    """Whether Ctrl-C ended `generate`, which then returns unfinished outputs."""
    return any(one.finish_reason == "abort" for one in output.outputs)


def _sampling_given(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters of the command line, by name."""
    given = {
        spec.name: getattr(options, spec.name)
        for spec in SAMPLING_ARGS
        if hasattr(options, spec.name)
    }
    word = given.get("early_stopping")
    if word is not None:
        given["early_stopping"] = _EARLY_STOPPING_WORDS.get(word, word)
    return given


def _check_output(options: argparse.Namespace, params: SamplingParams) -> None:
    """Raises ConfigError for a result that the chosen form of output does not show."""
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
        raise HeteroLLMError("no prompt: give --prompt, --prompt-file or standard input")
    return prompts


def _prompt_in(name: str) -> str:
    """The whole text of a file, its last newline included."""
    with as_config_errors("prompt_file", name):
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return read_bytes(name, most=_MOST_PROMPT, pipes=True).decode("utf-8")


def _heading(prompts: Sequence[str], index: int) -> str:
    """The line above a result; empty if there is only one prompt."""
    return f"--- {shortened(prompts[index], 60)}\n" if len(prompts) > 1 else ""


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
