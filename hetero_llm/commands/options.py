"""Flags of commands as `ArgSpec`s: same spelling, checks and errors as engine arguments."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero_llm.config.args import add_flags
from hetero_llm.config.args_spec import ArgSpec, Kind, checked, effective, grouped
from hetero_llm.core.errors import ConfigError

API_KEY_VARIABLE = "OPENAI_API_KEY"

SERVER_FLAGS: tuple[ArgSpec, ...] = grouped(
    "Server",
    effective(
        "base_url",
        Kind.STR,
        None,
        "Address of the server, instead of --host and --port.",
        aliases=("url",),
    ),
    effective("host", Kind.STR, "127.0.0.1", "Host of the server."),
    effective("port", Kind.INT, 8000, "Port of the server.", minimum=1, maximum=65535),
    effective("api_key", Kind.STR, None, f"Key to send (default: ${API_KEY_VARIABLE})."),
    effective(
        "timeout",
        Kind.FLOAT,
        300.0,
        "Seconds without a byte after which a request has failed.",
        above=0,
    ),
)


def add_rows(parser: argparse.ArgumentParser, rows: Sequence[ArgSpec]) -> None:
    """Adds a flag for each `ArgSpec`, under its heading."""
    groups: dict[str, Any] = {}
    for row in rows:
        if row.group not in groups:
            groups[row.group] = parser.add_argument_group(row.group)
        add_flags(groups[row.group], row)


def add_model_word(
    parser: argparse.ArgumentParser, text: str = "folder or Hugging Face name of the model"
) -> None:
    """Adds the first argument MODEL, which may be left out; `chosen_model` reads it."""
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help=f"{text}, as --model")


def chosen_model(options: argparse.Namespace) -> str | None:
    """The model that the first argument or --model names; None if neither is given.

    Raises:
        ConfigError: they name two models.
    """
    word, flag = options.model_tag, getattr(options, "model", None)
    if word is not None and flag not in (None, word):
        raise ConfigError("model", flag, f"contradicts the first argument, {word!r}")
    return word if flag is None else flag


def add_source_flags(parser: argparse.ArgumentParser, pickled: str) -> None:
    """Adds the flags with which `model_folder` finds a model. `pickled`: what is done with pickled
    weights."""
    parser.add_argument("--revision", default=None, help="branch, tag or commit of the model")
    parser.add_argument("--download-dir", default=None, help="where the hub's cache is")
    parser.add_argument(
        "--allow-pickle-weights", action="store_true", help=f"{pickled} pickled weights, too"
    )


def model_folder(options: argparse.Namespace, name: str) -> Path:
    """The folder of a model, which is fetched if it is a hub's.

    Raises:
        ModelLoadError: there is none.
    """
    from hetero_llm.models.folders import resolve_model_folder

    return resolve_model_folder(
        name,
        revision=options.revision,
        download_dir=options.download_dir,
        allow_pickle=options.allow_pickle_weights,
    )


def values_of(rows: Sequence[ArgSpec], options: argparse.Namespace) -> dict[str, Any]:
    """The checked value of each `ArgSpec`, by name.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """
    given = vars(options)
    return {row.name: checked(row, given.get(row.name, row.default)) for row in rows}


def server_of(values: dict[str, Any]) -> Any:
    """The `Server` that the values of `SERVER_FLAGS` name."""
    from hetero_llm.bench_client.client import Server, base_url

    host = values["host"]
    address = f"[{host}]" if ":" in host else host
    url = values["base_url"] or f"http://{address}:{values['port']}"
    key = values["api_key"] or os.environ.get(API_KEY_VARIABLE)
    return Server(base_url(url), key, values["timeout"])


def numbers(field: str, text: str, *, least: float, whole: bool = False) -> tuple[float, ...]:
    """The numbers of a list such as `1,8,64`; `inf` is allowed unless `whole`.

    Raises:
        ConfigError: one of them is not a number, or not greater than `least`.
    """
    found = []
    for word in text.split(","):
        try:
            number = float(int(word)) if whole else float(word)
        except ValueError:
            raise ConfigError(field, text, "must be numbers with commas between") from None
        if math.isnan(number) or number <= least:
            raise ConfigError(field, text, f"must be greater than {least:g}")
        found.append(number)
    return tuple(found)
