"""Counts the stops of a walk through the package.

A stop is a move into another file of the package: by a call, or by the return from one. Compiled
functions and replayed graphs are one function each; what they call is not seen.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import hetero_llm

_PACKAGE = str(Path(hetero_llm.__file__).parent) + "/"


class Walk:
    """The functions that run while it is open, in the order in which they are entered.

    Args:
        threads: those of all threads that start while it is open; else those of this thread.

    Attributes:
        functions: (file below hetero_llm/, name) of each; a coroutine is entered again whenever it
            goes on.
        num_stops: of one thread.
    """

    def __init__(self, *, threads: bool = False) -> None:
        self.functions: list[tuple[str, str]] = []
        self.num_stops = 0
        self._set = threading.setprofile if threads else sys.setprofile
        self._callers: list[CodeType] = []
        self._place = ""

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def __enter__(self) -> Self:
        self._set(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._set(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return
        if event == "call":
            self._callers.append(code)
            file = code.co_filename.removeprefix(_PACKAGE)
            self.functions.append((file, code.co_qualname))
            self._go_to(file)
        elif event == "return" and self._callers and self._callers[-1] is code:
            self._callers.pop()
            if self._callers:
                self._go_to(self._callers[-1].co_filename.removeprefix(_PACKAGE))

    def _go_to(self, file: str) -> None:
        self.num_stops += file != self._place
        self._place = file
