"""Ranks as threads of one process: `Collectives` over tensors in memory, sums in rank order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from hetero_llm.models.collectives import Rank

T = TypeVar("T")


class ThreadRanks:
    """What ranks that are threads share.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.places: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)
        self.num_sums = 0

    def run(self, act: Callable[[ThreadCollectives], T]) -> list[T]:
        """What each rank returns. An error of one ends the others and is raised."""

        def guarded(index: int) -> T:
            try:
                return act(ThreadCollectives(self, index))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, index) for index in range(self.size)]
        errors = [error for one in futures if (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [one.result() for one in futures]


class ThreadCollectives:
    """The `Collectives` of one of these ranks."""

    def __init__(self, ranks: ThreadRanks, index: int) -> None:
        self.rank = Rank(index, ranks.size)
        self._ranks = ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._exchange(x)
        if self.rank.index == 0:
            self._ranks.num_sums += 1
        total = parts[0].double() if x.dtype == torch.float64 else parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gather_columns(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return torch.cat(self._exchange(x), dim=1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """A copy of each rank's tensor."""
        ranks = self._ranks
        ranks.places[self.rank.index] = x.clone()
        ranks.barrier.wait()
        found = [part for part in ranks.places if part is not None]
        assert len(found) == ranks.size
        assert {(part.shape, part.dtype) for part in found} == {(x.shape, x.dtype)}
        ranks.barrier.wait()
        return found
