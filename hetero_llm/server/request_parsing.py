"""From the bytes of an HTTP request to a checked request.

msgspec alone decodes and validates: one pass in C that refuses what JSON does not know, and says
where a mistake is. Pydantic would want a second pass and accept NaN. Numbers and booleans may be
written as texts ("3", "true"), as vLLM takes them.

What is checked here is what HTTP clients may ask for: the JSON's shape, known fields, and the
server's limits on one request. `SamplingParams` checks the ranges of its fields, and the engine
client's `InputProcessor` checks the request against the model.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin
from uuid import uuid4

import msgspec
import numpy as np
from starlette.requests import Request

from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams
from hetero_llm.engine.engine_client import EngineInfo
from hetero_llm.engine.inputs.default_sampling import with_defaults
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server.constraints import FIELDS, constraint_names, output_constraint
from hetero_llm.server.context import Context, given_id_of, request_id_of
from hetero_llm.server.errors import (
    NO_NAMES,
    ApiError,
    FieldNames,
    context_exceeded,
    empty,
    invalid,
    required,
    too_many,
    unsupported,
    wrong,
    wrong_value,
)
from hetero_llm.server.protocol import (
    UNAVAILABLE,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Generation,
    TokenizeRequest,
)
from hetero_llm.server.settings import Limits, ServerSettings
from hetero_llm.server.tokenization import Cut

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
G = TypeVar("G", CompletionRequest, ChatRequest, GenerateRequest)

# An unterminated string runs to the end, so that no text makes the search start over again.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPEN_LIST, _OPEN_OBJECT = b"[{"
_SCANNED_AT_ONCE = 1 << 16
_ITEMS_LOOKED_AT = 4096
_ASKS_NOTHING: tuple[Any, ...] = (None, False, "", [])
_ARGUMENTS = frozenset(
    ("vllm_xargs", "kv_transfer_params", "ec_transfer_params", "mm_processor_kwargs",
     "media_io_kwargs")
)  # fmt: skip
"""Fields that pass arguments on, of which an empty object holds none; an empty `web_search_options`
asks for a search."""
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WHERE = re.compile(r" - at `(.*)`$")
_TYPES = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_TYPE_WORDS = {
    "array": "a list",
    "bool": "a boolean",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
_MISSING = re.compile(r"missing required field `(\w+)`")
_MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
_TIMEOUT_HEADER = "x-request-timeout-ms"
_RANK_HEADER = "x-data-parallel-rank"
_MOST_RANK_DIGITS = 8
_LEAST_SEED = -(1 << 63)
_NOT_PASSED = {"max_tokens", "truncation_side", "structured_outputs"} | UNAVAILABLE.keys()
_SAMPLING_FIELDS = [
    one.name
    for one in fields(SamplingParams)
    if one.name in Generation.__struct_fields__ and one.name not in _NOT_PASSED
]
"""Fields of a request that have the same name and meaning in `SamplingParams`."""
_sampling_values = attrgetter(*_SAMPLING_FIELDS)
_constraint_values = attrgetter(*FIELDS)
_UNCONSTRAINED = (None,) * len(FIELDS)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request within the server's limits, with tokenized prompts, ready for the engine client.

    Attributes:
        id: of the response.
        engine_id: the ids of its engine requests begin with it; unique among those that run.
        http_id: the HTTP request's id, which is in the log.
        created: Unix time in seconds.
        params: one per prompt; they differ in max_tokens at most.
        seconds: until the deadline, None without one.
        constraint_names: what the request calls the fields of its constraint.
        adapter, prompt_adapter: that it names as the model; both None: the base model.
        data_parallel_rank: of the replica that it asks for; None: the engine chooses.
    """

    id: str
    engine_id: str
    http_id: str
    created: int
    model: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    seconds: float | None
    constraint_names: FieldNames
    adapter: LoRARequest | None = None
    prompt_adapter: PromptAdapterRequest | None = None
    data_parallel_rank: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids or ()) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens a request may generate.

    Attributes:
        wanted: as the request says in its field `name`; None: it does not say.
        default: instead, cut to what fits; None: what the context has room for.
    """

    wanted: int | None
    default: int | None
    name: str = "max_tokens"

    @property
    def most(self) -> int | None:
        return self.default if self.wanted is None else self.wanted

    def behind(self, prompt_tokens: int, max_model_len: int) -> int | None:
        """The limit behind a prompt of this length; None means the rest of the context.

        Raises:
            ApiError: the wanted number does not fit.
        """
        room = max_model_len - prompt_tokens
        if self.wanted is None:
            if room < 1:
                raise context_exceeded(max_model_len, prompt_tokens, 1, "prompt")
            return None if self.default is None else min(self.default, room)
        if self.wanted > room:
            field = "prompt" if room < 1 and prompt_tokens else self.name
            raise context_exceeded(max_model_len, prompt_tokens, self.wanted, field)
        return self.wanted


async def read_generation(context: Context, request: Request, kind: type[G]) -> G:
    """Reads the body of a generation request and makes all checks that need no tokenizer.

    Raises:
        ApiError: the request is wrong, or the server cannot serve.
    """
    body = await read_known(context, request, kind)
    check_generation(context, body)
    return body


async def read_known(context: Context, request: Request, kind: type[T]) -> T:
    """Reads a body, counts and logs unknown fields, and checks that the server accepts requests
    for the model.

    Raises:
        ApiError: the body is wrong, the model is another one, or the server cannot serve.
    """
    body, unknown = await read_json(request, kind, context.settings)
    if unknown:
        context.metrics.unknown_fields(len(unknown))
        names = ", ".join(name[:64] for name in unknown[:8])
        logger.warning(
            "request %s: unknown fields ignored: %s", request_id_of(request), as_json(names)
        )
    context.check_open()
    context.model_name(getattr(body, "model", None))
    return body


def check_generation(context: Context, body: Generation) -> None:
    """Makes all checks of a request to generate that need no tokenizer.

    Raises:
        ApiError: the request is wrong, or the model generates no text.
    """
    pooling = context.client.info.pooling
    if pooling is not None:
        tasks = " and ".join(map(repr, pooling.tasks))
        reason = f"the model {context.names[0]!r} generates no text; it serves {tasks}"
        raise invalid("model", reason, "unsupported_task")
    refuse_unsupported(body)
    check_limits(body, context.settings.limits, context.client.info)
    check_stream(body)


def checked_request(
    context: Context,
    request: Request,
    body: Generation,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    prefix: str,
    limit: TokenLimit,
) -> CheckedRequest:
    """Makes the checks that depend on the prompts' lengths.

    Args:
        params: those of all prompts.
        prefix: of the response's id, with what separates it.
        limit: of the tokens to generate.

    Raises:
        ApiError: a prompt and the tokens to generate do not fit into the context.
    """
    max_model_len = context.client.info.max_model_len
    each = []
    for prompt in prompts:
        length = len(prompt.token_ids or ())
        max_tokens = limit.behind(length, max_model_len)
        check_min_tokens(params, prompt_tokens=length, max_model_len=max_model_len)
        same = max_tokens == params.max_tokens
        each.append(params if same else replace(params, max_tokens=max_tokens))
    salt = context.cache_salt(request, body.cache_salt)
    adapter, prompt_adapter = context.adapters_of(body.model)
    shown, unique = answer_ids(request, body.request_id, prefix)
    return CheckedRequest(
        id=shown,
        engine_id=unique,
        http_id=request_id_of(request),
        created=int(time.time()),
        model=context.model_name(body.model),
        prompts=[replace(prompt, cache_salt=salt) for prompt in prompts] if salt else prompts,
        params=each,
        seconds=deadline_seconds(request, context.settings.request_timeout),
        constraint_names=constraint_names(body) if params.constrains else NO_NAMES,
        adapter=adapter,
        prompt_adapter=prompt_adapter,
        data_parallel_rank=wanted_rank(request, context.client.info.num_replicas),
    )


def answer_ids(request: Request, wanted: str | None, prefix: str) -> tuple[str, str]:
    """The id of an answer, and the one that no other running request may have.

    As in vLLM, the client's X-Request-Id comes before the body's `request_id`. Several requests may
    carry the same header at once, so it names the answer alone. Answers that may be stored
    ("resp_") keep ids of their own.

    Args:
        wanted: the body's id.
        prefix: with what separates it.
    """
    given = given_id_of(request)
    if given and prefix.endswith("-"):
        shown = f"{prefix}{given}"
        return shown, f"{shown}-{uuid4().hex[:16]}"
    shown = f"{prefix}{wanted or uuid4().hex}"
    return shown, shown


def deadline_seconds(request: Request, default: float | None) -> float | None:
    """The sooner of the client's deadline and the server's; None without any.

    Raises:
        ApiError: the header is not a number of milliseconds.
    """
    text = request.headers.get(_TIMEOUT_HEADER)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= _MAX_TIMEOUT_MS):
        raise invalid(
            _TIMEOUT_HEADER,
            f"{_TIMEOUT_HEADER}={text[:32]!r}: must be 1 to {_MAX_TIMEOUT_MS} milliseconds",
        )
    seconds = int(text) / 1000
    return seconds if default is None else min(seconds, default)


def wanted_rank(request: Request, num_replicas: int) -> int | None:
    """The replica that a request asks for, as vLLM's clients do; None: it does not say.

    Raises:
        ApiError: the header is not the number of a replica.
    """
    text = request.headers.get(_RANK_HEADER)
    if text is None:
        return None
    plain = text.isascii() and text.isdecimal() and len(text) <= _MOST_RANK_DIGITS
    if not (plain and int(text) < num_replicas):
        raise invalid(
            _RANK_HEADER,
            f"{_RANK_HEADER}={text[:32]!r}: must be 0 to {num_replicas - 1} "
            f"(data_parallel_size={num_replicas})",
        )
    return int(text)


def as_json(value: Any) -> str:
    """For the log: one line, whatever a user wrote."""
    return msgspec.json.encode(value).decode()


# -- the body -------------------------------------------------------------------------------


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body of a JSON request.

    Raises:
        ApiError: 408, 413 or 415.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"content-type is {kind[:64]!r}; send application/json",
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"content-encoding is {coding[:64]!r}; send the body uncompressed",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408,
            "request_timeout",
            f"the body did not arrive within {limits.body_seconds:g} s",
            headers={"connection": "close"},
        ) from None
    return b"".join(chunks)


async def read_json(
    request: Request, kind: type[T], settings: ServerSettings
) -> tuple[T, list[str]]:
    """A request's body as `kind`, and the names in it that `kind` does not have.

    Raises:
        ApiError: the body is too large, too slow, no JSON, or not of this kind.
        starlette's ClientDisconnect: the client left before its body had come.
    """
    limits = settings.limits
    body = await read_body(request, limits)
    return decode(body, kind, limits, strict_fields=settings.strict_fields)


def decode(
    body: bytes, kind: type[T], limits: Limits, *, strict_fields: bool
) -> tuple[T, list[str]]:
    """See `read_json`."""
    _check_shape(body, limits)
    try:
        body.decode("utf-8")  # msgspec does not look into fields that it skips
        value = _decoder(kind).decode(body)
        unknown = _unknown_names(body, kind)
    except UnicodeDecodeError as error:
        raise _bad_json(f"the body is not UTF-8 text (byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise type_mistake(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_json(body, str(error)) from None
    if unknown and strict_fields:
        raise invalid(unknown[0], f"{unknown[0][:64]!r} is not a known field", "unknown_parameter")
    return value, unknown


def converted(value: Any, kind: type[T]) -> T:
    """JSON data as `kind`.

    Raises:
        ApiError: it is not of this kind; the error's path begins at `value`.
    """
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise type_mistake(str(error)) from None


def decode_json(data: bytes, kind: Any, limits: Limits) -> Any:
    """JSON inside of a request, such as a tool's arguments; it has the limits of a body.

    Raises:
        ApiError, msgspec.MsgspecError, RecursionError: it is no JSON, or not of this kind.
    """
    _check_shape(data, limits)
    return _decoder(kind).decode(data)


_RAW_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw], strict=False)
_RAW_LIST = msgspec.json.Decoder(list[dict[str, msgspec.Raw]], strict=False)


@lru_cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)


def _unknown_names(body: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Names in a body that `kind` does not have, and names in the objects of its fields, one level
    down, that their types do not have."""
    known, parts = _known_names(kind)
    names: dict[str, msgspec.Raw] = _RAW_OBJECT.decode(body)
    found = names.keys() - known
    for field in names.keys() & parts.keys():
        part, content = parts[field], bytes(names[field]).lstrip()
        if content.startswith(b"{"):
            inner = _RAW_OBJECT.decode(content).keys()
            if not inner <= part:
                found |= {f"{field}.{name}" for name in inner - part}
        elif content.startswith(b"["):
            for number, item in enumerate(_RAW_LIST.decode(content)[:_ITEMS_LOOKED_AT]):
                if not item.keys() <= part:
                    found |= {f"{field}[{number}].{name}" for name in item.keys() - part}
    return sorted(found)


