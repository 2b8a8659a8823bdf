"""`LoRARequest`: vLLM's fields, checked."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm import AdapterError, LoRARequest
from hetero_llm.core.lora import check_lora_request


def test_fields_and_their_short_names() -> None:
    request = LoRARequest("sql", 3, "/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")
    assert check_lora_request(request) is request
    assert request == LoRARequest(lora_name="sql", lora_int_id=3, lora_path="/adapters/sql")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": 1}, "lora_name"),
        ({"lora_name": "a\nb"}, "lora_name"),
        ({"lora_name": "a" * 257}, "lora_name"),
        ({"lora_int_id": 0}, "lora_int_id"),
        ({"lora_int_id": True}, "lora_int_id"),
        ({"lora_int_id": 1 << 31}, "lora_int_id"),
        ({"lora_path": ""}, "lora_path"),
        ({"lora_path": "a\0b"}, "lora_path"),
        ({"long_lora_max_len": 8}, "long_lora_max_len"),
        ({"base_model_name": 1}, "base_model_name"),
        ({"load_inplace": 1}, "load_inplace"),
    ],
)
def test_values_that_no_adapter_has(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(AdapterError) as caught:
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "/a", **changes})
    assert caught.value.field == field


@pytest.mark.parametrize("value", ["sql", None, 1])
def test_what_is_no_request(value: Any) -> None:
    with pytest.raises(AdapterError, match="must be a LoRARequest"):
        check_lora_request(value)
