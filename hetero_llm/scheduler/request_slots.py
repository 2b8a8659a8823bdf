"""Request slots: the numbers under which running sequences keep block tables and sampling state."""

from __future__ import annotations

from hetero_llm.core.request import Request


class RequestSlots:
    """Integers from 0 on, each held by a sequence, reserved for a request's forks, or free.

    Free slots are handed out last in, first out.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._reserved: dict[str, list[int]] = {}  # by request id

    def has_room_for(self, request: Request) -> bool:
        """Whether slots are free for the request's next sequence and for all forks of it."""
        return len(self._free) > _num_forks(request)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def reserve_for_forks(self, request: Request) -> None:
        """Reserves free slots for the forks of a request that is about to be admitted."""
        if count := _num_forks(request):
            self._reserved[request.request_id] = [self._free.pop() for _ in range(count)]

    def reserve(self, request: Request, slots: list[int]) -> None:
        """Reserves slots that the request's sequences held or that were reserved for it before."""
        if slots:
            self._reserved[request.request_id] = slots

    def take_reserved(self, request: Request) -> list[int]:
        """All slots reserved for the request, perhaps none; they are reserved no more."""
        return self._reserved.pop(request.request_id, [])

    def give_back_reserved(self, request: Request) -> None:
        self._free.extend(self.take_reserved(request))

    def check_integrity(self, held: list[int]) -> None:
        """Asserts that every slot is held, free or reserved, once."""
        reserved = [slot for slots in self._reserved.values() for slot in slots]
        everything = sorted(held + reserved + self._free)
        assert everything == list(range(self._count)), "a slot was lost or doubled"


def _num_forks(request: Request) -> int:
    """How many forks of its next admitted sequence a request still needs to reach its width."""
    return 0 if len(request.sequences) > 1 else request.params.width - 1
