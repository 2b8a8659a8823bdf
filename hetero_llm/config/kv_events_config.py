"""Where and how the events of the KV cache are published: `kv_events_config`, as vLLM has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.core.errors import ConfigError

FIELD = "kv_events_config"
_SCHEMES = ("tcp://", "ipc://", "inproc://")
_FORMATS = ("array", "map")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """
    Attributes:
        endpoint: address of the PUB socket. One with * or ::, ipc and inproc ones are bound, others
            connected to.
        replay_endpoint: address of the ROUTER socket that sends earlier batches again; None: there
            is none.
        buffer_steps: batches kept for it.
        hwm: messages that wait for a slow subscriber before ZeroMQ drops some.
        max_queue_size: batches that wait to be sent.
        topic: first frame of every message.
        event_format: "array": events are tagged arrays, as vLLM sends them up to 0.23 and all its
            subscribers read them; "map": tagged maps, as later ones do. The batch is an array.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    event_format: str = "array"

    def of_replica(self, replica: int) -> KvEventsConfig:
        """The configuration of one of several engines: as in vLLM, TCP ports are counted up, and
        other names get an ending."""
        if not replica:
            return self
        replay = self.replay_endpoint
        return dataclasses.replace(
            self,
            endpoint=_moved(self.endpoint, replica),
            replay_endpoint=None if replay is None else _moved(replay, replica),
        )


def kv_events_from_args(args: Mapping[str, Any]) -> KvEventsConfig | None:
    """Reads `kv_events_config`; None: no events are published.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    given: Mapping[str, Any] | None = args[FIELD]
    if not given:
        return None
    left = dict(given)
    enabled = left.pop("enable_kv_cache_events", False)
    if type(enabled) is not bool:
        raise ConfigError(f"{FIELD}.enable_kv_cache_events", enabled, "must be true or false")
    publisher = left.pop("publisher", None)
    if publisher not in (None, "zmq", "null"):
        raise ConfigError(f"{FIELD}.publisher", publisher, "must be 'zmq' or 'null'")
    known = KvEventsConfig()
    for name, value in left.items():
        if not hasattr(known, name):
            raise ConfigError(f"{FIELD}.{name}", value, "is unknown")
        _check(name, value)
    config = KvEventsConfig(**left)
    if not enabled or publisher == "null":
        return None
    if not args["enable_prefix_caching"]:
        reason = "needs enable_prefix_caching: without it no block can be found later"
        raise ConfigError(FIELD, dict(given), reason)
    return config


def _check(name: str, value: Any) -> None:
    field = f"{FIELD}.{name}"
    if name in ("buffer_steps", "hwm", "max_queue_size"):
        if type(value) is not int or not 1 <= value <= 1 << 30:
            raise ConfigError(field, value, "must be an integer of at least 1")
    elif name in ("endpoint", "replay_endpoint"):
        if value is None and name == "replay_endpoint":
            return
        if not isinstance(value, str) or not value.startswith(_SCHEMES):
            raise ConfigError(field, value, "must begin with tcp://, ipc:// or inproc://")
        if value.startswith("tcp://") and not value.rpartition(":")[2].isdecimal():
            raise ConfigError(field, value, "must end with a port")
    elif name == "event_format":
        if value not in _FORMATS:
            raise ConfigError(field, value, "must be 'array' or 'map'")
    elif not isinstance(value, str):
        raise ConfigError(field, value, "must be a text")


def _moved(endpoint: str, replica: int) -> str:
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{replica}"
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + replica}"
