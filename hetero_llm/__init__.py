"""hetero_llm: an LLM engine that puts the CPU beside the GPU to work.

    from hetero_llm import LLM, SamplingParams

    with LLM("demo") as llm:
        print(llm.generate("def add(a, b):", SamplingParams(temperature=0))[0].outputs[0].text)

Importing this package is cheap; torch and transformers load when `LLM` is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_llm.core.errors import AdapterError as AdapterError
    from hetero_llm.core.errors import ConfigError as ConfigError
    from hetero_llm.core.errors import ContextTooLongError as ContextTooLongError
    from hetero_llm.core.errors import DuplicateRequestError as DuplicateRequestError
    from hetero_llm.core.errors import EngineDeadError as EngineDeadError
    from hetero_llm.core.errors import EngineHungError as EngineHungError
    from hetero_llm.core.errors import HeteroLLMError as HeteroLLMError
    from hetero_llm.core.errors import ModelLoadError as ModelLoadError
    from hetero_llm.core.errors import OverloadedError as OverloadedError
    from hetero_llm.core.errors import PoolingError as PoolingError
    from hetero_llm.core.errors import PromptError as PromptError
    from hetero_llm.core.errors import RankDeadError as RankDeadError
    from hetero_llm.core.errors import RequestError as RequestError
    from hetero_llm.core.errors import RingError as RingError
    from hetero_llm.core.errors import SamplingError as SamplingError
    from hetero_llm.core.errors import SnapshotError as SnapshotError
    from hetero_llm.core.inputs import PromptType as PromptType
    from hetero_llm.core.inputs import TextPrompt as TextPrompt
    from hetero_llm.core.inputs import TokensPrompt as TokensPrompt
    from hetero_llm.core.lora import LoRARequest as LoRARequest
    from hetero_llm.core.outputs import BeamSearchOutput as BeamSearchOutput
    from hetero_llm.core.outputs import BeamSearchSequence as BeamSearchSequence
    from hetero_llm.core.outputs import CompletionOutput as CompletionOutput
    from hetero_llm.core.outputs import Logprob as Logprob
    from hetero_llm.core.outputs import RequestOutput as RequestOutput
    from hetero_llm.core.pooling_outputs import ClassificationOutput as ClassificationOutput
    from hetero_llm.core.pooling_outputs import (
        ClassificationRequestOutput as ClassificationRequestOutput,
    )
    from hetero_llm.core.pooling_outputs import EmbeddingOutput as EmbeddingOutput
    from hetero_llm.core.pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from hetero_llm.core.pooling_outputs import PoolingOutput as PoolingOutput
    from hetero_llm.core.pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
    from hetero_llm.core.pooling_outputs import ScoringOutput as ScoringOutput
    from hetero_llm.core.pooling_outputs import ScoringRequestOutput as ScoringRequestOutput
    from hetero_llm.core.pooling_params import PoolingParams as PoolingParams
    from hetero_llm.core.prompt_adapter import PromptAdapterRequest as PromptAdapterRequest
    from hetero_llm.core.sampling_params import BeamSearchParams as BeamSearchParams
    from hetero_llm.core.sampling_params import RequestOutputKind as RequestOutputKind
    from hetero_llm.core.sampling_params import SamplingParams as SamplingParams
    from hetero_llm.core.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
    from hetero_llm.core.structured_outputs import (
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from hetero_llm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
    from hetero_llm.engine.arg_utils import EngineArgs as EngineArgs
    from hetero_llm.engine.async_engine import AsyncLLMEngine as AsyncLLMEngine
    from hetero_llm.engine.llm import LLM as LLM
    from hetero_llm.engine.llm_engine import LLMEngine as LLMEngine

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)

_HOMES = {
    "LLM": "hetero_llm.engine.llm",
    "AsyncLLMEngine": "hetero_llm.engine.async_engine",
    "LLMEngine": "hetero_llm.engine.llm_engine",
    "EngineArgs": "hetero_llm.engine.arg_utils",
    "AsyncEngineArgs": "hetero_llm.engine.arg_utils",
    "BeamSearchParams": "hetero_llm.core.sampling_params",
    "SamplingParams": "hetero_llm.core.sampling_params",
    "RequestOutputKind": "hetero_llm.core.sampling_params",
    "GuidedDecodingParams": "hetero_llm.core.structured_outputs",
    "StructuredOutputsParams": "hetero_llm.core.structured_outputs",
    "TextPrompt": "hetero_llm.core.inputs",
    "TokensPrompt": "hetero_llm.core.inputs",
    "PromptType": "hetero_llm.core.inputs",
    "RequestOutput": "hetero_llm.core.outputs",
    "CompletionOutput": "hetero_llm.core.outputs",
    "Logprob": "hetero_llm.core.outputs",
    "BeamSearchOutput": "hetero_llm.core.outputs",
    "BeamSearchSequence": "hetero_llm.core.outputs",
    "LoRARequest": "hetero_llm.core.lora",
    "PromptAdapterRequest": "hetero_llm.core.prompt_adapter",
    "PoolingParams": "hetero_llm.core.pooling_params",
    "ClassificationOutput": "hetero_llm.core.pooling_outputs",
    "ClassificationRequestOutput": "hetero_llm.core.pooling_outputs",
    "EmbeddingOutput": "hetero_llm.core.pooling_outputs",
    "EmbeddingRequestOutput": "hetero_llm.core.pooling_outputs",
    "PoolingOutput": "hetero_llm.core.pooling_outputs",
    "PoolingRequestOutput": "hetero_llm.core.pooling_outputs",
    "ScoringOutput": "hetero_llm.core.pooling_outputs",
    "ScoringRequestOutput": "hetero_llm.core.pooling_outputs",
    "HeteroLLMError": "hetero_llm.core.errors",
    "AdapterError": "hetero_llm.core.errors",
    "ConfigError": "hetero_llm.core.errors",
    "ContextTooLongError": "hetero_llm.core.errors",
    "ModelLoadError": "hetero_llm.core.errors",
    "RequestError": "hetero_llm.core.errors",
    "PoolingError": "hetero_llm.core.errors",
    "PromptError": "hetero_llm.core.errors",
    "SamplingError": "hetero_llm.core.errors",
    "SnapshotError": "hetero_llm.core.errors",
    "RankDeadError": "hetero_llm.core.errors",
    "RingError": "hetero_llm.core.errors",
    "EngineDeadError": "hetero_llm.core.errors",
    "EngineHungError": "hetero_llm.core.errors",
    "OverloadedError": "hetero_llm.core.errors",
    "DuplicateRequestError": "hetero_llm.core.errors",
}

__all__ = ["__version__", "__version_tuple__", *_HOMES]


if not TYPE_CHECKING:  # which would take every name for known

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
