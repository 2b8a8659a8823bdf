"""Images of prompts: checks them, runs the model's own image processor, and puts their tokens into
the prompt. Runs in the API process; needs Pillow (the extra `images`)."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_llm.core.errors import ConfigError, ModelLoadError, PromptError, shown
from hetero_llm.core.images import MOST_PROMPT_BYTES, PromptImage, PromptImages, images_key
from hetero_llm.engine.inputs.media_fetch import Fetcher, HttpsFetcher, NoFetcher
from hetero_llm.models.config_reader import short_reason
from hetero_llm.models.configs.transformers_vision import ImageModelConfig, VisionConfig
from hetero_llm.models.image_tokens import image_grid, num_image_tokens

if TYPE_CHECKING:
    from PIL.Image import Image

    from hetero_llm.models.config import ModelConfig

logger = logging.getLogger(__name__)

FIELD = "multi_modal_data"
NO_PILLOW = "images need Pillow: pip install 'hetero-llm[images]'"
_MOST_PIXELS = 1 << 26
_TRIED_SIDE = 64
_ARRAYS = {
    "llava": ("pixel_values",),
    "llava_next": ("pixel_values", "image_sizes"),
    "qwen2_vl": ("pixel_values", "image_grid_thw"),
}


class ImageInputs:
    """Prepares the images of prompts for one model.

    Args:
        processor: transformers' image processor of the model; None without Pillow.
        vision: of the model's configuration.
        limit: most images of a prompt.
        fetcher: fetches images that a conversation names by URL.
    """

    def __init__(
        self, processor: Any, vision: VisionConfig, *, limit: int, fetcher: Fetcher | None = None
    ) -> None:
        self._processor = processor
        self._vision = vision
        self.limit = limit
        self.fetcher: Fetcher = NoFetcher() if fetcher is None else fetcher

    @property
    def token_id(self) -> int:
        """The id of the token that stands for an image in a prompt."""
        return self._vision.image_token_id

    def prepare(
        self, token_ids: Sequence[int], images: Sequence[Any]
    ) -> tuple[list[int], PromptImages]:
        """Processes images and gives each as many image tokens as it has embeddings.

        Args:
            token_ids: the prompt, with one image token for each image, or with all of them already.
            images: PIL images, or uint8 arrays of shape [height, width, 3].

        Raises:
            PromptError: an image cannot be used, there are too many, or the prompt does not have
                one image token for each.
        """
        if len(images) > self.limit:
            raise PromptError(
                FIELD,
                f"{len(images)} images",
                f"at most {self.limit} are accepted (limit_mm_per_prompt)",
            )
        if images and self._processor is None:
            raise PromptError(FIELD, f"{len(images)} images", NO_PILLOW)
        arrays = [self.processed(image, index) for index, image in enumerate(images)]
        counts = [num_image_tokens(self._vision, one) for one in arrays]
        expanded, starts = self._expand(token_ids, counts)
        items = tuple(
            PromptImage(start, count, image_grid(self._vision, one), one)
            for start, count, one in zip(starts, counts, arrays, strict=True)
        )
        prepared = PromptImages(items, images_key(items))
        if prepared.num_bytes > MOST_PROMPT_BYTES:
            raise PromptError(
                FIELD,
                f"{len(images)} images",
                f"{prepared.num_bytes} bytes when processed, at most {MOST_PROMPT_BYTES} are "
                "accepted",
            )
        return expanded, prepared

    def _expand(
        self, token_ids: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The prompt with all image tokens, and the index of the first one of each image."""
        token = self.token_id
        given = list(token_ids).count(token)
        if given == sum(counts) and given != len(counts):
            return list(token_ids), self._starts(token_ids, counts)
        if given != len(counts):
            raise PromptError(
                "prompt",
                f"{given} image tokens",
                f"{len(counts)} images need one place each (token id {token})",
            )
        expanded: list[int] = []
        starts: list[int] = []
        for one in token_ids:
            if one == token:
                count = counts[len(starts)]
                starts.append(len(expanded))
                expanded += [token] * count
            else:
                expanded.append(one)
        return expanded, starts

    def _starts(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The index of each image's first token in a prompt that has all image tokens."""
        starts: list[int] = []
        at = 0
        for count in counts:
            while token_ids[at] != self.token_id:
                at += 1
            if any(one != self.token_id for one in token_ids[at : at + count]):
                raise PromptError(
                    "prompt_token_ids",
                    f"{sum(counts)} image tokens",
                    f"image {len(starts)} needs {count} of them in a row",
                )
            starts.append(at)
            at += count
        return starts

    def processed(self, image: Any, index: int) -> dict[str, np.ndarray]:
        """The arrays of the prompt's image `index`; see `PromptImage`.

        Raises:
            PromptError: the image cannot be used.
        """
        picture = _as_picture(image, index)
        try:
            made = self._processor(images=[picture], return_tensors="np")
        except (ValueError, ZeroDivisionError) as error:
            raise PromptError(
                FIELD, f"image {index}: {picture.size}", f"cannot be processed: {error}"
            ) from error
        arrays = {}
        for name in _ARRAYS[self._vision.kind]:
            value = np.asarray(made[name])
            dtype = np.float32 if name == "pixel_values" else np.int64
            arrays[name] = np.ascontiguousarray(value, dtype)
        return arrays


def open_images(
    folder: Path, config: ModelConfig, limit: int | None, domains: Sequence[str] = ()
) -> ImageInputs | None:
    """The `ImageInputs` of a model; None if the model takes no images.

    Args:
        folder: of the model; its preprocessor_config.json says how images are scaled and cut.
        limit: most images of a prompt; None: one.
        domains: hosts from which images may be fetched; see `HttpsFetcher`.

    Raises:
        ConfigError: a limit, or domains, for a model without images; a domain is no host.
        ModelLoadError: the folder has no image processor.
    """
    if not isinstance(config, ImageModelConfig):
        if limit is not None:
            raise ConfigError(
                "limit_mm_per_prompt", f"image={limit}", f"{config.architecture} takes no images"
            )
        if domains:
            raise ConfigError(
                "allowed_media_domains", tuple(domains), f"{config.architecture} takes no images"
            )
        return None
    fetcher = HttpsFetcher(domains) if domains else NoFetcher()
    limit = 1 if limit is None else limit
    if importlib.util.find_spec("PIL") is None:
        logger.warning("prompts with images will be refused: %s", NO_PILLOW)
        return ImageInputs(None, config.vision, limit=limit, fetcher=fetcher)
    from transformers import AutoImageProcessor

    try:
        # With Pillow, whatever else is installed, so that all machines compute the same pixels.
        processor = AutoImageProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True
        )
    except Exception as error:
        reason = short_reason(error)
        raise ModelLoadError(f"{folder}: no usable image processor: {reason}") from error
    _check_processor(folder, processor, config.vision)
    return ImageInputs(processor, config.vision, limit=limit, fetcher=fetcher)


