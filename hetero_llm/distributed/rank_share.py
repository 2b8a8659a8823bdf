"""A rank's part in what all ranks do together."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_llm.distributed.agreement import ALONE, Agreement
from hetero_llm.models.collectives import ONE_RANK, Collectives


@dataclass(frozen=True, slots=True)
class RankShare:
    """Attributes:
    collectives: of the model.
    agreement: about what is measured at start.
    in_graphs: whether CUDA graphs may hold the collectives.
    """

    collectives: Collectives
    agreement: Agreement
    in_graphs: bool


ALONE_SHARE = RankShare(ONE_RANK, ALONE, in_graphs=True)
"""Of an engine whose one process runs the whole model."""
