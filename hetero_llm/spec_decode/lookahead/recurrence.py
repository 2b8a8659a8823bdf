"""A quick test whether the end of a text has occurred before: no index is looked up for it.

A paused drafter asks it every few steps, behind steps that take a third of a millisecond for a
small model: it takes some microseconds, where looking up a draft takes a hundred with cold caches.
"Yes" may be wrong and then costs a look-up; "no" is right about its own text and about all texts
that the filters were shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_llm.utils.jit import njit

GRAM = 4
"""Tokens of a gram. Three of a prompt are known together with its output."""
_NUM_GRAMS = 3
"""Grams, each one token on, of which all have to be known: six tokens."""
_OWN_TOKENS = 8
"""Last tokens of a text that have to occur earlier in it."""
LAST_TOKENS = 1024
"""Of a text, among which they are searched."""
_BITS_A_TOKEN, _FEWEST_BITS, _MOST_BITS = 8, 1 << 16, 1 << 26
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Knuth 6.4


class GramFilter:
    """A Bloom filter (Bloom, 1970) with one hash function for the grams of texts.

    Args:
        room: tokens from which on it says "known" more often.

    Attributes:
        words: [2^k] uint64. To be read only.
    """

    def __init__(self, room: int) -> None:
        bits = min(max(_BITS_A_TOKEN * room, _FEWEST_BITS), _MOST_BITS)
        self.words: NDArray[np.uint64] = np.zeros(1 << ((bits - 1).bit_length() - 6), np.uint64)

    def add(self, tokens: NDArray[np.int32], namespace: int) -> None:
        """Adds the grams of a text under a namespace's salt."""
        _mark(self.words, tokens, namespace)

    def clear(self) -> None:
        self.words[:] = 0


def recurs(
    tokens: NDArray[np.int32], num_output: int, filters: Sequence[GramFilter], namespace: int
) -> bool:
    """Whether the last tokens of a text occur earlier in it, or in a text of one of the filters.

    Args:
        tokens: [T] int32, the text's last ones; `LAST_TOKENS` are looked at.
        num_output: tokens that follow its prompt: with fewer than three, as many grams must be
            known.
        namespace: the text's salt in the filters.
    """
    young, old, static = filters
    return _recurs(tokens, num_output, young.words, old.words, static.words, namespace)


@njit(cache=True, nogil=True)
def _bit_of(tokens: np.ndarray, end: int, namespace: int, num_words: int) -> int:
    """Place of the bit of the gram that ends before `end`."""
    key = np.uint64(namespace)
    for i in range(end - GRAM, end):
        key = (key ^ np.uint64(tokens[i] + 1)) * _MULTIPLIER
        key ^= key >> np.uint64(29)
    bit: int = np.int64(key & np.uint64(num_words * 64 - 1))  # type: ignore[assignment]
    return bit


@njit(cache=True, nogil=True)
def _mark(words: np.ndarray, tokens: np.ndarray, namespace: int) -> None:
    for end in range(GRAM, len(tokens) + 1):
        bit = _bit_of(tokens, end, namespace, len(words))
        words[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)


@njit(cache=True, nogil=True)
def _holds(words: np.ndarray, tokens: np.ndarray, end: int, namespace: int) -> bool:
    bit = _bit_of(tokens, end, namespace, len(words))
    return (words[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1) != 0


@njit(cache=True, nogil=True)
def _recurs(
    tokens: np.ndarray,
    num_output: int,
    young: np.ndarray,
    old: np.ndarray,
    static: np.ndarray,
    namespace: int,
) -> bool:
    size = len(tokens)
    known, wanted = 0, max(min(_NUM_GRAMS, num_output), 1)
    for end in range(size, max(size - wanted, GRAM - 1), -1):
        if (
            _holds(young, tokens, end, namespace)
            or _holds(old, tokens, end, namespace)
            or _holds(static, tokens, end, namespace)
        ):
            known += 1
        else:
            break
    if known == wanted:
        return True
    for end in range(size - 1, max(_OWN_TOKENS - 1, size - LAST_TOKENS), -1):
        i = 1
        while i <= _OWN_TOKENS and tokens[end - i] == tokens[size - i]:
            i += 1
        if i > _OWN_TOKENS:
            return True
    return False
