"""An engine's processes and what they send: engine process, ranks, replicas, messages, streams."""
