"""Processed images of a prompt, as plain arrays for the way from the front end to the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

MOST_PROMPT_BYTES = 1 << 30
"""Most bytes of the arrays that come with a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """One processed image and its place in the prompt.

    Attributes:
        start: Index in the prompt of the first of its image tokens.
        count: Number of consecutive image tokens; the encoder makes one embedding for each.
        grid: (rows, columns) of the embeddings if the model's positions follow their grid
            (Qwen2-VL); else None.
        arrays: Contiguous inputs of the model's encoder by name: pixels as float32, sizes as int64.
    """

    start: int
    count: int
    grid: tuple[int, int] | None
    arrays: Mapping[str, np.ndarray]

    @property
    def end(self) -> int:
        """Index of the token after its last one."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """All images of a prompt, in order; `key` is their `images_key`."""

    items: tuple[PromptImage, ...]
    key: str

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for item in self.items for array in item.arrays.values())


def images_key(images: Sequence[PromptImage]) -> str:
    """Hex SHA-256 of everything that the images' embeddings depend on, order included."""
    found = sha256()
    for image in images:
        for name, array in sorted(image.arrays.items()):
            found.update(f"{name} {array.dtype.str} {array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
        found.update(b"|")
    return found.hexdigest()
