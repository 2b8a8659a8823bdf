"""vLLM's path of the HTTP server; here `hetero-llm serve` starts it."""
