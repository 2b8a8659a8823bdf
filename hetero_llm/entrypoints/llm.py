"""vLLM's path of `LLM`."""

from hetero_llm.engine.llm import LLM as LLM
