"""vLLM's paths of what is new in its second engine."""
