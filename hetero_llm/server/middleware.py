"""What happens to every HTTP request before and after its handler: its id, the size of its headers,
its API key, and how many requests run at once.

Plain ASGI around the whole application, so a route that was forgotten is not open to all. Paths are
compared as they came; neither Host nor dots in a path change them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from hmac import compare_digest
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero_llm.server.connection import CROWDED, crowded
from hetero_llm.server.context import Context
from hetero_llm.server.endpoints.page import PAGE_FILES
from hetero_llm.server.errors import ApiError, ErrorForm, busy, error_form
from hetero_llm.server.responses import report_error
from hetero_llm.utils.log_sink import REQUEST_ID

logger = logging.getLogger(__name__)

PUBLIC = frozenset(
    ("/", "/health", "/live", "/ready", "/ping", "/version", "/load", "/openapi.json")
)
"""Paths without data about models or users. All others need a key, those that do not exist
included."""
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_ONCE = frozenset(
    (b"authorization", b"proxy-authorization", b"x-api-key", b"api-key", b"host", b"content-type",
     b"content-length", b"content-encoding", b"x-request-timeout-ms",
     b"x-data-parallel-rank")
)  # fmt: skip
"""Headers that have one value."""
_FULL_RETRY_SECONDS = 1.0
_AT_ONCE_RETRY_SECONDS = 1.0


class RequestMiddleware:
    """ASGI middleware; the outermost one but for CORS."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        settings = context.settings
        self._app = app
        self._context = context
        self._keys = ApiKeys(settings.api_keys)
        self._key_limits = KeyLimits(
            settings.max_requests_per_key, settings.max_requests_per_minute
        )
        self._public = PUBLIC | set(PAGE_FILES) | set(settings.public_paths)
        if settings.public_metrics:
            self._public |= {"/metrics"}
        self._root_path = settings.root_path.rstrip("/")
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        headers = Headers(scope=scope)
        given = _given_id(headers)
        request_id = given or uuid4().hex
        form = error_form(_path(scope))
        scope.setdefault("state", {}).update(request_id=request_id, given_id=given, error_form=form)
        REQUEST_ID.set(request_id)  # of this request's own task
        status, started = 500, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                shown = [(b"x-request-id", request_id.encode("ascii"))]
                if form is ErrorForm.ANTHROPIC:
                    shown.append((b"request-id", request_id.encode("ascii")))
                message = {**message, "headers": [*message.get("headers", ()), *shown]}
            await send(message)

        metrics = self._context.metrics
        metrics.http_begins()
        self._num_requests += 1
        try:
            with self._admitted(scope, headers):
                await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not started:  # the server stops without waiting for this request
                failure = busy("draining", "the server was shut down", _FULL_RETRY_SECONDS)
                await failure.response(form)(scope, receive, send_with_id)
            raise
        except Exception as error:
            failure = report_error(self._context, error, request_id)
            if not started:
                await failure.response(form)(scope, receive, send_with_id)
        finally:
            self._num_requests -= 1
            metrics.http_ends(_route(scope), scope["method"], status)

    def _admitted(self, scope: Scope, headers: Headers) -> AbstractContextManager[None]:
        """Checks headers, key and load; the context counts the request of its key as running.

        Raises:
            ApiError: 431, 400 for a header that is given twice, 401, 503 for too many at once, or
                429 for too many of one key.
        """
        limits = self._context.settings.limits
        raw = scope["headers"]
        if len(raw) > limits.headers or sum(map(_header_bytes, raw)) > limits.header_bytes:
            raise ApiError(
                431,
                "headers_too_large",
                f"the headers are more than {limits.headers} or {limits.header_bytes} bytes",
            )
        twice = _given_twice(raw)
        if twice is not None:
            raise ApiError(400, "duplicate_header", f"the header {twice} is given more than once")
        path = _path(scope)
        if path not in self._public:
            if self._keys:
                scope["state"]["api_key"] = self._keys.match(_given_key(headers))
            if CROWDED in scope["state"]:
                raise crowded(scope["state"][CROWDED])
            if self._num_requests > limits.concurrent_requests:
                raise busy(
                    "too_many_requests",
                    f"more than {limits.concurrent_requests} requests are being answered",
                    _FULL_RETRY_SECONDS,
                )
            if self._key_limits and scope["method"] == "POST":
                return self._key_limits.admitted(scope["state"]["api_key"])
        elif path == "/health" and scope["query_string"] and self._keys:
            # Details need a key; the bare status is public.
            self._keys.match(_given_key(headers))
        return nullcontext()


def _given_key(headers: Headers) -> str | None:
    """The Authorization header, or Anthropic's x-api-key written as one."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


def _path(scope: Scope) -> str:
    """The path without the prefix of a proxy, which may have left it in."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _given_id(headers: Headers) -> str:
    """The id that the client gave the request; empty if it gave none that could be shown."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else ""


def _given_twice(raw: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The first of `_ONCE` with several values: a proxy may have looked at another one than we."""
    seen = set()
    for name, _ in raw:
        if name in _ONCE:
            if name in seen:
                return name.decode("ascii")
            seen.add(name)
    return None


def _header_bytes(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1])


def _route(scope: Scope) -> str | None:
    """The path of the route, not of the request: a metric's labels must be few."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else None


class ApiKeys:
    """The accepted API keys. It keeps and compares digests, all of the same length, so the time of
    a comparison does not depend on what was sent."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(key, _digest(key)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def match(self, authorization: str | None) -> str:
        """Returns the accepted key in an `Authorization` header.

        Raises:
            ApiError: 401, there is no key or it is not accepted.
        """
        scheme, _, given = (authorization or "").partition(" ")
        if not authorization:
            raise _refused("no API key was sent; send the header 'Authorization: Bearer KEY'")
        if scheme.lower() != "bearer":
            raise _refused("the authorization scheme must be Bearer")
        digest, found = _digest(given.strip()), None
        for key, known in self._keys:  # no break: the time must not depend on which key matches
            if compare_digest(digest, known):
                found = key
        if found is None:
            raise _refused("the API key is not accepted")
        return found


class KeyLimits:
    """Limits each API key's requests.

    Args:
        at_once: most requests of a key that run at once; None: any number.
        per_minute: most requests of a key in a minute, which may come in one burst; None: any
            number.
        clock: returns seconds.
    """

    def __init__(
        self,
        at_once: int | None,
        per_minute: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once = at_once
        self._per_minute = per_minute
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._used_up_to: dict[str, float] = {}

    def __bool__(self) -> bool:
        return self._at_once is not None or self._per_minute is not None

    @contextmanager
    def admitted(self, key: str) -> Iterator[None]:
        """Counts a request of this key as running.

        Raises:
            ApiError: 429, the key has reached a limit.
        """
        if self._at_once is not None and self._running[key] >= self._at_once:
            raise _too_many(f"{self._at_once} requests at once", _AT_ONCE_RETRY_SECONDS)
        self._count(key)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1

    def _count(self, key: str) -> None:
        """A leaky bucket: each request uses an equal part of a minute, and a key may be one minute
        ahead of the clock."""
        if self._per_minute is None:
            return
        now, part = self._clock(), 60.0 / self._per_minute
        used = max(self._used_up_to.get(key, now), now) + part
        ahead = used - now - 60.0
        if ahead > part * 1e-6:  # not by rounding alone
            raise _too_many(f"{self._per_minute} requests a minute", ahead)
        self._used_up_to[key] = used


def _too_many(limit: str, retry_after: float) -> ApiError:
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"this API key may send {limit} and has sent more; try again later",
        headers={"retry-after": str(max(1, math.ceil(retry_after)))},
    )


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refused(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
