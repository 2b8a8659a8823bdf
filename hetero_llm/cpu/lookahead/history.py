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
from hetero_llm.cpu.lookahead import raw, trie
from hetero_llm.cpu.lookahead.raw import RawIndex
from hetero_llm.cpu.lookahead.sources import GLOBAL_FREQ, Shared, raw_params, trie_params
from hetero_llm.cpu.lookahead.texts import SEPARATOR
from hetero_llm.cpu.lookahead.trie import CONTINUED, Trie, new_active


@dataclass(slots=True, eq=False)
class Generation:
    """A text and its indexes, None for one that is not in use. `end`: tokens of the text,
    separators included."""

    text: NDArray[np.int32]
    raw: RawIndex | None
    trie: Trie | None
    end: int = 0

    @property
    def num_bytes(self) -> int:
        indexes = sum(index.num_bytes for index in (self.raw, self.trie) if index is not None)
        return self.text.nbytes + indexes

    def clear(self) -> None:
        self.end = 0
        for index in (self.raw, self.trie):
            if index is not None:
                index.clear()


class History:
    """See above. One thread at a time.

    Args:
        capacity: tokens of the young and the old generation together; 0 keeps nothing.
    """

    def __init__(
        self, config: LookaheadConfig, capacity: int, *, uses_raw: bool, uses_trie: bool
    ) -> None:
        self._raw_params, self._trie_params = raw_params(config), trie_params(config)
        self._young, self._old, self._static = (
            Generation(
                np.empty(size, np.int32),
                RawIndex(self._raw_params) if uses_raw else None,
                Trie(self._trie_params) if uses_trie else None,
            )
            for size in (capacity // 2, capacity // 2, 0)
        )

    @property
    def num_bytes(self) -> int:
        """Of memory reserved; the system grants a text's as it fills."""
        return sum(generation.num_bytes for generation in self._generations)

    @property
    def _generations(self) -> tuple[Generation, Generation, Generation]:
        return self._young, self._old, self._static

    def shared(self) -> Shared:
        """To be read until the next `add`."""
        raws = tuple(
            (g.raw.arrays, g.text[: g.end]) for g in self._generations if g.raw is not None
        )
        tries = tuple(
            (g.trie.arrays, g.text[: g.end]) for g in self._generations if g.trie is not None
        )
        return Shared(raw=raws or None, trie=tries or None)

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
        text, new = young.text[:end], begin + told
        if young.raw is not None:
            young.raw.reserve(len(tokens))
            arrays = young.raw.arrays
            raw.insert(arrays, self._raw_params, text, space, begin, new, end, GLOBAL_FREQ, tick)
        if young.trie is not None:
            young.trie.reserve(len(tokens))
            active = new_active(self._trie_params)
            if told:
                active[0] = CONTINUED
            trie.insert(
                young.trie.arrays, self._trie_params, text, space, new, end, active, GLOBAL_FREQ
            )
