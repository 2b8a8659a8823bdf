"""Middleware for a test: marks every response."""

from __future__ import annotations

from typing import Any


class Tag:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def tagged(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-tag", b"seen")]}
            await send(message)

        await self._app(scope, receive, tagged)
