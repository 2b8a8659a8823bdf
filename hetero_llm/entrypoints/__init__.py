"""vLLM's path of its front ends."""
