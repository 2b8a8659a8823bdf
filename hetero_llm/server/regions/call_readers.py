"""Readers of tool calls, one for each kind of body that `formats` describes.

A reader consumes a section of calls after its opening marker. Until the first function's name is
known, a text that does not fit raises `NotACall`, and the caller shows it as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.server.regions.argument_types import STRING, types_in
from hetero_llm.server.regions.formats import (
    HeadedCalls,
    JsonCalls,
    PythonCalls,
    TaggedCalls,
    ToolFormat,
)
from hetero_llm.server.regions.json_scanner import PYTHON, JsonScanner
from hetero_llm.server.regions.message_writer import MessageWriter
from hetero_llm.server.regions.reading import (
    NotACall,
    Reading,
    TextEnded,
    any_of,
    comes,
    expect,
    held_back,
    more,
    peek,
    skip_space,
    string,
    until,
    value,
)
from hetero_llm.server.regions.text_source import TextSource

_BRACE = re.compile(r"\{")
_NAME_ENDS = re.compile(r"[\s<]")
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_NOT_IN_NAME = re.compile(r"[^\w.\-]")
_QUOTED_ESCAPES = {number: f"\\u{number:04x}" for number in range(32)} | {
    ord('"'): '\\"',
    ord("\\"): "\\\\",
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
}


@dataclass
class CallReader:
    """What readers of one message share.

    Attributes:
        format: of the calls.
        schemas: of the parameters of each function that the request declares.
        only_declared: of the section being read: other functions are not calls.
        begun: a call of the section has begun.
        is_open: a call has begun and not ended, so that what follows can no longer be text. Outside
            of calls the source keeps what it consumes.
    """

    source: TextSource
    writer: MessageWriter
    format: ToolFormat
    schemas: Mapping[str, Mapping[str, Any]]
    only_declared: bool = False
    begun: bool = False
    is_open: bool = False
    _is_closed: bool = False
    """The arguments of the call are complete, whatever follows."""

    def section(self, *, bare: bool) -> Reading[None]:
        """Reads a section behind its opening marker; `bare`: it has none, or an unusual one that
        may be prose.

        Raises:
            NotACall: see the module.
            TextEnded: the text ended inside of the section.
        """
        body = self.format.body
        self.begun, self.is_open, self.only_declared = False, False, bare
        if isinstance(body, TaggedCalls) and not body.name_ends:
            # Nothing marks a name, so prose behind a marker that is plain text looks like one.
            self.only_declared |= not self.source.has_token(self.format.opens[0])
        if isinstance(body, JsonCalls):
            yield from self._json_calls(body)
        elif isinstance(body, HeadedCalls):
            yield from self._headed_calls(body)
        elif isinstance(body, TaggedCalls):
            yield from self._tagged_calls(body)
        else:
            yield from self._python_calls(body)

    def _begin(self, name: str, call_id: str | None = None) -> None:
        """A call's name is known."""
        if not name or (self.only_declared and name not in self.schemas):
            raise NotACall
        self.begun, self.is_open, self._is_closed = True, True, False
        self.source.release()
        self.writer.begin_call(name, call_id)

    def _end(self) -> None:
        """A call is complete."""
        self.writer.end_call()
        self.is_open = False
        self.source.keep()

    def _closed(self) -> Reading[bool]:
        """Consumes the section's closing marker if it is next."""
        if not self.format.closes:
            return False
        return (yield from comes(self.source, self.format.closes))

    def _space(self, also: str = "") -> Reading[bool]:
        """Skips white space between calls. Returns False if the text ends there."""
        try:
            yield from skip_space(self.source, also)
        except TextEnded:
            if not self.begun:
                raise
            return False
        return True

    # -- JSON objects -------------------------------------------------------------------------

    def _json_calls(self, body: JsonCalls) -> Reading[None]:
        source = self.source
        in_list = (yield from skip_space(source)) == "["
        if in_list:
            source.take(source.at + 1)
            yield from skip_space(source)
        while True:
            yield from self._json_call(body)
            # Some models close more braces than they have opened.
            if not (yield from self._space(",}" if in_list else body.separators + "}")):
                return
            char = yield from peek(source)
            if char == "]" and in_list:
                in_list = False
                source.take(source.at + 1)
                if not (yield from self._space()):
                    return
                char = yield from peek(source)
            if (yield from self._closed()) or char != "{":
                return
            source.keep()

    def _json_call(self, body: JsonCalls) -> Reading[None]:
        source, writer = self.source, self.writer
        yield from expect(source, "{")
        name = call_id = None
        held: list[str] = []
        has_arguments = False
        while (yield from skip_space(source, ",")) != "}":
            key = yield from string(source)
            yield from skip_space(source)
            yield from expect(source, ":")
            char = yield from skip_space(source)
            if key == body.name_key and name is None:
                name = yield from string(source)
                self._begin(name, call_id)
                for piece in held:
                    writer.arguments(piece)
            elif key in body.argument_keys and not has_arguments:
                write = held.append if name is None else writer.arguments
                yield from self._arguments(char, write)
                self._is_closed = has_arguments = True
            elif key == "id" and char == '"':
                call_id = yield from string(source)
            else:
                yield from value(source, _ignore)
        if name is None:
            raise NotACall
        source.take(source.at + 1)
        self._end()

    def _arguments(self, char: str, write: Any) -> Reading[None]:
        """Arguments are an object; some models write it as JSON inside of a string, or null."""
        if char == "{":
            yield from value(self.source, write)
        elif char == '"':
            write((yield from string(self.source)))
        else:
            written: list[str] = []
            yield from value(self.source, written.append)
            text = "".join(written)
            write("{}" if text == "null" else text)

    # -- headers ------------------------------------------------------------------------------

    def _headed_calls(self, body: HeadedCalls) -> Reading[None]:
        source, writer = self.source, self.writer
        first = yield from skip_space(source)
        if body.as_json is not None and first in "[{":
            yield from self._json_calls(body.as_json)
            return
        while True:
            if body.opens:
                yield from expect(source, body.opens)
            header = body.header.fullmatch((yield from until(source, _BRACE)))
            if header is None:
                raise NotACall
            found = header.groupdict()
            self._begin(found["name"], found.get("id"))
            yield from value(source, writer.arguments)
            self._end()
            if not (yield from self._space()):
                return
            if body.tail:
                yield from comes(source, body.tail.strip())
            if body.closes:
                yield from self._space()
                yield from comes(source, body.closes)
            if not (yield from self._space()):
                return
            if (yield from self._closed()) or not body.opens:
                return
            if not (yield from self._next_is(body.opens)):
                return
            source.keep()

    def _next_is(self, literal: str) -> Reading[bool]:
        """Whether `literal` is next, without consuming it."""
        source = self.source
        while True:
            there = source.text[source.at : source.at + len(literal)]
            if there == literal or not literal.startswith(there):
                return there == literal
            if source.ended:
                return False
            yield

    # -- tags ---------------------------------------------------------------------------------

    def _tagged_calls(self, body: TaggedCalls) -> Reading[None]:
        source, writer = self.source, self.writer
        yield from skip_space(source)
        while True:
            if body.opens:
                yield from expect(source, body.opens)
            name_ends = any_of((body.name_ends,)) if body.name_ends else _NAME_ENDS
            name = (yield from until(source, name_ends)).strip()
            if body.name_ends:
                yield from expect(source, body.name_ends)
            else:
                yield from skip_space(source)
                if not (
                    (yield from self._next_is(body.parameter))
                    or (yield from self._next_is(self.format.closes))
                ):
                    raise NotACall
            if any(char in name for char in "<\n"):
                raise NotACall
            self._begin(name)
            writer.arguments("{")
            types = types_in(self.schemas.get(name, {}))
            first = True
            while True:
                yield from skip_space(source)
                if not (yield from comes(source, body.parameter)):
                    break
                yield from self._parameter(body, types, first=first)
                first = False
            writer.arguments("}")
            if body.closes:
                yield from expect(source, body.closes)
                self._end()
                if not (yield from self._space()):
                    return
                if (yield from self._closed()) or not (yield from self._next_is(body.opens)):
                    return
                source.keep()
            else:
                yield from expect(source, self.format.closes)
                self._end()
                return

    def _parameter(
        self, body: TaggedCalls, types: Mapping[str, frozenset[str]], *, first: bool
    ) -> Reading[None]:
        source, writer = self.source, self.writer
        key = (yield from until(source, body.key_ends)).strip()
        found = body.key_ends.match(source.text, source.at)
        assert found is not None
        source.take(found.end())
        writer.arguments(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        if body.trims:
            yield from comes(source, "\n")
        wanted = types.get(key, STRING)
        if wanted == STRING:
            writer.arguments('"')
            yield from self._until_value_ends(
                body, lambda text: writer.arguments(text.translate(_QUOTED_ESCAPES))
            )
            writer.arguments('"')
        else:
            written: list[str] = []
            yield from self._until_value_ends(body, written.append)
            writer.arguments(_as_json("".join(written), wanted))

    def _until_value_ends(self, body: TaggedCalls, write: Any) -> Reading[None]:
        """Passes on the text of a value and consumes the tag that ends it."""
        source = self.source
        end = body.value_ends
        marks = (f"\n{end}", end) if body.trims else (end,)
        while True:
            at = source.text.find(end, source.at)
            if at >= 0:
                text_end = at
                if body.trims and at > source.at and source.text[at - 1] == "\n":
                    text_end -= 1
                write(source.take(text_end))
                source.take(at + len(end))
                return
            # If the text ends here, its end is the beginning of the tag that was to come.
            whole = held_back(source.text, source.at, marks)
            if whole > source.at:
                write(source.take(whole))
            yield from more(source)

    # -- Python -------------------------------------------------------------------------------

    def _python_calls(self, body: PythonCalls) -> Reading[None]:
        source = self.source
        yield from skip_space(source)
        if body.bracketed:
            yield from expect(source, "[")
        while True:
            yield from skip_space(source)
            yield from self._python_call()
            if not (yield from self._space("," if body.bracketed else "")):
                return
            if body.bracketed and (yield from peek(source)) == "]":
                source.take(source.at + 1)
                if (yield from self._space()):
                    yield from self._closed()
                return
            if not body.bracketed and (yield from self._closed()):
                return
            if not _PYTHON_NAME.match((yield from peek(source))):
                return
            source.keep()

    def _python_call(self) -> Reading[None]:
        source, writer = self.source, self.writer
        name = yield from until(source, _NOT_IN_NAME)
        if not _PYTHON_NAME.fullmatch(name):
            raise NotACall
        yield from expect(source, "(")
        self._begin(name)
        writer.arguments("{")
        first = True
        while (yield from skip_space(source, ",")) != ")":
            key = yield from until(source, _NOT_IN_NAME)
            yield from skip_space(source)
            yield from expect(source, "=")
            yield from skip_space(source)
            writer.arguments(f"{'' if first else ', '}{json.dumps(key)}: ")
            yield from value(source, writer.arguments, PYTHON)
            first = False
        source.take(source.at + 1)
        writer.arguments("}")
        self._end()

    # -- what is no call after all --------------------------------------------------------------

    def rest(self, ends: tuple[str, ...]) -> Reading[None]:
        """After a mistake inside of a call: passes on what the model wrote, as arguments of that
        call, up to a marker that ends it."""
        source, space = self.source, ""
        while True:
            found = any_of(ends).search(source.text, source.at) if ends else None
            if found is not None:
                left = (space + source.take(found.start())).rstrip()
                self.writer.arguments(left)
                if self._is_closed and not left:
                    self.writer.end_call()
                if found[0] not in self.format.opens:
                    source.take(found.end())
                return
            # If the text ends here, its end is the beginning of the marker that was to come.
            whole = held_back(source.text, source.at, ends) if ends else len(source.text)
            text = space + source.take(whole)
            bare = text.rstrip()
            space = text[len(bare) :]
            if bare:
                self._is_closed = False
                self.writer.arguments(bare)
            yield from more(source)


def declared_schemas(tools: Collection[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of the parameters of each function."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def _ignore(text: str) -> None:
    """For values of keys that have no meaning."""


def _as_json(text: str, wanted: frozenset[str]) -> str:
    """The JSON of a value that stands in a tag, which is none or a string if it is no JSON."""
    bare = text.strip()
    scanner = JsonScanner(PYTHON)
    end = scanner.feed(bare, 0)
    scanner.finish()
    if scanner.done and end == len(bare):
        written = scanner.take()
        is_string = written.startswith('"')
        if not ("string" in wanted and (is_string or wanted.isdisjoint(_types_of(written)))):
            return written
    return json.dumps(text, ensure_ascii=False)


def _types_of(written: str) -> set[str]:
    """The types that a JSON value has: an integer is a number, too."""
    if re.fullmatch("-?[0-9]+", written):
        return {"integer", "number"}
    kinds = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    return {kinds.get(written[0], "number")}
