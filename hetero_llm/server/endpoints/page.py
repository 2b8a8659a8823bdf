"""The status page at `/` with the figures that it polls, and the page of the API at `/docs`.

The files are public and hold no data about model or users. `/status.json`, as all that the page
requests on the user's behalf, needs a key if there are keys.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hetero_llm import __version__
from hetero_llm.server.context import Context
from hetero_llm.server.endpoints.info import Info
from hetero_llm.server.errors import invalid

_FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_FILES = {
    "/": "index.html",
    "/docs": "docs.html",
    "/assets/docs.js": "docs.js",
    "/assets/page.css": "page.css",
    "/assets/page.js": "page.js",
    "/assets/calls.js": "calls.js",
    "/assets/chat.js": "chat.js",
    "/assets/charts.js": "charts.js",
    "/assets/conversation.js": "conversation.js",
    "/assets/elements.js": "elements.js",
    "/assets/json_field.js": "json_field.js",
    "/assets/markdown.js": "markdown.js",
    "/assets/turn.js": "turn.js",
    "/assets/icon.svg": "icon.svg",
}
"""Public paths and the files behind them."""
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated each time: another version may serve now
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    tag: str


class Page:
    """Handlers of the status page of one server."""

    def __init__(self, context: Context, info: Info) -> None:
        self._context = context
        self._info = info
        self._files = {path: _read(_FOLDER / name) for path, name in PAGE_FILES.items()}

    async def file(self, request: Request) -> Response:
        """GET / and the files under /assets."""
        file = self._files[request.scope["route"].path]
        headers = {**_HEADERS, "etag": file.tag}
        if _matches(request.headers.get("if-none-match"), file.tag):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.kind)

    async def status(self, request: Request) -> Response:
        """GET /status.json: the page's figures. Counters count since the engine's start; the page
        divides their differences by those of `uptime`, in seconds. With ?since=SECONDS also the
        earlier readings that are later than this `uptime`.

        Raises:
            ApiError: 400, `since` is no number.
        """
        since = _since(request)
        context = self._context
        client = context.client
        reading = await context.readings.read()
        body = {
            "version": __version__,
            "time": time.time(),
            "uptime": reading.uptime,
            "state": self._info.state(),
            "model": {
                "name": context.names[0],
                "max_model_len": client.info.max_model_len,
                "text": client.tokenizer is not None,
                "chat": context.tokenizer.chat_template is not None,
                "images": 0 if client.images is None else client.images.limit,
                "image_bytes": context.settings.limits.image_bytes,
            },
            "engine": client.info,
            "plan": context.plan,
            "counters": reading.counters,
            "now": reading.now,
            "latency": reading.latency,
            "machine": reading.machine,
            "errors": list(context.errors),
        }
        if since is not None:
            body["history"] = context.readings.since(since)
        return Response(
            msgspec.json.encode(body),
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
            media_type="application/json",
        )


def _since(request: Request) -> float | None:
    text = request.query_params.get("since")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise invalid("since", f"since={text[:64]!r}: a number of seconds is needed")
    return seconds


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{sha256(body).hexdigest()[:32]}"')


def _matches(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match header names this tag, which a proxy may have made a weak one."""
    tags = [one.strip().removeprefix("W/") for one in (header or "").split(",")]
    return tag in tags or "*" in tags
