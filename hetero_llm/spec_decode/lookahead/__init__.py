"""Lookahead cache: drafts from what was generated before. numpy and numba only."""
