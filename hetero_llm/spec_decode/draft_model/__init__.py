"""The engine's side of a draft model: on the CPU in a process of its own, or on the device."""
