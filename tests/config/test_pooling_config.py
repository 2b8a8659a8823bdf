"""The arguments of pooling models."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.pooling_config import PoolingConfig, pooling_from_args
from hetero_llm.core.errors import ConfigError


def read(**given: Any) -> PoolingConfig:
    return pooling_from_args(resolve_engine_args({"model": "m", **given}))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, PoolingConfig()),
        ({"runner": "generate"}, PoolingConfig("generate")),
        ({"runner": "pooling"}, PoolingConfig("pooling")),
        ({"task": "embed"}, PoolingConfig("pooling", "embed")),
        ({"task": "score"}, PoolingConfig("pooling")),
        ({"task": "generate"}, PoolingConfig("generate")),
        ({"convert": "classify"}, PoolingConfig("pooling", "classify")),
        ({"convert": "none"}, PoolingConfig()),
        (
            {"pooler_config": {"pooling_type": "mean", "normalize": False, "dimensions": 4}},
            PoolingConfig(pooling_type="MEAN", normalize=False, dimensions=4),
        ),
        ({"override_pooler_config": {"pooling_type": "LAST"}}, PoolingConfig(pooling_type="LAST")),
        ({"pooler_config": {"use_activation": False}}, PoolingConfig(use_activation=False)),
    ],
)
def test_read(given: dict[str, Any], wanted: PoolingConfig) -> None:
    assert read(**given) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "reward"}, "task='reward': is not available yet; use 'auto', "),
        ({"task": "embed", "runner": "generate"}, "runner='generate': contradicts task='embed'"),
        ({"runner": "generate", "convert": "embed"}, "convert='embed': contradicts runner="),
        ({"pooler_config": {"step_tag_id": 1}}, "pooler_config='step_tag_id': is no key of it"),
        (
            {"pooler_config": {"pooling_type": "MAX"}},
            "pooler_config.pooling_type='MAX': must be 'CLS', 'MEAN' or 'LAST'",
        ),
        ({"pooler_config": {"normalize": 1}}, "pooler_config.normalize=1: must be true or false"),
        ({"pooler_config": {"dimensions": -1}}, "pooler_config.dimensions=-1: must be a positive"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**given)
    assert str(caught.value).startswith(message)