@lru_cache
def _known_names(
    kind: type[msgspec.Struct],
) -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """The fields of `kind`, and of those that hold objects or lists of them the names these objects
    have."""
    found = {}
    for field in msgspec.structs.fields(kind):
        for one in get_args(field.type):
            part = next(iter(get_args(one)), None) if get_origin(one) is list else one
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                found[field.name] = frozenset(part.__struct_fields__)
    return frozenset(kind.__struct_fields__), found


def _check_shape(body: bytes, limits: Limits) -> None:
    """Refuses JSON that is nested too deep, or has too many small parts: decoding it would block
    the event loop. A body with few brackets and names passes at once; others are measured before
    they are decoded."""
    if body.count(b"[") + body.count(b"{") + body.count(b":") <= limits.json_depth:
        return
    bare = _STRING.sub(b"", body)
    brackets = np.frombuffer(bare.translate(None, _NOT_BRACKETS), np.uint8)
    opens = (brackets == _OPEN_LIST) | (brackets == _OPEN_OBJECT)
    if int(opens.sum()) + bare.count(b":") > limits.json_parts:
        raise _bad_json(f"the JSON has more than {limits.json_parts} lists, objects and names")
    level = 0
    for start in range(0, len(opens), _SCANNED_AT_ONCE):
        steps = np.where(opens[start : start + _SCANNED_AT_ONCE], 1, -1).cumsum()
        if level + int(steps.max()) > limits.json_depth:
            raise _bad_json(f"the JSON is nested deeper than {limits.json_depth} levels")
        level += int(steps[-1])


