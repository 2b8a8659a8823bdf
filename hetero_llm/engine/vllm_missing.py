"""What vLLM's engines have and ours lack: errors that say so, and arguments that must be empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_llm.core.errors import ConfigError

_LEVELS, _PROFILER = "a sleep level", "a profiler"
_PAUSE = "a pause of all requests"
_WORKERS = "a call in worker processes"
_WEIGHTS = "new weights in a running engine"
_FEATURES = {
    "reward": "a reward model", "sleep": _LEVELS, "wake_up": _LEVELS, "is_sleeping": _LEVELS,
    "start_profile": _PROFILER, "stop_profile": _PROFILER,
    "set_tokenizer": "another tokenizer after the start",
    "collective_rpc": _WORKERS, "apply_model": "a call on the model",
    "pause_generation": _PAUSE, "resume_generation": _PAUSE, "is_paused": _PAUSE,
    "init_weight_transfer_engine": _WEIGHTS, "start_weight_update": _WEIGHTS,
    "update_weights": _WEIGHTS, "finish_weight_update": _WEIGHTS,
    "renderer": "an object that renders prompts", "preprocess_chat": "rendering without an answer",
    "preprocess_cmpl": "tokenizing without an answer",
    "enqueue": "queueing prompts without waiting (use LLMEngine)",
    "scale_elastic_ep": "more replicas in a running engine",
}  # fmt: skip
"""Attributes, and what they are for."""


def why_missing(owner: str, name: str) -> str:
    """The text of the AttributeError for an attribute that `owner` does not have."""
    feature = _FEATURES.get(name)
    reason = f"{feature} is not available yet" if feature else "no such attribute"
    return f"{owner}.{name}: {reason}"


def refuse_options(tokenization: Any = None, *, images: Any = None) -> None:
    """Checks arguments of calls that are accepted only without content.

    Args:
        tokenization: `tokenization_kwargs`.
        images: `mm_processor_kwargs`.

    Raises:
        ConfigError: one of them has content.
    """
    for name, value, reason in (
        (
            "tokenization_kwargs",
            tokenization,
            "options of the tokenizer are not available yet; use truncate_prompt_tokens of the "
            "parameters, or token ids",
        ),
        (
            "mm_processor_kwargs",
            images,
            "another treatment of images than the model's own is not available yet",
        ),
    ):
        if value is not None and not (isinstance(value, Mapping) and not value):
            raise ConfigError(name, value, reason)
