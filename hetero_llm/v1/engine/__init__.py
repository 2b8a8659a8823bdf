"""vLLM's path of its second engine."""
