"""vLLM's path of `PromptAdapterRequest`."""

from hetero_llm.core.prompt_adapter import PromptAdapterRequest as PromptAdapterRequest
