"""Settings of the draft worker's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


# large: one field for each option of the worker.
@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything that a worker needs; passed as JSON on its command line.

    Attributes:
        folder: folder of the draft model.
        load_format: "auto" or "dummy".
        dtype: "bfloat16" or "float32".
        weight_format: weight format of the executor, or "auto".
        slots: maximum number of concurrent requests.
        max_model_len: longest sequence, in tokens, that the worker drafts for.
        window: tokens at the end of a sequence that the draft model sees, besides its first block.
        max_depth: maximum depth of a tree.
        threads: compute threads.
        cpus: one CPU for each thread; empty: threads are not pinned.
        ahead: whether trees grow on while the engine verifies; else a tree stops growing once
            `most_nodes` of its nodes were run since the last new token.
        allow_pickle: whether pickled weight files may be read.
        requests, answers: ring handles.
        parent: the worker exits when this process has ended; 0: its parent process.
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
