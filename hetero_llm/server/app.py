"""The HTTP application: routes, middleware and error handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import request_response

from hetero_llm import __version__
from hetero_llm.core.errors import HeteroLLMError
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.server.context import Context, request_id_of
from hetero_llm.server.endpoints.adapters import (
    AdapterEndpoints,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from hetero_llm.server.endpoints.chat import chat_endpoint
from hetero_llm.server.endpoints.completions import completions_endpoint
from hetero_llm.server.endpoints.generate import generate_endpoint
from hetero_llm.server.endpoints.info import Info
from hetero_llm.server.endpoints.messages import MessagesApi
from hetero_llm.server.endpoints.page import PAGE_FILES, Page
from hetero_llm.server.endpoints.pooling import PoolingEndpoints
from hetero_llm.server.endpoints.responses import ResponsesApi
from hetero_llm.server.errors import ApiError
from hetero_llm.server.messages_api.protocol import MessagesRequest
from hetero_llm.server.middleware import RequestMiddleware
from hetero_llm.server.openapi import request_schema
from hetero_llm.server.pooling_protocol import (
    UNAVAILABLE,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from hetero_llm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from hetero_llm.server.responses import (
    CLIENT_CLOSED_REQUEST,
    Responses,
    form_of,
    report_error,
)
from hetero_llm.server.responses_api.protocol import ResponsesRequest
from hetero_llm.server.settings import ServerSettings

_MODEL_PARAMETER = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
}
_RESPONSE_PARAMETER = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
}
_PAGE_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "limit",
        "in": "query",
        "required": False,
        "schema": {"type": "integer", "minimum": 1, "maximum": 100},
    },
    {
        "name": "order",
        "in": "query",
        "required": False,
        "schema": {"enum": ["asc", "desc"]},
    },
    {
        "name": "after",
        "in": "query",
        "required": False,
        "description": "id of the item before the first one",
        "schema": {"type": "string"},
    },
]
_SINCE_PARAMETER = {
    "name": "since",
    "in": "query",
    "required": False,
    "description": "also earlier readings that are later than this uptime in seconds",
    "schema": {"type": "number"},
}


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


# large: one entry for each route.
def _add_routes(app: FastAPI, context: Context) -> None:
    info = Info(context)
    page = Page(context, info)
    responses = Responses(context)
    stored = ResponsesApi(context, responses)
    anthropic = MessagesApi(context, responses)
    posts: list[tuple[str, Any, type[msgspec.Struct], tuple[str, ...], str]] = [
        (
            "/v1/completions",
            completions_endpoint(context, responses),
            CompletionRequest,
            ("prompt",),
            "Continue prompts",
        ),
        (
            "/v1/chat/completions",
            chat_endpoint(context, responses),
            ChatRequest,
            ("messages",),
            "Answer a conversation",
        ),
        (
            "/v1/responses",
            stored.create,
            ResponsesRequest,
            ("input",),
            "Answer a conversation of items",
        ),
        (
            "/v1/messages",
            anthropic.create,
            MessagesRequest,
            ("messages", "max_tokens"),
            "Answer a conversation, as Anthropic does",
        ),
        (
            "/v1/messages/count_tokens",
            anthropic.count_tokens,
            MessagesRequest,
            ("messages",),
            "Count the tokens of a conversation",
        ),
        (
            "/generate",
            generate_endpoint(context, responses),
            GenerateRequest,
            ("prompt",),
            "Continue a prompt, as vLLM's first server did",
        ),
        *_adapter_posts(context),
        ("/tokenize", info.tokenize, TokenizeRequest, (), "Text to token ids"),
        ("/detokenize", info.detokenize, DetokenizeRequest, ("tokens",), "Token ids to text"),
    ]
    for path, handler, kind, required, text in posts:
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_class=Response,
            summary=text,
            openapi_extra=request_schema(kind, required, context),
        )
    one = [_RESPONSE_PARAMETER]
    for path, method, response_handler, parameters in (
        ("/v1/responses/{response_id}", "GET", stored.retrieve, one),
        ("/v1/responses/{response_id}", "DELETE", stored.delete, one),
        (
            "/v1/responses/{response_id}/input_items",
            "GET",
            stored.input_items,
            one + _PAGE_PARAMETERS,
        ),
    ):
        app.add_api_route(
            path,
            response_handler,
            methods=[method],
            response_class=Response,
            openapi_extra={"parameters": parameters},
        )
    _add_pooling_routes(app, context)
    app.add_api_route(
        "/v1/models/{model:path}",
        info.model,
        methods=["GET"],
        response_class=Response,
        openapi_extra={"parameters": [_MODEL_PARAMETER]},
    )
    for path, handler in (
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
        _add_get(app, path, handler)
    _add_get(app, "/status.json", page.status, parameters=[_SINCE_PARAMETER])
    # SageMaker's health check may be of either kind.
    app.add_api_route(
        "/ping", info.live, methods=["POST"], response_class=Response, include_in_schema=False
    )
    for path in PAGE_FILES:
        app.add_api_route(
            path,
            page.file,
            methods=["GET", "HEAD"],
            response_class=Response,
            include_in_schema=False,
        )


def _adapter_posts(
    context: Context,
) -> list[tuple[str, Any, type[msgspec.Struct], tuple[str, ...], str]]:
    """The routes that load and unload adapters, where clients may do so."""
    if not context.adapters.may_change:
        return []
    adapters = AdapterEndpoints(context)
    return [
        (
            "/v1/load_lora_adapter",
            adapters.load,
            LoadAdapterRequest,
            ("lora_name", "lora_path"),
            "Load a LoRA adapter",
        ),
        (
            "/v1/unload_lora_adapter",
            adapters.unload,
            UnloadAdapterRequest,
            ("lora_name",),
            "Unload a LoRA adapter",
        ),
    ]


def _add_pooling_routes(app: FastAPI, context: Context) -> None:
    """Adds the routes of models that pool. For other models they are not documented, and answer
    400."""
    pooling = PoolingEndpoints(context)
    posts: list[tuple[tuple[str, ...], Any, type[msgspec.Struct], tuple[str, ...], str]] = [
        (
            ("/v1/embeddings",),
            pooling.embeddings,
            EmbeddingRequest,
            ("input",),
            "Embeddings of texts",
        ),
        (
            ("/v1/rerank", "/rerank", "/v2/rerank"),
            pooling.rerank,
            RerankRequest,
            ("query", "documents"),
            "Documents in the order of how well they answer a query",
        ),
        (("/v1/score", "/score"), pooling.score, ScoreRequest, (), "How well pairs of texts fit"),
        (("/classify",), pooling.classify, ClassifyRequest, ("input",), "Classes of texts"),
        (("/pooling",), pooling.pooling, PoolingRequest, ("input",), "Pooled values of texts"),
    ]
    for paths, handler, kind, required, text in posts:
        for path in paths:
            app.add_api_route(
                path,
                handler,
                methods=["POST"],
                response_class=Response,
                summary=text,
                include_in_schema=context.client.info.pooling is not None and path == paths[0],
                openapi_extra=request_schema(kind, required, context, UNAVAILABLE),
            )


def _add_get(
    app: FastAPI,
    path: str,
    handler: Callable[..., Any],
    parameters: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Adds a route for GET, and for HEAD, which is served but not documented: two operations of one
    handler have one id."""
    extra = {"parameters": [*parameters]} if parameters else None
    for method, shown in (("GET", True), ("HEAD", False)):
        app.add_api_route(
            path,
            handler,
            methods=[method],
            response_class=Response,
            include_in_schema=shown,
            openapi_extra=extra,
        )


async def _router_error(request: Request, error: Exception) -> Response:
    """Converts an error of the router into OpenAI's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        failure = ApiError(404, "not_found", "there is no such route; see /docs")
    elif error.status_code == 405:
        failure = ApiError(
            405, "method_not_allowed", "the route does not take this method", headers=error.headers
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
