"""`PoolingParams`: every wrong field is an error that names it."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm import PoolingError, PoolingParams, RequestError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 0}, "dimensions=0: must be an integer of at least 1"),
        ({"dimensions": True}, "dimensions=True: must be an integer of at least 1"),
        (
            {"truncate_prompt_tokens": -2},
            "truncate_prompt_tokens=-2: must be an integer of at least 1, or -1 for the model's "
            "limit",
        ),
        ({"normalize": 1}, "normalize=1: must be True, False or None"),
        ({"use_activation": "yes"}, "use_activation='yes': must be True, False or None"),
        ({"task": "ask"}, "task='ask': must be 'embed', 'classify' or 'score'"),
        (
            {"task": "token_embed"},
            "task='token_embed': is not available yet; use 'embed', 'classify' or 'score'",
        ),
        ({"truncation_side": "up"}, "truncation_side='up': must be 'left' or 'right'"),
        ({"prompt_name": 3}, "prompt_name=3: must be a string"),
        (
            {"softmax": True, "use_activation": False},
            "softmax=True: is another name of use_activation, also given",
        ),
        (
            {"extra_kwargs": {"a": 1}},
            "extra_kwargs={'a': 1}: an argument for a pooler of one's own is not available yet",
        ),
        (
            {"late_interaction_params": 3},
            "late_interaction_params=3: late interaction is not available yet",
        ),
        (
            {"requires_token_ids": True},
            "requires_token_ids=True: a pooler that sees the token ids is not available yet",
        ),
        (
            {"returned_token_ids": [1]},
            "returned_token_ids=[1]: a reward model is not available yet",
        ),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PoolingError) as caught:
        PoolingParams(**fields)
    assert str(caught.value) == message
    assert isinstance(caught.value, RequestError) and isinstance(caught.value, ValueError)


def test_older_names_and_copies() -> None:
    params = PoolingParams(activation=False, truncate_prompt_tokens=-1, dimensions=8)
    assert params.use_activation is False and params.activation is None
    copied = params.clone()
    copied.dimensions = 4
    assert params.dimensions == 8
    copied.dimensions = 0
    with pytest.raises(PoolingError, match="dimensions=0"):
        copied.check()


def test_parameters_of_vllm_without_content_are_accepted() -> None:
    params = PoolingParams(
        requires_token_ids=False,
        extra_kwargs={},
        late_interaction_params=None,
        skip_reading_prefix_cache=True,
    )
    assert params == PoolingParams() == params.clone()
