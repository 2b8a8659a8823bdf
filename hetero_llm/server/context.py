"""The state that middleware and endpoints of one server share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from starlette.requests import Request

from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.engine.engine_client import EngineClient
from hetero_llm.engine.text.tokenizer import Tokenizer, TokenizerThreads
from hetero_llm.server.adapters import ServedAdapters, ServedPromptAdapters
from hetero_llm.server.errors import ApiError, busy, duplicate
from hetero_llm.server.message_parsers import MessageParsers
from hetero_llm.server.metrics import Metrics
from hetero_llm.server.readings import Readings
from hetero_llm.server.settings import ServerSettings
from hetero_llm.server.tokenization import ApiTokenizer

_DRAIN_RETRY_SECONDS = 5.0
_ERRORS_KEPT = 20


# large: one name for each part of a server.
class Context:
    """One server's parts and state.

    A server that stops sets `leaving` first (load balancers see it at /ready, requests are still
    accepted), then `draining` (requests are refused).

    Attributes:
        names: the model's names; the first is in the responses.
        adapters, prompt_adapters: LoRA and prompt adapters, which have names of their own.
        parsers: of the model's messages.
        readings: figures for the status page.
        load: generation requests that are running.
        errors: the last responses with status 500 or above, for the status page; no prompts.
        plan: what serves, as text for the status page; None if the launcher did not set it.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings) -> None:
        info = client.info
        self.client = client
        self.settings = settings
        self.names = settings.served_names or info.served_names or (info.model,)
        self.prompt_adapters = ServedPromptAdapters(client, settings.prompt_adapters, self.names)
        taken = (*self.names, *(name for name, _ in settings.prompt_adapters))
        self.adapters = ServedAdapters(client, settings.lora_modules, settings.lora_root, taken)
        self.tokenizer = ApiTokenizer(
            client.tokenizer,
            client.threads,
            images=client.images,
            max_model_len=info.max_model_len,
            chat_template=settings.chat_template,
            template_seconds=settings.limits.template_seconds,
        )
        self.parsers = _parsers(self.tokenizer, settings)
        self.metrics = Metrics(client, self.names[0], legacy_names=settings.legacy_metric_names)
        self.readings = Readings(client, self.metrics)
        self.created = int(time.time())
        self.leaving = self.draining = False
        self.load = 0
        self.errors: deque[dict[str, Any]] = deque(maxlen=_ERRORS_KEPT)
        self.plan: str | None = None
        self._request_ids: set[str] = set()

    def model_name(self, wanted: str | None) -> str:
        """The model's name for the response: the first one, whichever the request says, or that of
        an adapter.

        Raises:
            ApiError: 404 for a model that is not served.
        """
        if wanted is None or wanted in self.names:
            return self.names[0]
        if wanted in self.adapter_names():
            return wanted
        known = ", ".join((*self.names, *self.adapter_names()))
        raise ApiError(
            404,
            "model_not_found",
            f"the model {wanted[:128]!r} does not exist here; available: {known}",
            param="model",
        )

    def adapter_names(self) -> list[str]:
        """What clients may name as the model besides the model itself."""
        return [*self.adapters.names(), *self.prompt_adapters.names()]

    def adapters_of(
        self, model: str | None
    ) -> tuple[LoRARequest | None, PromptAdapterRequest | None]:
        """The LoRA adapter and the prompt adapter that a request names as its model; two Nones for
        the model itself."""
        if model is None or model in self.names:
            return None, None
        return self.adapters.find(model), self.prompt_adapters.find(model)

    def check_open(self) -> None:
        """Checks that requests are accepted.

        Raises:
            ApiError: 503, the server is about to stop.
            EngineDeadError: the engine is dead or hangs.
        """
        if self.draining:
            raise busy("draining", "the server is shutting down", _DRAIN_RETRY_SECONDS)
        self.client.check_health()

    def note_error(self, failure: ApiError, request_id: str) -> None:
        """Keeps an error of status 500 or above for the status page."""
        self.errors.append(
            {
                "time": time.time(),
                "status": failure.status,
                "code": failure.code,
                "message": failure.message,
                "request_id": request_id,
            }
        )

    @contextmanager
    def answering(self, request_id: str) -> Iterator[None]:
        """Reserves a request's id and counts the request in `load` until the context is left.

        Raises:
            ApiError: 409, a running request has this id; 503, see `check_open`.
        """
        self.check_open()
        if request_id in self._request_ids:
            raise duplicate(request_id)
        self._request_ids.add(request_id)
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1
            self._request_ids.discard(request_id)

    def cache_salt(self, request: Request, wanted: str | None) -> str | None:
        """The prefix-cache namespace of a request: the one it wants, within that of its API key."""
        isolation = self.settings.prefix_cache_isolation
        keys = self.settings.api_keys
        by_key = isolation == "key" or (isolation is None and len(keys) > 1)
        digest = key_digest(request)
        return f"{digest}:{wanted or ''}" if by_key and digest else wanted


def check_formats(settings: ServerSettings, tokenizer: Tokenizer | None) -> None:
    """Checks what needs a model's tokenizer alone, before its weights are loaded.

    Raises:
        ConfigError: the format of tool calls is not known, though one is needed.
    """
    if settings.enable_auto_tool_choice:
        threads = TokenizerThreads()
        template = settings.chat_template
        _parsers(
            ApiTokenizer(tokenizer, threads, max_model_len=1, chat_template=template), settings
        )


def _parsers(tokenizer: ApiTokenizer, settings: ServerSettings) -> MessageParsers:
    return MessageParsers(
        tokenizer,
        tool_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        needs_tools=settings.enable_auto_tool_choice,
        in_reasoning=settings.constrained_reasoning,
    )


def key_digest(request: Request) -> str:
    """The SHA-256 of the request's API key; empty without one."""
    key = getattr(request.state, "api_key", None)
    return "" if key is None else sha256(key.encode()).hexdigest()


def request_id_of(request: Request) -> str:
    return str(getattr(request.state, "request_id", ""))


def given_id_of(request: Request) -> str:
    """The client's X-Request-Id; empty without one."""
    return str(getattr(request.state, "given_id", ""))
