"""The global cache: outputs of all requests, in generations of bounded size.

The young generation takes everything new. When it is full it becomes the old one, and what was old
is dropped as a whole: no bookkeeping for each entry, and what recurs comes back by itself. The
static generation is built elsewhere, from a warm-up file, and put in place as a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.config.lookahead_config import LookaheadConfig
from hetero_llm.spec_decode.lookahead.indexes import (
    GlobalIndex,
    GlobalNgramIndex,
    GlobalSuffixTrie,
    ngram_params,
    trie_params,
)
from hetero_llm.spec_decode.lookahead.recurrence import GramFilter
from hetero_llm.spec_decode.lookahead.sequence_state import SEPARATOR

BEGIN, NEW, SPACE, TICK = range(4)
"""Columns of `GenerationContent.documents`."""

_STATIC_TOKENS = 1 << 18
"""Tokens for which a generation without a bound has a filter of grams: more make it less sharp."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationContent:
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
        """tokens, num_known, namespace and tick of each document, as in `Generation.add`."""
        rows = self.documents.tolist()
        following = [*rows[1:], [len(self.text) + 1]]
        for (begin, new, namespace, tick), after in zip(rows, following, strict=False):
            yield self.text[begin : after[BEGIN] - 1], new - begin, namespace, tick


@dataclass(frozen=True, slots=True, eq=False)
class CacheContent:
    """What a whole global cache learned."""

    static: GenerationContent
    old: GenerationContent
    young: GenerationContent


class Generation:
    """Documents and their indexes. One thread at a time.

    Args:
        indexes: empty ones; none if the documents are only to be kept.
        room: tokens, separators included, that it holds without growing.

    Attributes:
        text: [room] int32.
        end: tokens of it in use, separators included.
        indexes: of the text. To be read only.
        grams: of the text, whether it is indexed or not. To be read only.
    """

    def __init__(self, indexes: Sequence[GlobalIndex] = (), room: int = 0) -> None:
        self.indexes = indexes
        self.grams = GramFilter(room or _STATIC_TOKENS)
        self._documents = array("q")
        self.text: NDArray[np.int32] = np.empty(room, np.int32)
        self.end = 0

    @property
    def num_bytes(self) -> int:
        indexes = sum(index.num_bytes for index in self.indexes)
        own = self.text.nbytes + self.grams.words.nbytes + 8 * len(self._documents)
        return own + indexes

    @property
    def num_documents(self) -> int:
        return len(self._documents) // 4

    def clear(self) -> None:
        self.end = 0
        self._documents = array("q")
        self.grams.clear()
        for index in self.indexes:
            index.clear()

    def add(self, tokens: NDArray[np.int32], num_known: int, namespace: int, tick: int) -> None:
        """Learns a document.

        Args:
            num_known: its first tokens that are context only: another document holds them.
            namespace: its namespace's salt.
            tick: time, never less than at the call before.
        """
        start = self._append(tokens, num_known, namespace, tick)
        text, begin, end = self.text[: self.end], start + num_known, self.end
        for index in self.indexes:
            index.add(text, namespace, start, begin, end, tick)

    def add_many(self, documents: Sequence[tuple[NDArray[np.int32], int, int]], tick: int) -> None:
        """Learns documents (tokens, num_known and namespace, as in `add`) in one compiled call for
        each index, which holds no lock: between calls a thread may wait long for one."""
        rows = []
        for tokens, num_known, namespace in documents:
            start = self._append(tokens, num_known, namespace, tick)
            rows.append((namespace, start, start + num_known, self.end))
        namespaces, starts, begins, ends = np.array(rows, np.int64).reshape(-1, 4).T.copy()
        text = self.text[: self.end]
        for index in self.indexes:
            index.add_many(text, namespaces, starts, begins, ends, tick)

    def _append(self, tokens: NDArray[np.int32], num_known: int, namespace: int, tick: int) -> int:
        """Appends a document to the text; returns where it begins."""
        start, end = self.end + 1, self.end + 1 + len(tokens)
        if end > len(self.text):
            larger = np.empty(max(end, 2 * len(self.text)), np.int32)
            larger[: self.end] = self.text[: self.end]
            self.text = larger
        self.text[self.end] = SEPARATOR
        self.text[start:end] = tokens
        self.end = end
        self.grams.add(tokens, namespace)
        self._documents.extend((start, start + num_known, namespace, tick))
        return start

    def content(self) -> GenerationContent:
        """What it learned. The text is shared: to be read until the next `add`. Ticks are replaced
        by their ranks, so that they cannot grow from one process to the next for ever."""
        documents = np.array(self._documents, np.int64).reshape(-1, 4)
        documents[:, TICK] = np.unique(documents[:, TICK], return_inverse=True)[1]
        return GenerationContent(self.text[: self.end], documents)


