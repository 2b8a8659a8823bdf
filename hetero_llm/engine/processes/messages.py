"""Messages between the API process and the engine process: typed structs in msgpack.

No message can carry code: each object is decoded into the declared type of its field, or refused.
Dataclasses of `core` travel as they are; numpy's arrays as their type, shape and bytes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import msgspec
import numpy as np

from hetero_llm.core.errors import (
    AdapterError,
    ConfigError,
    EngineDeadError,
    HeteroLLMError,
    ModelLoadError,
    PoolingError,
    PromptError,
    RequestError,
    SamplingError,
    SnapshotError,
    shown,
)
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.histogram import Histogram
from hetero_llm.core.images import MOST_PROMPT_BYTES, PromptImages
from hetero_llm.core.lora import AdapterRef
from hetero_llm.core.outputs import CompletionOutput, RequestMetrics, TokenLogprobs
from hetero_llm.core.pooling import PoolingRequest, PoolingResult
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import RequestOutputKind, SamplingParams


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


class Error(msgspec.Struct, array_like=True):
    """A typed error of core/errors.py; `is_shown`: `value` is the text that messages show."""

    kind: str
    text: str
    field: str = ""
    value: str | int | float | bool | None = None
    is_shown: bool = False
    reason: str = ""


# -- to the engine process ------------------------------------------------------------------


class Start(Message):
    """The first message: engine arguments as `resolve_engine_args` takes them, one of
    `log_sink.FORMATS`, and which replica of the model this process is."""

    args: dict[str, Any]
    log_level: int
    log_format: str = "text"
    replica: int = 0


class AddRequest(Message):
    """A checked `Request`, of whose fields it has the names; see `request_to_wire`.

    `key` names the request between the two processes: it is used once, unlike users' ids.
    `packed_prompt` holds the prompt's token ids, int32. `images` are prepared. `grammar` stands for
    the parameters' constraint, which does not travel.
    """

    key: str
    packed_prompt: bytes
    params: dict[str, Any]
    seed: int
    max_total_tokens: int
    root_hash: bytes
    end_ids: list[int] = []
    eos_ids: list[int] = []
    num_logprobs: int | None = None
    num_prompt_logprobs: int = 0
    bad_word_ids: list[list[int]] = []
    images: PromptImages | None = None
    grammar: Grammar | None = None
    adapter: AdapterRef | None = None
    num_virtual_tokens: int = 0


class AddPooling(Message):
    """A checked request to a model that pools."""

    request: PoolingRequest


class Abort(Message):
    key: str


class Call(Message):
    """Calls one of `engine_process.CALLS`; the reply is a `CallResult` of the same number."""

    number: int
    name: str
    arguments: list[Any]


class Shutdown(Message):
    pass


# -- from the engine process ----------------------------------------------------------------


class Ready(Message):
    """The engine is built; see `EngineInfo`."""

    max_model_len: int
    num_blocks: int
    device: str
    dtype: str
    backend: str
    seconds: dict[str, float]
    offload: str = ""


class StartFailed(Message):
    error: Error


class Output(msgspec.Struct, array_like=True):
    """A `RequestOutput` without what the API process knows. `prompt_logprobs` come once, with the
    first output, `metrics` with the first and the last one."""

    key: str
    finished: bool
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None


class StepOutputs(Message):
    """The outputs of one step."""

    outputs: list[Output]


class PooledOutputs(Message):
    """The requests to a pooling model that one step has finished."""

    outputs: list[PoolingResult]


class RequestFailed(Message):
    """The request was not started."""

    key: str
    error: Error


class Heartbeat(Message):
    metrics: dict[str, float]
    histograms: dict[str, Histogram] = {}


class CallResult(Message):
    number: int
    result: Any = None
    error: Error | None = None


class Dead(Message):
    """A step failed; the process ends."""

    text: str


_ARRAY_DTYPES = ("<f4", "<i4", "<i8", "|u1")


def _plain(value: Any) -> Any:
    """Converts arrays, mappings, numpy's numbers and subclasses of plain types into plain data."""
    if isinstance(value, np.ndarray):
        if value.dtype.str not in _ARRAY_DTYPES:
            raise TypeError(f"an array of {value.dtype} cannot travel to another process")
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot travel to another process")


def _array(kind: type, value: Any) -> np.ndarray:
    """The array of what `_plain` has made of one; a view of the message's bytes."""
    assert kind is np.ndarray, kind
    dtype, shape, data = value
    if dtype not in _ARRAY_DTYPES:
        raise ValueError(f"an array of {dtype!r}")
    return np.frombuffer(data, dtype).reshape(shape)


ToEngine = Start | AddRequest | AddPooling | Abort | Call | Shutdown
FromEngine = (
    Ready
    | StartFailed
    | StepOutputs
    | PooledOutputs
    | RequestFailed
    | Heartbeat
    | CallResult
    | Dead
)
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=_array)
_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_array)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)


def key_of_request(data: bytes) -> str | None:
    """The key in a message that starts a request, though `decode_to_engine` may refuse the rest;
    None: the message does something else, or is broken."""
    try:
        match msgspec.msgpack.decode(data):
            case ["AddRequest", str(key), *_] | ["AddPooling", {"key": str(key)}, *_]:
                return key
    except msgspec.DecodeError:
        pass
    return None


# -- requests -------------------------------------------------------------------------------

_DEFAULTS = SamplingParams()
_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_MOST = (1 << 64) - 1  # msgpack's largest integer


