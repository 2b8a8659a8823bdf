"""Every error of the API: status, error object (OpenAI's, or Anthropic's on its routes), and the
headers that control retries.

OpenAI's clients retry 408, 409, 429 and 5xx. So a client's own mistake is never a 5xx, and an error
that a retry would only repeat has the header `x-should-retry: false`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import msgspec
from starlette.responses import Response

from hetero_llm.core.errors import (
    DuplicateRequestError,
    EngineDeadError,
    EngineHungError,
    OverloadedError,
    PromptError,
    RequestError,
    shown,
)

INTERNAL = "internal_error"
MAX_MESSAGE_CHARS = 512
_MAX_PARAM_CHARS = 64
_NO_RETRY = {"x-should-retry": "false"}
_RETRY_AFTER_DEATH = 10  # seconds: about what a restart takes

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MESSAGES_ROUTE = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ENGINE_FIELDS = {"prompt_token_ids": "prompt", "prompts": "prompt"}


class ErrorForm(Enum):
    """Whose error object a route sends."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


def error_form(path: str) -> ErrorForm:
    """The form of the errors of the route with this path."""
    anthropic = path == _MESSAGES_ROUTE or path.startswith(f"{_MESSAGES_ROUTE}/")
    return ErrorForm.ANTHROPIC if anthropic else ErrorForm.OPENAI


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status; it decides `error.type`.
        code: short name that programs can test.
        message: cause, limit and remedy; cut to 512 characters.
        param: the wrong field of the request.
        headers: more response headers.

    Attributes:
        details: what Anthropic's form has beside the message, for programs.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = _cut(message, MAX_MESSAGE_CHARS)
        self.param = None if param is None else _cut(param, _MAX_PARAM_CHARS)
        self.headers = dict(headers or {})
        self.details: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "invalid_request_error")

    @property
    def anthropic_kind(self) -> str:
        """Anthropic's name for an error of this status."""
        return _ANTHROPIC_KINDS.get(self.status, "invalid_request_error")

    def body(self, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
        """The JSON of the error, at most 4 KiB."""
        if form is ErrorForm.ANTHROPIC:
            anthropic: dict[str, Any] = {"type": self.anthropic_kind, "message": self.message}
            if self.details is not None:
                anthropic["details"] = self.details
            return msgspec.json.encode({"type": "error", "error": anthropic})
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self, form: ErrorForm = ErrorForm.OPENAI) -> Response:
        return Response(
            self.body(form),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A mistake in the request."""
    return ApiError(400, code, message, param=param)


def wrong(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """A wrong field, which the message names before the reason."""
    return invalid(param, f"{param}: {reason}", code)


def wrong_value(param: str, value: Any, reason: str, code: str = "invalid_value") -> ApiError:
    """As `wrong`; the message shows the field's value, too."""
    return invalid(param, f"{param}={shown(value)}: {reason}", code)


def required(param: str) -> ApiError:
    """A field is missing."""
    return invalid(param, f"{param} is required", "missing_required_parameter")


def empty(param: str) -> ApiError:
    """A field is empty."""
    return invalid(param, f"{param} must not be empty")


def too_many(param: str, given: int | str, limit: int) -> ApiError:
    """More than the server accepts; `given`: a number, maybe with its unit."""
    return wrong(param, f"{given}, at most {limit} are accepted")


def unsupported(param: str, feature: str) -> ApiError:
    """A field of a feature that this server does not have."""
    return wrong(param, f"{feature} is not available", "unsupported_parameter")


def context_exceeded(limit: int, prompt: int, wanted: int, param: str) -> ApiError:
    """`prompt` tokens and `wanted` tokens to generate are more than `limit`, the context length."""
    return invalid(
        param,
        f"this model's maximum context length is {limit} tokens, but {prompt + wanted} were "
        f"requested ({prompt} in the prompt, {wanted} to generate); shorten the prompt or lower "
        "max_tokens",
        "context_length_exceeded",
    )


def busy(code: str, message: str, retry_after: float) -> ApiError:
    """The server cannot take this request now. `retry_after` is in seconds."""
    seconds = str(max(1, math.ceil(retry_after)))
    return ApiError(503, code, message, headers={"retry-after": seconds})


def duplicate(request_id: str) -> ApiError:
    """A running request has this id; a retry would meet it again."""
    return ApiError(
        409,
        "duplicate_request_id",
        f"a running request has the id {_cut(request_id, _MAX_PARAM_CHARS)!r}; choose another",
        param="request_id",
        headers=_NO_RETRY,
    )


def internal(request_id: str) -> ApiError:
    """A bug of the server. Details are in the log, never in the response."""
    return ApiError(
        500,
        INTERNAL,
        f"internal error; the server's log has the details under request {request_id}",
        headers=_NO_RETRY,
    )


def request_failed(request_id: str) -> ApiError:
    """The engine could not compute this request; others are not affected."""
    return ApiError(
        500,
        "generation_failed",
        f"generation failed; the server's log has the details under request {request_id}",
        headers=_NO_RETRY,
    )


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """The error response to an exception."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return _from_request_error(error)
        case OverloadedError():
            return busy(
                "overloaded", "too many requests are waiting; try again later", error.retry_after
            )
        case DuplicateRequestError():
            return duplicate(error.request_id)
        case EngineHungError():
            return busy(
                "engine_hung", "the engine has stopped responding", float(_RETRY_AFTER_DEATH)
            )
        case EngineDeadError():
            return busy("engine_dead", "the engine has stopped", float(_RETRY_AFTER_DEATH))
    return internal(request_id)


def _from_request_error(error: RequestError) -> ApiError:
    field = _ENGINE_FIELDS.get(error.field, error.field)
    where = "" if error.prompt_index is None else f"prompt {error.prompt_index}: "
    too_long = isinstance(error, PromptError) and (
        "max_model_len" in error.reason or "KV blocks" in error.reason
    )
    return invalid(
        field,
        f"{where}{field}={_shown(error.value)}: {error.reason}",
        "context_length_exceeded" if too_long else "invalid_value",
    )


def _shown(value: Any) -> str:
    return _cut(repr(value), 80)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


_PATH = re.compile(r"(?<![\w.])(?:/[\w.@+-]+){2,}")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


def without_paths(text: str) -> str:
    """The text of a foreign exception without paths of this machine and memory addresses."""
    return _ADDRESS.sub("(address)", _PATH.sub("(path)", text))


# -- errors in the words of the client --------------------------------------------------------


class FieldNames:
    """What the client calls the fields of what its request became: a chat request, or the
    parameters of a constraint.

    Args:
        names: paths such as "messages[2].content" to paths in the client's request. A path that is
            not in it has the name of the longest one that it begins with, and its own rest.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Errors that are raised inside name the client's fields."""
        try:
            yield
        except (ApiError, RequestError) as error:
            raise self._renamed(as_api_error(error, "")) from None

    def _renamed(self, error: ApiError) -> ApiError:
        param = None if error.param is None else self.of(error.param)
        return ApiError(
            error.status,
            error.code,
            self.of(error.message),
            param=param,
            headers=error.headers,
        )

    def of(self, text: str) -> str:
        """A path, or a message that begins with one, with the client's name for it."""
        end = _path_end(text)
        path = text[:end]
        while path:
            if path in self._names:
                return self._names[path] + text[len(path) :]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return text


NO_NAMES = FieldNames({})
"""Of a request whose fields have the client's names."""


def _path_end(text: str) -> int:
    """How far a text is a path: names, dots and indexes in brackets."""
    end = 0
    while end < len(text) and (text[end].isalnum() or text[end] in "_.[]"):
        end += 1
    return end
