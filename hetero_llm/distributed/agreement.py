"""What all ranks have to decide alike though each of them measures: numbers agreed on at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Agreement(Protocol):
    """All ranks call the same methods in the same order; each call waits for all of them.

    Attributes:
        size: number of ranks.
    """

    size: int

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        ...

    def of_first(self, values: Sequence[int]) -> list[int]:
        """The values of rank 0; all ranks give as many."""
        ...


class Alone:
    """The agreement of one process with itself."""

    size = 1

    def least(self, value: int) -> int:
        return value

    def of_first(self, values: Sequence[int]) -> list[int]:
        return list(values)


ALONE = Alone()


class GroupAgreement:
    """`Agreement` over torch's default group (`process_group`), in host memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def least(self, value: int) -> int:
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return int(shared[0])

    def of_first(self, values: Sequence[int]) -> list[int]:
        import torch
        import torch.distributed as dist

        shared = torch.tensor(list(values), dtype=torch.int64)
        dist.broadcast(shared, 0)
        return shared.tolist()
