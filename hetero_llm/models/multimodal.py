"""What models that see images add to the contract of `layers.CausalLM`.

An image is a run of image tokens in the prompt, one for each embedding that the vision tower makes
of it. The front end processes pixels and counts tokens (`vision_config`), the runner has each image
encoded once and hands its embeddings to the rows of these tokens (`ImageRows`). All else is text.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hetero_llm.core.images import PromptImage
from hetero_llm.models.configs.transformers_vision import ImageModelConfig
from hetero_llm.models.layers import Attend, CausalLM


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What images mean for the rows of a step.

    Attributes:
        embeddings: [E] int64 rows of the step that hold image tokens, and [E, hidden] what is there
            instead, in the parameters' dtype; None if there are none.
        positions: [3, T] int64 (time, height, width) instead of `positions`; None where those
            hold for all rows.
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
        images: ImageRows | None = None,
    ) -> Tensor:
        """As `CausalLM.forward`; `images`: None if no row belongs to a prompt with images."""
        raise NotImplementedError
