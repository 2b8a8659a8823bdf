"""The wire formats of a client: request bodies and answers of OpenAI's completions, chats and
responses, and of Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hetero_llm.bench_client.errors import ServerError
from hetero_llm.core.errors import ConfigError, shown

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
DONE = "[DONE]"

_LONGEST_MESSAGE = 300
_MESSAGE_TOKENS = 1024
"""Tokens to generate where the load does not say and the API has no default."""
_REASONS = {"max_output_tokens": "length", "max_tokens": "length", "end_turn": "stop"}
"""Other APIs' words for OpenAI's finish reasons."""


class Api(Enum):
    """Whose requests and answers an endpoint speaks; the value ends its path."""

    COMPLETIONS = "/completions"
    CHAT = "/chat/completions"
    RESPONSES = "/responses"
    MESSAGES = "/messages"

    @property
    def takes_conversations(self) -> bool:
        return self is not Api.COMPLETIONS


def api_of(path: str) -> Api:
    """The API of an endpoint, by its path."""
    for api in (Api.CHAT, Api.RESPONSES, Api.MESSAGES):
        if path.rstrip("/").endswith(api.value):
            return api
    return Api.COMPLETIONS


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
    """Token counts reported by the server, up to here where an answer reports several times."""

    prompt_tokens: int
    completion_tokens: int

    def later(self, other: Usage | None) -> Usage:
        """The counts after another report; what that leaves out stays."""
        if other is None:
            return self
        return Usage(
            max(self.prompt_tokens, other.prompt_tokens),
            max(self.completion_tokens, other.completion_tokens),
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Contents of one event or one whole answer. `num_ids`: number of token ids it contains."""

    text: str = ""
    num_ids: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None


def request_body(
    sample: Sample, *, api: Api, model: str, stream: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON body of one sample; fields in `extra` override the others.

    Raises:
        ConfigError: the sample cannot be sent to this kind of endpoint.
    """
    body: dict[str, Any] = {"model": model, "stream": stream}
    limit, most = "max_tokens", sample.output_len
    match api:
        case Api.COMPLETIONS:
            body["prompt"] = _prompt(sample)
        case Api.CHAT:
            body["messages"] = _messages(sample)
        case Api.RESPONSES:
            body["input"] = _messages(sample)
            limit = "max_output_tokens"
        case Api.MESSAGES:
            messages = _messages(sample)
            body["messages"] = [one for one in messages if one.get("role") != "system"]
            for one in messages:
                if one.get("role") == "system":
                    body["system"] = [*body.get("system", ()), *_blocks(one.get("content"))]
            most = _MESSAGE_TOKENS if most is None else most
    if most is not None:
        body[limit] = most
    if stream and api in (Api.COMPLETIONS, Api.CHAT):
        body["stream_options"] = {"include_usage": True}
    return body | dict(extra)


def _prompt(sample: Sample) -> str | list[int]:
    if sample.prompt is None:
        raise ConfigError("backend", "openai", "conversations need --backend openai-chat")
    return sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt)


def _messages(sample: Sample) -> list[Mapping[str, Any]]:
    if sample.messages is not None:
        return list(sample.messages)
    if not isinstance(sample.prompt, str):
        raise ConfigError("prompt_as", "ids", "a chat endpoint takes text only")
    return [{"role": "user", "content": sample.prompt}]


def _blocks(content: Any) -> list[Any]:
    """A system message's content; what is neither text nor list is the server's to refuse."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else [content]


def read_event(data: str) -> Piece:
    """Parses one event of a stream, or a whole answer that was not streamed, of any API: each says
    what it is.

    Raises:
        ServerError: it reports an error, or violates the format.
    """
    answer = _as_object(data)
    if answer.get("error") is not None:
        raise ServerError(f"error in the answer: {error_text(answer['error'])}")
    kind = answer.get("type")
    if isinstance(kind, str):
        return _typed(kind, answer)
    if answer.get("object") == "response":
        return _response(answer, _texts(answer.get("output")))
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


def _typed(kind: str, event: Mapping[str, Any]) -> Piece:
    """An event of a response or a message, or a whole message."""
    match kind:
        case "response.output_text.delta" | "response.reasoning_text.delta":
            return Piece(_str(event.get("delta") or ""))
        case "response.completed" | "response.incomplete" | "response.failed":
            return _response(_object(event, "response"), "")
        case "content_block_delta":
            delta = _object(event, "delta")
            return Piece(_str(delta.get("text") or delta.get("thinking") or ""))
        case "message_start":
            return Piece(usage=_usage(_object(event, "message").get("usage")))
        case "message_delta":
            reason = _reason(_object(event, "delta").get("stop_reason"))
            return Piece("", 0, reason, _usage(event.get("usage")))
        case "message":
            text, reason = _texts([event]), _reason(event.get("stop_reason"))
            return Piece(text, 0, reason, _usage(event.get("usage")))
        case "error":
            raise ServerError(f"error in the answer: {error_text(event)}")
    return Piece()  # beginnings and ends of parts, and pings


def _response(response: Mapping[str, Any], text: str) -> Piece:
    """A response that has ended."""
    if response.get("error") is not None:
        raise ServerError(f"error in the answer: {error_text(response['error'])}")
    details = response.get("incomplete_details")
    reason = _reason(details.get("reason")) if isinstance(details, dict) else "stop"
    return Piece(text, 0, reason, _usage(response.get("usage")))


def _texts(items: Any) -> str:
    """The texts in the content of a response's items, or of a message, with reasoning."""
    text = ""
    for item in items if isinstance(items, list) else ():
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                text += _str(part.get("text") or part.get("thinking") or "")
    return text


def _reason(reason: Any) -> str | None:
    return None if reason is None else _REASONS.get(_str(reason), reason)


def _object(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = event.get(name)
    if not isinstance(value, dict):
        raise ServerError(f"{name}={shown(value)} of an event is not an object")
    return value


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
    if "prompt_tokens" in value:
        given, made = value["prompt_tokens"], value.get("completion_tokens")
    else:  # later events of a message may leave out what the first one said
        cached = value.get("cache_read_input_tokens"), value.get("cache_creation_input_tokens")
        given, made = value.get("input_tokens") or 0, value.get("output_tokens")
        given += sum(one for one in cached if isinstance(one, int)) if type(given) is int else 0
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
