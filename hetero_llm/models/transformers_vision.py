"""Classes of transformers that take images: the vision tower computes as in transformers, one image
a call; the text model is served as any other (`transformers_backend`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetero_llm.core.images import PromptImage
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers_vision import ImageModelConfig
from hetero_llm.models.layers import Attend
from hetero_llm.models.multimodal import ImageCausalLM, StepImages
from hetero_llm.models.transformers_backend import TransformersForCausalLM
from hetero_llm.models.transformers_modules import Conversion

_TOWERS = {"qwen2_vl": "visual", "llava": "vision_tower", "llava_next": "vision_tower"}
"""Attribute of the base model that holds the tower, by `VisionConfig.kind`."""
_TOWER_ATTENTION = "sdpa"


class _TextConversion(Conversion):
    """Converts the text model only."""

    def _replacement(self, module: nn.Module, path: str) -> nn.Module | None:
        if path.startswith("model.") and not path.startswith("model.language_model"):
            return None
        return super()._replacement(module, path)


class TransformersForImages(TransformersForCausalLM, ImageCausalLM):
    """See `ImageCausalLM`."""

    auto_class = "AutoModelForImageTextToText"
    conversion = _TextConversion
    config: ImageModelConfig

    def __init__(self, config: ModelConfig) -> None:
        assert isinstance(config, ImageModelConfig)
        super().__init__(config)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        images: StepImages | None = None,
    ) -> Tensor:
        if images is None:
            return super().forward(input_ids, positions, attend)
        embedded = self.causal.get_input_embeddings()(input_ids)
        if images.embeddings is not None:
            embedded.index_copy_(0, *images.embeddings)
        if images.positions is not None:
            position_ids = images.positions.unsqueeze(1)
        else:
            position_ids = positions.unsqueeze(0)
        return self.run(
            self._attention(attend), inputs_embeds=embedded.unsqueeze(0), position_ids=position_ids
        )

    def encode(self, image: PromptImage) -> Tensor:
        weight = self.causal.get_input_embeddings().weight
        inputs: dict[str, Any] = {
            name: torch.from_numpy(array).to(weight.device) for name, array in image.arrays.items()
        }
        if self.config.vision.kind != "qwen2_vl":
            source = self.causal.config
            inputs["vision_feature_layer"] = source.vision_feature_layer
            inputs["vision_feature_select_strategy"] = source.vision_feature_select_strategy
        made = self.causal.model.get_image_features(**inputs)
        parts = getattr(made, "pooler_output", made)  # a list of tensors in early versions 5
        encoded = torch.cat(tuple(parts)).to(weight.dtype)
        expected = (image.count, self.config.hidden_size)
        assert encoded.shape == expected, f"embeddings are {tuple(encoded.shape)}, not {expected}"
        return encoded

    def finish_loading(self, *, batch_invariant: bool) -> None:
        super().finish_loading(batch_invariant=batch_invariant)
        tower = getattr(self.causal.model, _TOWERS[self.config.vision.kind])
        tower.set_attn_implementation(_TOWER_ATTENTION)
