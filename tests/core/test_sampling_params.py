"""Every wrong value of SamplingParams is an error that names the field and the value."""

from __future__ import annotations

import math

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
    ({"seed": -1}, "seed=-1"),
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
    ({"allowed_token_ids": []}, r"allowed_token_ids=\(\)"),
    ({"allowed_token_ids": 5}, "allowed_token_ids=5"),
    ({"temperature": 10**400}, "temperature=1000"),
    ({"output_kind": "delta"}, "output_kind='delta'"),
    ({"logits_processors": [3]}, "logits_processors=3"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
    ({"num_speculative_tokens": False}, "num_speculative_tokens=False"),
    ({"num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0"),
    ({"ignore_eos": 1}, "ignore_eos=1"),
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


def test_lists_become_immutable() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2], logit_bias={"7": 1})
    assert params.stop == ("x",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {7: 1.0}
    with pytest.raises(AttributeError):
        params.n = 2
