"""Every wrong value of SamplingParams is an error that names the field and the value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hetero_llm.core.errors import SamplingError
from hetero_llm.core.sampling_params import SamplingParams

BEAM = {"use_beam_search": True, "best_of": 3, "temperature": 0}

WRONG = [
    ({"n": 0}, "n=0"),
    ({"n": True}, "n=True"),
    ({"n": 2.0}, "n=2.0"),
    ({"best_of": 1, "n": 2}, "best_of=1"),
    ({"temperature": -1}, "temperature=-1"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": "0.5"}, "temperature='0.5'"),
    ({"top_p": 0}, "top_p=0"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"min_p": 2}, "min_p=2"),
    ({"presence_penalty": 2.01}, "presence_penalty=2.01"),
    ({"frequency_penalty": -2.01}, "frequency_penalty=-2.01"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": -1}, "max_tokens=-1"),
    ({"min_tokens": 17}, "min_tokens=17"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"seed": -2}, "seed=-2"),
    ({"seed": 2**64}, "seed=18446744073709551616"),
    ({"logprobs": -2}, "logprobs=-2"),
    ({"prompt_logprobs": 1.0}, "prompt_logprobs=1.0"),
    ({"stop": ""}, "stop=''"),
    ({"stop": ["a", 3]}, "stop=3"),
    ({"stop": "a", "detokenize": False}, "stop="),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
    ({"stop_token_ids": 5}, "stop_token_ids=5"),
    ({"logit_bias": {"abc": 1}}, "logit_bias='abc'"),
    ({"logit_bias": {3: 101}}, "logit_bias=101"),
    ({"logit_bias": [3]}, r"logit_bias=\[3\]"),
    ({"bad_words": [""]}, "bad_words=''"),
    ({"allowed_token_ids": []}, r"allowed_token_ids=\[\]"),
    ({"allowed_token_ids": 5}, "allowed_token_ids=5"),
    ({"temperature": 10**400}, "temperature=1000"),
    ({"output_kind": "delta"}, "output_kind='delta'"),
    ({"logits_processors": [3]}, "logits_processors=3"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2"),
    ({"truncation_side": "middle"}, "truncation_side='middle'"),
    ({"logprob_token_ids": [1]}, r"logprob_token_ids=\[1\]: .*not available yet"),
    ({"extra_args": {"a": 1}}, r"extra_args=\{'a': 1\}: .*not available yet"),
    ({"flat_logprobs": True}, "flat_logprobs=True: .*not available yet"),
    ({"skip_reading_prefix_cache": True}, "skip_reading_prefix_cache=True: .*not available yet"),
    ({"thinking_token_budget": 9}, "thinking_token_budget=9: .*not available yet"),
    ({"thinking_token_budget": 0}, "thinking_token_budget=0: .*not available yet"),
    ({"repetition_detection": {"n": 1}}, "repetition_detection=.*not available yet"),
    ({"guided_decoding": 5}, "guided_decoding=5"),
    ({"structured_outputs": {"regex": "a", "disable_fallback": 1}}, "disable_fallback=1"),
    ({"structured_outputs": {"xml": ""}}, r"structured_outputs\.xml=''"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs=.*regex and choice are given",
    ),
    ({"structured_outputs": {}}, "structured_outputs=.*none is given"),
    (
        {"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}},
        "guided_decoding=.*contradicts structured_outputs",
    ),
    ({"max_tokens": np.float32(3)}, "max_tokens="),
    ({"ignore_eos": np.int64(1)}, "ignore_eos="),
    ({"temperature": np.True_}, "temperature="),
    ({"stop_token_ids": "12"}, "stop_token_ids='12'"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
    ({"num_speculative_tokens": False}, "num_speculative_tokens=False"),
    ({"num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0"),
    ({"ignore_eos": 2}, "ignore_eos=2"),
    ({"early_stopping": True}, "early_stopping=True"),
    ({"length_penalty": 0.5}, "length_penalty=0.5"),
    (BEAM | {"best_of": 1}, "best_of=1"),
    (BEAM | {"temperature": 0.5}, "temperature=0.5"),
    (BEAM | {"top_p": 0.9}, "top_p=0.9"),
    (BEAM | {"top_k": 3}, "top_k=3"),
    (BEAM | {"early_stopping": "maybe"}, "early_stopping='maybe'"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_values_name_field_and_value(fields: dict, message: str) -> None:
    with pytest.raises(SamplingError, match=f"^{message}"):
        SamplingParams(**fields)


def test_unknown_fields_are_type_errors() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.3)


def test_defaults_are_the_manuals() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, -1)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert params.detokenize and params.skip_special_tokens
    assert params.spaces_between_special_tokens


def test_draft_length() -> None:
    assert SamplingParams().num_speculative_tokens is None
    for length in (0, 7, 1000):
        assert SamplingParams(num_speculative_tokens=length).num_speculative_tokens == length


def test_lists_read_back_as_lists() -> None:
    given = ["x", "y"]
    params = SamplingParams(stop=given, stop_token_ids=(1, 2), logit_bias={"7": 1}, bad_words={"z"})
    assert params.stop == given and params.stop is not given
    assert (params.stop_token_ids, params.bad_words) == ([1, 2], ["z"])
    assert params.logit_bias == {7: 1.0}
    assert SamplingParams(stop="x").stop == ["x"]
    plain = SamplingParams()
    assert (plain.stop, plain.stop_token_ids, plain.bad_words) == ([], [], [])
    assert plain.logits_processors is plain.allowed_token_ids is None


def test_fields_can_be_assigned_and_are_checked_for_a_request() -> None:
    params = SamplingParams(max_tokens=4)
    params.max_tokens = 9
    params.stop = "x"
    kept = params.checked_copy()
    assert (kept.max_tokens, kept.stop) == (9, ["x"])
    params.top_p = 1.5
    with pytest.raises(SamplingError, match=r"^top_p=1\.5"):
        params.checked_copy()
    with pytest.raises(AttributeError):
        params.temprature = 0.3


def test_a_clone_has_lists_of_its_own() -> None:
    def processor(ids: list[int], logits: Any) -> Any:
        return logits

    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, logits_processors=[processor])
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")
    copy.logit_bias[3] = 1.0
    assert (params.stop, params.logit_bias) == (["a"], {1: 2.0})
    assert copy.logits_processors == [processor]


def test_none_is_the_default_in_from_optional() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, max_tokens=None)
    assert params == SamplingParams(top_p=0.5, max_tokens=None)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams.from_optional(temprature=1)


def test_positions_are_vllms() -> None:
    params = SamplingParams(2, 3, 0.1, 0.2, 1.1, 0.7, 0.9, 5, 0.05, 11)
    assert params == SamplingParams(
        n=2, best_of=3, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1,
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, seed=11,
    )  # fmt: skip


def test_one_and_zero_are_booleans_and_arrays_lists() -> None:
    params = SamplingParams(
        ignore_eos=1, detokenize=0, stop_token_ids=np.array([3, 4]), allowed_token_ids=np.arange(2)
    )
    assert params.ignore_eos is True and params.detokenize is False
    assert params.stop_token_ids == [3, 4] and params.allowed_token_ids == [0, 1]
    assert {type(token) for token in params.stop_token_ids} == {int}
    for wrong in ({"ignore_eos": 2}, {"ignore_eos": 1.0}, {"stop_token_ids": np.ones((1, 1), int)},
                  {"stop_token_ids": np.array([0.5])}):  # fmt: skip
        with pytest.raises(SamplingError, match=f"^{next(iter(wrong))}="):
            SamplingParams(**wrong)


def test_numbers_of_numpy_become_plain() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_p=np.float64(0.25), top_k=np.uint8(7),
        seed=np.int32(3), max_tokens=np.int16(4), stop_token_ids=[np.int64(9)],
        logit_bias={np.int64(1): np.float32(2)}, ignore_eos=np.True_,
    )  # fmt: skip
    assert params == SamplingParams(
        n=2, temperature=0.5, top_p=0.25, top_k=7, seed=3, max_tokens=4, stop_token_ids=[9],
        logit_bias={1: 2.0}, ignore_eos=True,
    )  # fmt: skip
    numbers = (params.n, params.top_k, params.seed, params.max_tokens, params.stop_token_ids[0])
    assert {type(one) for one in numbers} == {int}
    assert type(params.temperature) is type(params.top_p) is float
    assert params.ignore_eos is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ({"logprobs": False, "prompt_logprobs": False}, {}),
        ({"seed": -1}, {}),
        ({"seed": None, "stop_token_ids": range(2)}, {"stop_token_ids": [0, 1]}),
    ],
)
def test_other_spellings_of_vllm(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert SamplingParams(**fields) == SamplingParams(**expected)
    assert SamplingParams(prompt_logprobs=-1).prompt_logprobs == -1


def test_parameters_of_vllm_without_content_are_accepted() -> None:
    params = SamplingParams(
        extra_args={},
        flat_logprobs=False,
        skip_reading_prefix_cache=None,
        thinking_token_budget=None,
        repetition_detection=None,
        skip_clone=True,
        structured_outputs={"regex": "a", "disable_fallback": True},  # type: ignore[arg-type]
    )
    assert params.extra_args is None
    assert params.clone() == params == SamplingParams(structured_outputs=params.structured_outputs)
