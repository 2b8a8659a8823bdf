"""Configuration of a draft model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """A draft model and where it runs: in a worker process on the CPU, or on the target's device.

    On the target's device the settings of the worker have their defaults.

    Attributes:
        model: folder or hub id.
        revision: branch, tag or commit of the hub's repository.
        num_tokens: maximum depth of a draft tree in tokens, 1 to 63.
        max_model_len: maximum length in tokens of sequences with drafts; None: the model's own.
        threads: threads of the worker; None: all cores that the engine leaves.
        weight_dtype: "auto", "int8", "int4", "bfloat16" or "float32".
        overlap: "auto", "off" or "enumerate".
        timeout: maximum seconds that a step waits for drafts; None: adapted to the worker's recent
            durations.
        optional: serve without drafts if the model cannot be loaded.
        on_cpu: run in a worker process on the CPU, else on the target's device.
    """

    model: str
    revision: str | None
    num_tokens: int
    max_model_len: int | None
    threads: int | None
    weight_dtype: str
    overlap: str
    timeout: float | None
    optional: bool
    on_cpu: bool = True
