"""Device-agnostic sampling: the reference that faster kernels are compared with."""
