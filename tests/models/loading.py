"""Loading a tiny checkpoint, and changing what is stored in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    load_format: str = "auto",
    allow_pickle: bool = False,
    seed: int = 0,
    show_progress: bool = False,
) -> CausalLM:
    """The folder's model on the CPU."""
    return load_model(
        folder,
        load_model_config(folder),
        dtype=dtype,
        device="cpu",
        show_progress=show_progress,
        load_format=load_format,
        allow_pickle=allow_pickle,
        seed=seed,
    )


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrites model.safetensors with what `change` makes of its dict of tensors."""
    path = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path)


def same_parameters(a: CausalLM, b: CausalLM) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)
