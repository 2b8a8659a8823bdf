"""The tokens of live sequences in one flat array, where compiled code finds them.

A sequence has a row of its own from its first step to the end of its request, whatever happens to
its KV: what was learned of its text survives a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""Stands between texts: nothing is matched or drafted across it."""

HEADER = 3
"""Last tokens of a prompt, which tell what kind of text follows: learned with the output."""

_FIRST_ROWS = 16


def namespace(root: bytes) -> int:
    """The salt in the history of requests with this root key, which depends on their cache_salt.
    One bit keeps it apart from the sequences' own salts, which are small."""
    return int.from_bytes(root[:7], "little") | 1 << 60


def parted(tokens: NDArray[np.int32], ends: Sequence[int]) -> NDArray[np.int32]:
    """The tokens, with separators for those at which a text ends: they part what is before from
    what follows."""
    return np.where(np.isin(tokens, ends), SEPARATOR, tokens).astype(np.int32, copy=False)


@dataclass(slots=True, eq=False)
class Text:
    """One sequence's row.

    Attributes:
        salt: belongs to this sequence alone; never used again.
        space: salt of its namespace in the global cache.
        first, end: positions in `Texts.tokens`.
        indexed: positions before it are in the local indexes.
        told: positions before it are in the global cache, or will never be.
    """

    row: int
    salt: int
    space: int
    first: int
    end: int
    indexed: int
    told: int


class Texts:
    """Rows of `width` tokens and a separator, as many as sequences are alive.

    Attributes:
        tokens: [rows * (width + 1)] int32; behind each text stands a separator. Replaced by a
            larger one when rows run out: take it anew after each `open`; positions stay.
    """

    def __init__(self, width: int) -> None:
        self._width = width + 1  # a separator follows
        self._free = list(range(_FIRST_ROWS))  # a heap: low rows first, so that rows stay few
        self._rows = _FIRST_ROWS
        self._next_salt = 1
        self.tokens: NDArray[np.int32] = np.empty(_FIRST_ROWS * self._width, np.int32)

    @property
    def num_bytes(self) -> int:
        """Of memory reserved; the system grants it as rows fill."""
        return self.tokens.nbytes

    def open(self, space: int) -> Text:
        """A row without tokens."""
        if not self._free:
            self._free = list(range(self._rows, 2 * self._rows))
            self._rows *= 2
            larger = np.empty(self._rows * self._width, np.int32)
            larger[: len(self.tokens)] = self.tokens
            self.tokens = larger
        row = heappop(self._free)
        first = row * self._width
        text = Text(row, self._next_salt, space, first, first, first, first)
        self._next_salt += 1
        return text

    def extend(self, text: Text, new: list[int] | NDArray[np.int32]) -> None:
        """Appends tokens to a text."""
        end = text.end + len(new)
        assert end - text.first < self._width, (end - text.first, self._width)
        if len(new) == 1:
            self.tokens[text.end] = new[0]
        else:
            self.tokens[text.end : end] = new
        self.tokens[end] = SEPARATOR
        text.end = end

    def close(self, text: Text) -> None:
        """The row is free for another sequence."""
        heappush(self._free, text.row)
