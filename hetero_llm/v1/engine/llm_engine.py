"""vLLM's second path of `LLMEngine`."""

from hetero_llm.engine.llm_engine import LLMEngine as LLMEngine
