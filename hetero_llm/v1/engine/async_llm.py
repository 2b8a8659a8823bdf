"""vLLM's path of `AsyncLLM`, which is `AsyncLLMEngine` here."""

from hetero_llm.engine.async_engine import AsyncLLMEngine as AsyncLLM

__all__ = ["AsyncLLM"]
