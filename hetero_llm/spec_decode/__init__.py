"""Speculative decoding: where drafts come from, which a step verifies, what came of them."""
