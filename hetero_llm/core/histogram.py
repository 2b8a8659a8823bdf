"""A histogram cheap enough to update every step; plain data that processes can exchange."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(slots=True)
class Histogram:
    """Counts of observed values.

    Attributes:
        bounds: ascending; a value belongs to the first bound that is not below it.
        counts: values that belong to each bound (not cumulative), and last those above all bounds.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        """Number of values observed."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
