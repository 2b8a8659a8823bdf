"""Draft model on the CPU: a worker process grows trees of what may come next. numba and torch."""
