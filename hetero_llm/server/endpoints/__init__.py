"""The HTTP endpoints, one file for each group of paths."""
