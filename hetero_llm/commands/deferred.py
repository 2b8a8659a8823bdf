"""Parsers of commands whose flags and code are loaded only when the command runs."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hetero_llm.config.args import nearest

_WRONG_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")

_PART_OF_HELP = "--help="

Fill = Callable[["DeferredParser"], None]


class CommandParser(argparse.ArgumentParser):
    """A parser that names the nearest choice when a command, or another choice, is misspelt."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        found = _WRONG_CHOICE.search(message)
        guess = nearest(found[1], re.findall(r"[\w-]+", found[2])) if found else None
        super().error(message if guess is None else f"{message}; did you mean {guess!r}?")


class DeferredParser(CommandParser):
    """A parser that calls `fill` to add its flags when it is first used; `words` is the command
    line by then."""

    fill: Fill | None = None
    words: Sequence[str] | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Adds the flags, then parses as argparse does; `--help=WORD` shows a part of the help."""
        if self.fill is not None:
            fill, self.fill = self.fill, None
            self.words = args
            fill(self)
        if self._subparsers is None:
            for word in args or ():
                if word.startswith(_PART_OF_HELP):
                    from hetero_llm.commands.help_search import show_help

                    show_help(self, word.removeprefix(_PART_OF_HELP))
        return super().parse_known_args(args, namespace)


def fill_all(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a command and of all commands below it, without those of vLLM that are
    added for a command line which names them."""
    if isinstance(parser, DeferredParser) and parser.fill is not None:
        fill, parser.fill = parser.fill, None
        parser.words = ()
        fill(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                fill_all(command)


def finish(parser: argparse.ArgumentParser, run: Any) -> None:
    """Sets the command's function, and the flags among which `cli` looks for a misspelt one."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(run=run, flags=flags)


def later(module: str, name: str) -> Callable[[Any], None]:
    """Returns a function that sets a parser to call
    `hetero_llm.commands.<module>.<name>(parser, finish)` when its command is chosen."""

    def fill(parser: DeferredParser) -> None:
        getattr(importlib.import_module(f"hetero_llm.commands.{module}"), name)(parser, finish)

    def defer(parser: DeferredParser) -> None:
        parser.fill = fill

    return defer
