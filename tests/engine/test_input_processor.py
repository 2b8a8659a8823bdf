"""Token ids of a prompt: checked all at once, and the first wrong one is named."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from hetero_llm.core.errors import PromptError
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.input_processor import InputProcessor, Prompt

VOCAB = 1000
ONE = SamplingParams(max_tokens=1, detokenize=False)


class Id(IntEnum):
    SEVEN = 7


def make(token_ids: list[Any], params: SamplingParams = ONE) -> Request:
    processor = InputProcessor(
        None, vocab_size=VOCAB, max_model_len=10_000, eos_ids=(2,), max_logprobs=20, seed=0
    )
    return processor.make_request("0", Prompt(token_ids=token_ids), params)


@pytest.mark.parametrize("ids", [[0], [VOCAB - 1], [0, VOCAB - 1] * 2000, [5, Id.SEVEN, 6]])
def test_every_id_of_the_vocabulary_is_taken(ids: list[int]) -> None:
    assert make(ids).prompt_token_ids == ids


@pytest.mark.parametrize("ids", [[0, 999], [5, Id.SEVEN, 6], list(range(700))])
@pytest.mark.parametrize("cut", [None, 2, 800])
def test_a_request_has_its_tokens_packed(ids: list[int], cut: int | None) -> None:
    params = SamplingParams(max_tokens=1, detokenize=False, truncate_prompt_tokens=cut)
    request = make(ids, params)
    assert request.prompt_token_ids == (ids if cut is None else ids[-cut:])
    assert np.frombuffer(request.packed_prompt, "<i4").tolist() == request.prompt_token_ids


@pytest.mark.parametrize("position", [0, 1, 2500, 4999])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (VOCAB, "is outside the vocabulary (0 to 999)"),
        (-1, "is outside the vocabulary (0 to 999)"),
        (-(2**31), "is outside the vocabulary (0 to 999)"),
        (2**31, "is outside the vocabulary (0 to 999)"),
        (2**32, "is outside the vocabulary (0 to 999)"),
        (-(2**64), "is outside the vocabulary (0 to 999)"),
        (True, "must be integers"),
        (False, "must be integers"),
        (5.0, "must be integers"),
        (np.int64(5), "must be integers"),
        (None, "must be integers"),
        ("5", "must be integers"),
    ],
)
def test_one_wrong_id_in_a_long_prompt_is_named(bad: Any, reason: str, position: int) -> None:
    ids: list[Any] = [1] * 5000
    ids[position] = bad
    with pytest.raises(PromptError) as caught:
        make(ids)
    assert (caught.value.field, caught.value.reason) == ("prompt_token_ids", reason)
    assert caught.value.value is bad


def test_the_first_of_several_wrong_ids_is_named() -> None:
    with pytest.raises(PromptError, match=r"^prompt_token_ids=-3: "):
        make([1, -3, True, VOCAB, "x"])
    with pytest.raises(PromptError, match=r"^prompt_token_ids=True: "):
        make([1, True, -3])
