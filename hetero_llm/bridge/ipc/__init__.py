"""Records between the engine and its draft worker: rings in shared memory."""