def type_mistake(text: str) -> ApiError:
    """The error that msgspec's words of a validation error stand for."""
    found = _WHERE.search(text)
    missing = _MISSING.search(text)
    where = found[1].removeprefix("$").removeprefix(".") if found else ""
    if missing:
        name = f"{where}.{missing[1]}" if where else missing[1]
        return required(name)
    reason = _in_words(_WHERE.sub("", text))
    if not where:
        return invalid(None, f"the body: {reason}", "invalid_type")
    return wrong(where, reason, "invalid_type")


def _in_words(reason: str) -> str:
    """msgspec's "Expected `array | null`, got `str`" as "must be a list, not a string"."""
    found = _TYPES.fullmatch(reason)
    if found is None:
        return reason[:1].lower() + reason[1:]
    wanted = [_TYPE_WORDS.get(word, word) for word in found[1].split(" | ") if word != "null"]
    *head, last = wanted
    either = f"{', '.join(head)} or {last}" if head else last
    got = "a fraction" if found[2] == "float" else _TYPE_WORDS.get(found[2], found[2])
    return f"must be {either}, not {got}"


def _not_json(body: bytes, reason: str) -> ApiError:
    if not body.strip():
        reason = "the body is empty"
    elif "truncated" in reason and _LONE_SURROGATE.search(body):
        reason = "a string holds half of a surrogate pair, or the text was cut off"
    return _bad_json(f"the body is not valid JSON: {reason}")


