"""vLLM's names for what is not available yet: a script may import them; using one says so."""

from __future__ import annotations

from typing import Any, ClassVar

from hetero_llm.core.errors import ConfigError


class NotYet:
    """Base of the classes below; making an object of one raises ConfigError."""

    feature: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs or args
        raise ConfigError(type(self).__name__, given, f"{self.feature} is not available yet")


class PromptAdapterRequest(NotYet):
    feature = "a prompt adapter"
