"""What all ranks have to decide alike though each of them measures: numbers agreed on at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch.distributed as dist


class Agreement(Protocol):
    """All ranks call the same methods in the same order; each call waits for those concerned.

    Attributes:
        size: number of ranks.
    """

    size: int

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""

    def of_first(self, values: Sequence[int]) -> list[int]:
        """The values of the first rank that shares this rank's layers; all that share them give as
        many."""


class Alone:
    """The agreement of one process with itself."""

    size = 1

    def least(self, value: int) -> int:
        return value

    def of_first(self, values: Sequence[int]) -> list[int]:
        return list(values)


ALONE = Alone()


class GroupAgreement:
    """`Agreement` over torch's default group (`process_group`), in host memory.

    Args:
        size: number of ranks.
        first, members: the first rank that shares this rank's layers, and how many share them; by
            default all do.
        group: of these; None: the default group.
    """

    def __init__(
        self,
        size: int,
        *,
        first: int = 0,
        members: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.size = size
        self._first, self._members, self._group = first, members or size, group

    def least(self, value: int) -> int:
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return int(shared[0])

    def of_first(self, values: Sequence[int]) -> list[int]:
        import torch
        import torch.distributed as dist

        if self._members == 1:
            return list(values)
        shared = torch.tensor(list(values), dtype=torch.int64)
        dist.broadcast(shared, self._first, group=self._group)
        return shared.tolist()