def _bad_json(message: str) -> ApiError:
    return invalid(None, message, "invalid_json")


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limits.body_bytes} bytes")


# -- the fields -----------------------------------------------------------------------------


def refuse_unsupported(request: Generation | TokenizeRequest) -> None:
    """What is empty or false asks for nothing and passes, and so does the choice to call none of no
    functions.

    Raises:
        ApiError: a field asks for a feature that is not available.
    """
    for name, feature in UNAVAILABLE.items():
        value = getattr(request, name, None)
        if value in _ASKS_NOTHING or (value == {} and name in _ARGUMENTS):
            continue
        if name == "function_call" and value in ("none", "auto"):
            continue
        raise unsupported(name, feature)
    if isinstance(request, ChatRequest):
        if request.echo:
            raise unsupported("echo", "echo in a chat")
        if set(request.modalities or ()) - {"text"}:
            raise unsupported("modalities", "output other than text")
    if isinstance(request, (ChatRequest, TokenizeRequest)) and request.chat_template is not None:
        # A template is a program; only the operator chooses which one runs.
        raise wrong(
            "chat_template",
            "a request cannot bring its own template; the server's operator sets it",
            "unsupported_parameter",
        )
    if isinstance(request, Generation) and request.priority:
        raise wrong(
            "priority",
            "priority scheduling is not available, only 0 is accepted",
            "unsupported_parameter",
        )


