"""Images of a prompt as they travel from the front end to the runner: plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """One processed image and its place in the prompt.

    Attributes:
        start: Index in the prompt of the first of its image tokens.
        count: Image tokens, which follow each other; the model makes as many embeddings.
        grid: (rows, columns) of these embeddings where they lie in a grid that the model's
            positions follow (Qwen2-VL); else None.
        arrays: By the names that the model's encoder takes, contiguous: pixels as float32, sizes as
            int64.
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
    """All images of a prompt, in order. `key` tells them from those of other prompts."""

    items: tuple[PromptImage, ...]
    key: str

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for item in self.items for array in item.arrays.values())


def images_key(images: Sequence[PromptImage]) -> str:
    """SHA-256 of everything that the images' embeddings depend on, order included."""
    found = sha256()
    for image in images:
        for name, array in sorted(image.arrays.items()):
            found.update(f"{name} {array.dtype.str} {array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
        found.update(b"|")
    return found.hexdigest()
