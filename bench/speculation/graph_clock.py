"""Device times of an engine's captured steps, and of the gaps between them."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from hetero_llm.gpu.model_runner import GpuModelRunner

_REPLAYS = 16  # a multiple of the lengths of the input and the result ring


class GraphClock:
    """Events around every replayed graph of a runner, until it is stopped.

    Args:
        keeps: the input buffer of the last verify step, for `alone`. Costs some microseconds a
            step.
    """

    def __init__(self, runner: GpuModelRunner, *, keeps: bool = False) -> None:
        assert runner.graphs is not None
        graphs = runner.graphs.captured
        self._graphs = graphs
        self._replay = graphs.replay
        self._filler, self._keeps = runner.filler, keeps
        self._kept: tuple[tuple[str, int], np.ndarray] | None = None  # a verify step's input buffer
        self.events: list[tuple[tuple[str, int], torch.cuda.Event, torch.cuda.Event]] = []
        graphs.replay = self._timed  # type: ignore[method-assign]

    def stop(self) -> None:
        self._graphs.replay = self._replay  # type: ignore[method-assign]

    def _timed(self, key: tuple[str, int]) -> None:
        if self._keeps and "verify" in key[0] and (self._kept is None or self._kept[0] != key):
            # Not torch's: its threads would wake up, on cores that others spin on.
            self._kept = key, self._filler.filled.copy()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._replay(key)
        end.record()
        self.events.append((key, begin, end))

    def alone(self) -> float:
        """Milliseconds of the verify graph last kept, replayed over every place of the rings."""
        assert self._kept is not None
        key, buffer = self._kept
        torch.cuda.synchronize()
        self._filler.ring[:] = torch.from_numpy(buffer)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._replay(key)
        begin.record()
        for _ in range(_REPLAYS - 1):
            self._replay(key)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / (_REPLAYS - 1)

    def medians(self, names: tuple[str, ...]) -> tuple[float, float]:
        """Median ms of graphs of these names, and of the gaps between neighbouring ones."""
        torch.cuda.synchronize()
        chosen = [(b, e) for key, b, e in self.events if key[0] in names]
        self.events.clear()
        steps = [begin.elapsed_time(end) for begin, end in chosen]
        gaps = [a[1].elapsed_time(b[0]) for a, b in zip(chosen, chosen[1:], strict=False)]
        return statistics.median(steps), statistics.median(gaps)

    def gaps(self, names: tuple[str, ...]) -> list[float]:
        """Ms from the end of each graph of these names to the next one, where that is of them too;
        the events are forgotten."""
        torch.cuda.synchronize()
        pairs = zip(self.events, self.events[1:], strict=False)
        found = [
            one[2].elapsed_time(other[1])
            for one, other in pairs
            if one[0][0] in names and other[0][0] in names
        ]
        self.events.clear()
        return found


def same_share(first: list[list[int]], second: list[list[int]]) -> float:
    """Share of tokens before a sequence's first difference."""
    same = total = 0
    for one, other in zip(first, second, strict=True):
        pairs = zip(one, other, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))
        total += len(one)
    return same / total
