"""Triton kernels, one operation a file, each with its checked wrapper and its reference in
torch."""
