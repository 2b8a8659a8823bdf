"""Engine and server arguments of the Python API and the command line, in one table.

It holds every argument of TACO-LLM's manual with its status: EFFECTIVE (checked and used),
OBSOLETE (any value accepted with one notice line) or NOT_YET (only the default is accepted).
A name that it lacks may be one of vLLM's, in `foreign_args.py`. docs/flags.md is generated from
both tables by tools/gen_flags_doc.py.
"""

from __future__ import annotations

import argparse
import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetero_llm.config.args_server import SERVER_ARGS
from hetero_llm.config.args_spec import (
    ArgSpec,
    Kind,
    Scope,
    Status,
    checked,
    from_text,
    is_default,
)
from hetero_llm.config.args_table import ENGINE_ARGS
from hetero_llm.config.foreign_args import FOREIGN_ARGS
from hetero_llm.config.foreign_spec import ForeignArg, Takes, check_foreign, read_value
from hetero_llm.core.errors import ConfigError

logger = logging.getLogger(__name__)

LOG_SWITCH = "enable_log_requests"
"""vLLM's opposite of `disable_log_requests`."""

ARGS: tuple[ArgSpec, ...] = ENGINE_ARGS + SERVER_ARGS

_ENGINE_BY_NAME = {name: spec for spec in ENGINE_ARGS for name in (spec.name, *spec.aliases)}
_SERVER_BY_NAME = {name: spec for spec in SERVER_ARGS for name in (spec.name, *spec.aliases)}
_FOREIGN_BY_NAME = {name: arg for arg in FOREIGN_ARGS for name in (arg.name, *arg.aliases)}


def resolve_engine_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the engine arguments of one `LLM` or one command and fill in the defaults.

    Logs one warning for each argument without effect that is given: OBSOLETE ones, and those of
    vLLM that mean nothing here.

    Args:
        given: The arguments as the user wrote them, by Python name or alias.

    Returns:
        The value of every engine argument, by Python name, in the table's order.

    Raises:
        ConfigError: An argument is unknown, of the wrong type, out of range, given twice, or
            asks for a feature that is not available yet.
    """
    return _resolve(Scope.ENGINE, ENGINE_ARGS, _ENGINE_BY_NAME, given)


def resolve_server_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the server's own arguments and fill in the defaults, as `resolve_engine_args` does.
    `LOG_SWITCH` becomes `disable_log_requests`."""
    turned = read_value(given.get(LOG_SWITCH))
    if isinstance(turned, bool):
        given = {name: value for name, value in given.items() if name != LOG_SWITCH}
        if given.setdefault("disable_log_requests", not turned) is turned:
            raise ConfigError(LOG_SWITCH, turned, "contradicts disable_log_requests")
    return _resolve(Scope.SERVE, SERVER_ARGS, _SERVER_BY_NAME, given)


def spec_of(name: str) -> ArgSpec | None:
    """The `ArgSpec` of an engine or server argument, by Python name or alias; None if unknown."""
    return _ENGINE_BY_NAME.get(name) or _SERVER_BY_NAME.get(name)


def foreign_of(name: str) -> ForeignArg | None:
    """vLLM's argument of this Python name or alias, if this engine lacks it and knows of it."""
    return _FOREIGN_BY_NAME.get(name)


def is_argument_of(scope: Scope, name: str) -> bool:
    """Whether the engine, or the server, knows an argument of this Python name."""
    known = spec_of(name) or foreign_of(name)
    return known is not None and known.scope is scope


