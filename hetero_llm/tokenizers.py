"""vLLM's path of `get_tokenizer`."""

from hetero_llm.engine.resolve import get_tokenizer as get_tokenizer
