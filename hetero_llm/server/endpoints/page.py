"""The status page at `/` with the figures that it polls, and the page of the API at `/docs`.

The files are public and hold no data about model or users. `/status.json`, as all that the page
requests on the user's behalf, needs a key if there are keys.
"""

from __future__ import annotations

import asyncio
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
from hetero_llm.server.machine import Machine

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
    "/assets/chat.js": "chat.js",
    "/assets/charts.js": "charts.js",
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
_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "requests_finished": "num_requests_finished",
    "preemptions": "num_preemptions",
    "steps": "num_steps",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
}
"""Names in status.json, and the engine's."""


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
        self._machine = Machine(context.client.info.device)
        self._begun = time.monotonic()
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
        divides their differences by those of `uptime`, in seconds."""
        context = self._context
        client = context.client
        machine = await asyncio.to_thread(self._machine.read)
        stats = client.stats()
        figures = stats.metrics
        body = {
            "version": __version__,
            "time": time.time(),
            "uptime": time.monotonic() - self._begun,
            "state": self._info.state(),
            "model": {
                "name": context.names[0],
                "max_model_len": client.info.max_model_len,
                "text": client.tokenizer is not None,
                "chat": self._can_chat(),
            },
            "engine": client.info,
            "plan": context.plan,
            "counters": {name: figures.get(theirs, 0) for name, theirs in _COUNTERS.items()},
            "now": {
                "running": figures.get("num_requests_running", 0),
                "waiting": figures.get("num_requests_waiting", 0),
                "queue": stats.queue,
                "kv_usage": figures.get("kv_cache_usage_perc", 0.0),
                "last_step_age": stats.last_step_age,  # infinity becomes null
            },
            "machine": machine,
            "errors": list(context.errors),
        }
        return Response(
            msgspec.json.encode(body),
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
            media_type="application/json",
        )

    def _can_chat(self) -> bool:
        return self._context.tokenizer.chat_template is not None


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{sha256(body).hexdigest()[:32]}"')


def _matches(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match header names this tag, which a proxy may have made a weak one."""
    tags = [one.strip().removeprefix("W/") for one in (header or "").split(",")]
    return tag in tags or "*" in tags
