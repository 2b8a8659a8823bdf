"""What must hold between steps; for tests and when idle.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetero_llm.core.request import Request, Sequence
from hetero_llm.scheduler.step_builder import InFlight


def check_in_flight(
    flights: Iterable[InFlight], running: Iterable[Sequence], others: Iterable[Sequence]
) -> None:
    """Asserts that tokens yet unknown are those that steps in flight draw."""
    expected: dict[int, int] = {}
    for flight in flights:
        for s, epoch, samples in zip(flight.sequences, flight.epochs, flight.samples, strict=True):
            if s.epoch == epoch:
                expected[id(s)] = expected.get(id(s), 0) + samples
    assert all(s.num_pending_tokens == expected.get(id(s), 0) for s in running)
    assert all(s.num_pending_tokens == 0 for s in others)


def check_members(requests: Iterable[Request], placed: Iterable[Sequence]) -> None:
    """Asserts that the unfinished sequences of all requests are those that have a place."""
    kept = list(requests)
    live = [s for request in kept for s in request.sequences if not s.finished]
    assert sorted(map(id, live)) == sorted(map(id, placed)), "a sequence was lost or doubled"
    assert all(r.num_unfinished == sum(not s.finished for s in r.sequences) for r in kept)
