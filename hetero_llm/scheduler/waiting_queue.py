"""Sequences that wait for a slot and blocks, in the order in which their requests arrived.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hetero_llm.core.request import Request, Sequence


class WaitingQueue:
    """A queue into which preempted sequences come back at their old place."""

    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()
        self._arrival: dict[str, int] = {}  # of requests, waiting or not
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def arrive(self, sequence: Sequence) -> None:
        """The first sequence of a new request."""
        self._arrival[sequence.request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._sequences.append(sequence)

    def come_back(self, sequence: Sequence) -> None:
        """A sequence that lost its slot."""
        arrival = self._arrival[sequence.request.request_id]
        position = 0
        for other in self._sequences:
            if self._arrival[other.request.request_id] >= arrival:
                break
            position += 1
        self._sequences.insert(position, sequence)

    def take_first(self) -> Sequence:
        return self._sequences.popleft()

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def forget(self, request: Request) -> None:
        """The request is over; none of its sequences waits."""
        del self._arrival[request.request_id]
