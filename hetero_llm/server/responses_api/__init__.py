"""OpenAI's Responses API: its objects, their translation into a conversation, and its store."""
