"""What the ranks of a model that several processes or GPUs run together exchange. No torch at run
time: configurations name ranks, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that run a model together.

    Attributes:
        index: from 0 on.
        size: how many there are.
    """

    index: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.size, (self.index, self.size)


class Collectives(Protocol):
    """Exchanges between the ranks of a model. All ranks call the same methods in the same order,
    with tensors of the same shape and dtype."""

    rank: Rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, of the same shape and dtype; may overwrite `x`.

        The parts are added in the order of the ranks, half types in float32 and rounded once, so
        that every rank gets the same bits.
        """
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """[R, n] of each rank -> [R, n * size], the columns of rank 0 first."""
        ...


class _OneRank:
    """The `Collectives` of a model that one process runs."""

    rank = Rank(0, 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        return x


ONE_RANK: Collectives = _OneRank()


def same(x: Tensor) -> Tensor:
    """The product of a model that one rank runs is whole: see `Linear.reduce`."""
    return x
