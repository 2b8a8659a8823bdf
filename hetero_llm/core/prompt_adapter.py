"""What requests say about prompt adapters: embeddings that stand before a prompt's own.

"The Power of Scale for Parameter-Efficient Prompt Tuning" (Lester et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.images import PromptImage, PromptImages
from hetero_llm.core.lora import check_adapter_fields, check_request, pair_requests

VIRTUAL_TOKEN = 0
"""The id that stands in a sequence for each virtual token, as in vLLM."""
EMBEDDINGS = "embeddings"
"""The name of a virtual prompt's array in its `PromptImage`."""


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt adapter of a request, with the fields and the order of vLLM's class (0.6 to 0.9).

    Attributes:
        prompt_adapter_name: what clients call it.
        prompt_adapter_id: its number, from 1 on; an engine knows an adapter by one name and number.
        prompt_adapter_local_path: folder with adapter_config.json and the weights, as PEFT saves
            them, or a hub id.
        prompt_adapter_num_virtual_tokens: as adapter_config.json says.

    Raises:
        AdapterError: a field has a value that no adapter has.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    def __post_init__(self) -> None:
        fields = "prompt_adapter_name", "prompt_adapter_id", "prompt_adapter_local_path"
        check_adapter_fields(self, *fields)
        count = self.prompt_adapter_num_virtual_tokens
        if type(count) is not int or count < 1:
            reason = "must be an integer of at least 1"
            raise AdapterError("prompt_adapter_num_virtual_tokens", count, reason)

    @property
    def name(self) -> str:
        return self.prompt_adapter_name

    @property
    def adapter_id(self) -> int:
        return self.prompt_adapter_id

    @property
    def local_path(self) -> str:
        return self.prompt_adapter_local_path


@dataclass(frozen=True, slots=True, eq=False)
class VirtualPrompt:
    """A prompt adapter that was read.

    Attributes:
        embeddings: [tokens, size] float32, in the place of those of the first tokens.
        content_hash: SHA-256 over them, in hexadecimal.
    """

    embeddings: np.ndarray
    content_hash: str

    @property
    def num_tokens(self) -> int:
        return len(self.embeddings)

    def as_images(self) -> PromptImages:
        """The form in which embeddings travel with a request and reach the runner: one image, at
        the beginning of the prompt, that is encoded already."""
        arrays = {EMBEDDINGS: self.embeddings}
        return PromptImages((PromptImage(0, self.num_tokens, None, arrays),), self.content_hash)


def check_prompt_adapter_request(value: Any) -> PromptAdapterRequest:
    """See `check_request`."""
    return check_request(value, PromptAdapterRequest, "prompt_adapter_request")


def pair_prompt_adapters(given: Any, count: int) -> list[PromptAdapterRequest | None]:
    """See `pair_requests`."""
    return pair_requests(given, count, PromptAdapterRequest, "prompt_adapter_request")
