"""`hetero-llm run-batch`: answers a file of requests, without a server."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hetero_llm.commands.console import Finish
from hetero_llm.commands.options import add_model_word, add_rows, values_of
from hetero_llm.commands.serve import gather
from hetero_llm.config.args import SERVER_ARGS, add_engine_arguments, resolve_server_args
from hetero_llm.config.args_spec import Kind, effective, grouped
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils import env
from hetero_llm.utils.files import as_config_errors

if TYPE_CHECKING:
    from hetero_llm.server.batch import BatchCounts
    from hetero_llm.server.context import Context

_ROWS = grouped(
    "Batch",
    effective(
        "input_file", Kind.PATH, None, "Requests, one JSON object a line, as OpenAI's batch files "
        "have them.", short=("-i",),
    ),
    effective(
        "output_file", Kind.PATH, None, "Where the results go, one a line as they come; an "
        "existing file is overwritten.", short=("-o",),
    ),
    effective(
        "max_concurrency", Kind.INT, 256, "Requests that run at once.", minimum=1, maximum=2048,
    ),
)  # fmt: skip
_WITHOUT_CLIENTS = frozenset(
    ("config", "served_model_name", "chat_template", "response_role",
     "return_tokens_as_token_ids", "allowed_chat_template_kwargs", "strict_fields",
     "enable_auto_tool_choice", "tool_call_parser", "request_timeout",
     "step_timeout")
)  # fmt: skip
"""The server's arguments that concern answers, not connections. Others, which a variable or the
file of --config may hold, have no effect."""


def add_run_batch(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `run-batch`."""
    add_model_word(parser)
    add_rows(parser, _ROWS)
    add_engine_arguments(parser, [one for one in SERVER_ARGS if one.name in _WITHOUT_CLIENTS])
    add_engine_arguments(parser)
    parser.usage = "%(prog)s -i INPUT.jsonl -o OUTPUT.jsonl --model MODEL [options]"
    parser.epilog = "docs/apis.md describes the files; every POST route of the server is a url."
    finish(parser, run_run_batch)


def run_run_batch(options: argparse.Namespace) -> int:
    """Answers all requests of the input file. Errors of single requests are in the output."""
    values = values_of(_ROWS, options)
    paths = [_path(values, name) for name in ("input_file", "output_file")]
    source, target = paths
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError("output_file", str(target), "is the input file; choose another one")
    engine_args, server_args = gather(options, env.flag_variables(), command="run-batch")
    used = {name: value for name, value in server_args.items() if name in _WITHOUT_CLIENTS}
    checked = resolve_server_args({**used, "disable_log_requests": True})

    from hetero_llm.server.batch import check_batch_file

    total = check_batch_file(source)
    with as_config_errors("output_file", target):
        output = target.open("wb")
    with output:
        counts = _answer_all(
            engine_args, checked, source, output, total=total, most=values["max_concurrency"]
        )
    print(f"{counts.answered} requests answered, {counts.failed} of them with an error")
    return 0


def _path(values: Mapping[str, Any], name: str) -> Path:
    if values[name] is None:
        flag = "-i" if name == "input_file" else "-o"
        raise ConfigError(name, None, f"is required: {flag} FILE")
    return Path(values[name])


def _answer_all(
    engine_args: Mapping[str, Any],
    server_args: Mapping[str, Any],
    source: Path,
    output: BinaryIO,
    *,
    total: int,
    most: int,
) -> BatchCounts:
    """Starts the engine and the application, answers `most` requests at once, and ends both."""
    from tqdm import tqdm

    from hetero_llm.config.engine_config import EngineConfig
    from hetero_llm.engine.arg_utils import EngineArgs
    from hetero_llm.engine.async_engine import AsyncLLMEngine
    from hetero_llm.server.app import build_app
    from hetero_llm.server.batch import run_batch
    from hetero_llm.server.context import check_formats
    from hetero_llm.server.serving import settings_of

    arguments = EngineArgs(**engine_args)
    config = EngineConfig.from_args(arguments.resolved())
    settings = settings_of(server_args, config.constraints)
    engine = AsyncLLMEngine(
        arguments,
        served_names=settings.served_names,
        max_queued_requests=most * settings.limits.prompts,
        step_timeout=server_args["step_timeout"],
        check_tokenizer=partial(check_formats, settings),
    )
    app = build_app(engine, settings)
    context: Context = app.state.context
    context.tokenizer.start()

    async def run() -> BatchCounts:
        with tqdm(total=total, unit=" requests", disable=None) as bar:
            try:
                return await run_batch(
                    app, source, output, concurrency=most, answered=bar.update,
                    check_health=engine.check_health,
                )  # fmt: skip
            finally:
                await engine.shutdown(0.0)

    try:
        return asyncio.run(run())
    finally:
        context.tokenizer.close()
