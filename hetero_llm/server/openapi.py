"""The request schemas of /openapi.json: those of the decoder, narrowed by the server's limits.

A schema that allowed what the server always refuses would be useless for generated clients and test
cases. Of rules between fields it has only one: stream_options needs stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hetero_llm.core.sampling_params import MAX_SEED
from hetero_llm.server.context import Context
from hetero_llm.server.prompts import EFFORTS, MAX_ROLE_CHARS
from hetero_llm.server.protocol import UNAVAILABLE, ChatRequest, GenerateRequest
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
_REFUSAL_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
    "required": ["type", "refusal"],
}
_IMAGE_PART: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string", "pattern": "^data:image/"}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}


def request_schema(
    kind: type[msgspec.Struct], required: tuple[str, ...], context: Context
) -> Schema:
    """The part of an operation that describes the request body."""
    schema = _inlined(*msgspec.json.schema_components([kind]))
    properties = {n: p for n, p in schema["properties"].items() if n not in UNAVAILABLE}
    for name, rule in _rules(context).items():
        if name in properties:
            _narrow(properties[name], rule)
    wholes = _whole_schemas(context)
    if kind is ChatRequest:
        wholes["echo"] = {"enum": [False, None]}
    if kind is GenerateRequest:
        wholes["prompt"] = {"type": "string", "minLength": 1}
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
        "seed": {"minimum": -1, "maximum": _SEED_SHOWN},
        "stop": {
            "minLength": 1,
            "maxLength": limits.stop_chars,
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
        "truncation_side": {"enum": ["left", "right"]},
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
    ids = {"type": "array", "minItems": 1, "items": token}
    text = {"type": "string", "minLength": 1}
    several = {"type": "array", "minItems": 1, "maxItems": limits.prompts}
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    parts = [part, _REFUSAL_PART, *([] if context.client.images is None else [_IMAGE_PART])]
    content = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, *parts]}},
        ]
    }
    message = {
        "type": "object",
        "properties": {
            "role": {
                "anyOf": [
                    {"enum": _SPOKEN_ROLES},
                    {"type": "string", "minLength": 1, "maxLength": MAX_ROLE_CHARS},
                ]
            },
            "content": content,
            "name": {"type": ["string", "null"]},
        },
        "required": ["role", "content"],
    }
    return {
        "prompt": {"anyOf": [text, ids, {**several, "items": {"anyOf": [text, ids]}}]},
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": limits.messages,
            "items": message,
        },
        "response_format": {
            "type": ["object", "null"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]}
            },
            "required": ["type"],
        },
        "tools": _tools(context),
        "tool_choice": {"enum": ["none", "auto", None]},
        "truncate_prompt_tokens": {
            "anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}]
        },
        "chat_template": {"type": "null"},
    }


def _tools(context: Context) -> Schema:
    """Tools can be declared to a template that describes them, in a format that is known."""
    template, limits = context.tokenizer.chat_template, context.settings.limits
    if template is None or not template.mentions("tools") or not context.parsers.format.calls_tools:
        return {"enum": [[], None]}
    function = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
            "description": {"type": ["string", "null"]},
            "parameters": {
                "type": ["object", "null"],
                "properties": {
                    "type": {"const": "object"},
                    "properties": {
                        "type": "object",
                        "additionalProperties": {"type": ["object", "boolean"]},
                    },
                    "required": {"type": "array", "items": {"type": "string"}},
                },
            },
            "strict": {"enum": [False, None]},
        },
        "required": ["name"],
    }
    tool = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function},
        "required": ["type", "function"],
    }
    return {"type": ["array", "null"], "maxItems": limits.tools, "items": tool}


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
