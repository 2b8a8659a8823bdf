"""Heads of requests and responses on their way through the router: which headers pass, and where a
body ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

Headers = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)  # fmt: skip
"""RFC 9110, section 7.6.1: these concern one connection."""
_PHRASES = {one.value: one.phrase.encode() for one in HTTPStatus}
_CHUNK_END = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """How a client sees the end of a body: by its length, by chunks, or by the connection's end."""

    chunked: bool = False
    closes: bool = False

    def frame(self, pieces: Iterable[bytes]) -> bytes:
        """The bytes of pieces of a body; an empty piece is left out."""
        if not self.chunked:
            return b"".join(pieces)
        framed: list[bytes] = []
        for piece in pieces:
            if piece:
                framed += (b"%x\r\n" % len(piece), piece, _CHUNK_END)
        return b"".join(framed)


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers without those of one connection, those that Connection names included. Names are
    in lower case."""
    named = {
        word.strip().lower()
        for name, value in headers
        if name == b"connection"
        for word in value.split(b",")
    }
    dropped = _HOP_BY_HOP | (named - {b"authorization", b"content-length", b"content-type"})
    return [(name, value) for name, value in headers if name not in dropped]


def value_of(headers: Headers, name: bytes) -> bytes:
    """A header's first value; empty without one."""
    return next((value for known, value in headers if known == name), b"")


def request_headers(headers: Headers, *, host: bytes, client: str, length: int) -> Headers:
    """A client's headers as a replica gets them: with the replica's host, the body's length, and
    the client's address behind those of earlier proxies."""
    kept = [
        (name, value)
        for name, value in passed_on(headers)
        if name not in (b"host", b"content-length", b"x-forwarded-for")
    ]
    before = [value for name, value in headers if name == b"x-forwarded-for"]
    forwarded = b", ".join([*before, client.encode("ascii", "replace")])
    added = [(b"host", host), (b"x-forwarded-for", forwarded)]
    if length or any(name == b"content-length" for name, _ in headers):
        added.append((b"content-length", b"%d" % length))
    return [*added, *kept]


def response_framing(headers: Headers, *, status: int, method: bytes, http_1_0: bool) -> Framing:
    """How a client gets a response with these headers of a replica's."""
    bodiless = method == b"HEAD" or status in (204, 304)
    if bodiless or any(name == b"content-length" for name, _ in headers):
        return Framing()
    return Framing(closes=True) if http_1_0 else Framing(chunked=True)


def response_head(status: int, headers: Headers, framing: Framing, *, close: bool) -> bytes:
    """The bytes of a response's head. `headers`: those that pass, the length included."""
    lines = [b"HTTP/1.1 %d %s" % (status, _PHRASES.get(status, b""))]
    lines += [name + b": " + value for name, value in headers]
    if framing.chunked:
        lines.append(b"transfer-encoding: chunked")
    if close or framing.closes:
        lines.append(b"connection: close")
    return b"\r\n".join([*lines, b"", b""])
