"""vLLM's path of `AsyncLLMEngine`."""

from hetero_llm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
from hetero_llm.engine.async_engine import AsyncLLMEngine as AsyncLLMEngine
