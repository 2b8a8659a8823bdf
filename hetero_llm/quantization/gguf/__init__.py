"""The block types of GGUF files (ggml's): their sizes, and their conversion to `QuantizedMatrix`
or to plain numbers. `models.gguf` reads the files themselves."""
