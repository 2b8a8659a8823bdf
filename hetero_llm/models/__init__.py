"""Model families as plain torch modules, their configuration and the checkpoint loader."""
