"""Messages between engine and draft worker, and the shared-memory rings that carry them."""
