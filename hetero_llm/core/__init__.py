"""Plain data that every other part of the engine speaks. Imports nothing of ours, never torch."""
