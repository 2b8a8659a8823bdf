"""Reading a `TextSource` in generators, which yield where they need more text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from hetero_llm.server.regions.json_scanner import JSON, Dialect, JsonScanner
from hetero_llm.server.regions.text_source import TextSource

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields where it needs more text, and returns a T."""

_NOT_SPACE = re.compile(r"\S")
MOST_HEADER = 256
"""Characters of a function's name with what is written around it."""


class TextEnded(Exception):
    """The text ended before the part that is being read."""


class NotACall(Exception):
    """The text is not what the format of a call demands."""


def more(source: TextSource) -> Reading[None]:
    """Waits for more text.

    Raises:
        TextEnded: there will be none.
    """
    if source.ended:
        raise TextEnded
    yield


def peek(source: TextSource) -> Reading[str]:
    """The next character."""
    while source.at >= len(source.text):
        yield from more(source)
    return source.text[source.at]


def skip_space(source: TextSource, also: str = "") -> Reading[str]:
    """Consumes white space, and characters of `also`. Returns the next character."""
    while True:
        found = _NOT_SPACE.search(source.text, source.at)
        if found is None:
            source.take(len(source.text))
            yield from more(source)
        elif found[0] in also:
            source.take(found.end())
        else:
            source.take(found.start())
            return found[0]


def comes(source: TextSource, literal: str) -> Reading[bool]:
    """Consumes `literal` if it is next.

    Raises:
        TextEnded: only its beginning came.
    """
    while True:
        there = source.text[source.at : source.at + len(literal)]
        if there == literal:
            source.take(source.at + len(literal))
            return True
        if not literal.startswith(there):
            return False
        if source.ended:
            if there:
                raise TextEnded
            return False
        yield


def expect(source: TextSource, literal: str) -> Reading[None]:
    """Consumes `literal`.

    Raises:
        NotACall: something else is next.
    """
    if not (yield from comes(source, literal)):
        if source.ended and literal.startswith(source.text[source.at :]):
            raise TextEnded
        raise NotACall


def until(source: TextSource, pattern: re.Pattern[str], *, most: int = MOST_HEADER) -> Reading[str]:
    """Consumes text up to a match of `pattern`, whose matches are one character long or end where
    they cannot become longer.

    Raises:
        NotACall: `most` characters do not match.
    """
    start = 0
    while True:
        found = pattern.search(source.text, source.at + start)
        if found is not None and found.end() - source.at <= most:
            return source.take(found.start())
        start = max(0, len(source.text) - source.at - 64)
        if len(source.text) - source.at >= most:
            raise NotACall
        yield from more(source)


def value(
    source: TextSource, write: Callable[[str], None], dialect: Dialect = JSON
) -> Reading[None]:
    """Consumes a value and passes its JSON on as it comes.

    Raises:
        NotACall: it is none.
    """
    scanner = JsonScanner(dialect)
    while True:
        source.take(scanner.feed(source.text, source.at))
        ended = source.ended and not scanner.done and not scanner.failed
        if ended:
            scanner.finish()
        written = scanner.take()
        if written:
            write(written)
        if scanner.done:
            return
        if scanner.failed:
            raise NotACall
        if ended:
            raise TextEnded
        yield


def string(source: TextSource) -> Reading[str]:
    """Consumes a JSON string and returns its text.

    Raises:
        NotACall: it is none.
    """
    if (yield from peek(source)) != '"':
        raise NotACall
    written: list[str] = []
    yield from value(source, written.append)
    return str(json.loads("".join(written)))


def held_back(text: str, start: int, markers: tuple[str, ...]) -> int:
    """The index from which the text's end may be the beginning of a marker, else its length."""
    first_letters, longest = _beginnings(markers)
    for found in first_letters.finditer(text, max(start, len(text) - longest + 1)):
        tail = text[found.start() :]
        if any(marker.startswith(tail) for marker in markers):
            return found.start()
    return len(text)


@lru_cache(maxsize=256)
def _beginnings(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """A pattern of the markers' first letters, and the length of the longest one."""
    letters = "".join(sorted({marker[0] for marker in markers}))
    return re.compile(f"[{re.escape(letters)}]"), max(map(len, markers))


@lru_cache(maxsize=256)
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of the markers, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
