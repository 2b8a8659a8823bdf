"""The HTTP application: routes, middleware and error handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, request_response

from hetero_llm import __version__
from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.server.context import Context, request_id_of
from hetero_llm.server.endpoints.adapters import AdapterEndpoints
from hetero_llm.server.endpoints.caches import CacheEndpoints
from hetero_llm.server.endpoints.chat import chat_endpoint
from hetero_llm.server.endpoints.completions import completions_endpoint
from hetero_llm.server.endpoints.generate import generate_endpoint
from hetero_llm.server.endpoints.info import Info
from hetero_llm.server.endpoints.invocations import invocations_endpoint
from hetero_llm.server.endpoints.messages import MessagesApi
from hetero_llm.server.endpoints.page import PAGE_FILES, Page
from hetero_llm.server.endpoints.pooling import PoolingEndpoints
from hetero_llm.server.endpoints.responses import ResponsesApi
from hetero_llm.server.errors import ApiError
from hetero_llm.server.middleware import RequestMiddleware
from hetero_llm.server.openapi import Schema, request_schema, summary_of
from hetero_llm.server.responses import (
    CLIENT_CLOSED_REQUEST,
    Handler,
    Responses,
    form_of,
    report_error,
)
from hetero_llm.server.settings import ServerSettings


def _parameter(name: str, place: str, schema: Schema, text: str | None = None) -> Schema:
    """A parameter of an operation; those in a path are required."""
    shown = {"name": name, "in": place, "required": place == "path"}
    return shown | ({} if text is None else {"description": text}) | {"schema": schema}


_NOT_EMPTY = {"type": "string", "minLength": 1}
_MODEL = [_parameter("model", "path", _NOT_EMPTY)]
_RESPONSE = [_parameter("response_id", "path", _NOT_EMPTY)]
_RESPONSE_PAGE = [
    *_RESPONSE,
    _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}),
    _parameter("order", "query", {"enum": ["asc", "desc"]}),
    _parameter("after", "query", {"type": "string"}, "id of the item before the first one"),
]
_SINCE = [
    _parameter(
        "since",
        "query",
        {"type": "number"},
        "also earlier readings that are later than this uptime in seconds",
    )
]


class _Route(APIRoute):
    """A route that FastAPI documents, but whose handler gets the raw request: FastAPI's handling of
    arguments and results would take 0.1 ms of each request."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = request_response(endpoint)


def build_app(client: EngineClient, settings: ServerSettings) -> FastAPI:
    """The application that serves one engine. `app.state.context` is its `Context`.

    The server around it has to limit what precedes a request: the time and size of headers, and
    idle connections.
    """
    context = Context(client, settings)
    app = FastAPI(
        title="hetero_llm",
        version=__version__,
        docs_url=None,  # it would load scripts from other hosts; /docs is a page of our own
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = _Route
    app.state.context = context
    _add_routes(app, context)
    app.add_exception_handler(HTTPException, _router_error)
    for kind in (ApiError, HeteroLLMError):
        app.add_exception_handler(kind, _error_response)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_middleware(RequestMiddleware, context=context)
    cors = settings.cors
    if cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=["x-request-id"],
        )
    return app


