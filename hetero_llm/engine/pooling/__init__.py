"""The step loop and the inputs of embedding and scoring models."""
