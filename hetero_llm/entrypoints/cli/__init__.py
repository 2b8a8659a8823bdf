"""vLLM's path of its command line."""
