"""Prefix KV in host memory: what is where (`host_cache`), how it moves (`copier`), and both joined
as the block manager sees them (`offload`)."""
