"""How several processes share the model, as the arguments say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import ConfigError

MAX_RANKS = 64
"""Of one engine, the engine's own process included."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Attributes:
    tensor_parallel_size: ranks that share each layer; 1: one process runs it alone.
    peer_memory: GPUs exchange through memory that they map of each other, where they can.
    sequence_parallel_size: such groups of ranks, which share the tokens of long prompts.
    pipeline_parallel_size: stages that the layers are cut into.
    """

    tensor_parallel_size: int = 1
    peer_memory: bool = True
    sequence_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes that run the model, the engine's own included."""
        sizes = self.tensor_parallel_size, self.sequence_parallel_size, self.pipeline_parallel_size
        return math.prod(sizes)

    @property
    def asked_by(self) -> tuple[str, int]:
        """The argument that errors about ranks name, and its value."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "sequence_parallel_size"):
            if getattr(self, name) > 1:
                return name, getattr(self, name)
        return "tensor_parallel_size", self.tensor_parallel_size


def parallel_from_args(args: Mapping[str, Any]) -> ParallelConfig:
    """Reads `tensor_parallel_size`, `sequence_parallel_size`, `pipeline_parallel_size`,
    `distributed_executor_backend` and
    `disable_custom_all_reduce`.

    Raises:
        ConfigError: Ray is to start the ranks, one process is to be several, or there are too many.
    """
    backend = args["distributed_executor_backend"]
    config = ParallelConfig(
        args["tensor_parallel_size"],
        peer_memory=not args["disable_custom_all_reduce"],
        sequence_parallel_size=args["sequence_parallel_size"],
        pipeline_parallel_size=args["pipeline_parallel_size"],
    )
    if backend == "ray":
        reason = (
            "the ranks of an engine are processes of one host, which the engine starts itself: "
            "leave it out. For replicas over several hosts deploy/ray has a Ray Serve application"
        )
        raise ConfigError("distributed_executor_backend", backend, reason)
    name, size = config.asked_by
    if backend == "uni" and size > 1:
        reason = f"is one process, and {name}={size} needs as many; use 'mp'"
        raise ConfigError("distributed_executor_backend", backend, reason)
    stages, sequence = config.pipeline_parallel_size, config.sequence_parallel_size
    if stages > 1 and sequence > 1:
        reason = f"cannot be combined with pipeline_parallel_size ({stages}) yet: use one of them"
        raise ConfigError("sequence_parallel_size", sequence, reason)
    if config.num_ranks > MAX_RANKS:
        reason = (
            f"with tensor_parallel_size={config.tensor_parallel_size} these are "
            f"{config.num_ranks} processes; {MAX_RANKS} at most"
        )
        field = "pipeline_parallel_size" if stages > 1 else "sequence_parallel_size"
        raise ConfigError(field, max(stages, sequence), reason)
    return config
