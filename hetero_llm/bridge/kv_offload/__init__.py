"""Prefix KV in host memory: which blocks are where (`host_block_index`), how they move (`copier`),
and both joined as the block manager sees them (`pinned_host_tier`)."""
