"""vLLM's path of `LoRARequest`, which is not available yet."""

from hetero_llm.core.not_yet import LoRARequest as LoRARequest
