"""Responses that clients may come back to, in memory and within bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_ENTRY_BYTES = 512
"""What an entry takes beside its two texts, about."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and what it was made from, as JSON.

    Attributes:
        response: the response object.
        items: the list of all its input items, those of earlier responses included.
    """

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.response) + len(self.items) + _ENTRY_BYTES


class ResponseStore:
    """Keeps the responses that were used last, each for its owner only.

    Args:
        most: responses of all owners together; 0 keeps none.
        most_bytes: of their texts.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._size = 0

    def __bool__(self) -> bool:
        """Whether responses are kept at all."""
        return self._most > 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response_id: str, entry: StoredResponse) -> bool:
        """Keeps a response, and drops those that were not used for longest. Returns False if it is
        larger than the whole store."""
        self.delete(owner, response_id)
        if not self or entry.size > self._most_bytes:
            return False
        self._entries[owner, response_id] = entry
        self._size += entry.size
        while len(self._entries) > self._most or self._size > self._most_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._size -= dropped.size
        return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The owner's response of this id; None if there is none."""
        found = self._entries.get((owner, response_id))
        if found is not None:
            self._entries.move_to_end((owner, response_id))
        return found

    def delete(self, owner: str, response_id: str) -> bool:
        """Drops a response; returns whether there was one."""
        found = self._entries.pop((owner, response_id), None)
        if found is not None:
            self._size -= found.size
        return found is not None