def request_to_wire(key: str, request: Request) -> AddRequest:
    """The message that starts a request which the `InputProcessor` has checked. Cumulative outputs
    travel as deltas.

    Raises:
        SamplingError: as `params_to_wire`.
        PromptError: the arrays of the prompt are too large, or of a type that does not travel.
    """
    if request.images is not None:
        _check_arrays(request.images)
    kind = request.params.output_kind
    if kind is RequestOutputKind.CUMULATIVE:
        kind = RequestOutputKind.DELTA
    return AddRequest(
        key,
        request.packed_prompt,
        params_to_wire(request.params, kind),
        request.seed,
        request.max_total_tokens,
        request.root_hash,
        list(request.end_ids),
        list(request.eos_ids),
        request.num_logprobs,
        request.num_prompt_logprobs,
        [list(word) for word in request.bad_word_ids],
        request.images,
        request.grammar,
        request.adapter,
        request.num_virtual_tokens,
    )


def _check_arrays(images: PromptImages) -> None:
    for item in images.items:
        for name, array in item.arrays.items():
            if array.dtype.str not in _ARRAY_DTYPES:
                known = ", ".join(_ARRAY_DTYPES)
                reason = f"arrays of this type cannot go to the engine's process ({known} can)"
                raise PromptError(name, str(array.dtype), reason)
    if images.num_bytes > MOST_PROMPT_BYTES:
        reason = f"at most {MOST_PROMPT_BYTES} bytes of arrays may come with a prompt"
        raise PromptError("prompt", f"{images.num_bytes} bytes", reason)


def request_from_wire(message: AddRequest) -> Request:
    """The request, without its text. What the sender has checked is not checked again, but for
    what the types themselves refuse.

    Raises:
        SamplingError: as `SamplingParams` does.
    """
    return Request(
        request_id=message.key,
        prompt=None,
        prompt_token_ids=np.frombuffer(message.packed_prompt, "<i4").tolist(),
        params=params_from_wire(message.params),
        seed=message.seed,
        end_ids=frozenset(message.end_ids),
        eos_ids=frozenset(message.eos_ids),
        max_total_tokens=message.max_total_tokens,
        root_hash=message.root_hash,
        metrics=RequestMetrics(time.monotonic()),
        num_logprobs=message.num_logprobs,
        num_prompt_logprobs=message.num_prompt_logprobs,
        bad_word_ids=tuple(map(tuple, message.bad_word_ids)),
        images=message.images,
        grammar=message.grammar,
        adapter=message.adapter,
        packed_prompt=message.packed_prompt,
        num_virtual_tokens=message.num_virtual_tokens,
    )


def params_to_wire(params: SamplingParams, kind: RequestOutputKind) -> dict[str, Any]:
    """The fields that are not at their default, and `kind` as the output kind. A constraint on the
    output is left out: its grammar travels with the request.

    Raises:
        SamplingError: a field cannot travel: a Python function, or a number of over 64 bits.
    """
    if params.logits_processors:
        raise SamplingError(
            "logits_processors",
            params.logits_processors,
            "Python functions cannot go to the engine's process; use LLM, which has none",
        )
    fields: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(params, name)
        if value == getattr(_DEFAULTS, name) or name == "structured_outputs":
            continue
        if isinstance(value, int) and value > _MOST:
            raise SamplingError(name, value, f"must be at most {_MOST}")
        fields[name] = value
    fields["output_kind"] = kind.value
    return fields


def params_from_wire(fields: dict[str, Any]) -> SamplingParams:
    """Raises SamplingError: as `SamplingParams` does."""
    return SamplingParams(**{**fields, "output_kind": RequestOutputKind(fields["output_kind"])})


# -- errors ---------------------------------------------------------------------------------

_WITH_FIELD: dict[str, type[RequestError] | type[ConfigError]] = {
    kind.__name__: kind
    for kind in (RequestError, PromptError, SamplingError, PoolingError, AdapterError, ConfigError)
}
_LONGEST_VALUE = 256


class _Shown(str):
    """A value that was converted into text by `shown` on the other side."""

    def __repr__(self) -> str:
        return str(self)


def error_to_wire(error: BaseException) -> Error:
    """Keeps the error's class (of those with a field the nearest one that travels), field and
    reason; its value if plain and short, else as text."""
    kind = type(error).__name__
    if isinstance(error, (RequestError, ConfigError)):
        kind = next((of.__name__ for of in type(error).__mro__ if of.__name__ in _WITH_FIELD), kind)
        value = error.value
        plain = value is None or isinstance(value, (bool, float))
        plain |= isinstance(value, int) and -(_MOST >> 1) <= value <= _MOST
        plain |= isinstance(value, str) and len(value) <= _LONGEST_VALUE and value.isprintable()
        kept = value if plain else shown(value)
        return Error(kind, str(error), error.field, kept, not plain, error.reason)
    if isinstance(error, SnapshotError):
        return Error(kind, str(error), error.path, reason=error.reason)
    return Error(kind, str(error))


def error_from_wire(error: Error) -> HeteroLLMError:
    """The same error, or a `HeteroLLMError` that names the class of a foreign one."""
    if error.kind in _WITH_FIELD:
        value = _Shown(error.value) if error.is_shown else error.value
        return _WITH_FIELD[error.kind](error.field, value, error.reason)
    if error.kind == SnapshotError.__name__:
        return SnapshotError(error.field, error.reason)
    if error.kind == ModelLoadError.__name__:
        return ModelLoadError(error.text)
    if error.kind == EngineDeadError.__name__:
        return EngineDeadError(error.text)
    return HeteroLLMError(f"{error.kind} in the engine's process: {error.text}")
