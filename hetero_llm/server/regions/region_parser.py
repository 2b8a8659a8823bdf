"""The parser of a message by the description of its format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from hetero_llm.core.reasoning_formats import ReasoningFormat
from hetero_llm.server.message_events import Content, MessageEvent, Reasoning
from hetero_llm.server.regions.call_readers import CallReader
from hetero_llm.server.regions.formats import Channels, MessageFormat, ToolFormat
from hetero_llm.server.regions.message_writer import (
    MessageWriter,
    new_call_id,
    new_mistral_id,
)
from hetero_llm.server.regions.reading import (
    MOST_HEADER,
    NotACall,
    Reading,
    TextEnded,
    any_of,
    held_back,
    skip_space,
    value,
)
from hetero_llm.server.regions.reasoning_counter import ReasoningCounter
from hetero_llm.server.regions.special_tokens import NO_TOKENS, SpecialTokens, Start
from hetero_llm.server.regions.text_source import TextSource


class RegionParser:
    """A `MessageParser`; its text has to hold special tokens.

    Args:
        message_format: at most `channels`, or any of `tools` and `reasoning`.
        start: see `Start`.
        schemas: of the parameters of the functions that the request declares; None: the request
            declares none, so nothing is a call.
        only_one_call: further calls are left out.
    """

    def __init__(
        self,
        message_format: MessageFormat,
        start: Start = "content",
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        tokens: SpecialTokens = NO_TOKENS,
        only_one_call: bool = False,
    ) -> None:
        tools = message_format.tools if schemas is not None else None
        mistral = tools is not None and tools.id_form == "mistral"
        self._source = TextSource(tokens.marker_ids, tokens.dropped, tokens.decode)
        self._writer = MessageWriter(
            new_mistral_id if mistral else new_call_id, only_one_call=only_one_call
        )
        if message_format.channels is not None:
            self._reading = _channel_regions(
                self._source, self._writer, message_format.channels, start, schemas
            )
        else:
            regions = _Regions(
                self._source, self._writer, tools, message_format.reasoning, schemas or {}
            )
            self._reading = regions.read(start)
        next(self._reading)
        self._counter = ReasoningCounter(message_format, tokens, start)

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning up to now, without its markers; None where these are no tokens
        and the reasoning's tokens cannot be told from others."""
        return self._counter.count

    def feed(self, text: str, token_ids: Sequence[int]) -> list[MessageEvent]:
        self._source.feed(text, token_ids)
        self._counter.note(token_ids)
        if text:
            next(self._reading)
        return self._writer.take()

    def finish(self) -> list[MessageEvent]:
        self._source.ended = True
        next(self._reading, None)
        self._writer.end()
        return self._writer.take()


