"""Every error a user can cause.

HeteroLLMError
 ├── ConfigError          an engine argument or a configuration file is wrong
 │    └── ContextTooLongError the KV cache does not hold one sequence of max_model_len tokens
 ├── ModelLoadError       a model folder cannot be read, is damaged or is not supported
 ├── RequestError         one request is wrong; the engine stays usable
 │    ├── PromptError         the prompt (empty, too long, token id out of range)
 │    ├── SamplingError       a field of SamplingParams
 │    ├── AdapterError        a LoRARequest, or the adapter that it names
 │    └── PoolingError        a field of PoolingParams, or a call that the model has no task for
 ├── SnapshotError        a snapshot of the lookahead cache cannot be saved or loaded
 ├── RingError            shared memory to the draft worker cannot be made, or is another's
 ├── OverloadedError      too many requests wait; try again later
 ├── DuplicateRequestError  a running request has this id
 └── EngineDeadError      the engine cannot serve any more
      ├── EngineHungError     it has not responded for too long, though its process runs
      └── RankDeadError       a process that computes a part of the model has ended or hangs

Each message names the field and the value. `RequestError.prompt_index` is the position in the list
given to `LLM.generate`, or None.
"""

from __future__ import annotations

from typing import Any

_SHOWN_VALUE_CHARS = 80


def shown(value: Any) -> str:
    """`repr(value)`, shortened to fit a log line: both ends stay, since paths differ there."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    if len(text) <= _SHOWN_VALUE_CHARS:
        return text
    kept = _SHOWN_VALUE_CHARS - 3
    return text[: kept // 2] + "..." + text[kept // 2 - kept :]


def refuse_later(field: str, value: Any, feature: str) -> None:
    """Raises ConfigError unless `value` is None: the feature is not available yet."""
    if value is not None:
        raise ConfigError(field, value, f"{feature} is not available yet")


class HeteroLLMError(Exception):
    """Base of every error this package raises on purpose.

    `exit_code`: that of a command which the error ends; 2 is a mistake of the user's.
    """

    exit_code = 2


class ConfigError(HeteroLLMError, ValueError):
    """An engine argument is unknown, out of range or contradicts another one."""

    def __init__(self, field: str, value: Any, reason: str) -> None:
        super().__init__(f"{field}={shown(value)}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class ContextTooLongError(ConfigError):
    """The KV cache does not hold one sequence of `max_model_len` tokens.

    `fits`: tokens that it holds, less than `max_model_len`; may be 0.
    """

    def __init__(self, field: str, value: Any, reason: str, *, fits: int) -> None:
        super().__init__(field, value, reason)
        self.fits = fits


class ModelLoadError(HeteroLLMError):
    """A model folder is missing, damaged, or of an architecture that is not supported."""


class RequestError(HeteroLLMError, ValueError):
    """One request is wrong. Nothing was started for it and the engine stays usable."""

    def __init__(
        self, field: str, value: Any, reason: str, *, prompt_index: int | None = None
    ) -> None:
        where = "" if prompt_index is None else f"prompt {prompt_index}: "
        super().__init__(f"{where}{field}={shown(value)}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason
        self.prompt_index = prompt_index

    def at_prompt(self, index: int) -> RequestError:
        """The same error with the prompt's position in the caller's list."""
        return type(self)(self.field, self.value, self.reason, prompt_index=index)


class PromptError(RequestError):
    """The prompt is empty, too long, or holds a token id outside the vocabulary."""


class SamplingError(RequestError):
    """A field of `SamplingParams` is out of range or contradicts another one."""


class AdapterError(RequestError):
    """A `LoRARequest` is wrong, or its adapter cannot be served: files, options or tensors."""


class PoolingError(RequestError):
    """A field of `PoolingParams` is wrong, or the model does not serve this task."""


class SnapshotError(HeteroLLMError):
    """A snapshot of the lookahead cache cannot be saved or loaded. File and cache stay as they
    were."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class RingError(HeteroLLMError):
    """The shared-memory rings to a draft worker cannot be made or opened, so it cannot start."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"rings of shared memory: {reason}")
        self.reason = reason


class EngineDeadError(HeteroLLMError):
    """The step loop failed; this engine accepts no more requests."""


class EngineHungError(EngineDeadError):
    """The engine has not responded for longer than its step timeout."""


class RankDeadError(EngineDeadError):
    """A rank process has ended, or gives no sign of life."""


class OverloadedError(HeteroLLMError):
    """Too many requests wait. `retry_after`: estimated seconds until a retry can succeed."""

    def __init__(self, retry_after: float, reason: str = "too many requests are waiting") -> None:
        super().__init__(f"{reason}; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class DuplicateRequestError(HeteroLLMError, ValueError):
    """A running request has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id={shown(request_id)}: a running request has this id")
        self.request_id = request_id
