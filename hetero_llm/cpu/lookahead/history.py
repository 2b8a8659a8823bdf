"""The global cache: outputs of all requests, in generations of bounded size.

`young` takes everything new. When it is full it becomes `old`, and what was old is dropped as a
whole: no bookkeeping for each entry, and what recurs comes back by itself. `static` is for a text
that stays. Documents are parted by separators.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.lookahead_config import LookaheadConfig
from hetero_llm.cpu.lookahead import raw
from hetero_llm.cpu.lookahead.raw import RawIndex
from hetero_llm.cpu.lookahead.sources import GLOBAL_FREQ, Shared, raw_params

SEPARATOR = -1


@dataclass(slots=True, eq=False)
class Generation:
    """A text and its index. `end`: tokens of the text, separators included."""

    text: NDArray[np.int32]
    raw: RawIndex
    end: int = 0

    def clear(self) -> None:
        self.end = 0
        self.raw.clear()


class History:
    """See above. One thread at a time.

    Args:
        capacity: tokens of the young and the old generation together; 0 keeps nothing.
    """

    def __init__(self, config: LookaheadConfig, capacity: int) -> None:
        self._params = raw_params(config)
        sizes = (capacity // 2, capacity // 2, 0)
        self._young, self._old, self._static = (
            Generation(np.empty(size, np.int32), RawIndex(self._params)) for size in sizes
        )

    @property
    def num_bytes(self) -> int:
        """Of memory reserved; the system grants a text's as it fills."""
        return sum(g.text.nbytes + g.raw.num_bytes for g in self._generations)

    @property
    def _generations(self) -> tuple[Generation, Generation, Generation]:
        return self._young, self._old, self._static

    def shared(self) -> Shared:
        """To be read until the next `add`."""
        return Shared(raw=tuple((g.raw.arrays, g.text[: g.end]) for g in self._generations))

    def add(self, tokens: NDArray[np.int32], told: int, space: int, tick: int) -> None:
        """Learns a document under a namespace's salt. One that is larger than a generation is
        left out.

        Args:
            told: its first tokens that are context only, known from another document.
        """
        size = len(tokens) + 1
        if size > len(self._young.text):
            return
        if self._young.end + size > len(self._young.text):
            self._old.clear()
            self._young, self._old = self._old, self._young
        young = self._young
        begin, end = young.end + 1, young.end + size
        young.text[young.end] = SEPARATOR
        young.text[begin:end] = tokens
        young.end = end
        young.raw.reserve(len(tokens))
        raw.insert(
            young.raw.arrays,
            self._params,
            young.text,
            space,
            begin,
            begin + told,
            end,
            GLOBAL_FREQ,
            tick,
        )
