"""The embedded model pair and its held-out prompts (see MODEL_CARD.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

ALIASES = ("demo", "demo-draft")


@dataclass(frozen=True, slots=True)
class HeldoutPrompts:
    """Text that neither model was trained on, one row per file.

    `prompts` uint16 [N, 1024]; `continuations` uint16 [N, 300], what really followed; `names` and
    `packages` [N] say where each came from.
    """

    prompts: np.ndarray
    continuations: np.ndarray
    names: np.ndarray
    packages: np.ndarray


def demo_folder(alias: str) -> Path:
    """Folder of "demo" (target) or "demo-draft"."""
    assert alias in ALIASES
    return Path(__file__).parent / alias


@lru_cache(maxsize=1)
def heldout_prompts() -> HeldoutPrompts:
    with np.load(Path(__file__).parent / "heldout_prompts.npz", allow_pickle=False) as data:
        return HeldoutPrompts(*(data[key] for key in HeldoutPrompts.__dataclass_fields__))
