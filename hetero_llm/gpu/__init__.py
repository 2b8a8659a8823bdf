"""The CUDA side: for now how much memory the KV cache may take."""
