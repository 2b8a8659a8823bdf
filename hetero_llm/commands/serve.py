"""`hetero-llm serve` and `hetero-llm run`: the HTTP server.

The value of an option comes from the command line, else from its variable HETERO_LLM_<FLAG>, else
(`run` only) from Angel-vLLM's variable, else from the file of --config, else (the API key only)
from VLLM_API_KEY, else it is the default. `run` has defaults of its own: `angel.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetero_llm.commands import angel
from hetero_llm.commands.console import Finish, needs_server_packages
from hetero_llm.commands.options import add_model_word, chosen_model
from hetero_llm.config.args import (
    ARGS,
    SERVER_ARGS,
    add_engine_arguments,
    foreign_of,
    is_argument_of,
    nearest,
    resolve_server_args,
    spec_of,
)
from hetero_llm.config.args_spec import ArgSpec, Kind, Scope, from_text
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils import env
from hetero_llm.utils.files import MIB, read_text

logger = logging.getLogger(__name__)

_MOST_FILE = MIB


def add_serve(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `serve`."""
    _add_flags(parser)
    finish(parser, run_serve)


def add_run(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `run`, which has the flags of `serve`."""
    _add_flags(parser)
    names = ", ".join(env.ANGEL_NAMES)
    parser.description = (
        f"As serve, with Angel-vLLM's defaults ({angel.DEFAULTS['model']}, port "
        f"{angel.DEFAULTS['port']}, a context of at most {angel.MOST_CONTEXT} tokens), with its "
        f"variables as options, too ({names}), and with its conversation templates by MODEL_ID or "
        "CONV_TEMPLATE."
    )
    finish(parser, run_run)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    add_engine_arguments(parser, SERVER_ARGS)
    add_engine_arguments(parser)
    parser.usage = "%(prog)s MODEL [options]"
    parser.epilog = (
        "--help=listgroup shows the headings, --help=HEADING or --help=FLAG a part of this text. "
        "docs/flags.md lists all flags, those without effect included."
    )


def run_serve(options: argparse.Namespace) -> int:
    """Serves until SIGTERM, SIGHUP or Ctrl-C, after which the exit code is 0."""
    return _serve(*gather(options, env.flag_variables(), env.vllm_variables()))


def run_run(options: argparse.Namespace) -> int:
    """Serves as `run_serve` does, with Angel-vLLM's variables and defaults."""
    variables = {**env.angel_variables(), **env.flag_variables()}
    last = {**angel.DEFAULTS, **env.vllm_variables()}
    engine_args, server_args = gather(options, variables, last)
    return _serve(*angel.with_angels_defaults(engine_args, server_args, env.angel_names()))


def _serve(engine_args: Mapping[str, Any], server_args: Mapping[str, Any]) -> int:
    without_effect = env.other_vllm_variables()
    if without_effect:
        logger.warning("variables of vLLM without effect here: %s", ", ".join(without_effect))
    checked = resolve_server_args(server_args)
    with needs_server_packages("the server"):
        from hetero_llm.server.serving import serve
    return serve(engine_args, checked)


def gather(
    options: argparse.Namespace,
    variables: Mapping[str, str],
    last: Mapping[str, Any] = MappingProxyType({}),
    *,
    command: str = "serve",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's and the server's arguments as given, by Python name, unchecked.

    Args:
        options: the command line; flags that were not given have no attribute.
        variables: Python names and texts of the environment.
        last: values of arguments that are given nowhere else.
        command: named in the error for a missing model.

    Raises:
        ConfigError: a name is unknown, or the configuration file cannot be read.
    """
    flags = {name: value for name, value in vars(options).items() if _is_known(name)}
    model = chosen_model(options)
    if model is not None:
        flags["model"] = model
    from_variables = _read_variables(variables)
    file = flags.get("config", from_variables.get("config"))
    from_file = {} if file is None else _read_file(Path(file))
    given = {**last, **from_file, **from_variables, **flags}
    if "api_key" in last and given["api_key"] is last["api_key"]:
        logger.warning("requests need the API key of VLLM_API_KEY")
    given = {name: _read_value(spec_of(name), value) for name, value in given.items()}
    if "model" not in given:
        swallowed = "; --served-model-name takes all words behind it: write MODEL before it"
        hint = swallowed if "served_model_name" in flags else ""
        raise ConfigError("model", None, f"is required: hetero-llm {command} MODEL{hint}")
    return (
        {name: value for name, value in given.items() if is_argument_of(Scope.ENGINE, name)},
        {name: value for name, value in given.items() if is_argument_of(Scope.SERVE, name)},
    )


def _is_known(name: str) -> bool:
    return spec_of(name) is not None or foreign_of(name) is not None


def _read_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in variables.items():
        spec = spec_of(name)
        if spec is None:
            foreign = foreign_of(name)
            if foreign is None:
                raise ConfigError(f"HETERO_LLM_{name.upper()}", text, _unknown(name))
            found[foreign.name] = text
            continue
        found[spec.name] = text.split(",") if _is_words(spec, text) else from_text(spec, text)
    return found


def _read_file(path: Path) -> dict[str, Any]:
    """Reads the options of a YAML file. Names are flags without the leading hyphens, with hyphens
    or underscores between words."""
    import yaml

    try:
        content = yaml.safe_load(read_text(path, most=_MOST_FILE, pipes=True))
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("config", str(path), f"cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError("config", str(path), f"is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("config", str(path), "must be a mapping of options to values")
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        spec = spec_of(name) or foreign_of(name)
        if spec is None:
            raise ConfigError(f"{path}: {key}", value, _unknown(name))
        if spec.name in found:
            raise ConfigError(f"{path}: {key}", value, "is given twice")
        if spec.name == "config":
            raise ConfigError(f"{path}: {key}", value, "a file cannot name another one")
        found[spec.name] = value
    return found


def _unknown(name: str) -> str:
    guess = nearest(name, [spec.name for spec in ARGS])
    return "unknown option" + (f"; did you mean {guess!r}?" if guess else "")


def _is_words(spec: ArgSpec, text: str) -> bool:
    return spec.kind is Kind.LIST and not text.startswith("[")


def _read_value(spec: ArgSpec | None, value: Any) -> Any:
    """Converts a list that is written as JSON, as vLLM's CORS flags are: '["*"]', and a file's
    number with a suffix, such as 10k."""
    if spec is not None and spec.suffixes and isinstance(value, str):
        return from_text(spec, value)
    if spec is None or spec.kind is not Kind.LIST:
        return value
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)):
        return value
    if len(words) != 1 or not (isinstance(words[0], str) and words[0].startswith("[")):
        return value
    try:
        return json.loads(words[0])
    except ValueError as error:
        raise ConfigError(spec.name, words[0], f"is not a JSON list: {error}") from None
