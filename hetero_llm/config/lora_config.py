"""How the engine serves LoRA adapters, as the arguments say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import ConfigError

logger = logging.getLogger(__name__)

_OF_ADAPTERS = {
    "max_loras": 1,
    "max_lora_rank": 16,
    "lora_experts": False,
    "max_cpu_loras": None,
    "lora_dtype": "auto",
}
"""Arguments that say something about adapters of requests, and their defaults."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of requests, and the one that is merged into the weights.

    Attributes:
        enabled: requests may have adapters.
        max_loras: adapters on the device.
        max_cpu_loras: adapters in host memory.
        max_rank: largest rank of a module.
        dtype: of the adapters' tensors; "auto": the model's, float32 where torch serves on a CPU.
        experts: they may name experts of mixtures.
        merge: folder of an adapter that is added to the weights; None: none is.
    """

    enabled: bool = False
    max_loras: int = 1
    max_cpu_loras: int = 1
    max_rank: int = 16
    dtype: str = "auto"
    experts: bool = False
    merge: str | None = None


def lora_from_args(args: Mapping[str, Any]) -> LoraConfig:
    """Reads `enable_lora`, `max_*lora*`, `lora_dtype`, `lora_experts` and `lora_merge`.

    Raises:
        ConfigError: host memory is to hold fewer adapters than the device.
    """
    enabled, on_device = args["enable_lora"], args["max_loras"]
    in_memory = args["max_cpu_loras"]
    if not enabled:
        given = [name for name, default in _OF_ADAPTERS.items() if args[name] != default]
        if given:
            logger.warning("%s: no effect without enable_lora", ", ".join(given))
    if in_memory is not None and in_memory < on_device:
        raise ConfigError("max_cpu_loras", in_memory, f"must be at least max_loras ({on_device})")
    merge = args["lora_merge"]
    return LoraConfig(
        enabled=enabled,
        max_loras=on_device,
        max_cpu_loras=on_device if in_memory is None else in_memory,
        max_rank=args["max_lora_rank"],
        dtype=args["lora_dtype"],
        experts=enabled and args["lora_experts"],
        merge=None if merge is None else str(merge),
    )
