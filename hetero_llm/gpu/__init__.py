"""The CUDA side: the step input buffer, captured graphs, attention, Triton kernels, memory."""
