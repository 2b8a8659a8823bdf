"""What the CPU side and the GPU side of one engine exchange, and through what."""
