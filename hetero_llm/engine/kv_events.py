"""The engine's side of KV events: the stream, or a null object without one."""

from __future__ import annotations

from typing import Protocol

from hetero_llm.config.kv_events_config import FIELD, KvEventsConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.kv_events import KvEvents, NoKvEvents
from hetero_llm.core.request import Request


class KvEventPublisher(Protocol):
    """See `kv_event_stream.KvEventStream`."""

    @property
    def log(self) -> KvEvents: ...

    def note_request(self, request: Request) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class NoKvEventPublisher:
    """Stands in where no events are published."""

    log = NoKvEvents()

    def note_request(self, request: Request) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_kv_events(
    config: KvEventsConfig | None, *, replica: int, block_size: int
) -> KvEventPublisher:
    """Opens the sockets of the configuration.

    Args:
        config: of the first replica; None: no events are published.
        replica: number of this engine.
        block_size: tokens in a block.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """
    if config is None:
        return NoKvEventPublisher()
    try:
        from hetero_llm.engine.kv_event_stream import KvEventStream
    except ImportError as error:
        if error.name not in ("zmq", "msgspec"):
            raise
        package = {"zmq": "pyzmq", "msgspec": "msgspec"}[error.name]
        reason = f"needs {package}: pip install 'hetero-llm[kv-events]'"
        raise ConfigError(FIELD, {"publisher": "zmq"}, reason) from None
    return KvEventStream(config.of_replica(replica), rank=replica, block_size=block_size)
