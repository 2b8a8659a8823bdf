"""Scores of experts on disk: where the bank begins, so that the first token finds its experts.

One line of JSON, then the scores as little-endian float32, [layers, experts]. The line has format,
version, the model's fingerprint, the shape, and the SHA-256 of the rest. The file is replaced as a
whole, so a reader never sees half of one.

A file that does not suit is no reason not to serve: `load_or_none` logs it and the engine begins
without scores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.errors import HeteroLLMError, shown
from hetero_llm.utils.files import read_bytes, replace_file

FORMAT, VERSION = "hetero_llm expert scores", 1

MOST_EXPERTS = 1 << 20
"""Of all layers. Larger files are neither read nor written."""

_LONGEST_LINE = 4096
_ITEM = np.dtype("<f4")
_LARGEST_SCORE = 1e9
_SHOWN = 12  # characters of a fingerprint

logger = logging.getLogger(__name__)


class ProfileError(HeteroLLMError):
    """A profile of experts cannot be read, or is another model's. Nothing was changed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def model_fingerprint(config: Mapping[str, Any]) -> str:
    """Identity of a model: a hash of its config.json. Two fine-tunes of one shape may share a
    profile: it is a guess that promotions correct.

    Args:
        config: what the file says; values of JSON.
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def save_profile(path: str, scores: NDArray[np.float32], *, model: str) -> None:
    """Writes scores, readable to their owner alone; an existing file is replaced at once.

    Args:
        scores: [layers, experts], finite and not negative.
        model: of `model_fingerprint`.

    Raises:
        ProfileError: the file cannot be written. An existing one stays as it was.
    """
    assert scores.ndim == 2 and 0 < scores.size <= MOST_EXPERTS
    data = np.minimum(scores, _LARGEST_SCORE).astype(_ITEM).tobytes()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "shape": list(scores.shape),
        "sha256": _checksum(data, model, scores.shape),
    }
    content = json.dumps(header).encode() + b"\n" + data
    try:
        replace_file(path, content)
    except OSError as error:
        raise ProfileError(path, f"cannot be written: {error.strerror or error}") from error


def load_profile(path: str, *, model: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Reads scores, [layers, experts].

    Args:
        model: `model_fingerprint` of the model that is served.
        shape: layers that have experts, experts of each.

    Raises:
        ProfileError: there is no such file, or it is damaged, too large or not this model's.
    """
    try:
        content = read_bytes(path, most=_LONGEST_LINE + MOST_EXPERTS * _ITEM.itemsize)
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror or error}") from error
    line, found, data = content.partition(b"\n")
    if not found or len(line) > _LONGEST_LINE:
        raise ProfileError(path, "is no profile of experts")
    header = _header(path, line)
    if header.get("version") != VERSION:
        reason = f"has version {shown(header.get('version'))}, and {VERSION} is needed"
        raise ProfileError(path, reason)
    if header.get("model") != model:
        other = shown(str(header.get("model"))[:_SHOWN])
        raise ProfileError(path, f"is of another model ({other}, this one is {model[:_SHOWN]!r})")
    if header.get("shape") != list(shape):
        reason = (
            f"is of [layers, experts] {shown(header.get('shape'))}, the model has {list(shape)}"
        )
        raise ProfileError(path, reason)
    if header.get("sha256") != _checksum(data, model, shape):
        raise ProfileError(path, "is damaged: its checksum is another one")
    if len(data) != shape[0] * shape[1] * _ITEM.itemsize:
        raise ProfileError(path, f"has {len(data)} bytes of scores for [layers, experts] {shape}")
    scores = np.frombuffer(data, _ITEM).reshape(shape).astype(np.float32)
    if not (np.isfinite(scores).all() and (scores >= 0).all()):
        raise ProfileError(path, "has scores that are negative or no numbers")
    return scores


def load_or_none(path: str, *, model: str, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """`load_profile`; None where there is no file, or one that does not suit, which is logged."""
    if not os.path.lexists(path):
        logger.info("%s: no profile of experts yet; it is written at the end", path)
        return None
    try:
        return load_profile(path, model=model, shape=shape)
    except ProfileError as error:
        logger.warning("%s; placement of experts begins without it", error)
        return None


def _header(path: str, line: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ProfileError(path, "is no profile of experts")
    return header


def _checksum(data: bytes, model: str, shape: tuple[int, ...]) -> str:
    return hashlib.sha256(f"{model} {list(shape)}\n".encode() + data).hexdigest()
