"""vLLM's path of metrics."""
