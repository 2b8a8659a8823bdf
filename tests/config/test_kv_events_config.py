"""`kv_events_config`: vLLM's keys, checked."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.kv_events_config import KvEventsConfig
from hetero_llm.core.errors import ConfigError

ON = {"enable_kv_cache_events": True}


def read(given: Any, **args: Any) -> KvEventsConfig | None:
    resolved = resolve_engine_args({"model": "m", "kv_events_config": given, **args})
    return EngineConfig.from_args(resolved).kv_events


@pytest.mark.parametrize(
    "given", [None, {}, {"enable_kv_cache_events": False}, {**ON, "publisher": "null"}]
)
def test_nothing_is_published(given: Any) -> None:
    assert read(given) is None


def test_all_keys() -> None:
    assert read({**ON, "publisher": "zmq"}) == KvEventsConfig()
    given = {
        "endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7001", "buffer_steps": 5,
        "hwm": 6, "max_queue_size": 7, "topic": "kv", "event_format": "map",
    }  # fmt: skip
    assert read({**ON, **given}) == KvEventsConfig(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1: must be true or false"),
        ({"publisher": "nats"}, "publisher='nats': must be 'zmq' or 'null'"),
        ({"port": 5}, "port=5: is unknown"),
        ({"endpoint": "5557"}, "must begin with tcp://"),
        ({"endpoint": "tcp://*:x"}, "must end with a port"),
        ({"endpoint": None}, "must begin with"),
        ({"replay_endpoint": 5}, "must begin with"),
        ({"hwm": 0}, "hwm=0: must be an integer of at least 1"),
        ({"buffer_steps": True}, "must be an integer"),
        ({"topic": 1}, "topic=1: must be a text"),
        ({"event_format": "json"}, "must be 'array' or 'map'"),
    ],
)
def test_mistakes_name_their_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({**ON, **given})
    assert said in str(caught.value) and "kv_events_config." in str(caught.value)


def test_it_needs_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        read(ON, enable_prefix_caching=False)


def test_replicas_count_ports_up() -> None:
    config = KvEventsConfig("tcp://*:5557", "ipc://replay")
    assert config.of_replica(0) is config
    moved = config.of_replica(2)
    assert (moved.endpoint, moved.replay_endpoint) == ("tcp://*:5559", "ipc://replay_dp2")
    assert KvEventsConfig("inproc://x").of_replica(1).endpoint == "inproc://x_dp1"
