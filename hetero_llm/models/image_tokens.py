"""How many tokens an image becomes, and their positions. No torch, for the front end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetero_llm.core.images import PromptImage
from hetero_llm.models.configs.transformers_vision import VisionConfig


def num_image_tokens(vision: VisionConfig, arrays: Mapping[str, np.ndarray]) -> int:
    """Image tokens of one processed image. `arrays`: see `PromptImage`."""
    if vision.kind == "qwen2_vl":
        return int(arrays["image_grid_thw"].prod()) // vision.merge_size**2
    if vision.kind == "llava_next":
        height, width = arrays["image_sizes"].reshape(2).tolist()
        return _llava_next_rows(vision, height, width)
    height, width = arrays["pixel_values"].shape[-2:]
    return (height // vision.patch_size) * (width // vision.patch_size) + vision.num_class_tokens


def image_grid(vision: VisionConfig, arrays: Mapping[str, np.ndarray]) -> tuple[int, int] | None:
    """See `PromptImage.grid`."""
    if vision.kind != "qwen2_vl":
        return None
    _, rows, columns = arrays["image_grid_thw"].reshape(3).tolist()
    return rows // vision.merge_size, columns // vision.merge_size


def _llava_next_rows(vision: VisionConfig, height: int, width: int) -> int:
    """Embeddings of the image scaled down and of its pieces without padding, with a newline
    embedding after each row of the pieces (the "anyres" of LLaVA-NeXT, Liu et al. 2024).

    Args:
        height, width: Of the image before processing, in pixels.
    """
    side = vision.image_size // vision.patch_size
    scaled_height, scaled_width = best_pinpoint(vision.pinpoints, height, width)
    rows = scaled_height // vision.image_size * side
    columns = scaled_width // vision.image_size * side
    # The image keeps its shape: padding above and below or left and right is cut off again.
    if width / height > columns / rows:
        seen = int(round(height * (columns / width), 7))
        rows -= 2 * ((rows - seen) // 2)
    else:
        seen = int(round(width * (rows / height), 7))
        columns -= 2 * ((columns - seen) // 2)
    return side * side + vision.num_class_tokens + rows * columns + rows


def best_pinpoint(pinpoints: Sequence[tuple[int, int]], height: int, width: int) -> tuple[int, int]:
    """The size that keeps most pixels of an image; among equals the one with the least padding."""

    def value(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(pinpoints, key=value)


def mrope_table(length: int, images: Sequence[PromptImage]) -> tuple[np.ndarray, int]:
    """Positions of a prompt in Qwen2-VL (Wang et al. 2024).

    A text token's position is one more than the one before in all three directions. An image has
    one time; its rows and columns count from the position where the text before it ends. The text
    after it starts at the largest of these positions plus one.

    Args:
        length: Tokens of the prompt.
        images: In order; each has a grid.

    Returns:
        [3, length] int64 (time, height, width), and the difference between position and index of
        the tokens after the prompt.
    """
    table = np.empty((3, length), np.int64)
    at, position = 0, 0
    for image in images:
        assert image.grid is not None and image.start >= at, "images out of order"
        table[:, at : image.start] = np.arange(position, position + image.start - at)
        position += image.start - at
        rows, columns = image.grid
        assert rows * columns == image.count, "an image of another size than its grid"
        of_image = table[:, image.start : image.end]
        of_image[0] = position
        of_image[1] = position + np.arange(rows).repeat(columns)
        of_image[2] = position + np.tile(np.arange(columns), rows)
        at, position = image.end, position + max(rows, columns)
    table[:, at:] = np.arange(position, position + length - at)
    return table, position + length - at - length
