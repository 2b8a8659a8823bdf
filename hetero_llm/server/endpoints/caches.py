"""POST /reset_prefix_cache and its relatives, vLLM's routes of its development mode."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response

from hetero_llm.server.context import Context
from hetero_llm.server.errors import ApiError, wrong

logger = logging.getLogger(__name__)

_SWITCHES = ("reset_running_requests", "reset_external")
_BOOLEANS = ("true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n")
"""What vLLM's web framework reads as a boolean of a query."""


class CacheEndpoints:
    """Handlers of one server. Without `server_dev_mode` they answer 404 and name the switch."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: forgets the cached prefixes of all engines, those in host
        memory too. Running requests keep their blocks and go on. The query's switches ask for what
        is done anyway."""
        self._check(request)
        for name, value in request.query_params.items():
            if name not in _SWITCHES:
                raise wrong(name, f"{name[:64]!r} is no parameter of this route")
            if value.lower() not in _BOOLEANS:
                raise wrong(name, f"{name}={value[:64]!r}: must be true or false")
        self._context.check_open()
        await self._context.client.reset_prefix_cache()
        logger.info("the prefix cache was reset")
        return Response()

    async def reset_nothing(self, request: Request) -> Response:
        """POST /reset_mm_cache, /reset_encoder_cache: prepared images are kept in the prefix cache
        alone, so there is nothing else to reset."""
        self._check(request)
        self._context.check_open()
        return Response()

    def _check(self, request: Request) -> None:
        if not self._context.settings.server_dev_mode:
            reason = "needs --server-dev-mode: it empties a cache that all clients share"
            raise ApiError(404, "not_found", f"{request.url.path} {reason}")
