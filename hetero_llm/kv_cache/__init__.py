"""The paged KV cache's bookkeeping: block tables, prefixes, what moves to host memory. No torch."""