def _check_processor(folder: Path, processor: Any, vision: VisionConfig) -> None:
    """Checks that the processor makes arrays of the size that the model takes: else the first image
    would fail in the middle of a step.

    Raises:
        ModelLoadError: the sizes differ, or the processor does not work.
    """
    from PIL import Image

    tried = Image.new("RGB", (_TRIED_SIDE, _TRIED_SIDE))
    try:
        shape = ImageInputs(processor, vision, limit=1).processed(tried, 0)["pixel_values"].shape
    except (PromptError, KeyError) as error:
        raise ModelLoadError(f"{folder}: its image processor does not work: {error}") from error
    if vision.kind == "qwen2_vl":
        found = shape[-1], processor.merge_size
        needed = vision.patch_values, vision.merge_size
        names = "numbers of a patch, merge_size"
    else:
        found, needed, names = shape[-2:], (vision.image_size,) * 2, "height and width"
    if found != needed:
        raise ModelLoadError(
            f"{folder}: preprocessor_config.json makes images ({names}) of {found}, "
            f"config.json needs {needed}"
        )
    if vision.kind == "llava_next":
        points = tuple((int(h), int(w)) for h, w in processor.image_grid_pinpoints)
        if points != vision.pinpoints:
            raise ModelLoadError(
                f"{folder}: image_grid_pinpoints are {shown(points)} in preprocessor_config.json, "
                f"{shown(vision.pinpoints)} in config.json"
            )


def given_images(data: Any) -> tuple[Any, ...]:
    """The images of a prompt's `multi_modal_data`, as users write it: {"image": one or a list}.

    Raises:
        PromptError: the value has another form.
    """
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        raise PromptError(FIELD, data, 'must be a dict such as {"image": image}')
    for name in data:
        if name != "image":
            raise PromptError(FIELD, name, "only images are available, as 'image'")
    given = data.get("image")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _as_picture(image: Any, index: int) -> Image:
    """Converts an image into an RGB picture; transparent pixels become white, as in vLLM."""
    from PIL import Image

    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            what = f"{image.dtype} array of shape {image.shape}"
            raise PromptError(
                FIELD, f"image {index}: {what}", "must be uint8 of shape [height, width, 3]"
            )
        image = Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, Image.Image):
        raise PromptError(
            FIELD,
            f"image {index}: {shown(image)}",
            "must be a PIL image or a uint8 array of shape [height, width, 3]",
        )
    width, height = image.size
    if width * height > _MOST_PIXELS or not width * height:
        raise PromptError(
            FIELD,
            f"image {index}: {width} x {height} pixels",
            f"must have 1 to {_MOST_PIXELS} pixels",
        )
    return on_white(image)


def on_white(image: Image) -> Image:
    """The picture as RGB on a white background."""
    from PIL import Image

    if image.mode == "RGB":
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(ground, image).convert("RGB")