class _Regions:
    """Reads a message whose regions have markers around them."""

    def __init__(
        self,
        source: TextSource,
        writer: MessageWriter,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        schemas: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._source, self._writer = source, writer
        self._tools, self._reasoning = tools, reasoning
        self._calls = None if tools is None else CallReader(source, writer, tools, schemas)
        self._thinks = () if reasoning is None else reasoning.opens
        self._thought = () if reasoning is None else reasoning.closes
        self._call_opens = () if tools is None else tools.opens
        # What ends a section is skipped where a section has ended without it.
        stray = (tools.closes,) if tools is not None and tools.closes else ()
        self._in_content = (*self._thinks, *self._thought, *self._call_opens, *stray)
        in_reasoning = self._call_opens[:1] if tools is not None and tools.in_reasoning else ()
        self._in_reasoning = (*self._thought, *self._thinks, *in_reasoning)

    def read(self, start: Start) -> Reading[None]:
        """Reads the whole message."""
        kind: type[Content] | type[Reasoning] = Content
        if start == "reasoning":
            kind = Reasoning
            self._writer.border()
        try:
            if kind is Content:
                yield from self._bare_calls()
            while True:
                marker = yield from self._text(kind)
                if marker in self._thinks:
                    kind = Reasoning
                    self._writer.border()
                elif marker in self._call_opens:
                    if (yield from self._section(kind)):
                        kind = Content
                else:
                    kind = Content
                    self._writer.border()
                    yield from self._bare_calls()
        except TextEnded:
            return

    def _text(self, kind: type[Content] | type[Reasoning]) -> Reading[str]:
        """Passes on text up to a marker; returns the marker, which is consumed unless it opens
        calls."""
        source = self._source
        markers = self._in_content if kind is Content else self._in_reasoning
        write = partial(self._writer.text, kind, may_end=bool(markers))
        found = yield from _up_to(source, write, markers, partial(self._is_marker, kind))
        if found[0] not in self._call_opens:
            source.take(found.end())
        return found[0]

    def _is_marker(self, kind: type[Content] | type[Reasoning], found: re.Match[str]) -> bool:
        """Whether a text in a region of this kind is the marker that it looks like."""
        source, marker, start = self._source, found[0], found.start()
        if not source.is_real(marker, start):
            return False
        # A marker that is plain text opens reasoning at the beginning of a message only.
        if marker in self._thinks:
            return source.has_token(marker) or self._at_beginning(start)
        if marker in self._thought:
            return source.has_token(marker) or kind is Reasoning
        # What closes calls means nothing before the first one.
        return marker in self._call_opens or bool(self._writer.num_calls)

    def _at_beginning(self, start: int) -> bool:
        source = self._source
        return self._writer.is_empty and not source.text[source.at : start].strip()

    def _section(self, kind: type[Content] | type[Reasoning]) -> Reading[bool]:
        """Reads a section of calls whose opening marker is next; False if it is none but text."""
        assert self._tools is not None
        source = self._source
        source.keep()
        opens = next(one for one in self._call_opens if source.text.startswith(one, source.at))
        if opens != getattr(self._tools.body, "opens", ""):
            source.take(source.at + len(opens))
        unusual = opens != self._tools.opens[0] and not source.has_token(opens)
        return (yield from self._calls_or_text(kind, bare=unusual))

    def _bare_calls(self) -> Reading[None]:
        """Reads calls that stand without a marker where a region begins, if there are any: lists of
        them may stand one behind another."""
        if self._tools is None or not self._tools.bare:
            return
        source, is_call, between = self._source, True, ""
        while is_call:
            source.keep()
            try:
                first = yield from skip_space(source, between)
            except TextEnded:
                self._writer.text(Content, source.kept(), may_end=False)
                raise
            is_call, between = first in self._tools.bare, ","
            if is_call:
                is_call = yield from self._calls_or_text(Content, bare=True)
            else:
                self._writer.text(Content, source.kept(), may_end=True)

    def _calls_or_text(self, kind: type[Content] | type[Reasoning], *, bare: bool) -> Reading[bool]:
        calls, source = self._calls, self._source
        assert calls is not None and self._tools is not None
        try:
            yield from calls.section(bare=bare)
            source.release()
        except NotACall:
            if calls.is_open:
                yield from calls.rest((*self._ends(), *self._call_opens))
            else:
                if calls.begun:
                    kind = Content
                    self._writer.border()
                self._writer.text(kind, source.kept(), may_end=True)
                return calls.begun
        except TextEnded:
            if not calls.is_open:
                left = source.kept() + source.take(len(source.text))
                if not (self._writer.num_calls and self._is_cut_markup(left)):
                    self._writer.text(Content if calls.begun else kind, left, may_end=True)
            raise
        self._writer.border()
        return True

    def _is_cut_markup(self, left: str) -> bool:
        """Whether the end of a text, behind a call, is markup of that call or the beginning of
        another one."""
        assert self._tools is not None
        rest = left.strip()
        opens = getattr(self._tools.body, "opens", "")
        for one in (*self._ends(), *self._call_opens, opens):
            rest = rest.removeprefix(one).lstrip()
        return rest.startswith("{") or not re.search(r"\s", rest)

    def _ends(self) -> tuple[str, ...]:
        assert self._tools is not None
        body = self._tools.body
        ends = [*(getattr(body, one, "") for one in ("tail", "closes")), self._tools.closes]
        return tuple(one.strip() for one in ends if one.strip())


def _channel_regions(
    source: TextSource,
    writer: MessageWriter,
    channels: Channels,
    start: Start,
    schemas: Collection[str] | None,
) -> Reading[None]:
    """Reads a whole message in channels."""
    begins = (channels.part, channels.channel)
    ends = (*channels.ends, *begins)
    in_header = start == "header"
    kind: type[Content] | type[Reasoning] = Reasoning if start == "reasoning" else Content
    try:
        while True:
            header = (yield from _header(source, channels)) if in_header else None
            if header is not None:
                writer.border()
                name = header.partition(channels.channel)[2].split(maxsplit=1)
                region = channels.regions.get(name[0] if name else "", "content")
                kind = Reasoning if region == "reasoning" else Content
            called = None if header is None else channels.recipient.search(header)
            if called is not None and schemas is not None:
                writer.begin_call(called["name"])
                marker = yield from _channel_call(source, writer, ends)
            else:
                if in_header and header is None:  # the model does not write harmony
                    kind = Content
                    begun = next((b for b in begins if source.text.startswith(b, source.at)), "")
                    writer.text(kind, source.take(source.at + len(begun)), may_end=True)
                write = partial(writer.text, kind, may_end=True)
                marker = yield from _until_real(source, write, ends)
            writer.border()
            in_header = marker in begins
            if in_header:
                source.at -= len(marker)
    except TextEnded:
        return


def _header(source: TextSource, channels: Channels) -> Reading[str | None]:
    """Consumes a header with the marker that ends it; None if the text is no header."""
    begins = (channels.part, channels.channel, "to=")
    while True:
        at = source.text.find(channels.message, source.at)
        end = at + len(channels.message) if at >= 0 else len(source.text) + 1
        text = source.text[source.at : end].lstrip()
        may_be = text.startswith(begins) or any(one.startswith(text) for one in begins)
        if not may_be or end - source.at > MOST_HEADER:
            return None
        if at >= 0:
            header = source.take(at)
            source.take(end)
            return header
        if source.ended:
            return None
        yield


def _channel_call(source: TextSource, writer: MessageWriter, ends: tuple[str, ...]) -> Reading[str]:
    """Reads the arguments of a call behind its header. What does not fit is passed on as it is.
    Returns the marker that ends the part."""
    try:
        yield from skip_space(source)
        yield from value(source, writer.arguments)
    except NotACall:
        return (yield from _until_real(source, writer.arguments, ends))
    writer.end_call()
    return (yield from _until_real(source, partial(writer.text, Content, may_end=True), ends))


def _until_real(
    source: TextSource, write: Callable[[str], None], markers: tuple[str, ...]
) -> Reading[str]:
    """Passes on text up to one of the markers, which it consumes and returns."""
    found = yield from _up_to(source, write, markers, lambda m: source.is_real(m[0], m.start()))
    source.take(found.end())
    return found[0]


def _up_to(
    source: TextSource,
    write: Callable[[str], None],
    markers: tuple[str, ...],
    is_one: Callable[[re.Match[str]], bool],
) -> Reading[re.Match[str]]:
    """Passes on text up to a marker that `is_one`, and returns it unconsumed.

    Raises:
        TextEnded: there is none.
    """
    while True:
        for found in any_of(markers).finditer(source.text, source.at) if markers else ():
            if is_one(found):
                write(source.take(found.start()))
                return found
        end = len(source.text)
        if markers and not source.ended:
            end = held_back(source.text, source.at, markers)
        if end > source.at:
            write(source.take(end))
        if source.ended:
            raise TextEnded
        yield
