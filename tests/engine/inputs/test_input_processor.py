"""Token ids of a prompt: checked all at once, and the first wrong one is named."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from hetero_llm.core.errors import PromptError, SamplingError
from hetero_llm.core.request import Request
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt

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
        (np.float32(5), "must be integers"),
        (np.int64(VOCAB), "is outside the vocabulary (0 to 999)"),
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


def test_a_users_list_of_ids_stays_his_own() -> None:
    ids = [3, 4]
    request = make(ids)
    request.shown_prompt_ids.append(5)  # as a user may do with an output's
    assert ids == [3, 4] and make(ids).prompt_token_ids == [3, 4]


def test_the_first_of_several_wrong_ids_is_named() -> None:
    with pytest.raises(PromptError, match=r"^prompt_token_ids=-3: "):
        make([1, -3, True, VOCAB, "x"])
    with pytest.raises(PromptError, match=r"^prompt_token_ids=True: "):
        make([1, True, -3])


@pytest.mark.parametrize("ids", [[np.int64(5), np.int32(999)], [5, np.uint16(0), 7]])
def test_numbers_of_numpy_become_plain(ids: list[Any]) -> None:
    request = make(ids)
    assert request.prompt_token_ids == [int(one) for one in ids]
    assert {type(one) for one in request.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 30, "truncation_side": "right"}, list(range(10))),
        ({"truncate_prompt_tokens": -1}, list(range(5, 10))),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, list(range(5))),
    ],
)
def test_a_prompt_is_cut_at_the_wanted_end(fields: dict[str, Any], kept: list[int]) -> None:
    processor = InputProcessor(
        None, vocab_size=VOCAB, max_model_len=6 if -1 in fields.values() else 100, eos_ids=(2,),
        max_logprobs=20, seed=0,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, detokenize=False, **fields)
    request = processor.make_request("0", Prompt(token_ids=list(range(10))), params)
    assert request.prompt_token_ids == kept
    assert np.frombuffer(request.packed_prompt, "<i4").tolist() == kept


def test_a_request_keeps_its_own_checked_parameters() -> None:
    params = SamplingParams(max_tokens=5, stop_token_ids=[7], detokenize=False)
    request = make([1], params)
    params.max_tokens = 0
    params.stop_token_ids.append(8)
    assert (request.params.max_tokens, request.params.stop_token_ids) == (5, [7])
    with pytest.raises(SamplingError, match="^max_tokens=0: "):
        make([1], params)
    params.max_tokens = 9
    later = make([1], params)
    assert (later.max_total_tokens, later.end_ids) == (10, {2, 7, 8})
