"""Structured output: grammars from users' constraints, their state, masks of allowed tokens."""
