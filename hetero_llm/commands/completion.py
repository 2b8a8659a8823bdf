"""`hetero-llm completion`: a script that completes commands, flags and choices in a shell."""

from __future__ import annotations

import argparse

from hetero_llm.commands.console import PROGRAM, Finish, write
from hetero_llm.commands.deferred import fill_all
from hetero_llm.core.errors import HeteroLLMError

SHELLS = ("bash", "zsh", "fish")
_WHERE = (
    f'bash: write eval "$({PROGRAM} completion bash)" into ~/.bashrc. '
    f"zsh: {PROGRAM} completion zsh > _{PROGRAM}, in a folder of $fpath. "
    f"fish: {PROGRAM} completion fish > ~/.config/fish/completions/{PROGRAM}.fish."
)


def add_completion(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
    parser.epilog = _WHERE
    finish(parser, run_completion)


def run_completion(options: argparse.Namespace) -> int:
    """Writes the script on standard output.

    Raises:
        HeteroLLMError: shtab, which writes such scripts, is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        reason = "completion needs shtab: pip install 'hetero-llm[completion]'"
        raise HeteroLLMError(reason) from None
    fill_all(options.program)
    _add_choices(options.program)
    write(shtab.complete(options.program, shell=options.shell))
    return 0


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """Tells argparse the choices that so far only the help shows, as `{a,b}`, for all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _add_choices(command)
        elif isinstance(action.metavar, str) and action.metavar.startswith("{"):
            action.choices = action.metavar.strip("{}").split(",")
