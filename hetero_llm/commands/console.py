"""Shared by the commands: names, exit codes, output, and the import of `LLM`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.utils.neighbours import busy_line

if TYPE_CHECKING:
    from hetero_llm.core.outputs import RequestOutput

Finish = Callable[[argparse.ArgumentParser, Any], None]
"""Sets the function that runs the command of a parser."""

PROGRAM = "hetero-llm"
DEMO_MODEL = "demo"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def common_flags() -> argparse.ArgumentParser:
    """Flags of every command, as a parent of its parser."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--verbose",
        action="store_true",
        default=argparse.SUPPRESS,
        help="log more, and show the traceback of errors",
    )
    return common


def add_command(commands: Any, name: str, text: str) -> Any:
    """Adds a command to argparse's `commands`; `text`: what it does. Returns its parser."""
    return commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        parents=[common_flags()],
        allow_abbrev=False,
    )


def llm_class() -> Any:
    try:
        from hetero_llm.engine.llm import LLM
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hetero_llm"):
            raise
        raise HeteroLLMError(
            f"module {error.name!r} is not installed; `{PROGRAM} doctor` shows what is missing"
        ) from error
    return LLM


@contextmanager
def needs_server_packages(what: str) -> Iterator[None]:
    """Imports inside may lack a package of the extra "server", which `what` needs."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.startswith("hetero_llm"):
            raise  # ours: nothing to install
        reason = f"{what} needs {error.name}: pip install 'hetero-llm[server]'"
        raise HeteroLLMError(reason) from None


def stream_text(updates: Iterator[RequestOutput]) -> RequestOutput:
    """Write a request's text as it grows; returns the last update."""
    shown = 0
    last: RequestOutput | None = None
    for last in updates:
        text = last.outputs[0].text
        write(text[shown:])
        shown = max(shown, len(text))
    assert last is not None, "a stream ends with the finished request"
    return last


def write(text: str) -> None:
    """Print at once; characters that the terminal cannot show are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def held_files(folder: Path) -> str:
    """Number and size of a folder of compiled code, in words."""
    from hetero_llm.utils import cache_folder

    held = cache_folder.usage(folder)
    return f"{held.files} files, {held.bytes / 1e6:.1f} MB"


def note_neighbours() -> None:
    """Says on standard error that other programs use this machine, before figures are measured."""
    sys.stderr.write(busy_line())


def shortened(text: str, width: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."
