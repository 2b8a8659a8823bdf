"""Tokenizers, incremental detokenization, stop strings."""
