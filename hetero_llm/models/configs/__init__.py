"""Readers of config.json, one for each architecture of `models.registry`. They import no torch.

A reader makes a `ModelConfig` from a `ConfigSource`; a key that is wrong or asks for what is not
computed is a `ModelLoadError`. Where a new reader goes: `llama_like` if its keys are Llama's,
`layer_norm` for families with layer norms, `mixture` for mixtures of experts, else a file of its
own. `common` holds what several of them share.
"""
