"""Commands whose flags and code are loaded only when they are the one that runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

Fill = Callable[["DeferredParser"], None]


class DeferredParser(argparse.ArgumentParser):
    """A parser that learns its flags when it is first used."""

    fill: Fill | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, with the flags filled in first."""
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
        return super().parse_known_args(args, namespace)


def finish(parser: argparse.ArgumentParser, run: Any) -> None:
    """Names the command's function, and its flags for the hint after a misspelt one."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(run=run, flags=flags)


def later(module: str, name: str) -> Callable[[Any], None]:
    """A function that makes a parser call `hetero_llm.commands.<module>.<name>(parser, finish)`
    when its command is chosen."""

    def fill(parser: DeferredParser) -> None:
        getattr(importlib.import_module(f"hetero_llm.commands.{module}"), name)(parser, finish)

    def defer(parser: DeferredParser) -> None:
        parser.fill = fill

    return defer
