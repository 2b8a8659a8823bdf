"""How several processes share the model, as the arguments say."""

from __future__ import annotations

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
    pipeline_parallel_size: stages that the layers are cut into.
    """

    tensor_parallel_size: int = 1
    peer_memory: bool = True
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes that run the model together, the engine's own included."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def field(self) -> tuple[str, int]:
        """The argument that asks for several ranks, and its value: what errors name."""
        if self.tensor_parallel_size == 1 < self.pipeline_parallel_size:
            return "pipeline_parallel_size", self.pipeline_parallel_size
        return "tensor_parallel_size", self.tensor_parallel_size


def parallel_from_args(args: Mapping[str, Any]) -> ParallelConfig:
    """Reads `tensor_parallel_size`, `pipeline_parallel_size`, `distributed_executor_backend` and
    `disable_custom_all_reduce`.

    Raises:
        ConfigError: Ray is to start the ranks, one process is to be several, or there are too many.
    """
    backend = args["distributed_executor_backend"]
    parallel = ParallelConfig(
        args["tensor_parallel_size"],
        peer_memory=not args["disable_custom_all_reduce"],
        pipeline_parallel_size=args["pipeline_parallel_size"],
    )
    if backend == "ray":
        reason = (
            "the ranks of an engine are processes of one host, which the engine starts itself: "
            "leave it out. For replicas over several hosts deploy/ray has a Ray Serve application"
        )
        raise ConfigError("distributed_executor_backend", backend, reason)
    field, size = parallel.field
    if backend == "uni" and size > 1:
        reason = f"is one process, and {field}={size} needs as many; use 'mp'"
        raise ConfigError("distributed_executor_backend", backend, reason)
    if parallel.num_ranks > MAX_RANKS:
        stages = parallel.pipeline_parallel_size
        reason = f"with tensor_parallel_size={size} at most {MAX_RANKS // size}"
        raise ConfigError("pipeline_parallel_size", stages, reason)
    return parallel
