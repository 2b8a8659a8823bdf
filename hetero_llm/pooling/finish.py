"""A pooled vector to what the user gets; plain numpy in float32."""

from __future__ import annotations

import numpy as np

from hetero_llm.core.pooling import Finish

_TINY = 1e-12
"""Least length that divides an embedding, as in torch's `normalize`."""


def finish(values: np.ndarray, wanted: Finish) -> np.ndarray:
    """What the user gets of a pooled vector [D], float32; see `Finish`."""
    if wanted.dimensions:
        values = values[: wanted.dimensions]
    if wanted.normalize:
        values = values / max(float(np.linalg.norm(values)), _TINY)
    if wanted.activation == "sigmoid":
        with np.errstate(over="ignore"):  # exp of a large number is infinite, and 1 / inf is 0
            values = 1.0 / (1.0 + np.exp(-values))
    elif wanted.activation == "softmax":
        powers = np.exp(values - values.max())
        values = powers / powers.sum()
    return np.ascontiguousarray(values, np.float32)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Cosine of the angle between two vectors [D], in float64; 0 if one of them is 0."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.dot(one, other)) / max(lengths, _TINY)
