"""How the engine serves prompt adapters, as the arguments say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import ConfigError

logger = logging.getLogger(__name__)

_OF_ADAPTERS = {"max_prompt_adapters": 1, "max_prompt_adapter_token": 0}
"""Arguments that say something about prompt adapters, and their defaults."""


@dataclass(frozen=True, slots=True)
class PromptAdapterConfig:
    """Attributes:
    enabled: requests may have prompt adapters.
    max_adapters: in memory.
    max_tokens: virtual tokens of one.
    """

    enabled: bool = False
    max_adapters: int = 1
    max_tokens: int = 0


def prompt_adapters_from_args(args: Mapping[str, Any]) -> PromptAdapterConfig:
    """Reads `enable_prompt_adapter` and `max_prompt_adapter*`.

    Raises:
        ConfigError: the most virtual tokens are not given.
    """
    enabled, most = args["enable_prompt_adapter"], args["max_prompt_adapter_token"]
    if not enabled:
        given = [name for name, default in _OF_ADAPTERS.items() if args[name] != default]
        if given:
            logger.warning("%s: no effect without enable_prompt_adapter", ", ".join(given))
    elif most == 0:
        reason = "must be given with enable_prompt_adapter: the most virtual tokens of an adapter"
        raise ConfigError("max_prompt_adapter_token", most, reason)
    return PromptAdapterConfig(enabled, args["max_prompt_adapters"], most)
