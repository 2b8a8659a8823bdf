"""vLLM's path of `LoRARequest`."""

from hetero_llm.core.lora import LoRARequest as LoRARequest
