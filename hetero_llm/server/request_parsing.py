"""From bytes on the wire to a typed request.

msgspec alone decodes and validates: one pass in C that is strict about types, refuses what JSON
does not know, and says where a mistake is. Pydantic would want a second pass and accept NaN.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np
from starlette.requests import Request

from hetero_llm.server.errors import ApiError, invalid
from hetero_llm.server.settings import Limits

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

# An unterminated string runs to the end, so that no text makes the search start over again.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPEN_LIST, _OPEN_OBJECT = b"[{"
_SCANNED_AT_ONCE = 1 << 16
_ITEMS_LOOKED_AT = 4096
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WHERE = re.compile(r" - at `(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body of a JSON request.

    Raises:
        ApiError: 408, 413 or 415.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"content-type is {kind[:64]!r}; send application/json",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408,
            "request_timeout",
            f"the body did not arrive within {limits.body_seconds:g} s",
            headers={"connection": "close"},
        ) from None
    return b"".join(chunks)


async def read_json(
    request: Request, kind: type[T], limits: Limits, *, strict_fields: bool
) -> tuple[T, list[str]]:
    """A request's body as `kind`, and the names in it that `kind` does not have.

    Raises:
        ApiError: the body is too large, too slow, no JSON, or not of this kind.
        starlette's ClientDisconnect: the client left before its body had come.
    """
    return decode(await read_body(request, limits), kind, limits, strict_fields=strict_fields)


def decode(
    body: bytes, kind: type[T], limits: Limits, *, strict_fields: bool
) -> tuple[T, list[str]]:
    """See `read_json`."""
    _check_shape(body, limits)
    try:
        body.decode("utf-8")  # msgspec does not look into fields that it skips
        value = _decoder(kind).decode(body)
        unknown = _unknown_names(body, kind)
    except UnicodeDecodeError as error:
        raise invalid(
            None, f"the body is not UTF-8 text (byte {error.start})", "invalid_json"
        ) from None
    except msgspec.ValidationError as error:
        raise _type_mistake(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_json(body, str(error)) from None
    if unknown and strict_fields:
        raise invalid(unknown[0], f"{unknown[0][:64]!r} is not a known field", "unknown_parameter")
    return value, unknown


def decode_json(data: bytes, kind: Any, limits: Limits) -> Any:
    """JSON inside of a request, such as a tool's arguments, within the limits of a body.

    Raises:
        ApiError, msgspec.MsgspecError, RecursionError: it is no JSON, or not of this kind.
    """
    _check_shape(data, limits)
    return _decoder(kind).decode(data)


@lru_cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _unknown_names(body: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Names in a body that `kind` does not have, nor the objects in its fields, one level down."""
    raw = dict[str, msgspec.Raw]
    names: dict[str, msgspec.Raw] = _decoder(raw).decode(body)
    found = names.keys() - set(kind.__struct_fields__)
    for field, part in _parts(kind).items():
        content = bytes(names.get(field, b"")).lstrip()
        if content.startswith(b"{"):
            found |= {
                f"{field}.{name}" for name in _decoder(raw).decode(content) if name not in part
            }
        elif content.startswith(b"["):
            for number, item in enumerate(_decoder(list[raw]).decode(content)[:_ITEMS_LOOKED_AT]):
                found |= {f"{field}[{number}].{name}" for name in item if name not in part}
    return sorted(found)


@lru_cache
def _parts(kind: type[msgspec.Struct]) -> dict[str, frozenset[str]]:
    """Fields of `kind` that hold objects or lists of them, and the names these objects have."""
    found = {}
    for field in msgspec.structs.fields(kind):
        for one in get_args(field.type):
            part = next(iter(get_args(one)), None) if get_origin(one) is list else one
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                found[field.name] = frozenset(part.__struct_fields__)
    return found


def _check_shape(body: bytes, limits: Limits) -> None:
    """Refuses JSON that is deep, or made of so many small parts that decoding it would hold up
    everybody. A body with few brackets and names is neither; others are measured undecoded."""
    if body.count(b"[") + body.count(b"{") + body.count(b":") <= limits.json_depth:
        return
    bare = _STRING.sub(b"", body)
    brackets = np.frombuffer(bare.translate(None, _NOT_BRACKETS), np.uint8)
    opens = (brackets == _OPEN_LIST) | (brackets == _OPEN_OBJECT)
    if int(opens.sum()) + bare.count(b":") > limits.json_parts:
        raise invalid(
            None,
            f"the JSON has more than {limits.json_parts} lists, objects and names",
            "invalid_json",
        )
    level = 0
    for start in range(0, len(opens), _SCANNED_AT_ONCE):
        steps = np.where(opens[start : start + _SCANNED_AT_ONCE], 1, -1).cumsum()
        if level + int(steps.max()) > limits.json_depth:
            raise invalid(
                None, f"the JSON is nested deeper than {limits.json_depth} levels", "invalid_json"
            )
        level += int(steps[-1])


def _type_mistake(text: str) -> ApiError:
    found = _WHERE.search(text)
    missing = _MISSING.search(text)
    where = found[1].removeprefix("$").removeprefix(".") if found else ""
    if missing:
        name = f"{where}.{missing[1]}" if where else missing[1]
        return invalid(name, f"{name} is required", "missing_required_parameter")
    reason = _WHERE.sub("", text)
    reason = reason[:1].lower() + reason[1:]
    if not where:
        return invalid(None, f"the body: {reason}", "invalid_type")
    return invalid(where, f"{where}: {reason}", "invalid_type")


def _not_json(body: bytes, reason: str) -> ApiError:
    if not body.strip():
        reason = "the body is empty"
    elif "truncated" in reason and _LONE_SURROGATE.search(body):
        reason = "a string holds half of a surrogate pair, or the text was cut off"
    return invalid(None, f"the body is not valid JSON: {reason}", "invalid_json")


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limits.body_bytes} bytes")
