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

    def quantile(self, share: float) -> float:
        """The value below which this share (0 to 1) of the values lies, interpolated between the
        bounds around it. Values above all bounds count as the last bound.

        Raises:
            ValueError: there are no values.
        """
        wanted = share * self.count
        below, lower = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        if not self.count:
            raise ValueError("a histogram without values has no quantiles")
        return self.bounds[-1]
