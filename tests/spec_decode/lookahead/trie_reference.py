"""The suffix trie as a dict from contexts to what followed them, to compare the arrays with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetero_llm.spec_decode.lookahead import suffix_trie
from hetero_llm.spec_decode.lookahead.ngram_index import find_slot, hash_tokens
from hetero_llm.spec_decode.lookahead.suffix_trie import SuffixTrie, TrieArrays, TrieParams

Context = tuple[int, tuple[int, ...]]
"""Salt and tokens."""
Cell = dict[int, tuple[np.float32, int]]
"""Frequency and last position by token."""
Place = Context | int
"""Of a context that is known: its key, or the position in the text where it goes on."""


@dataclass
class DictTrie:
    """A leaf is the position where its context went on."""

    params: TrieParams
    nodes: dict[Context, int | Cell] = field(default_factory=dict)

    def insert(self, text: np.ndarray, salt: int, span: range, reach: int, freq: float) -> None:
        """The positions of `span`, in contexts that begin at `reach` or later."""
        shortest, deepest = self.params.key_length, self.params.max_depth - 1
        for position in span:
            token = int(text[position])
            if token < 0:
                continue
            for length in range(deepest, shortest - 1, -1):
                context = _context(text, reach, position, length)
                node = None if context is None else self.nodes.get((salt, context))
                # A leaf that goes on right here has been made for this very occurrence.
                if context is not None and node is not None and node != position:
                    self._follow((salt, context), text, position, freq)
            key = _context(text, reach, position + 1, shortest)
            if key is not None:
                self.nodes.setdefault((salt, key), position + 1)

    def remove(self, salt: int) -> None:
        self.nodes = {key: node for key, node in self.nodes.items() if key[0] != salt}

    def find(self, salt: int, context: tuple[int, ...], text: np.ndarray) -> Place | None:
        if min(context) < 0:
            return None
        for length in range(self.params.key_length, len(context) + 1):
            node = self.nodes.get((salt, context[:length]))
            if node is None:
                return None
            rest = context[length:]
            if rest and isinstance(node, int):
                known = text[node : node + len(rest)].tolist()
                return node + len(rest) if known == list(rest) else None
        return salt, context

    def after(self, place: Place, text: np.ndarray) -> list[tuple[int, float, int, Place]]:
        """Token, frequency (0 for a single occurrence), last position, place behind it."""
        node = place if isinstance(place, int) else self.nodes[place]
        if isinstance(node, int):
            if node >= len(text) or text[node] < 0:
                return []
            return [(int(text[node]), 0.0, node, node + 1)]
        assert not isinstance(place, int)
        found: list[tuple[int, float, int, Place]] = []
        for token, (freq, last) in node.items():
            below = (place[0], (*place[1], token))
            found.append((token, float(freq), last, below if below in self.nodes else last + 1))
        return found

    def _follow(self, key: Context, text: np.ndarray, position: int, freq: float) -> None:
        node = self.nodes[key]
        if isinstance(node, int):
            self.nodes[key] = {}
            if node < len(text) and text[node] >= 0:
                self._add(key, int(text[node]), node, freq)
        cell, token = self.nodes[key], int(text[position])
        assert isinstance(cell, dict)
        if token in cell:
            cell[token] = (np.float32(cell[token][0] + np.float32(1)), position)
        else:
            self._add(key, token, position, freq)

    def _add(self, key: Context, token: int, position: int, freq: float) -> None:
        salt, context = key
        cell = self.nodes[key]
        assert isinstance(cell, dict)
        if len(cell) == self.params.cell_max_size:
            weak = [t for t in cell if cell[t][0] <= self.params.threshold]
            if weak:
                victim = min(weak, key=lambda t: cell[t][1])
            else:
                for other, (held, last) in cell.items():
                    cell[other] = (np.float32(float(held) * self.params.decay), last)
                victim = min(cell, key=lambda t: cell[t])
            del cell[victim]
            gone = (*context, victim)
            for below in [k for k in self.nodes if k[0] == salt and k[1][: len(gone)] == gone]:
                del self.nodes[below]
        cell[token] = (np.float32(freq), position)
        if len(context) + 1 < self.params.max_depth:
            self.nodes[salt, (*context, token)] = position + 1


def _context(text: np.ndarray, reach: int, end: int, length: int) -> tuple[int, ...] | None:
    """The tokens before `end`, unless a separator is among them or the text begins later."""
    if end - length < reach:
        return None
    tokens = tuple(text[end - length : end].tolist())
    return None if min(tokens) < 0 else tokens


def contents(
    held: SuffixTrie, params: TrieParams, keys: list[Context]
) -> dict[Context, int | Cell]:
    """All that a trie holds under these keys, after a check of its structure."""
    arrays = held.arrays
    nodes: dict[Context, int | Cell] = {}
    waiting: list[tuple[int, Context]] = []
    for salt, tokens in keys:
        text = np.array(tokens, np.int32)
        slot = find_slot(arrays.slots, hash_tokens(text, 0, len(text), salt))
        assert arrays.slots[slot, suffix_trie.KEY] != 0, (salt, tokens)
        waiting.append((int(arrays.slots[slot, suffix_trie.ROOT]), (salt, tokens)))
    assert len(waiting) == held.num_keys
    room = 0
    seen = set()
    while waiting:
        node, (salt, tokens) = waiting.pop()
        assert node not in seen
        seen.add(node)
        block, size = arrays.nodes[node].tolist()
        if size == 0:
            nodes[salt, tokens] = block
            continue
        assert 0 < size <= params.cell_max_size
        room += 1 << (size - 1).bit_length()
        cell = nodes[salt, tokens] = {}
        for row in range(block, block + size):
            token, child, _, last = arrays.entries[row].tolist()
            assert token not in cell
            cell[token] = (arrays.freqs[row, suffix_trie.FREQ], last)
            assert (child >= 0) == (len(tokens) + 1 < params.max_depth)
            if child >= 0:
                waiting.append((child, (salt, (*tokens, token))))
    assert len(seen) == held.num_nodes
    assert room == held.num_entries
    return nodes


def keys_of(nodes: dict[Context, int | Cell], params: TrieParams) -> list[Context]:
    return [key for key in nodes if len(key[1]) == params.key_length]


def no_trie(params: TrieParams) -> tuple[TrieArrays, np.ndarray]:
    """An empty trie and its text."""
    return SuffixTrie(params).arrays, np.zeros(0, np.int32)
