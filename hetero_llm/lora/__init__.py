"""vLLM's paths about LoRA, which is not available yet."""
