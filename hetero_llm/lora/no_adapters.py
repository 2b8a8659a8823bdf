"""What an engine that serves no adapters has in the place of their store. No torch: the engine's
process has to begin before that is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.lora import AdapterRef, LoRARequest


class NoAdapters:
    """In the place of an `AdapterStore` where adapters are not served."""

    def open(self, request: LoRARequest) -> AdapterRef:
        reason = "adapters are not served: start with enable_lora=True"
        raise AdapterError("lora_request", request.lora_name, reason)

    def forget(self, name: str) -> None:
        """There is none to forget."""
        raise AdapterError("lora_name", name, "no adapter of this name is known")

    def names(self) -> Mapping[str, AdapterRef]:
        return {}

    def name_of(self, number: int) -> str | None:
        return None

    def check(self, adapter: AdapterRef) -> None:
        """See `AdapterStore`."""
        reason = "adapters are not served: start with enable_lora=True"
        raise AdapterError("lora_request", adapter.name, reason)
