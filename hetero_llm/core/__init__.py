"""Plain data and protocols that every other package uses. Imports none of them, and no torch."""
