"""The row-wise parts of a step (csrc/step/rows.h, candidates.h), called from Python.

Arrays are contiguous and one-dimensional, float32 unless said otherwise; results are new arrays.
References are torch's own operators and hetero_llm/sampling/noise.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.kernels.native_parts import STRIP, call

Floats = NDArray[np.float32]

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Kinds of `gated` by number."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best score so far and its token."""

    score: float = -np.inf
    token: int = -1


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Of one sample: seed is unsigned with 64 bits, position that of the token to be sampled."""

    temperature: float
    seed: int
    position: int
    sample_index: int

    @property
    def arguments(self) -> tuple[object, ...]:
        """The key as the C functions take it."""
        seed = ctypes.byref(ctypes.c_uint64(self.seed))
        return float(self.temperature), seed, self.position, self.sample_index


def _is_flat(*arrays: Floats) -> bool:
    return all(x.dtype == np.float32 and x.ndim == 1 and x.flags.c_contiguous for x in arrays)


def rms_norm(library: ctypes.CDLL, x: Floats, weight: Floats, *, eps: float, isa: int) -> Floats:
    """x / rms(x) * weight."""
    assert _is_flat(x, weight) and x.shape == weight.shape
    out = np.empty_like(x)
    call(library, "rows_rms_norm", x, weight, float(eps), x.size, out, isa)
    return out


def rotate(library: ctypes.CDLL, head: Floats, factors: Floats, *, isa: int) -> Floats:
    """Rotates the first len(factors) values; factors: cosines, then sines."""
    assert _is_flat(head, factors) and factors.size % 2 == 0 and factors.size <= head.size
    out = head.copy()
    call(library, "rows_rotate", out, factors, factors.size, isa)
    return out


def gated(library: ctypes.CDLL, gate: Floats, up: Floats, *, kind: int, isa: int) -> Floats:
    """activation(gate) * up, [rows, size] each; laid out as a product leaves them."""
    assert gate.dtype == up.dtype == np.float32 and gate.shape == up.shape and gate.ndim == 2
    assert 0 <= kind < len(ACTIVATIONS)
    rows, size = gate.shape
    wide = -(-size // STRIP) * STRIP
    block = np.zeros((rows, wide // STRIP, 2, STRIP), np.float32)
    for place, part in enumerate((gate, up)):
        padded = np.zeros((rows, wide), np.float32)
        padded[:, :size] = part
        block[:, :, place] = padded.reshape(rows, -1, STRIP)
    out = np.empty((rows, wide + 5), np.float32)  # rows may be further apart than they are wide
    call(library, "rows_gated", block, 2 * wide, rows, wide, kind, out, wide + 5, isa)
    return out[:, :size]


def add_block(library: ctypes.CDLL, x: Floats, y: Floats, bias: Floats, *, isa: int) -> Floats:
    """x + y + bias, [rows, size] and [size]."""
    assert x.dtype == y.dtype == bias.dtype == np.float32 and x.shape == y.shape
    rows, size = x.shape
    out, y = np.array(x, order="C"), np.ascontiguousarray(y)
    call(library, "rows_add_block", out, size, y, size, rows, size, bias, isa)
    return out


def add(library: ctypes.CDLL, x: Floats, y: Floats, *, isa: int) -> Floats:
    assert _is_flat(x, y) and x.shape == y.shape
    out = x.copy()
    call(library, "rows_add", out, y, x.size, isa)
    return out


def widen(library: ctypes.CDLL, x: NDArray[np.uint16], *, isa: int) -> Floats:
    """Bits of bf16 to float32."""
    assert x.dtype == np.uint16 and x.flags.c_contiguous
    out = np.empty(x.size, np.float32)
    call(library, "rows_widen", x, x.size, out, isa)
    return out


def narrow(library: ctypes.CDLL, x: Floats, *, isa: int) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even."""
    assert _is_flat(x)
    out = np.empty(x.size, np.uint16)
    call(library, "rows_narrow", x, x.size, out, isa)
    return out


def forbid(
    library: ctypes.CDLL, scores: Floats, mask: NDArray[np.int32], *, first: int, isa: int
) -> Floats:
    """Scores of tokens first, first + 1, ..., -inf where the token mask forbids; first is a
    multiple of 16."""
    assert _is_flat(scores) and mask.dtype == np.int32 and mask.flags.c_contiguous
    assert first % 16 == 0 and first + scores.size <= 32 * mask.size
    out = scores.copy()
    call(library, "rows_forbid", out, out.size, first, mask, isa)
    return out


def allows_any(library: ctypes.CDLL, mask: NDArray[np.int32], *, first: int, size: int) -> bool:
    """Whether a token mask allows any of the tokens first .. first + size - 1."""
    assert mask.dtype == np.int32 and mask.flags.c_contiguous and first + size <= 32 * mask.size
    function = library.hetero_rows_allows_any
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return bool(function(mask.ctypes.data, first, size))


def pick_greedy(library: ctypes.CDLL, scores: Floats, *, first: int, best: Best, isa: int) -> Best:
    """The better of `best` and the scores of tokens first, first + 1, ..."""
    assert _is_flat(scores) and scores.size > 0
    score, token = ctypes.c_float(best.score), ctypes.c_int64(best.token)
    to = (ctypes.byref(score), ctypes.byref(token))
    call(library, "rows_pick_greedy", scores, scores.size, first, *to, isa)
    return Best(score.value, token.value)


def pick_noisy(
    library: ctypes.CDLL, scores: Floats, key: NoiseKey, *, first: int, best: Best, isa: int
) -> Best:
    """The same over scores / temperature + noise; first is a multiple of 4."""
    assert _is_flat(scores) and scores.size > 0 and first % 4 == 0
    assert key.temperature > 0 and 0 <= key.seed < 1 << 64
    score, token = ctypes.c_float(best.score), ctypes.c_int64(best.token)
    to = (ctypes.byref(score), ctypes.byref(token))
    call(library, "rows_pick_noisy", scores, scores.size, first, *key.arguments, *to, isa)
    return Best(score.value, token.value)


def candidates(
    library: ctypes.CDLL,
    scores: Floats,
    count: int,
    *,
    ends: list[int],
    key: NoiseKey | None,
    isa: int,
) -> tuple[NDArray[np.int32], Floats]:
    """The `count` likeliest tokens and their log-probabilities, see csrc/step/candidates.h.

    Args:
        ends: where parts of the scores end that are searched apart, as by threads; all but the
            last are multiples of 16.
        key: of the noise; None for the scores as they are.
    """
    assert _is_flat(scores) and ends[-1] == scores.size and 1 <= count <= 16
    assert ends == sorted(ends) and not any(end % STRIP for end in ends[:-1])
    tokens, log_probs = np.empty(count, np.int32), np.empty(count, np.float32)
    noise = (key or NoiseKey(0.0, 0, 0, 0)).arguments
    where = np.array(ends, np.int64)
    results = (count, tokens, log_probs)
    call(library, "candidates", scores, where, len(ends), *noise, *results, isa)
    return tokens, log_probs
