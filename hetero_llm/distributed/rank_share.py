"""A rank's part in what all ranks do together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero_llm.distributed.agreement import ALONE, Agreement
from hetero_llm.models.collectives import NO_LINK, ONE_RANK, Collectives, StageLink


def _nothing() -> None:
    pass


def never() -> bool:
    """False: what cannot happen here."""
    return False


@dataclass(frozen=True, slots=True)
class RankShare:
    """Attributes:
    collectives: of the model, or of this rank's stage: between the ranks that share its layers.
    agreement: about what is measured at start.
    in_graphs: whether CUDA graphs may hold the collectives.
    sequence: between the ranks with the same part of each layer, which share the tokens of a step.
    serves: called when the engine begins to serve: from now on a peer is waited for as long as
        a step may take, and no longer as long as a start.
    gave_up: whether collectives have ended without a peer, and their results are garbage.
    abort: ends collectives that wait on the device for a peer that is dead; any thread calls it.
    leave: gives back what the collectives hold, and leaves the group of all ranks.
    link: to the neighbouring stages.
    faults: descriptor of the memory in which ranks say that their numbers are garbage; -1: none.
    """

    collectives: Collectives
    agreement: Agreement
    in_graphs: bool = True
    serves: Callable[[], None] = _nothing
    gave_up: Callable[[], bool] = never
    abort: Callable[[], None] = _nothing
    leave: Callable[[], None] = _nothing
    sequence: Collectives = ONE_RANK
    link: StageLink = NO_LINK
    faults: int = -1


ALONE_SHARE = RankShare(ONE_RANK, ALONE)
"""Of an engine whose one process runs the whole model."""
