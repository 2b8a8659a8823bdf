"""Prompt lookup, vLLM's `[ngram]`: a sequence drafts from its own tokens."""
