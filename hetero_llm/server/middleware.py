"""What every request passes first and last: its id, its headers' size, its key, its count.

Plain ASGI around the whole application, so that nothing is reached without a key because a route
was forgotten. Paths are compared as they came; neither Host nor dots in a path change them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import AbstractContextManager, nullcontext
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero_llm.server.auth import PUBLIC, KeyLimits, Keys
from hetero_llm.server.connection import CROWDED, crowded
from hetero_llm.server.context import Context
from hetero_llm.server.endpoints.page import PAGE_FILES
from hetero_llm.server.errors import ApiError, busy
from hetero_llm.server.responses import reported
from hetero_llm.utils.log_sink import REQUEST_ID

logger = logging.getLogger(__name__)

_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_FULL_RETRY_SECONDS = 1.0


class Gate:
    """ASGI middleware; the outermost but for CORS."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        settings = context.settings
        self._app = app
        self._context = context
        self._keys = Keys(settings.api_keys)
        self._key_limits = KeyLimits(
            settings.max_requests_per_key, settings.max_requests_per_minute
        )
        self._public = PUBLIC | set(PAGE_FILES) | set(settings.public_paths)
        if settings.public_metrics:
            self._public |= {"/metrics"}
        self._root_path = settings.root_path.rstrip("/")
        self._open = 0

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
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)  # of this request's own task
        status, started = 500, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                shown = (b"x-request-id", request_id.encode("ascii"))
                message = {**message, "headers": [*message.get("headers", ()), shown]}
            await send(message)

        metrics = self._context.metrics
        metrics.http_begins()
        self._open += 1
        try:
            with self._admitted(scope, headers):
                await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not started:  # the server ends, and does not wait for us
                failure = busy("draining", "the server was shut down", _FULL_RETRY_SECONDS)
                await failure.response()(scope, receive, send_with_id)
            raise
        except Exception as error:
            failure = reported(self._context, error, request_id)
            if not started:
                await failure.response()(scope, receive, send_with_id)
        finally:
            self._open -= 1
            metrics.http_ends(_route(scope), status)

    def _admitted(self, scope: Scope, headers: Headers) -> AbstractContextManager[None]:
        """Holds what the request counts for while it is answered.

        Raises:
            ApiError: 431, 401, 503 for too many at once, or 429 for too many of one key.
        """
        limits = self._context.settings.limits
        raw = scope["headers"]
        if len(raw) > limits.headers or sum(map(_header_bytes, raw)) > limits.header_bytes:
            raise ApiError(
                431,
                "headers_too_large",
                f"the headers are more than {limits.headers} or {limits.header_bytes} bytes",
            )
        path = _path(scope)
        if path not in self._public:
            if self._keys:
                scope["state"]["api_key"] = self._keys.match(headers.get("authorization"))
            if CROWDED in scope["state"]:
                raise crowded(scope["state"][CROWDED])
            if self._open > limits.concurrent_requests:
                raise busy(
                    "too_many_requests",
                    f"more than {limits.concurrent_requests} requests are being answered",
                    _FULL_RETRY_SECONDS,
                )
            if self._key_limits and scope["method"] == "POST":
                return self._key_limits.admitted(scope["state"]["api_key"])
        elif path == "/health" and scope["query_string"] and self._keys:
            # Details are for those with a key; the status alone is for everybody.
            self._keys.match(headers.get("authorization"))
        return nullcontext()


def _path(scope: Scope) -> str:
    """The path below the prefix that a proxy may have left in."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid4().hex


def _header_bytes(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1])


def _route(scope: Scope) -> str:
    """A route's own path, never the one that was asked for: labels must be few."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"
