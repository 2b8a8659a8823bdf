"""Row-wise parts of a step (csrc/step/rows.h) for tests and benches.

The executor calls the C++ functions itself; this is the checked way to them from Python. Arrays are
contiguous and one-dimensional, float32 unless said otherwise; results are new arrays. Twins are
torch's own operators and hetero_llm/sampling/noise.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Kinds of `gated` by number."""
_STRIP = 16


@dataclass(frozen=True, slots=True)
class Best:
    """The best score so far and its token."""

    score: float = -np.inf
    token: int = -1


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Of one draw: seed is unsigned with 64 bits, position that of the token to be drawn."""

    temperature: float
    seed: int
    position: int
    sample_index: int


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    assert array.ndim == 1 and array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _float(value: float) -> object:
    return ctypes.byref(ctypes.c_float(value))


def _integers(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(value) for value in values]


def rms_norm(library: ctypes.CDLL, x: Floats, weight: Floats, *, eps: float, isa: int) -> Floats:
    """x / rms(x) * weight."""
    assert x.dtype == weight.dtype == np.float32 and x.shape == weight.shape
    out = np.empty_like(x)
    library.hetero_rows_rms_norm(
        _pointer(x),
        _pointer(weight),
        _float(eps),
        *_integers(x.size),
        _pointer(out),
        *_integers(isa),
    )
    return out


def rotate(library: ctypes.CDLL, head: Floats, factors: Floats, *, isa: int) -> Floats:
    """Rotates the first len(factors) values; factors: cosines, then sines."""
    assert head.dtype == factors.dtype == np.float32
    assert factors.size % 2 == 0 and factors.size <= head.size
    out = head.copy()
    library.hetero_rows_rotate(_pointer(out), _pointer(factors), *_integers(factors.size, isa))
    return out


def gated(library: ctypes.CDLL, gate: Floats, up: Floats, *, kind: int, isa: int) -> Floats:
    """activation(gate) * up, [rows, size] each; handed over as a product leaves them."""
    assert gate.dtype == up.dtype == np.float32 and gate.shape == up.shape and gate.ndim == 2
    assert 0 <= kind < len(ACTIVATIONS)
    rows, size = gate.shape
    wide = -(-size // _STRIP) * _STRIP
    block = np.zeros((rows, wide // _STRIP, 2, _STRIP), np.float32)
    for place, part in enumerate((gate, up)):
        padded = np.zeros((rows, wide), np.float32)
        padded[:, :size] = part
        block[:, :, place] = padded.reshape(rows, -1, _STRIP)
    out = np.empty((rows, wide + 5), np.float32)  # rows may be further apart than they are wide
    library.hetero_rows_gated(
        _pointer(block.reshape(-1)),
        *_integers(2 * wide, rows, wide, kind),
        _pointer(out.reshape(-1)),
        *_integers(wide + 5, isa),
    )
    return out[:, :size]


def add_block(library: ctypes.CDLL, x: Floats, y: Floats, bias: Floats, *, isa: int) -> Floats:
    """x + y + bias, [rows, size] and [size]."""
    assert x.dtype == y.dtype == bias.dtype == np.float32 and x.shape == y.shape
    rows, size = x.shape
    out = np.ascontiguousarray(x.copy())
    library.hetero_rows_add_block(
        _pointer(out.reshape(-1)),
        *_integers(size),
        _pointer(np.ascontiguousarray(y).reshape(-1)),
        *_integers(size, rows, size),
        _pointer(bias),
        *_integers(isa),
    )
    return out


def add(library: ctypes.CDLL, x: Floats, y: Floats, *, isa: int) -> Floats:
    assert x.dtype == y.dtype == np.float32 and x.shape == y.shape
    out = x.copy()
    library.hetero_rows_add(_pointer(out), _pointer(y), *_integers(x.size, isa))
    return out


def widen(library: ctypes.CDLL, x: NDArray[np.uint16], *, isa: int) -> Floats:
    """Bits of bf16 to float32."""
    assert x.dtype == np.uint16
    out = np.empty(x.size, np.float32)
    library.hetero_rows_widen(_pointer(x), *_integers(x.size), _pointer(out), *_integers(isa))
    return out


def narrow(library: ctypes.CDLL, x: Floats, *, isa: int) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even."""
    assert x.dtype == np.float32
    out = np.empty(x.size, np.uint16)
    library.hetero_rows_narrow(_pointer(x), *_integers(x.size), _pointer(out), *_integers(isa))
    return out


def pick_greedy(library: ctypes.CDLL, scores: Floats, *, first: int, best: Best, isa: int) -> Best:
    """The better of `best` and the scores of tokens first, first + 1, ..."""
    assert scores.dtype == np.float32 and scores.size > 0
    score, token = ctypes.c_float(best.score), ctypes.c_int64(best.token)
    library.hetero_rows_pick_greedy(
        _pointer(scores),
        *_integers(scores.size, first),
        ctypes.byref(score),
        ctypes.byref(token),
        *_integers(isa),
    )
    return Best(score.value, token.value)


def pick_noisy(
    library: ctypes.CDLL, scores: Floats, key: NoiseKey, *, first: int, best: Best, isa: int
) -> Best:
    """The same over scores / temperature + noise; first is a multiple of 4."""
    assert scores.dtype == np.float32 and scores.size > 0 and first % 4 == 0
    assert key.temperature > 0 and 0 <= key.seed < 1 << 64
    score, token = ctypes.c_float(best.score), ctypes.c_int64(best.token)
    library.hetero_rows_pick_noisy(
        _pointer(scores),
        *_integers(scores.size, first),
        _float(key.temperature),
        ctypes.byref(ctypes.c_uint64(key.seed)),
        *_integers(key.position, key.sample_index),
        ctypes.byref(score),
        ctypes.byref(token),
        *_integers(isa),
    )
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
        ends: where parts of the scores end that are looked at apart, as by threads; all but the
            last are multiples of 16.
        key: of the noise; None for the scores as they are.
    """
    assert scores.dtype == np.float32 and ends[-1] == scores.size and 1 <= count <= 16
    assert ends == sorted(ends) and not any(end % _STRIP for end in ends[:-1])
    tokens, log_probs = np.empty(count, np.int32), np.empty(count, np.float32)
    noise = key or NoiseKey(0.0, 0, 0, 0)
    library.hetero_candidates(
        _pointer(scores),
        _pointer(np.array(ends, np.int64)),
        *_integers(len(ends)),
        _float(noise.temperature),
        ctypes.byref(ctypes.c_uint64(noise.seed)),
        *_integers(noise.position, noise.sample_index, count),
        _pointer(tokens),
        _pointer(log_probs),
        *_integers(isa),
    )
    return tokens, log_probs
