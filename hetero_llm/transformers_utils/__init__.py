"""vLLM's path of what it adds to transformers."""
