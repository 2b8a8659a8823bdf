"""The text that a parser reads while it comes, and which of its markers are special tokens."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence


# large: the text, its tokens up to the next marker, and the reader's place in it.
class TextSource:
    """Text up to now, without what was consumed.

    A marker that is one token of the model is real only where that token was generated: the same
    text in prose, which the model writes with other tokens, is text. Tokens come before their text
    or with it, so the order of tokens tells which occurrences in the text are real.

    Args:
        marker_ids: the token of each marker that has one.
        dropped: special tokens, by id, whose text is left out.
        decode: token ids to text, special tokens included.

    Attributes:
        text, at: what has come, and where the reader stands in it.
        ended: no more text will come.
    """

    def __init__(
        self,
        marker_ids: Mapping[str, int],
        dropped: Mapping[int, str],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._marker_ids = marker_ids
        self._markers = {token: marker for marker, token in marker_ids.items()}
        self._dropped = dropped
        self._control = frozenset(self._markers) | dropped.keys()
        self._decode = decode
        longest_first = sorted(marker_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if marker_ids else None
        self._overlap = max(map(len, marker_ids), default=1) - 1
        self._since: list[int] = []
        """Tokens since the last marker's."""
        self._seen: dict[str, int] = {}
        """Occurrences of each marker in the text of these tokens, as far as it has come."""
        self._coming: dict[str, deque[bool]] = {marker: deque() for marker in marker_ids}
        """Of each marker whose text has not come yet: whether it is real."""
        self._to_drop: list[str] = []
        self._real: set[int] = set()
        self._base = 0
        self._searched = 0
        self._kept: list[str] | None = None
        self.text = ""
        self.at = 0
        self.ended = False

    def feed(self, text: str, token_ids: Sequence[int]) -> None:
        """Appends text; `token_ids` are the new tokens, whose text may come later."""
        if self._control.isdisjoint(token_ids):
            self._since.extend(token_ids)
        else:
            for token in token_ids:
                self._note(token)
        if not text:
            return
        self._base += self.at
        self.text = self.text[self.at :] + text
        self.at = 0
        if self._to_drop:
            self._drop()
        if self._pattern is not None:
            self._classify()

    def _note(self, token: int) -> None:
        if token in self._dropped:
            self._to_drop.append(self._dropped[token])
        elif token not in self._markers:
            self._since.append(token)
        else:
            before = self._decode(self._since) if self._since else ""
            for marker, coming in self._coming.items():
                coming.extend([False] * (before.count(marker) - self._seen.get(marker, 0)))
            self._coming[self._markers[token]].append(True)
            self._since.clear()
            self._seen.clear()

    def _drop(self) -> None:
        """Removes the text of special tokens that has come."""
        left = []
        for unwanted in self._to_drop:
            found = self.text.find(unwanted)
            if found < 0:
                left.append(unwanted)
            else:
                self.text = self.text[:found] + self.text[found + len(unwanted) :]
        self._to_drop = left

    def _classify(self) -> None:
        """Notes which occurrences of markers in the new text are real."""
        assert self._pattern is not None
        start = max(self._searched - self._base, 0)
        for found in self._pattern.finditer(self.text, start):
            coming = self._coming[found[0]]
            if not coming:
                self._seen[found[0]] = self._seen.get(found[0], 0) + 1
            elif coming.popleft():
                self._real.add(self._base + found.start())
            start = found.end()
        # A marker may have begun within the last characters.
        self._searched = self._base + max(start, len(self.text) - self._overlap)

    def is_real(self, marker: str, index: int) -> bool:
        """Whether the text at `index`, which equals `marker`, is the marker."""
        return marker not in self._marker_ids or self._base + index in self._real

    def has_token(self, marker: str) -> bool:
        return marker in self._marker_ids

    def take(self, end: int) -> str:
        """Consumes the text up to index `end`."""
        taken = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def keep(self) -> None:
        """From here on keeps what is consumed, until `release` or `kept`."""
        self._kept = []

    def release(self) -> None:
        """Forgets what was kept."""
        self._kept = None

    def kept(self) -> str:
        """What was consumed since `keep`; ends keeping."""
        text = "".join(self._kept or ())
        self._kept = None
        return text
