"""Commands of `hetero-llm` that are loaded when they run: `bench`, `chat`, `complete`."""
