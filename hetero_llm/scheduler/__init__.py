"""What runs in the next step. No torch, no text."""
