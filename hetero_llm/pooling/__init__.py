"""Pooling models: texts to embeddings, scores and classes; see docs/embeddings.md."""
