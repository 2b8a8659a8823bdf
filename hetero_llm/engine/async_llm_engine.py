"""vLLM's path of `AsyncLLMEngine`."""

from hetero_llm.core.errors import EngineDeadError as AsyncEngineDeadError
from hetero_llm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
from hetero_llm.engine.async_engine import AsyncLLMEngine as AsyncLLMEngine

__all__ = ["AsyncEngineArgs", "AsyncEngineDeadError", "AsyncLLMEngine"]
