"""hetero_llm: an LLM engine that puts the CPU beside the GPU to work.

    from hetero_llm import LLM, SamplingParams

    with LLM("demo") as llm:
        print(llm.generate("def add(a, b):", SamplingParams(temperature=0))[0].outputs[0].text)

Importing this package is cheap; torch and transformers load when `LLM` is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "hetero_llm.engine.llm",
    "AsyncLLMEngine": "hetero_llm.engine.async_engine",
    "AsyncEngineArgs": "hetero_llm.engine.async_engine",
    "SamplingParams": "hetero_llm.core.sampling_params",
    "RequestOutputKind": "hetero_llm.core.sampling_params",
    "RequestOutput": "hetero_llm.core.outputs",
    "CompletionOutput": "hetero_llm.core.outputs",
    "Logprob": "hetero_llm.core.outputs",
    "HeteroLLMError": "hetero_llm.core.errors",
    "ConfigError": "hetero_llm.core.errors",
    "ModelLoadError": "hetero_llm.core.errors",
    "RequestError": "hetero_llm.core.errors",
    "PromptError": "hetero_llm.core.errors",
    "SamplingError": "hetero_llm.core.errors",
    "SnapshotError": "hetero_llm.core.errors",
    "RingError": "hetero_llm.core.errors",
    "EngineDeadError": "hetero_llm.core.errors",
    "EngineHungError": "hetero_llm.core.errors",
    "OverloadedError": "hetero_llm.core.errors",
    "DuplicateRequestError": "hetero_llm.core.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
