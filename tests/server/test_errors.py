"""Errors in the words of the API that was called."""

from __future__ import annotations

import pytest

from hetero_llm.core.errors import SamplingError
from hetero_llm.server.errors import ApiError, FieldNames, invalid

NAMES = FieldNames(
    {
        "messages": "input",
        "messages[0]": "instructions",
        "messages[2]": "input[4]",
        "messages[2].content": "input[4].output",
        "stop": "stop_sequences",
    }
)


@pytest.mark.parametrize(
    ("chat", "client"),
    [
        ("messages[0]", "instructions"),
        ("messages[2].role", "input[4].role"),
        ("messages[2].content[1].text is required", "input[4].output[1].text is required"),
        ("messages[7].role", "input[7].role"),
        ("messages: 9, at most 8", "input: 9, at most 8"),
        ("stop='': must be", "stop_sequences='': must be"),
        ("stopped=1", "stopped=1"),
        ("this model's maximum", "this model's maximum"),
        ("", ""),
    ],
)
def test_names(chat: str, client: str) -> None:
    assert NAMES.of(chat) == client


def test_errors_are_renamed_and_keep_the_rest() -> None:
    with pytest.raises(ApiError) as caught, NAMES.in_errors():
        raise invalid("messages[0].content", "messages[0].content is required", "missing")
    error = caught.value
    assert (error.status, error.code) == (400, "missing")
    assert (error.param, error.message) == (
        "instructions.content",
        "instructions.content is required",
    )
    with pytest.raises(ApiError) as caught, NAMES.in_errors():
        raise SamplingError("stop", "", "must be non-empty strings")
    assert caught.value.message == "stop_sequences='': must be non-empty strings"
