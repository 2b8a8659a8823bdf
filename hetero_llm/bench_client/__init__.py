"""A client for any OpenAI-compatible server: load, measurement, reports. It needs no engine."""
