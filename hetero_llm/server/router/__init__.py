"""`hetero-llm route`: a proxy that sends each request to the server whose prefix cache knows it."""
