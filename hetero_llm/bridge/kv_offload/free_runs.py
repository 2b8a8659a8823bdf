"""Free host blocks as runs of neighbours, so that consecutive KV blocks get neighbouring ones."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import groupby

_SLACK = 64


class FreeRuns:
    """A set of integers, kept as maximal runs of neighbours. Operations take about a microsecond a
    run, whatever its length.

    Attributes:
        count: number of free host blocks.
    """

    def __init__(self) -> None:
        self.count = 0
        self._end: dict[int, int] = {}  # start of each run to its end, exclusive
        self._start: dict[int, int] = {}  # the other way round
        self._longest: list[tuple[int, int]] = []  # heap of (-length, start); may be out of date

    def give(self, blocks: Iterable[int]) -> None:
        """Adds host blocks, none of which is free, each listed once."""
        numbered = enumerate(sorted(blocks))
        for _, group in groupby(numbered, lambda pair: pair[1] - pair[0]):
            run = [block for _, block in group]
            self.give_range(run[0], run[-1] + 1)

    def give_range(self, start: int, end: int) -> None:
        """Adds the host blocks `start .. end - 1`, none of which is free."""
        assert start < end and start not in self._end and end not in self._start
        self.count += end - start
        before = self._start.pop(start, None)
        if before is not None:
            del self._end[before]
            start = before
        behind = self._end.pop(end, None)
        if behind is not None:
            del self._start[behind]
            end = behind
        self._add(start, end)

    def take(self, count: int, *, after: int, before: int, low: bool) -> list[int]:
        """Removes `count` free host blocks; there must be as many.

        Args:
            after: preferred predecessor of the first one; negative: none.
            before: preferred successor of the last one; negative: none.
            low: take from the low end of a run, for a prefix that will grow upwards; else from the
                high end, for one that will grow downwards.

        Returns:
            The host blocks in ascending runs, as few as the longest free runs allow.
        """
        assert count <= self.count
        head: list[int] = []
        tail: list[int] = []
        if after >= 0 and after + 1 in self._end:
            head = self._cut(after + 1, count, low=True)
        if len(head) < count and before > 0 and before in self._start:
            tail = self._cut(self._start[before], count - len(head), low=False)
        while len(head) + len(tail) < count:
            head += self._cut(self._find_longest(), count - len(head) - len(tail), low=low)
        return head + tail

    def runs(self) -> list[tuple[int, int]]:
        """All runs, (start, end), ascending."""
        return sorted(self._end.items())

    def _find_longest(self) -> int:
        while True:
            length, start = self._longest[0]
            if self._end.get(start) == start - length:
                return start
            heappop(self._longest)

    def _cut(self, start: int, count: int, *, low: bool) -> list[int]:
        """Removes up to `count` host blocks from the run that begins at `start`."""
        end = self._end.pop(start)
        del self._start[end]
        count = min(count, end - start)
        self.count -= count
        if low:
            taken = range(start, start + count)
            start += count
        else:
            taken = range(end - count, end)
            end -= count
        if start < end:
            self._add(start, end)
        return list(taken)

    def _add(self, start: int, end: int) -> None:
        self._end[start] = end
        self._start[end] = start
        heappush(self._longest, (start - end, start))
        if len(self._longest) > 2 * len(self._end) + _SLACK:
            self._longest = [(first - last, first) for first, last in self._end.items()]
            heapify(self._longest)
