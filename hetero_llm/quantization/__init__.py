"""Quantized weight matrices: one internal form, readers of the formats of checkpoints, and
quantization of plain weights while they are loaded. Products by kernels are in `cpu` and `gpu`."""
