"""Formats from a tokenizer's `response_template` (transformers from 5.13 on).

Such a template describes the fields of a message by what opens and closes them, in texts or regular
expressions, and by how their contents are parsed. What stands in it is data here, too: those that
say what `formats` can say are translated, for others there is a reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.reasoning_formats import ReasoningFormat
from hetero_llm.server.regions.formats import (
    HARMONY,
    CallBody,
    HeadedCalls,
    JsonCalls,
    MessageFormat,
    TaggedCalls,
    ToolFormat,
)

_NAME = "response_template"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_PART = re.compile(
    r"(?P<space>\\s[*+]|\\n\?)"
    r"|\(\?P<(?P<group>\w+)>(?:\[\^?(?:\\.|[^\]\\])*\][+*]?|\\[wS][+*]|\.[+*]\??)+\)"
    r"|\\(?P<escaped>[^\w\s])|(?P<line>\\n)|(?P<plain>[^\\^$.|?*+()\[\]{}])"
)
_TAG = re.compile(r"<(?P<tag>[\w:]+)[ =]")


class _NotTranslated(Exception):
    """Why a field has no translation."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A template's format, and what of it has no translation: a field and the reason, each."""

    format: MessageFormat
    problems: tuple[str, ...] = ()


def translated(template: Any) -> Translation:
    """Translates a template."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        return Translation(MessageFormat(), ("it has no fields",))
    if HARMONY.channel in str(fields).replace("\\", "") and HARMONY.message in str(fields):
        return Translation(MessageFormat(channels=HARMONY))
    problems = []
    reasoning = tools = None
    for name, one in fields.items():
        try:
            if name in _REASONING_FIELDS:
                reasoning = _reasoning(one)
            elif name == "tool_calls":
                tools = _tools(one)
            elif name != "content":
                raise _NotTranslated("no field of a message")
        except _NotTranslated as error:
            problems.append(f"{name}: {error}")
    return Translation(MessageFormat(tools, reasoning), tuple(problems))


def _reasoning(field: Mapping[str, Any]) -> ReasoningFormat:
    opens, closes = _literals(field, "open"), _literals(field, "close")
    if not opens or not closes:
        raise _NotTranslated("it needs texts that open and close it")
    return ReasoningFormat(_NAME, opens, closes)


def _tools(field: Mapping[str, Any]) -> ToolFormat:
    if field.get("content_args") and field.get("content") != "xml-inline":
        raise _NotTranslated(f"content_args {sorted(field['content_args'])} are not known")
    function = _function(field)
    opens = _parts(field, "open")
    closes = [one for one in _parts(field, "close") if one is not None]
    if not opens or not isinstance(opens[0], str):
        raise _NotTranslated("no text opens it")
    if any(not isinstance(one, str) for one in closes):
        raise _NotTranslated("what closes it has a named group")
    body: CallBody
    section: tuple[str, ...]
    if field.get("content") == "json":
        body = _json_body(opens, function, field)
        section, closing = (opens[0],), closes[-1:]
    elif field.get("content") == "xml-inline":
        body, section = _tagged_body(opens, function, field, closes)
        closing = [one for one in closes[-1:] if one != body.closes]
    else:
        raise _NotTranslated(f"content {field.get('content')!r} is not known")
    if len(opens) == 1 and not isinstance(field.get("open"), (str, type(None))):
        section = _literals(field, "open")
    close = str(closing[0]) if closing else ""
    several = not field.get("repeats", False)
    written = (f"{section[0]}\n", "\n", f"\n{close}" if close else "")
    return ToolFormat(_NAME, body, opens=section, closes=close, several=several, written=written)


def _function(field: Mapping[str, Any]) -> Any:
    """What a call's function is made of: "{content}", or texts for its name and arguments."""
    transform = field.get("transform")
    if isinstance(transform, list) and len(transform) == 1:
        transform = transform[0]
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}" or isinstance(function, Mapping):
        return function
    raise _NotTranslated("its transform makes no function of it")


