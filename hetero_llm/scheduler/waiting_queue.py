"""The queue of sequences without a request slot, in the order in which their requests arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hetero_llm.core.request import Request, Sequence


class WaitingQueue:
    """First come, first served; a preempted sequence returns to the place of its request."""

    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()
        self._arrival: dict[str, int] = {}  # by id of every unfinished request
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        """Appends the first sequence of a new request."""
        self._arrival[sequence.request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._sequences.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Inserts a sequence that lost its request slot before those of the same request and of all
        that arrived later."""
        arrival = self._arrival[sequence.request.request_id]
        position = 0
        for other in self._sequences:
            if self._arrival[other.request.request_id] >= arrival:
                break
            position += 1
        self._sequences.insert(position, sequence)

    def at(self, index: int) -> Sequence | None:
        """The sequence behind `index` others; None if there are not as many."""
        return self._sequences[index] if index < len(self._sequences) else None

    def pop(self, index: int) -> None:
        """Removes the sequence behind `index` others."""
        if index:
            del self._sequences[index]
        else:
            self._sequences.popleft()

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def forget(self, request: Request) -> None:
        """Drops the arrival of a finished request, none of whose sequences waits."""
        del self._arrival[request.request_id]
