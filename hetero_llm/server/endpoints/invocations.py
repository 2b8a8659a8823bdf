"""POST /invocations, the one route of a model at SageMaker: the body's fields say which endpoint is
meant, in the order in which vLLM tries its endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from hetero_llm.server.context import Context
from hetero_llm.server.errors import invalid
from hetero_llm.server.request_parsing import decode, read_body
from hetero_llm.server.responses import Handler

_OF_TEXT = (("messages", "/v1/chat/completions"), ("prompt", "/v1/completions"))
_OF_POOLING = (
    ("query", "/v1/rerank"),
    ("text_1", "/v1/score"),
    ("data_1", "/v1/score"),
    ("queries", "/v1/score"),
    ("task", "/pooling"),
)
_OF_INPUT = (("embed", "/v1/embeddings"), ("classify", "/classify"))
"""Task of the model, and the route that `input` then goes to."""


class _Fields(msgspec.Struct):
    """A body of which the names alone are looked at."""


def invocations_endpoint(context: Context, handlers: Mapping[str, Handler]) -> Handler:
    """The handler of the route.

    Args:
        handlers: of the other endpoints, by their routes.
    """

    async def invocations(request: Request) -> Response:
        limits = context.settings.limits
        body = await read_body(request, limits)
        _, names = decode(body, _Fields, limits, strict_fields=False)
        route = _route_of(names, context)
        return await handlers[route](_with_body(request, body))

    return invocations


def _route_of(names: Sequence[str], context: Context) -> str:
    pooling = context.client.info.pooling
    routes: Sequence[tuple[str, str]] = _OF_TEXT
    if pooling is not None:
        of_input = [route for task, route in _OF_INPUT if task in pooling.tasks]
        routes = (*_OF_POOLING, ("input", (*of_input, "/pooling")[0]))
    for name, route in routes:
        if name in names:
            return route
    known = " or ".join(f"{name} ({route})" for name, route in routes)
    raise invalid(None, f"no endpoint takes this body; it needs {known}")


def _with_body(request: Request, body: bytes) -> Request:
    """The request with its body still to be read."""
    bodies = iter([body])

    async def receive() -> Message:
        for one in bodies:
            return {"type": "http.request", "body": one, "more_body": False}
        return await request.receive()

    return Request(request.scope, receive)
