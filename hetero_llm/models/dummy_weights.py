"""Random weights of `load_format="dummy"`: the same model for any number of ranks.

A parameter's row is a window of one pool of random numbers, whose place follows from the seed, the
parameter's name and the number of the row in the whole model. So a rank makes its own rows, and its
own columns of them, as fast as memory is copied, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from hetero_llm.models.layers import CausalLM
from hetero_llm.models.sharding import Cut, RankParts

_STD = 0.02
_POOL = 1 << 22
"""Places of windows: rows of a parameter that share one are few."""


def fill_randomly(
    model: CausalLM,
    seed: int,
    parts: RankParts,
    *,
    filled: Callable[[Tensor], None] = lambda parameter: None,
) -> None:
    """Reproducible weights of a trained model's magnitude: norms are 1, all others uniform.

    Args:
        parts: of the rank's model.
        filled: called with each parameter when it has its numbers.
    """
    widest = max(_columns(p, parts.cuts.get(name)) for name, p in model.named_parameters())
    generator = torch.Generator("cpu").manual_seed(seed)
    bound = _STD * 3**0.5
    pool = torch.empty(_POOL + widest, dtype=torch.float32, device="cpu")
    pool.uniform_(-bound, bound, generator=generator)
    pools: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for name, parameter in list(model.named_parameters()):  # `filled` may replace them
        if name in parts.added and model.config.rank.index:
            parameter.zero_()
        elif parameter.dim() == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            key = (parameter.device, parameter.dtype)
            if key not in pools:
                pools[key] = pool.to(*key)
            starts = _starts(model.whole_name(name), seed)
            _fill(parameter, pools[key], starts, parts.cuts.get(name))
        filled(parameter)


def _columns(parameter: Tensor, cut: Cut | None) -> int:
    """Of the whole parameter."""
    last = parameter.dim() - 1
    return cut.length if cut is not None and cut.dim == last else parameter.shape[last]


def _starts(name: str, seed: int) -> np.random.Philox:
    key = sha256(f"{seed} {name}".encode()).digest()[:16]
    return np.random.Philox(key=np.frombuffer(key, np.uint64))


def _fill(parameter: Tensor, pool: Tensor, starts: np.random.Philox, cut: Cut | None) -> None:
    shape = list(parameter.shape)
    if cut is not None:
        shape[cut.dim] = cut.length
    *leading, width = shape
    places = torch.from_numpy(np.random.Generator(starts).integers(0, _POOL, leading or [1]))
    runs = [(0, width)]
    if cut is not None and cut.dim == len(leading):
        runs = list(cut.runs)
    elif cut is not None:
        places = places.index_select(cut.dim, cut.index())
    places = places.flatten().to(pool.device)
    rows, at = parameter.view(-1, parameter.shape[-1]), 0
    for first, count in runs:
        windows = pool.as_strided((_POOL, count), (1, 1), first)
        if len(runs) == 1:
            torch.index_select(windows, 0, places, out=rows)
        else:  # a fused bias
            rows[:, at : at + count] = windows.index_select(0, places)
        at += count
