"""Anthropic's Messages API: its objects and their translation into a conversation."""