def _resolve(
    scope: Scope,
    specs: Iterable[ArgSpec],
    by_any_name: Mapping[str, ArgSpec],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    by_name: dict[str, Any] = {}
    for name, value in given.items():
        spec = by_any_name.get(name)
        if spec is None:
            foreign = foreign_of(name)
            if foreign is None or foreign.scope is not scope:
                raise ConfigError(name, value, _why_unknown(name))
            check_foreign(foreign, value)
            continue
        if spec.name in by_name:
            raise ConfigError(name, value, f"is another name of {spec.name!r}, also given")
        by_name[spec.name] = value
    return {
        spec.name: _resolved(spec, by_name[spec.name]) if spec.name in by_name else _default(spec)
        for spec in specs
    }


def add_engine_arguments(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    specs: Iterable[ArgSpec] = ENGINE_ARGS,
) -> None:
    """Add a flag for every argument; one that is not given leaves no attribute.

    Flags may be written with `-` or `_`, booleans also as `--no-x`. Only EFFECTIVE ones show in
    `--help`. Read the result with `engine_args_from_namespace`.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in specs:
        if spec.group not in groups:
            if isinstance(parser, argparse._ArgumentGroup):  # which has no groups of its own
                groups[spec.group] = parser
            else:
                groups[spec.group] = parser.add_argument_group(spec.group)
        add_flags(groups[spec.group], spec)
    for scope in {spec.scope for spec in specs}:
        _add_foreign_flags(parser, scope)


def add_flags(group: argparse._ArgumentGroup, spec: ArgSpec) -> None:
    """Adds an argument's flags in every spelling, the default in the help. A flag that is not given
    leaves no attribute."""
    hyphened = [n.replace("_", "-") for n in (spec.name, *spec.aliases)]
    underscored = [n for n in (spec.name, *spec.aliases) if "_" in n]
    effective = spec.status is Status.EFFECTIVE
    shown = _with_default(spec).replace("%", "%%") if effective else argparse.SUPPRESS
    _add_spelling(group, spec, [*spec.short, *(f"--{n}" for n in hyphened)], shown)
    if underscored:
        _add_spelling(group, spec, [f"--{n}" for n in underscored], argparse.SUPPRESS)
        if spec.kind is Kind.BOOL:
            _add_negation(group, spec, [f"--no_{n}" for n in underscored])


def _with_default(spec: ArgSpec) -> str:
    if spec.default in (None, (), {}) or spec.default is False:
        return spec.help
    shown = str(spec.default).lower() if spec.kind is Kind.BOOL else spec.default
    return f"{spec.help.removesuffix('.')} (default: {shown})."


def foreign_flags(arg: ForeignArg) -> list[str]:
    """The flags of an argument of vLLM, in every spelling."""
    long = [f"--{name}" for name in (arg.name, *arg.aliases)]
    return [*arg.short, *long, *(flag.replace("_", "-") for flag in long if "_" in flag)]


def _add_foreign_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, scope: Scope
) -> None:
    """Adds the flags of vLLM that this engine lacks, without help; flags of the command stay.

    They are many: a parser with an attribute `words`, its command line, gets those that it needs.
    """
    taken = {flag for action in parser._actions for flag in action.option_strings}
    words: Iterable[str] | None = getattr(parser, "words", None)
    for arg in FOREIGN_ARGS:
        if arg.scope is not scope or not (words is None or _is_in(words, arg)):
            continue
        flags = [flag for flag in foreign_flags(arg) if flag not in taken]
        shared: dict[str, Any] = {
            "dest": arg.name,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS,
        }
        if arg.takes is Takes.NOTHING:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **shared)
        elif flags:
            parser.add_argument(*flags, nargs="+" if arg.takes is Takes.MANY else None, **shared)


def _is_in(words: Iterable[str], arg: ForeignArg) -> bool:
    """Whether one of the words may be a flag of the argument."""
    known = foreign_flags(arg)
    negated = [f"--no-{flag[2:]}" for flag in known if flag.startswith("--")]
    return any(
        word.partition("=")[0] in (*known, *negated)
        or any(word.startswith(short) for short in arg.short)
        for word in words
    )


def engine_args_from_namespace(namespace: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments given on the command line, as arguments of `LLM`."""
    given = vars(namespace)
    return {name: value for name, value in given.items() if is_argument_of(Scope.ENGINE, name)}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most probably a misspelling of, or None."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def _why_unknown(name: str) -> str:
    if is_argument_of(Scope.SERVE, name):
        return "is an argument of the server, not of the engine"
    guess = nearest(name.replace("-", "_"), [*_ENGINE_BY_NAME, *_FOREIGN_BY_NAME])
    return "unknown argument" + (f"; did you mean {guess!r}?" if guess else "")


def _default(spec: ArgSpec) -> Any:
    if spec.required:
        raise ConfigError(spec.name, None, "is required")
    return spec.default


def _resolved(spec: ArgSpec, value: Any) -> Any:
    if spec.status is Status.EFFECTIVE:
        return checked(spec, value)
    if spec.status is Status.NOT_YET:
        if is_default(spec, value):
            return spec.default
        raise ConfigError(spec.name, value, f"{spec.feature} is not available yet")
    if value is None:
        return spec.default
    logger.warning("%s has no effect and can be left out: %s", spec.flag, spec.reason)
    return value


def _add_spelling(
    group: argparse._ArgumentGroup, spec: ArgSpec, flags: list[str], shown: str
) -> None:
    shared: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": shown}
    if spec.kind is not Kind.BOOL:
        if spec.choices:
            shared["metavar"] = "{" + ",".join(map(str, spec.choices)) + "}"
        if spec.many_words:
            shared["nargs"] = "+"
        several = "extend" if spec.many_words else "append"
        action = several if spec.kind is Kind.LIST else "store"
        group.add_argument(*flags, type=_parser_of(spec), action=action, **shared)
    elif spec.optional_value:
        shared["metavar"] = "true|false"
        group.add_argument(*flags, type=_parser_of(spec), nargs="?", const=True, **shared)
        _add_negation(group, spec, [f"--no-{flag[2:]}" for flag in flags if flag[:2] == "--"])
    else:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **shared)


def _add_negation(group: argparse._ArgumentGroup, spec: ArgSpec, flags: list[str]) -> None:
    group.add_argument(
        *flags,
        dest=spec.name,
        action="store_false",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def _parser_of(spec: ArgSpec) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return from_text(spec, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
