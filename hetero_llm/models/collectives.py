"""What the ranks of a model that several processes or GPUs run together exchange. No torch at run
time: configurations name ranks, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that run a model together, or that share the layers of one stage of it.

    Attributes:
        index: from 0 on.
        size: how many there are.
        stage: which part of the layers they share, from the first one on.
        stages: how many such parts there are.
    """

    index: int
    size: int
    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.size, (self.index, self.size)
        assert 0 <= self.stage < self.stages, (self.stage, self.stages)

    @property
    def is_whole(self) -> bool:
        """Whether it has all of the model."""
        return self.size == self.stages == 1

    @property
    def is_first(self) -> bool:
        """Whether it has the first layers, and so embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last layers and the head, and so samples."""
        return self.stage == self.stages - 1


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


class OneRank:
    """The `Collectives` of a model that one process runs, or of one stage of it.

    Args:
        rank: of size 1.
    """

    def __init__(self, rank: Rank) -> None:
        assert rank.size == 1
        self.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        return x


ONE_RANK: Collectives = OneRank(Rank(0, 1))


class StageLink(Protocol):
    """What a stage exchanges with its neighbours: one tensor a step, in the order of the steps."""

    def receive(self, out: Tensor) -> None:
        """Fills `out`, [T, hidden], with what the stage before has sent. On a GPU the current
        stream waits for it, not the host."""
        ...

    def send(self, x: Tensor) -> None:
        """Sends [T, hidden] to the next stage, without waiting until that has received it. Nothing
        may write to `x` afterwards."""
        ...


class _NoLink:
    """The `StageLink` of a model without stages."""

    def receive(self, out: Tensor) -> None:
        raise AssertionError("the first stage receives nothing")

    def send(self, x: Tensor) -> None:
        raise AssertionError("the last stage sends nothing")


NO_LINK: StageLink = _NoLink()


def same(x: Tensor) -> Tensor:
    """The product of a model that one rank runs is whole: see `Linear.reduce`."""
    return x
