"""`hetero-llm warmup`: compiles everything that a first start would compile.

To be run once on a machine or while an image is built. Without a model, small engines of the
embedded one start, for each kind of drafter; with a model its own engine starts, too, which on a
GPU compiles the kernels for its shapes.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hetero_llm.commands.console import DEMO_MODEL, Finish, held_files, llm_class, write
from hetero_llm.commands.options import add_model_word, chosen_model
from hetero_llm.config.args import add_engine_arguments, engine_args_from_namespace
from hetero_llm.core.errors import ConfigError, HeteroLLMError
from hetero_llm.utils import cache_folder, compile_progress
from hetero_llm.utils.env import native_choice

_DRAFT_MODEL = {
    "speculative_model": "demo-draft", "num_speculative_tokens": 4, "cpu_draft_worker": True,
}  # fmt: skip
_NGRAM = {
    "speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3,
}  # fmt: skip
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("lookahead cache", {"use_lookahead": True}),
    ("prompt lookup", _NGRAM),
    ("draft model", _DRAFT_MODEL),
)
"""Name and arguments of engines that together use every compiled function of drafting, and of steps
on this machine's device."""


def add_warmup(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `warmup`."""
    add_model_word(parser, "folder or Hugging Face name of a model to warm up as well")
    add_engine_arguments(parser)
    parser.usage = "%(prog)s [MODEL] [options]"
    finish(parser, run_warmup)


def run_warmup(options: argparse.Namespace) -> int:
    """Fills the caches and says what they hold.

    Raises:
        HeteroLLMError: a library cannot be compiled, or the model cannot be served.
    """
    engine_args = engine_args_from_namespace(options)
    engine_args.pop("model", None)
    model = chosen_model(options)
    if model is None and engine_args:
        name, value = next(iter(engine_args.items()))
        raise ConfigError(name, value, "needs a MODEL to be warmed up with it")
    _timed("C++ libraries", _build_libraries)
    for name, arguments in VARIANTS:
        if "cpu_draft_worker" in arguments and native_choice() == "0":
            continue  # there is no draft worker without rings
        _timed(name, partial(_start, DEMO_MODEL, arguments))
    if model is not None:
        _timed(model, partial(_start, model, engine_args))
    folder = cache_folder.write_folder()
    write(f"{folder}: {held_files(folder)}\n")
    return 0


def _timed(name: str, work: Callable[[], object]) -> None:
    begin = time.monotonic()
    work()
    compile_progress.finish()
    write(f"{name}: ready after {time.monotonic() - begin:.1f} s\n")


def _build_libraries() -> None:
    """Finds or compiles the C++ libraries.

    Raises:
        HeteroLLMError: one cannot be compiled.
    """
    if native_choice() == "0":
        return
    from hetero_llm.bridge.build import RECIPES
    from hetero_llm.cpu import native
    from hetero_llm.utils.native_build import build_library, reason

    try:
        native.build()
        for _, recipe in RECIPES:
            build_library(recipe())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise HeteroLLMError(f"the C++ libraries cannot be built: {reason(error)}") from error


def _start(model: str, arguments: Mapping[str, Any]) -> None:
    """Starts an engine, which compiles what it uses, and ends it."""
    llm_class()(model, **arguments).close()
