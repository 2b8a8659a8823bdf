"""Readers of quantized checkpoints: what `quantization_config` says -> which tensors a matrix has
in the files and how they become a `QuantizedMatrix`. One file a format; no reader opens a file."""