def _json_body(opens: list[_Group | str | None], function: Any, field: Mapping[str, Any]) -> Any:
    each = bool(field.get("transform_each"))
    if not any(isinstance(one, _Group) for one in opens):
        if len(opens) > 1:
            raise _NotTranslated("its open_pattern is not one text")
        if function == "{content}":
            return JsonCalls(as_list=each)
        prefix = "" if each else "content."
        name, arguments = (_key(function.get(one), prefix) for one in ("name", "arguments"))
        return JsonCalls(name, (arguments,), as_list=each)
    if function != {"name": "{name}", "arguments": "{content}"}:
        raise _NotTranslated("its transform has other parts than name and content")
    pattern = "".join(
        r"\s*" if one is None else one.pattern if isinstance(one, _Group) else re.escape(one)
        for one in opens[1:]
    )
    written = "".join(
        "" if one is None else "{name}" if isinstance(one, _Group) else one for one in opens[1:]
    )
    return HeadedCalls(re.compile(rf"\s*{pattern}\s*"), written)


def _tagged_body(
    opens: list[_Group | str | None],
    function: Any,
    field: Mapping[str, Any],
    closes: list[Any],
) -> tuple[TaggedCalls, tuple[str, ...]]:
    if function != {"name": "{name}", "arguments": "{content}"}:
        raise _NotTranslated("its transform has other parts than name and content")
    bare = [one for one in opens if one is not None]
    match bare:
        case [str(marker), _Group(), str(ends)]:
            parts, outer = marker, marker
            at = marker.rfind("<")
            if at > 0:
                parts, outer = marker[at:], marker[:at].rstrip()
        case [str(outer), str(parts), _Group(), str(ends)]:
            pass
        case _:
            raise _NotTranslated("its open_pattern has another form")
    pattern = (field.get("content_args") or {}).get("tag_pattern", "")
    inner = _split(pattern)
    match [one for one in inner if one is not None]:
        case [str(parameter), _Group("key"), str(key_ends), _Group("value"), str(value_ends)]:
            pass
        case _:
            raise _NotTranslated("its tag_pattern has another form")
    trims = None in inner[3:]
    tag = _TAG.match(parts)
    inferred = f"</{tag['tag']}>" if tag else ""
    ends_call = closes[0] if len(closes) > 1 or outer == parts else inferred
    body = TaggedCalls(
        opens=parts,
        name_ends=ends,
        parameter=parameter,
        key_ends=re.compile(re.escape(key_ends)),
        key_end_written=f"{key_ends}\n" if trims else key_ends,
        value_ends=value_ends,
        closes=ends_call,
        trims=trims,
    )
    return body, (outer,)


# -- parts of regular expressions -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """A named group."""

    name: str
    pattern: str = ""


def _split(pattern: str) -> list[_Group | str | None]:
    """A pattern as texts, named groups, and None for white space that may stand there.

    Raises:
        _NotTranslated: it has anything else.
    """
    parts: list[_Group | str | None] = []
    at = 0
    while at < len(pattern):
        found = _PART.match(pattern, at)
        if found is None:
            raise _NotTranslated(f"the pattern {pattern!r} is too general")
        if found["group"]:
            parts.append(_Group(found["group"], found[0]))
        elif found["space"]:
            parts.append(None)
        else:
            text = found["escaped"] or ("\n" if found["line"] else found["plain"])
            if parts and isinstance(parts[-1], str):
                parts[-1] += text
            else:
                parts.append(text)
        at = found.end()
    return parts


def _parts(field: Mapping[str, Any], side: str) -> list[_Group | str | None]:
    """What opens or closes a field, without white space at its ends."""
    pattern = field.get(f"{side}_pattern")
    if pattern is None:
        return list(_literals(field, side)[:1])
    parts = _split(pattern)
    while parts and parts[0] is None:
        parts.pop(0)
    while parts and parts[-1] is None:
        parts.pop()
    return parts


def _literals(field: Mapping[str, Any], side: str) -> tuple[str, ...]:
    """The texts that open or close a field, without white space at their ends."""
    given = field.get(side)
    if given is None:
        pattern = field.get(f"{side}_pattern")
        parts = [] if pattern is None else [one for one in _split(pattern) if one is not None]
        if len(parts) > 1 or not all(isinstance(one, str) for one in parts):
            raise _NotTranslated(f"its {side}_pattern is not one text")
        given = parts
    texts = [given] if isinstance(given, str) else given
    return tuple(str(one).strip() for one in texts)


def _key(value: Any, prefix: str) -> str:
    """The key that a placeholder such as "{content.name}" names."""
    found = re.fullmatch(r"\{" + re.escape(prefix) + r"(\w+)\}", str(value))
    if found is None:
        raise _NotTranslated(f"its transform has {value!r}")
    return found[1]
