"""Models in GGUF files: the container, and configuration, names of tensors and tokenizer as the
rest of the package expects them. `models.weight_files.GgufFile` reads the weights."""
