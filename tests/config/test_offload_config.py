"""What the arguments say of the prefix cache in host memory."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.args_features import OFFLOAD
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.offload_config import OffloadConfig, no_effect_on_cpu, pool_words
from hetero_llm.core.errors import ConfigError

ON = {"enable_prefix_cache_offload": True}
DEFAULTS = OffloadConfig(
    memory_utilization=0.3,
    lazy=True,
    lookahead=2,
    max_inflight_bytes=32 << 20,
    min_uses=1,
    hit_count=False,
    gpu_evictor_limit=None,
    write_policy="victim",
    host_policy="slru",
    load_min_tokens=None,
    background_pin=True,
)
OTHERS: dict[str, Any] = {
    "cpu_prefill_memory_utilization": 0.5,
    "apc_offload_not_lazy": True,
    "apc_offload_min_access_threshold": 2,
    "apc_offload_enable_hit_cnt": True,
    "apc_offload_gpu_evictor_limit": 0,
    "apc_offload_lookahead": 3,
    "apc_offload_max_inflight_mb": 5,
    "apc_offload_write_policy": "write_through",
    "apc_offload_host_policy": "cost",
    "apc_offload_load_min_tokens": 0,
    "apc_offload_background_pin": False,
}
"""Of every argument but the switch, a value that is not its default."""


def offload(**given: Any) -> OffloadConfig | None:
    return EngineConfig.from_args(resolve_engine_args({"model": "demo", **given})).offload


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        offload(**given)
    return str(caught.value)


def test_off_unless_asked_for() -> None:
    assert offload() is None
    assert offload(enable_prefix_cache_offload=False, enable_prefix_caching=False) is None
    assert offload(cpu_prefill_memory_utilization=0.3, apc_offload_lookahead=2) is None


def test_defaults_are_the_manuals() -> None:
    assert offload(**ON) == DEFAULTS
    with pytest.raises(FrozenInstanceError):
        DEFAULTS.lookahead = 3  # type: ignore[misc]


def test_every_value_arrives() -> None:
    lazy = {name: value for name, value in OTHERS.items() if name != "apc_offload_not_lazy"}
    config = offload(**ON, **lazy)
    assert config == OffloadConfig(
        0.5, True, 3, 5 << 20, 2, True, 0, "write_through", "cost", 0, False
    )
    eager = offload(**ON, apc_offload_not_lazy=True)
    assert eager is not None and not eager.lazy
    assert {spec.name for spec in OFFLOAD} == {*ON, *OTHERS}
    assert len(fields(OffloadConfig)) == len(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_given_in_vain(name: str) -> None:
    value = OTHERS[name]
    assert refused(**{name: value}) == f"{name}={value!r}: needs enable_prefix_cache_offload=True"


def test_it_needs_the_prefix_cache() -> None:
    wrong = refused(**ON, enable_prefix_caching=False)
    assert wrong.startswith("enable_prefix_cache_offload=True: needs enable_prefix_caching=True")


@pytest.mark.parametrize("name", ["apc_offload_lookahead", "apc_offload_max_inflight_mb"])
def test_no_limits_without_laziness(name: str) -> None:
    wrong = refused(**ON, apc_offload_not_lazy=True, **{name: OTHERS[name]})
    assert wrong.startswith(f"{name}={OTHERS[name]}: has no effect with apc_offload_not_lazy=True")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("enable_prefix_cache_offload", 1, "must be True or False"),
        ("cpu_prefill_memory_utilization", 0, "must be greater than 0"),
        ("cpu_prefill_memory_utilization", -0.1, "must be greater than 0"),
        ("cpu_prefill_memory_utilization", 1.5, "must be at most 1"),
        ("cpu_prefill_memory_utilization", math.nan, "must be a finite number"),
        ("cpu_prefill_memory_utilization", "0.3", "must be a number"),
        ("apc_offload_not_lazy", 0, "must be True or False"),
        ("apc_offload_min_access_threshold", 0, "must be at least 1"),
        ("apc_offload_min_access_threshold", -3, "must be at least 1"),
        ("apc_offload_min_access_threshold", 1.0, "must be an integer"),
        ("apc_offload_enable_hit_cnt", None, "must be True or False"),
        ("apc_offload_gpu_evictor_limit", -2, "must be at least -1"),
        ("apc_offload_gpu_evictor_limit", 2**31, "must be at most 2147483647"),
        ("apc_offload_lookahead", 0, "must be at least 1"),
        ("apc_offload_lookahead", 2**31, "must be at most 2147483647"),
        ("apc_offload_max_inflight_mb", 0, "must be at least 1"),
        ("apc_offload_max_inflight_mb", 2**20 + 1, "must be at most 1048576"),
        ("apc_offload_write_policy", "write_back", "must be 'victim' or 'write_through'"),
        ("apc_offload_host_policy", "fifo", "must be 'lru', 'slru' or 'cost'"),
        ("apc_offload_load_min_tokens", -1, "must be at least 0"),
        ("apc_offload_background_pin", "no", "must be True or False"),
    ],
)
@pytest.mark.parametrize("switch", [ON, {}], ids=["on", "off"])
def test_bad_values_are_errors(switch: Any, name: str, value: Any, reason: str) -> None:
    wrong = refused(**{**switch, name: value})
    assert wrong.startswith(f"{name}=") and reason in wrong


def test_limits_of_the_manual() -> None:
    def limit(value: int) -> int | None:
        config = offload(**ON, apc_offload_gpu_evictor_limit=value)
        assert config is not None
        return config.gpu_evictor_limit

    assert [limit(value) for value in (-1, 0, 7)] == [None, 0, 7]
    whole = offload(**ON, cpu_prefill_memory_utilization=1)
    assert whole is not None and whole.memory_utilization == 1.0


def test_sentences() -> None:
    assert no_effect_on_cpu().startswith("enable_prefix_cache_offload has no effect on a CPU: ")
    assert pool_words(38 << 30, "batched copies") == (
        "38.0 GiB of pinned host memory for the prefix cache, batched copies"
    )
