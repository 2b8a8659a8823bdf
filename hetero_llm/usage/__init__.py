"""vLLM's path of who reports usage; nothing is reported here."""
