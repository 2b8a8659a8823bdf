"""What a user wants of a draft model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """A draft model and what runs it: a worker on the CPU, or the target's own device.

    What concerns the worker has its default on the device.

    Attributes:
        model: folder or hub id. revision: of the hub's repository.
        num_tokens: most tokens of a draft from its root on, 1 to 63.
        max_model_len: tokens of the longest sequence that is drafted for; None: the model's own.
        threads: of the worker; None: what the machine leaves.
        weight_dtype: "auto", "int8", "bfloat16" or "float32".
        overlap: "auto", "off" or "enumerate".
        timeout: seconds that a step waits at most; None: by what the worker took lately.
        optional: serve without drafts if it cannot be loaded.
        on_cpu: in a worker's process on the CPU; else beside the target, on its device.
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
