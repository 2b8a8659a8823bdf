"""Virtual tokens of prompt adapters: embeddings that a step puts into the place of the tokens' own,
as it does with those of images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetero_llm.core.images import PromptImage
from hetero_llm.core.prompt_adapter import EMBEDDINGS
from hetero_llm.models.layers import CausalLM


class VirtualTokens:
    """Replaces rows of what a model's embedding returns: what transformers takes as inputs_embeds.

    Args:
        model: any `CausalLM` that takes no images.
    """

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self._device = device
        self._given: tuple[Tensor, Tensor] | None = None
        model.input_embedding().register_forward_hook(self._replace)

    def encode(self, image: PromptImage) -> Tensor:
        """[count, hidden] float32: embeddings of virtual tokens, which come with the request."""
        # A copy: what has come from another process cannot be written to, which torch warns of.
        return torch.tensor(image.arrays[EMBEDDINGS], device=self._device)

    @contextmanager
    def given(self, embeddings: tuple[Tensor, Tensor] | None) -> Iterator[None]:
        """For the forward passes inside: [E] int64 indices of tokens and [E, hidden] float32 their
        embeddings; None: all tokens have their own."""
        self._given = embeddings
        try:
            yield
        finally:
            self._given = None

    def _replace(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if self._given is None:
            return None
        indices, rows = self._given
        replaced = output.clone()
        replaced.view(-1, output.shape[-1]).index_copy_(0, indices, rows.to(output.dtype))
        return replaced