def _add_routes(app: FastAPI, context: Context) -> None:
    info = Info(context)
    page = Page(context, info)
    responses = Responses(context)
    stored = ResponsesApi(context, responses)
    anthropic = MessagesApi(context, responses)
    posts: dict[str, Handler] = {
        "/v1/completions": completions_endpoint(context, responses),
        "/v1/chat/completions": chat_endpoint(context, responses),
        "/v1/responses": stored.create,
        "/v1/responses/input_tokens": stored.input_tokens,
        "/v1/messages": anthropic.create,
        "/v1/messages/count_tokens": anthropic.count_tokens,
        "/generate": generate_endpoint(context, responses),
    }
    if context.adapters.may_change:
        adapters = AdapterEndpoints(context)
        posts["/v1/load_lora_adapter"] = adapters.load
        posts["/v1/unload_lora_adapter"] = adapters.unload
    posts |= {"/tokenize": info.tokenize, "/detokenize": info.detokenize}
    for path, handler in posts.items():
        _add_post(app, context, path, handler)
    one = "/v1/responses/{response_id}"
    _add(app, one, stored.retrieve, "GET", parameters=_RESPONSE)
    _add(app, one, stored.delete, "DELETE", parameters=_RESPONSE)
    _add(app, f"{one}/cancel", stored.cancel, "POST", parameters=_RESPONSE)
    _add(app, f"{one}/input_items", stored.input_items, "GET", parameters=_RESPONSE_PAGE)
    pooling = PoolingEndpoints(context)
    _add_pooling_routes(app, context, pooling)
    invocations = invocations_endpoint(context, {**posts, **pooling.handlers})
    _add(app, "/invocations", invocations, "POST", shown=False)
    caches = CacheEndpoints(context)
    _add(app, "/reset_prefix_cache", caches.reset_prefix_cache, "POST", shown=False)
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        _add(app, path, caches.reset_nothing, "POST", shown=False)
    for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"):
        _add(app, path, info.no_files, "GET", "POST", "DELETE", shown=False)
    _add_get(app, "/v1/models/{model:path}", info.model, parameters=_MODEL)
    for path, get in (
        ("/v1/models", info.models),
        ("/tokenizer_info", info.tokenizer_info),
        ("/health", info.health),
        ("/live", info.live),
        ("/ready", info.ready),
        ("/ping", info.live),
        ("/version", info.version),
        ("/load", info.load),
        ("/metrics", info.metrics),
    ):
        _add_get(app, path, get)
    _add_get(app, "/status.json", page.status, parameters=_SINCE)
    # SageMaker's health check may be of either kind.
    _add(app, "/ping", info.live, "POST", shown=False)
    for path in PAGE_FILES:
        _add(app, path, page.file, "GET", "HEAD", shown=False)


def _add_pooling_routes(app: FastAPI, context: Context, pooling: PoolingEndpoints) -> None:
    """Adds the routes of models that pool. For other models they are not documented, and answer
    400."""
    pools = context.client.info.pooling is not None
    for path, handler in pooling.handlers.items():
        _add_post(app, context, path, handler, shown=pools)
    for path, same in (
        ("/rerank", "/v1/rerank"),
        ("/v2/rerank", "/v1/rerank"),
        ("/score", "/v1/score"),
    ):
        _add(app, path, pooling.handlers[same], "POST", shown=False)


def _add_post(
    app: FastAPI, context: Context, path: str, handler: Handler, *, shown: bool = True
) -> None:
    """Adds a route whose requests `openapi` describes."""
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_class=Response,
        summary=summary_of(path),
        include_in_schema=shown,
        openapi_extra=request_schema(path, context),
    )


def _add_get(app: FastAPI, path: str, handler: Handler, parameters: Sequence[Schema] = ()) -> None:
    """Adds a route for GET, and for HEAD, which is served but not documented: two operations of one
    handler have one id."""
    _add(app, path, handler, "GET", parameters=parameters)
    _add(app, path, handler, "HEAD", shown=False)


def _add(
    app: FastAPI,
    path: str,
    handler: Handler,
    *methods: str,
    shown: bool = True,
    parameters: Sequence[Schema] = (),
) -> None:
    app.add_api_route(
        path,
        handler,
        methods=list(methods),
        response_class=Response,
        include_in_schema=shown,
        openapi_extra={"parameters": [*parameters]} if parameters else None,
    )


def _methods(request: Request) -> list[str]:
    """The methods that a request's path takes; the router names those of one of its routes."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


async def _router_error(request: Request, error: Exception) -> Response:
    """Converts an error of the router into OpenAI's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        failure = ApiError(404, "not_found", "there is no such route; see /docs")
    elif error.status_code == 405:
        failure = ApiError(
            405,
            "method_not_allowed",
            "the route does not take this method",
            headers={"allow": ", ".join(_methods(request))},
        )
    else:
        failure = ApiError(error.status_code, "http_error", str(error.detail))
    return failure.response(form_of(request.scope))


async def _error_response(request: Request, error: Exception) -> Response:
    failure = report_error(request.app.state.context, error, request_id_of(request))
    return failure.response(form_of(request.scope))


async def _client_gone(request: Request, error: Exception) -> Response:
    request.app.state.context.metrics.aborted("client_gone")
    return Response(status_code=CLIENT_CLOSED_REQUEST)
