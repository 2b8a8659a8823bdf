"""`ImageCausalLM`: what models that take images add to `layers.CausalLM`.

An image is a run of image tokens in the prompt, one for each embedding that the vision tower makes
of it. The front end processes pixels and counts tokens (`VisionConfig`). The runner encodes each
image once and passes its embeddings with the step that has its tokens (`StepImages`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hetero_llm.core.images import PromptImage
from hetero_llm.models.configs.transformers_vision import ImageModelConfig
from hetero_llm.models.layers import Attend, CausalLM


@dataclass(frozen=True, slots=True)
class StepImages:
    """Images of one step.

    Attributes:
        embeddings: [E] int64 indices of the step's image tokens, and [E, hidden] their embeddings
            in the parameters' dtype; None if the step has no image tokens.
        positions: [3, T] int64 (time, height, width), which replace the step's positions; None if
            they do not.
    """

    embeddings: tuple[Tensor, Tensor] | None
    positions: Tensor | None


class ImageCausalLM(CausalLM):
    """A `CausalLM` whose prompts may hold images."""

    config: ImageModelConfig

    def encode(self, image: PromptImage) -> Tensor:
        """[count, hidden], in the parameters' dtype, on their device."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        images: StepImages | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`; `images`: None if no token is of a prompt with images."""
        raise NotImplementedError
