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
    tensor_parallel_size: ranks that share each layer; 1: the engine's process runs it alone.
    peer_memory: GPUs exchange through memory that they map of each other, where they can.
    """

    tensor_parallel_size: int = 1
    peer_memory: bool = True


def parallel_from_args(args: Mapping[str, Any]) -> ParallelConfig:
    """Reads `tensor_parallel_size`, `distributed_executor_backend` and
    `disable_custom_all_reduce`.

    Raises:
        ConfigError: Ray is to start the ranks, or one process is to be several.
    """
    backend, size = args["distributed_executor_backend"], args["tensor_parallel_size"]
    if backend == "ray":
        reason = (
            "the ranks of an engine are processes of one host, which the engine starts itself: "
            "leave it out. For replicas over several hosts deploy/ray has a Ray Serve application"
        )
        raise ConfigError("distributed_executor_backend", backend, reason)
    if backend == "uni" and size > 1:
        reason = f"is one process, and tensor_parallel_size={size} needs as many; use 'mp'"
        raise ConfigError("distributed_executor_backend", backend, reason)
    return ParallelConfig(size, peer_memory=not args["disable_custom_all_reduce"])