def check_limits(request: Generation, limits: Limits, info: EngineInfo) -> None:
    """Refuses a request that would take the server's time from all others.

    Raises:
        ApiError: names the field and its limit.
    """
    for name in ("n", "best_of", "temperature"):
        _at_most(name, getattr(request, name), getattr(limits, name))
    if request.stream_interval is not None and request.stream_interval < 1:
        raise wrong_value("stream_interval", request.stream_interval, "must be at least 1")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    _short_list("stop", stop, limits.stop)
    _short_list("bad_words", request.bad_words, limits.bad_words)
    _short_list("stop_token_ids", request.stop_token_ids, limits.stop_token_ids)
    _short_list("logit_bias", request.logit_bias, limits.logit_bias)
    _short_list("allowed_token_ids", request.allowed_token_ids, info.vocab_size)
    short_text("cache_salt", request.cache_salt, limits.salt_chars)
    short_text("request_id", request.request_id, limits.request_id_chars)
    for word in stop or ():
        short_text("stop", word, limits.stop_chars)
    for word in request.bad_words or ():
        short_text("bad_words", word, limits.bad_word_chars)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = getattr(request, name, None)
        if isinstance(value, bool) or value is None:
            continue
        _at_most(name, value, info.max_logprobs)
        if value < -1:
            raise wrong_value(name, value, "must be at least 0, or -1 for all tokens")
        if value == -1 and info.max_logprobs < info.vocab_size:
            reason = f"asks for all tokens, at most {info.max_logprobs} are given"
            raise wrong_value(name, value, reason)


def check_stream(request: Generation) -> None:
    """Refuses fields that contradict streaming, or that need it.

    Raises:
        ApiError: names the field.
    """
    if not request.stream:
        if request.stream_options is not None:
            raise wrong("stream_options", "needs stream=true")
        return
    if request.prompt_logprobs is not None:
        reason = "not with stream; a completion streams them with echo and logprobs"
        raise wrong("prompt_logprobs", reason)
    if request.use_beam_search:
        raise wrong("use_beam_search", "its text is known at the end only; unset stream")
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise wrong("best_of", "above n the best are known at the end only; unset stream")


