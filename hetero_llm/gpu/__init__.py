"""The CUDA side: a step's packet, captured graphs, attention, Triton kernels, memory."""
