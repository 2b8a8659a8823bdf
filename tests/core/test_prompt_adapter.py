"""`PromptAdapterRequest`: vLLM's fields, checked; and the form in which embeddings travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero_llm import AdapterError, PromptAdapterRequest, RequestError
from hetero_llm.core.prompt_adapter import (
    VirtualPrompt,
    check_prompt_adapter_request,
    pair_prompt_adapters,
)

GIVEN: dict[str, Any] = {
    "prompt_adapter_name": "polite",
    "prompt_adapter_id": 3,
    "prompt_adapter_local_path": "/adapters/polite",
    "prompt_adapter_num_virtual_tokens": 8,
}


def test_fields_and_their_short_names() -> None:
    request = PromptAdapterRequest("polite", 3, "/adapters/polite", 8)
    assert request == PromptAdapterRequest(**GIVEN)
    assert (request.name, request.adapter_id, request.local_path) == (
        "polite", 3, "/adapters/polite",
    )  # fmt: skip
    assert check_prompt_adapter_request(request) is request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""), ("name", 1), ("name", "a\nb"), ("name", "a" * 257),
        ("id", 0), ("id", True), ("id", 1 << 31),
        ("local_path", ""), ("local_path", "a\0b"), ("local_path", None),
        ("num_virtual_tokens", 0), ("num_virtual_tokens", 1.0), ("num_virtual_tokens", True),
    ],
)  # fmt: skip
def test_values_that_no_adapter_has(field: str, value: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        PromptAdapterRequest(**{**GIVEN, f"prompt_adapter_{field}": value})
    assert caught.value.field == f"prompt_adapter_{field}"


def test_one_for_all_prompts_or_one_for_each() -> None:
    request = PromptAdapterRequest(**GIVEN)
    assert pair_prompt_adapters(None, 2) == [None, None]
    assert pair_prompt_adapters(request, 2) == [request, request]
    assert pair_prompt_adapters([None, request], 2) == [None, request]
    for wrong in ([request], "polite", 3):
        with pytest.raises(RequestError, match="one PromptAdapterRequest or a list of 2"):
            pair_prompt_adapters(wrong, 2)
    with pytest.raises(AdapterError, match="must be a PromptAdapterRequest"):
        pair_prompt_adapters([None, "polite"], 2)


def test_embeddings_travel_as_an_image_before_the_prompt() -> None:
    virtual = VirtualPrompt(np.ones((3, 4), np.float32), "key")
    images = virtual.as_images()
    assert images.key == "key"
    ((start, count, arrays),) = [(one.start, one.count, one.arrays) for one in images.items]
    assert (start, count) == (0, 3)
    assert np.array_equal(arrays["embeddings"], virtual.embeddings)