def sampling_params(
    context: Context,
    request: CompletionRequest | ChatRequest | GenerateRequest,
    limit: TokenLimit,
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """The engine's parameters.

    Args:
        defaults: the model's, for fields that the request leaves out.

    Raises:
        SamplingError: a field is out of range or contradicts another one.
        ApiError: the fields for log-probabilities contradict each other.
    """
    values: dict[str, Any] = {
        name: value
        for name, value in zip(_SAMPLING_FIELDS, _sampling_values(request), strict=True)
        if value is not None
    }
    if request.seed == -1:
        del values["seed"]  # vLLM's way to say that any will do
    elif request.seed is not None and request.seed < 0:
        if request.seed < _LEAST_SEED:
            raise wrong_value("seed", request.seed, f"must be at least {_LEAST_SEED}")
        values["seed"] = request.seed + (1 << 64)  # OpenAI's seeds are signed
    if request.truncate_prompt_tokens == -1:
        # What the context holds beside the answer.
        room = context.client.info.max_model_len - (limit.most or 1)
        values["truncate_prompt_tokens"] = max(room, 1)
    if request.use_beam_search and request.temperature is None:
        values["temperature"] = 0.0
    if isinstance(request, ChatRequest):
        values["logprobs"] = _chat_logprobs(request)
    else:
        values["logprobs"] = completion_logprobs(request)
        echoes = isinstance(request, CompletionRequest) and request.echo
        if echoes and values["logprobs"] is not None:
            values["prompt_logprobs"] = _larger(values["logprobs"], request.prompt_logprobs)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    values |= {"max_tokens": limit.most, "output_kind": kind}
    if _constraint_values(request) != _UNCONSTRAINED:
        values["structured_outputs"] = output_constraint(request, context.settings.limits)
    return SamplingParams(**with_defaults(defaults, values))


def prompt_cut(request: Generation, params: SamplingParams) -> Cut:
    """Which tokens of a prompt are kept. `params` has their number.

    Raises:
        ApiError: truncation_side is neither "left" nor "right".
    """
    side = request.truncation_side or "left"
    if side not in ("left", "right"):
        raise wrong_value("truncation_side", side, "must be 'left' or 'right'")
    return Cut(params.truncate_prompt_tokens, keep_first=side == "right")


def check_max_tokens(wanted: int | None, name: str, *, lowest: int) -> None:
    """Raises:
    ApiError: fewer than `lowest`.
    """
    if wanted is not None and wanted < lowest:
        zero = "; 0 scores a prompt, with echo in a completion" if wanted == 0 else ""
        raise wrong_value(name, wanted, f"must be at least {lowest}{zero}")


def check_min_tokens(params: SamplingParams, *, prompt_tokens: int, max_model_len: int) -> None:
    """Without max_tokens only the context bounds min_tokens.

    Raises:
        ApiError: the context has no room for that many tokens.
    """
    if prompt_tokens + params.min_tokens > max_model_len:
        reason = (
            f"with the {prompt_tokens} tokens of the prompt it exceeds the context of "
            f"{max_model_len}"
        )
        raise wrong_value("min_tokens", params.min_tokens, reason)


def completion_logprobs(request: CompletionRequest | GenerateRequest) -> int | None:
    """Log-probabilities of each token; `true` asks for one, as in vLLM."""
    wanted = request.logprobs
    return (1 if wanted else None) if isinstance(wanted, bool) else wanted


def _chat_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise wrong("top_logprobs", "needs logprobs=true")
        return None
    return request.top_logprobs or 0


def _larger(count: int, other: int | None) -> int:
    """The larger of two numbers of log-probabilities; -1, all tokens, is the largest."""
    return -1 if -1 in (count, other) else max(count, other or 0)


def _at_most(name: str, value: float | None, limit: float) -> None:
    if value is not None and value > limit:
        raise wrong_value(name, value, f"must be at most {limit:g}")


def _short_list(name: str, values: Any, limit: int) -> None:
    if values is not None and len(values) > limit:
        raise too_many(name, f"{len(values)} entries", limit)


def short_text(name: str, text: str | None, limit: int) -> None:
    """Raises ApiError: a text is empty or longer than `limit` characters."""
    if text is None:
        return
    if not text and name != "stop":  # SamplingParams says it about stop strings
        raise empty(name)
    if len(text) > limit:
        raise too_many(name, f"{len(text)} characters", limit)
