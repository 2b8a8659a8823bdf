"""What the draft worker's process is told at its start, and nodes on their way to the engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from hetero_llm.bridge.records import Kind, Outbox, Records, Stamps
from hetero_llm.cpu.draft.growth import Unsent

WORDS = 4
"""Of a node in a NODES record: id, parent, token, kind."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything that a worker needs; on its command line as JSON.

    Attributes:
        folder: of the draft model. load_format: "auto" or "dummy".
        dtype: "bfloat16" or "float32". weight_format: of the executor, or "auto".
        slots: sequences at a time.
        max_model_len: tokens of the longest text that is drafted for.
        window: tokens of a text that the draft model sees, besides its first ones.
        max_depth: levels of a tree.
        threads: that compute. cpus: a core for each; none: they may wander.
        ahead: whether trees grow on while the engine verifies; else until `most_nodes` were run
            since the last tokens came.
        requests, answers: tickets of the rings.
        parent: process whose end is the worker's, too; 0: whoever started it.
    """

    folder: str
    load_format: str
    dtype: str
    weight_format: str
    slots: int
    max_model_len: int
    window: int
    max_depth: int
    threads: int
    cpus: tuple[int, ...]
    ahead: bool
    most_nodes: int
    requests: str = ""
    answers: str = ""
    parent: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerSettings:
        given = json.loads(text)
        return WorkerSettings(**{**given, "cpus": tuple(given["cpus"])})


def put_nodes(outbox: Outbox, unsent: Unsent, generations: np.ndarray) -> None:
    """NODES records out of what a forest has to tell.

    Args:
        generations: [slots] of all slots.
    """
    if not len(unsent.slots):
        return
    bodies = np.empty((len(unsent.ids), WORDS), np.int32)
    bodies[:, 0], bodies[:, 1] = unsent.ids, unsent.parents
    bodies[:, 2], bodies[:, 3] = unsent.tokens, unsent.kinds
    stamps = Stamps(unsent.slots, generations[unsent.slots], unsent.lengths)
    outbox.extend(Kind.NODES, stamps, unsent.counts * WORDS, bodies=bodies.reshape(-1))


def read_nodes(
    records: Records,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """slots, generations, lengths, counts and nodes [n, `WORDS`] of NODES records, int32; None if
    there is one that holds no whole nodes."""
    words = records.headers["words"]
    if (words % WORDS).any():
        return None
    told = records.headers
    stamps = (told[name].astype(np.int32) for name in ("slot", "generation", "base_length"))
    slots, generations, lengths = stamps
    counts = (words // WORDS).astype(np.int32)
    return slots, generations, lengths, counts, records.words.reshape(-1, WORDS)
