"""Device-agnostic execution of a step with plain torch: the reference path of `cpu` and `gpu`."""
