"""vLLM's import path of prompt adapters: re-exports, no code."""
