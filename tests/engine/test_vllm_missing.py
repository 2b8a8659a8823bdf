"""What vLLM's engines have and ours lack."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.vllm_missing import refuse_options, why_missing


def test_what_is_missing_says_why() -> None:
    assert why_missing("LLM", "sleep") == "LLM.sleep: a sleep level is not available yet"
    assert why_missing("LLM", "slep") == "LLM.slep: no such attribute"


@pytest.mark.parametrize(("tokenization", "images"), [(None, None), ({}, {})])
def test_options_without_content_are_accepted(tokenization: Any, images: Any) -> None:
    refuse_options(tokenization, images=images)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenization": {"truncation": True}}, "^tokenization_kwargs=.*truncate_prompt_tokens"),
        ({"tokenization": "x"}, "^tokenization_kwargs='x'"),
        ({"images": {"num_crops": 4}}, "^mm_processor_kwargs=.*not available yet"),
    ],
)
def test_options_with_content_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_options(**fields)
