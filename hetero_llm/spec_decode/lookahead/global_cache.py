"""The global cache: outputs of all requests, in generations of bounded size.

`young` takes everything new. When it is full it becomes `old`, and what was old is dropped as a
whole: no bookkeeping for each entry, and what recurs comes back by itself. `static` is a text that
stays, made elsewhere and put in place as a whole. Documents are parted by separators.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.spec_decode.lookahead import ngram_index, suffix_trie
from hetero_llm.spec_decode.lookahead.indexes import GLOBAL_FREQ, raw_params, trie_params
from hetero_llm.spec_decode.lookahead.ngram_index import RawIndex, RawParams
from hetero_llm.spec_decode.lookahead.suffix_trie import CONTINUED, Trie, TrieParams, new_active
from hetero_llm.spec_decode.lookahead.token_buffer import SEPARATOR

BEGIN, NEW, SPACE, TICK = range(4)
"""Columns of `Part.documents`."""

_SLICE = 4096
"""Tokens entered at once: the indexes reserve room for the worst that so many could need."""


@dataclass(frozen=True, slots=True)
class IndexParams:
    """Of the indexes of every generation; None for one that is not in use."""

    raw: RawParams | None
    trie: TrieParams | None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a generation learned: enough to learn it again.

    Attributes:
        text: [T] int32; before each document stands a separator.
        documents: [D, 4] int64, in order: where it begins; where its new tokens do, before which
            stands what other documents hold; its namespace's salt; when it was added. It ends
            before the next one's separator.
    """

    text: NDArray[np.int32]
    documents: NDArray[np.int64]

    def each(self) -> Iterator[tuple[NDArray[np.int32], int, int, int]]:
        """tokens, told, space and tick of each document, as in `Generation.add`."""
        rows = self.documents.tolist()
        following = [*rows[1:], [len(self.text) + 1]]
        for (begin, new, space, tick), after in zip(rows, following, strict=False):
            yield self.text[begin : after[BEGIN] - 1], new - begin, space, tick


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Of a whole history."""

    static: Part
    old: Part
    young: Part


class Generation:
    """A text and its indexes. One thread at a time.

    Args:
        room: tokens, separators included, that it holds without growing.

    Attributes:
        text: [room] int32.
        end: tokens of it in use, separators included.
        raw, trie: its indexes, None for one that is not in use.
    """

    def __init__(self, params: IndexParams, room: int = 0) -> None:
        self._params = params
        self._documents = array("q")
        self.text: NDArray[np.int32] = np.empty(room, np.int32)
        self.end = 0
        self.raw = None if params.raw is None else RawIndex(params.raw)
        self.trie = None if params.trie is None else Trie(params.trie)

    @property
    def num_bytes(self) -> int:
        indexes = sum(index.num_bytes for index in (self.raw, self.trie) if index is not None)
        return self.text.nbytes + indexes + 8 * len(self._documents)

    @property
    def num_documents(self) -> int:
        return len(self._documents) // 4

    def clear(self) -> None:
        self.end = 0
        self._documents = array("q")
        for index in (self.raw, self.trie):
            if index is not None:
                index.clear()

    def add(self, tokens: NDArray[np.int32], told: int, space: int, tick: int) -> None:
        """Learns a document.

        Args:
            told: its first tokens that are context only, known from another document.
            space: its namespace's salt.
            tick: time, never less than at the call before.
        """
        begin = self._append(tokens, told, space, tick)
        text, end, params = self.text[: self.end], self.end, self._params
        active = None if params.trie is None else new_active(params.trie)
        if active is not None and told:
            active[0] = CONTINUED
        for first in range(begin + told, end, _SLICE):
            last = min(first + _SLICE, end)
            if self.raw is not None and params.raw is not None:
                self.raw.reserve(last - first)
                ngram_index.insert(
                    self.raw.arrays, params.raw, text, space, begin, first, last, GLOBAL_FREQ, tick
                )
            if self.trie is not None:
                self.trie.reserve(last - first)
                suffix_trie.insert(
                    self.trie.arrays, params.trie, text, space, first, last, active, GLOBAL_FREQ
                )

    def add_many(self, documents: Sequence[tuple[NDArray[np.int32], int, int]], tick: int) -> None:
        """Learns documents (tokens, told and space, as in `add`) in two compiled calls, which hold
        no lock: between calls a thread may wait long for one."""
        rows = []
        for tokens, told, space in documents:
            begin = self._append(tokens, told, space, tick)
            rows.append((space, begin, begin + told, self.end))
        spaces, begins, news, ends = np.array(rows, np.int64).reshape(-1, 4).T.copy()
        text, size, params = self.text[: self.end], int((ends - news).sum()), self._params
        if self.raw is not None and params.raw is not None:
            self.raw.reserve(size)
            ngram_index.insert_all(
                self.raw.arrays, params.raw, text, spaces, begins, news, ends, GLOBAL_FREQ, tick
            )
        if self.trie is not None and params.trie is not None:
            self.trie.reserve(size)
            actives = np.tile(new_active(params.trie), (len(rows), 1))
            actives[news > begins, 0] = CONTINUED
            suffix_trie.insert_all(
                self.trie.arrays, params.trie, text, spaces, news, ends, actives, GLOBAL_FREQ
            )

    def _append(self, tokens: NDArray[np.int32], told: int, space: int, tick: int) -> int:
        """Adds a document to the text; returns where it begins."""
        begin, end = self.end + 1, self.end + 1 + len(tokens)
        if end > len(self.text):
            larger = np.empty(max(end, 2 * len(self.text)), np.int32)
            larger[: self.end] = self.text[: self.end]
            self.text = larger
        self.text[self.end] = SEPARATOR
        self.text[begin:end] = tokens
        self.end = end
        self._documents.extend((begin, begin + told, space, tick))
        return begin

    def part(self) -> Part:
        """What it learned. The text is shared: to be read until the next `add`. Ticks are replaced
        by their ranks, so that they cannot grow from one process to the next for ever."""
        documents = np.array(self._documents, np.int64).reshape(-1, 4)
        documents[:, TICK] = np.unique(documents[:, TICK], return_inverse=True)[1]
        return Part(self.text[: self.end], documents)


class History:
    """See above. One thread at a time, but for `use`.

    Args:
        capacity: tokens of the young and the old generation together; 0 keeps nothing.

    Attributes:
        capacity: that of the old and the young, and once more of the static generation.
        changed: set to True whenever a generation is changed or replaced.
    """

    def __init__(
        self, config: LookaheadConfig, capacity: int, *, uses_raw: bool, uses_trie: bool
    ) -> None:
        self.capacity = capacity
        self.changed = True
        self._params = IndexParams(
            raw_params(config) if uses_raw else None, trie_params(config) if uses_trie else None
        )
        self._young, self._old = (Generation(self._params, capacity // 2) for _ in range(2))
        self._static = self.new_static()
        self._ticks_before = 0  # of the process whose snapshot was restored
        self._compile()

    def _compile(self) -> None:
        """Goes once through everything that is compiled at its first use."""
        scratch, document = self.new_static(), np.zeros(2, np.int32)
        scratch.add(document, 0, 0, 0)
        scratch.add_many([(document, 0, 0)], 0)

    @property
    def num_bytes(self) -> int:
        """Of memory reserved; the system grants a text's as it fills."""
        return sum(generation.num_bytes for generation in self.generations)

    @property
    def num_tokens(self) -> int:
        """Separators included."""
        return sum(generation.end for generation in self.generations)

    @property
    def num_documents(self) -> int:
        return sum(generation.num_documents for generation in self.generations)

    @property
    def num_bigrams(self) -> int:
        """Different contexts of min_match_length tokens (two unless configured), those of other
        generations and namespaces apart; 0 without the trie."""
        return sum(g.trie.num_keys for g in self.generations if g.trie is not None)

    @property
    def room(self) -> int:
        """Tokens, separators included, that the young and the old generation have each."""
        return self.capacity // 2

    @property
    def generations(self) -> tuple[Generation, Generation, Generation]:
        """The young, the old and the static one; to be read until the next `add`."""
        return self._young, self._old, self._static

    def add(self, tokens: NDArray[np.int32], told: int, space: int, tick: int) -> None:
        """Learns a document under a namespace's salt. One that is larger than a generation is
        left out.

        Args:
            told: its first tokens that are context only, known from another document.
            tick: time, never less than at the call before.
        """
        size = len(tokens) + 1
        if size > self.room:
            return
        if self._young.end + size > self.room:
            self._old.clear()
            self._young, self._old = self._old, self._young
        self._young.add(tokens, told, space, self._ticks_before + tick)
        self.changed = True

    def new_static(self) -> Generation:
        """An empty generation to be filled, by any thread, and then put in place by `use`."""
        return Generation(self._params)

    def use(self, static: Generation) -> None:
        """Puts a static generation in place, from any thread: whoever looks up meanwhile has the
        one before or this one. It is not to be changed any more."""
        self._static = static
        self.changed = True

    def parts(self) -> Parts:
        """Everything it knows, to be read until the next `add`."""
        return Parts(self._static.part(), self._old.part(), self._young.part())

    def restore(self, parts: Parts) -> None:
        """Becomes what another history was, whose parts fit: its `room` and `capacity` hold them.

        Raises:
            MemoryError: there is none for it; nothing has changed.
        """
        assert max(len(parts.young.text), len(parts.old.text)) <= self.room
        young, old = (Generation(self._params, self.room) for _ in range(2))
        static = self.new_static()
        for generation, part in ((young, parts.young), (old, parts.old), (static, parts.static)):
            for tokens, told, space, tick in part.each():
                generation.add(tokens, told, space, tick)
        ticks = parts.young.documents[-1:, TICK].tolist()
        self._young, self._old, self._static = young, old, static
        self._ticks_before = ticks[0] + 1 if ticks else 0
        self.changed = True
