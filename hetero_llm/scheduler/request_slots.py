"""The places of running sequences: free, taken, or kept for the forks of a request to come.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from hetero_llm.core.request import Request
from hetero_llm.scheduler.admission import forks_to_come


class Slots:
    """Integers from 0 on, handed out last in, first out.

    Args:
        count: of all slots.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._reserved: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has_room_for(self, request: Request) -> bool:
        """Whether there is a slot for its next sequence and for all that fork from it."""
        return len(self._free) > forks_to_come(request)

    def take(self) -> int:
        return self._free.pop()

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def reserve(self, request: Request, count: int) -> None:
        """Keeps slots for a request."""
        if count:
            self._reserved[request.request_id] = [self._free.pop() for _ in range(count)]

    def reserve_these(self, request: Request, slots: list[int]) -> None:
        """Keeps slots for a request that it had already."""
        if slots:
            self._reserved[request.request_id] = slots

    def take_reserved(self, request: Request) -> list[int]:
        """All that were kept for a request, perhaps none."""
        return self._reserved.pop(request.request_id, [])

    def give_reserved(self, request: Request) -> None:
        self._free.extend(self.take_reserved(request))

    def check_integrity(self, held: list[int]) -> None:
        """Asserts that every slot is held, free or reserved, once."""
        reserved = [slot for slots in self._reserved.values() for slot in slots]
        everything = sorted(held + reserved + self._free)
        assert everything == list(range(self._count)), "a slot was lost or doubled"
