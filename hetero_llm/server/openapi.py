"""The request schemas of /openapi.json: those of the decoder, narrowed by the server's limits.

A schema that allowed what the server always refuses would be useless for generated clients and test
cases. Of rules between fields it has only one: stream_options needs stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from hetero_llm.core.sampling_params import MAX_SEED
from hetero_llm.server import pooling_protocol
from hetero_llm.server.chat_requests import EFFORTS, MAX_ROLE_CHARS
from hetero_llm.server.context import Context
from hetero_llm.server.endpoints.adapters import LoadAdapterRequest, UnloadAdapterRequest
from hetero_llm.server.messages_api import protocol as messages_api
from hetero_llm.server.messages_api.protocol import MessagesRequest
from hetero_llm.server.pooling_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from hetero_llm.server.protocol import (
    UNAVAILABLE,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from hetero_llm.server.responses_api import protocol as responses_api
from hetero_llm.server.responses_api.protocol import ResponsesRequest
from hetero_llm.server.tool_requests import TOOL_NAME

Schema = dict[str, Any]

_NUMBERS = ("integer", "number")
_HOLDERS = {
    "minimum": _NUMBERS,
    "maximum": _NUMBERS,
    "exclusiveMinimum": _NUMBERS,
    "minLength": ("string",),
    "maxLength": ("string",),
    "enum": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "items": ("array",),
    "maxProperties": ("object",),
    "propertyNames": ("object",),
    "additionalProperties": ("object",),
}
"""The types of values to which a keyword applies."""

_OPTIONS_NEED_STREAM: Schema = {
    "if": {"properties": {"stream_options": {"type": "object"}}, "required": ["stream_options"]},
    "then": {"properties": {"stream": {"const": True}}, "required": ["stream"]},
}
_SEED_SHOWN = (MAX_SEED + 1) // 2  # limits are written as floats, and MAX_SEED would round up
_SPOKEN_ROLES = ["system", "developer", "user", "assistant"]
_STRING: Schema = {"type": "string"}
_TEXT: Schema = {"type": "string", "minLength": 1}


_UNAVAILABLE_IN: dict[type[msgspec.Struct], dict[str, str]] = {
    ResponsesRequest: responses_api.UNAVAILABLE,
    MessagesRequest: messages_api.UNAVAILABLE,
}
_POSTS: dict[str, tuple[type[msgspec.Struct], str, tuple[str, ...]]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts", ("prompt",)),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", ("messages",)),
    "/v1/responses": (ResponsesRequest, "Answer a conversation of items", ("input",)),
    "/v1/responses/input_tokens": (
        ResponsesRequest,
        "Count the tokens of a conversation of items",
        ("input",),
    ),
    "/v1/messages": (
        MessagesRequest,
        "Answer a conversation, as Anthropic does",
        ("messages", "max_tokens"),
    ),
    "/v1/messages/count_tokens": (
        MessagesRequest,
        "Count the tokens of a conversation",
        ("messages",),
    ),
    "/generate": (GenerateRequest, "Continue a prompt, as vLLM's first server did", ("prompt",)),
    "/v1/load_lora_adapter": (
        LoadAdapterRequest,
        "Load a LoRA adapter",
        ("lora_name", "lora_path"),
    ),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, "Unload a LoRA adapter", ("lora_name",)),
    "/tokenize": (TokenizeRequest, "Text to token ids", ()),
    "/detokenize": (DetokenizeRequest, "Token ids to text", ("tokens",)),
    "/v1/embeddings": (EmbeddingRequest, "Embeddings of texts", ("input",)),
    "/v1/rerank": (
        RerankRequest,
        "Documents in the order of how well they answer a query",
        ("query", "documents"),
    ),
    "/v1/score": (ScoreRequest, "How well pairs of texts fit", ()),
    "/classify": (ClassifyRequest, "Classes of texts", ("input",)),
    "/pooling": (PoolingRequest, "Pooled values of texts", ("input",)),
}
"""Of each POST route: its request, what it does, and the fields that a request has to have."""


def summary_of(path: str) -> str:
    """What the POST route of this path does."""
    return _POSTS[path][1]


def request_schema(path: str, context: Context) -> Schema:
    """The part of an operation that describes the request body, without fields of features that
    are not available."""
    kind, _, required = _POSTS[path]
    schema = _inlined(*msgspec.json.schema_components([kind]))
    hidden = UNAVAILABLE.keys() | _UNAVAILABLE_IN.get(kind, {}).keys()
    if issubclass(kind, PoolingFields):
        hidden = set(pooling_protocol.UNAVAILABLE)
    properties = {n: p for n, p in schema["properties"].items() if n not in hidden}
    for name, rule in _rules(context).items():
        if name in properties:
            _narrow(properties[name], rule)
    wholes = _whole_schemas(context)
    if kind is ChatRequest:
        wholes["echo"] = {"enum": [False, None]}
    if kind is GenerateRequest:
        wholes["prompt"] = _TEXT
    if kind is ResponsesRequest:
        wholes |= _responses_schemas(context)
    if kind is MessagesRequest:
        wholes |= _messages_schemas(context)
    properties |= {name: wholes[name] for name in wholes.keys() & properties.keys()}
    schema["properties"], schema["required"] = properties, list(required)
    if "stream_options" in properties:
        schema["allOf"] = [_OPTIONS_NEED_STREAM]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _rules(context: Context) -> dict[str, Schema]:
    """Keywords by field; each is added to those alternatives of the field to which it applies."""
    limits, info = context.settings.limits, context.client.info
    token = _token(context)
    all_tokens = info.max_logprobs >= info.vocab_size
    logprobs = {"minimum": -1 if all_tokens else 0, "maximum": info.max_logprobs}
    tokens = {"minimum": 1, "maximum": info.max_model_len}
    return {
        "model": {"enum": list(context.names)},
        "n": {"minimum": 1, "maximum": limits.n},
        "best_of": {"minimum": 1, "maximum": limits.best_of},
        "temperature": {"minimum": 0, "maximum": limits.temperature},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "min_p": {"minimum": 0, "maximum": 1},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"exclusiveMinimum": 0},
        "early_stopping": {"enum": ["never"]},
        "no_repeat_ngram_size": {"minimum": 0},
        "num_speculative_tokens": {"minimum": 0},
        "seed": {"minimum": -(1 << 63), "maximum": _SEED_SHOWN},
        "stream_interval": {"minimum": 1},
        "stop": {
            "minLength": 1,
            "maxLength": limits.stop_chars,
            "maxItems": limits.stop,
            "items": {"minLength": 1, "maxLength": limits.stop_chars},
        },
        "stop_sequences": {
            "maxItems": limits.stop,
            "items": {"minLength": 1, "maxLength": limits.stop_chars},
        },
        "bad_words": {
            "maxItems": limits.bad_words,
            "items": {"minLength": 1, "maxLength": limits.bad_word_chars},
        },
        "stop_token_ids": {"maxItems": limits.stop_token_ids, "items": token},
        "allowed_token_ids": {"minItems": 1, "maxItems": info.vocab_size, "items": token},
        "tokens": {"items": token},
        "logit_bias": {
            "maxProperties": limits.logit_bias,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "max_output_tokens": tokens,
        "truncation_side": {"enum": ["left", "right"]},
        "encoding_format": {"enum": ["float", "base64"]},
        "embed_dtype": {"enum": ["float32"]},
        "endianness": {"enum": ["little", "native"]},
        "dimensions": {"minimum": 1},
        "top_n": {"minimum": 0},
        "query": {"minLength": 1},
        "min_tokens": {"minimum": 0, "maximum": info.max_model_len},
        "priority": {"minimum": 0, "maximum": 0},
        "cache_salt": {"minLength": 1, "maxLength": limits.salt_chars},
        "request_id": {"minLength": 1, "maxLength": limits.request_id_chars},
        "reasoning_effort": {"enum": list(EFFORTS)},
        "modalities": {"items": {"enum": ["text"]}},
        "chat_template_kwargs": {
            "propertyNames": {"enum": list(context.settings.chat_template_kwargs)},
            "additionalProperties": {"type": ["boolean", "number", "string"], "maxLength": 256},
        },
    }


def _whole_schemas(context: Context) -> dict[str, Schema]:
    """Whole schemas of fields for which the decoder's type is too general."""
    limits, token = context.settings.limits, {"type": "integer", **_token(context)}
    ids = _list(token)
    side = _any_of(_TEXT, _list(_TEXT, limits.pooling_inputs))
    parts = [_object({"type": {"const": kind}, kind: _STRING}) for kind in ("text", "refusal")]
    if context.client.images is not None:
        url = _object({"url": {"type": "string", "pattern": "^data:image/"}})
        parts.append(_object({"type": {"const": "image_url"}, "image_url": url}))
    role = _any_of(
        {"enum": _SPOKEN_ROLES}, {"type": "string", "minLength": 1, "maxLength": MAX_ROLE_CHARS}
    )
    content = _any_of(_STRING, _list(_any_of(_STRING, *parts)))
    message = _object({"role": role, "content": content}, {"name": _or_null("string")})
    formats = {"enum": ["text", "json_object", "json_schema", "structural_tag"]}
    return {
        "prompt": _any_of(_TEXT, ids, _list(_any_of(_TEXT, ids), limits.prompts)),
        "input": _any_of(_TEXT, ids, _list(_any_of(_TEXT, ids), limits.pooling_inputs)),
        **dict.fromkeys(("text_1", "text_2", "data_1", "data_2", "queries", "documents"), side),
        "messages": _list(message, limits.messages),
        "response_format": _object({"type": formats}) | _or_null("object"),
        "tools": _tools(context),
        "tool_choice": {"enum": ["none", "auto", None]},
        "truncate_prompt_tokens": _any_of(
            {"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}
        ),
        "chat_template": {"type": "null"},
    }


def _responses_schemas(context: Context) -> dict[str, Schema]:
    """Whole schemas of fields of /v1/responses."""
    settings = context.settings
    part = _object({"type": {"const": "input_text"}, "text": _STRING})
    message = _object(
        {
            "type": {"const": "message"},
            "role": {"enum": _SPOKEN_ROLES},
            "content": _any_of(_TEXT, _list(part)),
        }
    )
    tool = _object({"type": {"const": "function"}, "name": _TEXT})
    form = _object({"type": {"const": "text"}}) | _or_null("object")
    included = {"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    stores = settings.stored_responses > 0
    return {
        "input": _any_of(_TEXT, _list(message, settings.limits.messages)),
        "tools": _or_null("array") | {"items": tool},
        "reasoning": _optional(
            {"effort": {"enum": [*EFFORTS, None]}, "summary": _or_null("string")}
        ),
        "text": _optional({"format": form, "verbosity": _or_null("string")}),
        "include": _or_null("array") | {"items": included},
        "truncation": {"enum": ["disabled", None]},
        "store": _or_null("boolean") if stores else {"enum": [False, None]},
        "previous_response_id": _or_null("string") if stores else {"type": "null"},
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "stream_options": _optional({"include_obfuscation": {"enum": [False, None]}}),
    }


def _messages_schemas(context: Context) -> dict[str, Schema]:
    """Whole schemas of fields of /v1/messages."""
    said = [_STRING, _list(_object({"type": {"const": "text"}, "text": _STRING}))]
    message = _object(
        {"role": {"enum": ["user", "assistant", "system"]}, "content": _any_of(*said)}
    )
    thinking = _object(
        {"type": {"enum": ["enabled", "disabled", "adaptive", "between_tools"]}},
        {"budget_tokens": _or_null("integer") | {"minimum": 1}},
    )
    tool = _object({"name": _TEXT, "input_schema": {"type": "object"}})
    null = {"type": "null"}
    return {
        "messages": _list(message, context.settings.limits.messages),
        "system": _any_of(null, *said),
        "max_tokens": {"type": "integer", "minimum": 1},
        "tools": _or_null("array") | {"items": tool},
        "tool_choice": _any_of(null, _object({"type": {"enum": ["auto", "none"]}})),
        "thinking": _any_of(null, thinking),
        "output_config": _optional({"effort": {"enum": [*EFFORTS, None]}}),
        "output_format": null,
    }


def _tools(context: Context) -> Schema:
    """Tools can be declared to a template that describes them, in a format that is known."""
    template, limits = context.tokenizer.chat_template, context.settings.limits
    if template is None or not template.mentions("tools") or not context.parsers.format.calls_tools:
        return {"enum": [[], None]}
    parameters: dict[str, Schema] = {
        "type": {"const": "object"},
        "properties": {
            "type": "object",
            "additionalProperties": {"type": ["object", "boolean"]},
        },
        "required": {"type": "array", "items": _STRING},
    }
    function = _object(
        {"name": {"type": "string", "pattern": f"^{TOOL_NAME}$"}},
        {
            "description": _or_null("string"),
            "parameters": _optional(parameters),
            "strict": _or_null("boolean"),
        },
    )
    tool = _object({"type": {"const": "function"}, "function": function})
    return _or_null("array") | {"maxItems": limits.tools, "items": tool}


def _object(
    required: dict[str, Schema], more: Mapping[str, Schema] = MappingProxyType({})
) -> Schema:
    """An object that has to have the first properties, and may have the others."""
    return {"type": "object", "properties": {**required, **more}, "required": list(required)}


def _optional(properties: dict[str, Schema]) -> Schema:
    """Null, or an object that may have these properties."""
    return _or_null("object") | {"properties": properties}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


def _any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _list(items: Schema, most: int | None = None) -> Schema:
    """A list of one to `most` items."""
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "minItems": 1, **limit, "items": items}


def _token(context: Context) -> Schema:
    return {"minimum": 0, "maximum": context.client.info.vocab_size - 1}


def _narrow(schema: Schema, rule: Schema) -> None:
    """Adds the keywords of `rule` to a field's schema in place."""
    for one in schema.get("anyOf", [schema]):
        for keyword, value in rule.items():
            if one.get("type") not in _HOLDERS[keyword]:
                continue
            one[keyword] = {**one.get(keyword, {}), **value} if keyword == "items" else value


def _inlined(schemas: tuple[Schema, ...], parts: Schema) -> Schema:
    """The schema with all references replaced by what they name."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        reference = value.get("$ref")
        if reference is not None:
            return resolve(parts[reference.rpartition("/")[2]])
        return {name: resolve(item) for name, item in value.items()}

    (schema,) = schemas
    result: Schema = resolve(schema)
    return result
