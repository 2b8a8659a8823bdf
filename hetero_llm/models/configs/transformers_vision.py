"""Qwen2-VL, LLaVA 1.5 and LLaVA-NeXT, as `models.transformers_vision` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hetero_llm.core.errors import ConfigError, ModelLoadError, shown
from hetero_llm.models.config_reader import ConfigSource, Reader
from hetero_llm.models.configs.transformers import (
    TransformersConfig,
    check_version,
    load_source,
    model_fields,
)

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Embeddings before those of the patches, by the vision tower's model_type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """How many embeddings an image becomes, by family.

    Attributes:
        kind: "llava", "llava_next" or "qwen2_vl".
        image_token_id: Of the token that stands for an embedding.
        patch_size: Side of a patch, in pixels.
        image_size: Side of what the tower takes at once, in pixels; unused by Qwen2-VL, whose
            tower takes any size.
        num_class_tokens: Embeddings of an image, or of one piece of it, besides those of patches: 1
            if the class token's is kept.
        merge_size: Patches, in both directions, that become one embedding (Qwen2-VL).
        patch_values: How many numbers the processor makes of a patch (Qwen2-VL).
        pinpoints: Sizes in pixels (height, width) that a large image may be scaled to, to be cut
            into pieces of `image_size` (LLaVA-NeXT).
    """

    kind: str
    image_token_id: int
    patch_size: int
    image_size: int = 0
    num_class_tokens: int = 0
    merge_size: int = 1
    patch_values: int = 0
    pinpoints: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModelConfig(TransformersConfig):
    """Of a class of transformers that takes images. `mrope`: positions are [3, T], see
    `mrope_table`."""

    vision: VisionConfig
    mrope: bool = False


def read(source: ConfigSource) -> ImageModelConfig:
    """See `ModelConfig`; what transformers' config class fills in is taken from there.

    Raises:
        ModelLoadError: The text model or the vision tower is of a kind that is not served.
        ConfigError: A change of the rotary embedding is asked for.
    """
    reader, name = source.config, source.architecture
    for field in ("rope_scaling", "rope_theta"):
        if getattr(source, field) is not None:
            reason = f"needs a native implementation, and {name} runs on transformers"
            raise ConfigError(field, getattr(source, field), reason)
    check_version(reader.where, name)
    config = load_source(reader)
    fields = model_fields(
        reader, name, config, disable_sliding_window=source.disable_sliding_window
    )
    vision = _READERS[name](reader, config)
    if not 0 <= vision.image_token_id < fields["vocab_size"]:
        raise reader.bad(
            "image_token_id", f"{vision.image_token_id} is outside of the text model's vocabulary"
        )
    tied = bool(getattr(config, "tie_word_embeddings", False))
    fields |= {"architecture": name, "tie_word_embeddings": tied, "trust_remote_code": False}
    return ImageModelConfig(**fields, vision=vision, mrope=vision.kind == "qwen2_vl")


def _llava(reader: Reader, config: Any) -> VisionConfig:
    """One tower of a fixed size, as LLaVA 1.5 (Liu et al. 2023)."""
    tower = config.vision_config
    kind = tower.model_type
    if kind not in _CLASS_TOKENS:
        raise ModelLoadError(
            f"{reader.where}: vision_config: a tower of model_type {shown(kind)} is not supported "
            f"with LLaVA, only {', '.join(_CLASS_TOKENS)}"
        )
    strategy = config.vision_feature_select_strategy
    if strategy not in ("default", "full"):
        raise reader.bad("vision_feature_select_strategy", "supported are default, full")
    return VisionConfig(
        kind="llava",
        image_token_id=config.image_token_id,
        patch_size=tower.patch_size,
        image_size=tower.image_size,
        # "default" leaves out the first embedding even if it is a patch's.
        num_class_tokens=_CLASS_TOKENS[kind] - (strategy == "default"),
    )


def _llava_next(reader: Reader, config: Any) -> VisionConfig:
    vision = _llava(reader, config)
    if vision.num_class_tokens:
        raise reader.bad(
            "vision_feature_select_strategy", "pieces must have one embedding for each patch"
        )
    pinpoints = tuple((int(h), int(w)) for h, w in config.image_grid_pinpoints)
    return replace(vision, kind="llava_next", pinpoints=pinpoints)


def _qwen2_vl(reader: Reader, config: Any) -> VisionConfig:
    tower = config.vision_config
    return VisionConfig(
        kind="qwen2_vl",
        image_token_id=config.image_token_id,
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        patch_values=tower.in_channels * tower.temporal_patch_size * tower.patch_size**2,
    )


_READERS: dict[str, Callable[[Reader, Any], VisionConfig]] = {
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": _llava_next,
    "Qwen2VLForConditionalGeneration": _qwen2_vl,
}
