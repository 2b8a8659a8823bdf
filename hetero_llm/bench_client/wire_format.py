"""The OpenAI wire format of a client: request bodies and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.bench_client.errors import ServerError
from hetero_llm.core.errors import ConfigError, shown

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DONE = "[DONE]"

_LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a load: text, token ids, or the messages of a conversation.

    `output_len`: number of tokens to generate; None: the server's default.
    """

    prompt: str | tuple[int, ...] | None
    output_len: int | None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts reported by the server."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Contents of one event or one whole answer. `num_ids`: number of token ids it contains."""

    text: str = ""
    num_ids: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None


def request_body(
    sample: Sample, *, chat: bool, model: str, stream: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON body of one sample; fields in `extra` override the others.

    Raises:
        ConfigError: the sample cannot be sent to this kind of endpoint.
    """
    body: dict[str, Any] = {"model": model, "stream": stream}
    if chat:
        body["messages"] = _messages(sample)
    elif sample.prompt is None:
        raise ConfigError("backend", "openai", "conversations need --backend openai-chat")
    else:
        ids = not isinstance(sample.prompt, str)
        body["prompt"] = list(sample.prompt) if ids else sample.prompt
    if sample.output_len is not None:
        body["max_tokens"] = sample.output_len
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body | dict(extra)


def _messages(sample: Sample) -> list[Mapping[str, Any]]:
    if sample.messages is not None:
        return list(sample.messages)
    if not isinstance(sample.prompt, str):
        raise ConfigError("prompt_as", "ids", "a chat endpoint takes text only")
    return [{"role": "user", "content": sample.prompt}]


def read_event(data: str) -> Piece:
    """Parses one event of a stream, or a whole answer that was not streamed.

    Raises:
        ServerError: it reports an error, or violates the format.
    """
    answer = _as_object(data)
    if answer.get("error") is not None:
        raise ServerError(f"error in the answer: {error_text(answer['error'])}")
    choices = answer.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise ServerError(f"choices={shown(choices)} of an event is not a list of objects")
    text, num_ids, reason = "", 0, None
    for choice in choices:
        text += _text_of(choice)
        ids = choice.get("token_ids")
        num_ids += len(ids) if isinstance(ids, list) else 0
        reason = choice.get("finish_reason") or reason
    return Piece(text, num_ids, reason, _usage(answer.get("usage")))


def _text_of(choice: Mapping[str, Any]) -> str:
    """The text of a completion, a chat message or a chat delta, with its reasoning."""
    for name in ("delta", "message"):
        message = choice.get(name)
        if isinstance(message, dict):
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            return _str(thought) + _str(message.get("content") or "")
    return _str(choice.get("text") or "")


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ServerError(f"{shown(value)} stands where text should be")
    return value


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    given, made = value.get("prompt_tokens"), value.get("completion_tokens")
    if not isinstance(given, int) or not isinstance(made, int) or min(given, made) < 0:
        return None
    return Usage(given, made)


def _as_object(data: str) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        raise ServerError(f"not JSON: {shown(data)}") from None
    if not isinstance(answer, dict):
        raise ServerError(f"not a JSON object: {shown(data)}")
    return answer


def error_text(error: Any) -> str:
    """The message of an error object, or any other value as text, on one line."""
    message = error
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or json.dumps(error)
    line = " ".join(str(message).split())
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 3] + "..."


def refusal(status: int, body: bytes) -> ServerError:
    """The error for an HTTP status that is not 200."""
    text = body.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = text or "empty answer"
    if isinstance(answer, dict):
        answer = answer.get("error") or answer
    return ServerError(f"HTTP {status}: {error_text(answer)}", status=status)
