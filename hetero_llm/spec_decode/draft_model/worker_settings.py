"""What the draft worker's process is told at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything that a worker needs; on its command line as JSON.

    Attributes:
        folder: of the draft model. load_format: "auto" or "dummy". allow_pickle: weights.
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
    allow_pickle: bool = False
    requests: str = ""
    answers: str = ""
    parent: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerSettings:
        given = json.loads(text)
        return WorkerSettings(**{**given, "cpus": tuple(given["cpus"])})