class GlobalCache:
    """See the module. One thread at a time, but for `use`.

    Args:
        capacity: tokens of the young and the old generation together; 0 keeps nothing.

    Attributes:
        capacity: that of the old and the young, and once more of the static generation.
        changed: set to True whenever a generation is changed or replaced.
    """

    def __init__(
        self, config: LookaheadConfig, capacity: int, *, uses_ngrams: bool, uses_trie: bool
    ) -> None:
        self.capacity = capacity
        self.changed = True
        self._ngrams = ngram_params(config) if uses_ngrams else None
        self._trie = trie_params(config) if uses_trie else None
        self._young, self._old = (self._new_generation(self.room) for _ in range(2))
        self._static = self.new_static()
        self._first_tick = 0  # above those of a restored snapshot
        self._compile()

    def _compile(self) -> None:
        """Calls everything that is compiled at its first use."""
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
        indexes = [index for generation in self.generations for index in generation.indexes]
        return sum(index.num_keys for index in indexes if isinstance(index, GlobalSuffixTrie))

    @property
    def room(self) -> int:
        """Tokens, separators included, that the young and the old generation have each."""
        return self.capacity // 2

    @property
    def generations(self) -> tuple[Generation, Generation, Generation]:
        """The young, the old and the static one; to be read until the next `add`."""
        return self._young, self._old, self._static

    def add(self, tokens: NDArray[np.int32], num_known: int, namespace: int, tick: int) -> None:
        """Learns a document under a namespace's salt. One that is larger than a generation is
        left out.

        Args:
            num_known: its first tokens that are context only: another document holds them.
            tick: time, never less than at the call before.
        """
        size = len(tokens) + 1
        if size > self.room:
            return
        if self._young.end + size > self.room:
            self._old.clear()
            self._young, self._old = self._old, self._young
        self._young.add(tokens, num_known, namespace, self._first_tick + tick)
        self.changed = True

    def new_static(self) -> Generation:
        """An empty generation to be filled, by any thread, and then put in place by `use`."""
        return self._new_generation(0)

    def _new_generation(self, room: int) -> Generation:
        indexes: list[GlobalIndex] = []
        if self._trie is not None:
            indexes.append(GlobalSuffixTrie(self._trie))
        if self._ngrams is not None:
            indexes.append(GlobalNgramIndex(self._ngrams))
        return Generation(indexes, room)

    def use(self, static: Generation) -> None:
        """Puts a static generation in place, from any thread: a lookup meanwhile sees the one
        before or this one. It is not to be changed any more."""
        self._static = static
        self.changed = True

    def content(self) -> CacheContent:
        """Everything it knows, to be read until the next `add`."""
        return CacheContent(self._static.content(), self._old.content(), self._young.content())

    def restore(self, content: CacheContent) -> None:
        """Becomes what another cache was, whose content fits: `room` and `capacity` hold it.

        Raises:
            MemoryError: there is none for it; nothing has changed.
        """
        assert max(len(content.young.text), len(content.old.text)) <= self.room
        young, old = (self._new_generation(self.room) for _ in range(2))
        static = self.new_static()
        for generation, learned in (
            (young, content.young), (old, content.old), (static, content.static),
        ):  # fmt: skip
            for tokens, num_known, namespace, tick in learned.each():
                generation.add(tokens, num_known, namespace, tick)
        ticks = content.young.documents[-1:, TICK].tolist()
        self._young, self._old, self._static = young, old, static
        self._first_tick = ticks[0] + 1 if ticks else 0
        self.changed = True
