"""Publishes the events of the KV cache over ZeroMQ, in the form of vLLM's `kv_events`.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a msgpack array
[seconds since 1970, [event, ...], data parallel rank]. An event is a tagged array or map; block
hashes are the last 8 bytes of ours as an unsigned integer, as vLLM sends its own. A request to the
replay socket is a sequence number; the answers are (number, batch) from there on, and (-1, empty).
The schema is that of vLLM's documentation, "KV events subscriber", and of its module
vllm/distributed/kv_events.py.

Nothing here holds up a step: `flush` appends to a queue, all else happens in a thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from hetero_llm.config.kv_events_config import FIELD, KvEventsConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.request import Request
from hetero_llm.kv_cache.kv_event_log import (
    PLAIN,
    AllCleared,
    BlocksRemoved,
    KvEvent,
    KvEventLog,
    RootInfo,
)
from hetero_llm.kv_cache.prefix_cache import hash_root

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES = 8
_SECONDS_TO_END = 1.0


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one step."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _ArrayEvent(msgspec.Struct, array_like=True, tag=True):
    pass


class _MapEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


_EVENTS: dict[str, list[Any]] = {
    "BlockStored": [
        ("block_hashes", list[int]),
        ("parent_block_hash", int | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[tuple[str, ...] | None] | None, None),
    ],
    "BlockRemoved": [("block_hashes", list[int]), ("medium", str | None)],
    "AllBlocksCleared": [],
}
"""Fields of each event, in vLLM's order."""

_TYPES: dict[str, dict[str, Any]] = {
    event_format: {
        name: msgspec.defstruct(name, fields, bases=(base,), tag=name)
        for name, fields in _EVENTS.items()
    }
    for event_format, base in (("array", _ArrayEvent), ("map", _MapEvent))
}


def encode_batch(
    events: Sequence[KvEvent], *, ts: float, rank: int, block_size: int, event_format: str
) -> bytes:
    """The msgpack of one batch.

    Args:
        ts: seconds since 1970.
        rank: the engine's number among its replicas.
        block_size: tokens in a block.
        event_format: see `KvEventsConfig`.
    """
    types = _TYPES[event_format]
    found = [_as_struct(event, types, block_size) for event in events]
    return msgspec.msgpack.encode(EventBatch(ts, found, rank))


def _as_struct(event: KvEvent, types: dict[str, Any], block_size: int) -> Any:
    if isinstance(event, AllCleared):
        return types["AllBlocksCleared"]()
    hashes = [_short(one) for one in event.block_hashes]
    if isinstance(event, BlocksRemoved):
        return types["BlockRemoved"](hashes, event.medium)
    root, parent = event.root, event.parent_hash
    extra_keys = None
    if root.extra and parent is None:  # it distinguishes the first block, and all behind it
        extra_keys = [(root.extra,), *[None] * (len(hashes) - 1)]
    tokens = np.frombuffer(b"".join(event.tokens), "<i4").tolist()
    return types["BlockStored"](
        hashes, None if parent is None else _short(parent), tokens, block_size,
        root.lora_id, event.medium, root.lora_name, extra_keys,
    )  # fmt: skip


def _short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class KvEventStream:
    """The log that the caches write, and the sockets that it goes to.

    Args:
        config: of this replica.
        rank: its number.
        block_size: tokens in a block.

    Attributes:
        log: what the prefix cache and the host tier get as their `KvEvents`.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: KvEventsConfig, *, rank: int, block_size: int) -> None:
        self.log = KvEventLog()
        self._config, self._rank, self._block_size = config, rank, block_size
        self._context = zmq.Context()
        self._context.linger = 0
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._replay: Any = None
        try:
            if _is_bound(config.endpoint):
                self._open("endpoint", self._publisher.bind, config.endpoint)
            else:
                self._open("endpoint", self._publisher.connect, config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._open("replay_endpoint", self._replay.bind, config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._queue: deque[tuple[float, list[KvEvent]]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._num_dropped = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, name: str, use: Any, address: str) -> None:
        try:
            use(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{FIELD}.{name}", address, f"cannot be used: {error}") from None

    # -- the step loop ----------------------------------------------------------------------

    def note_request(self, request: Request) -> None:
        """Called before a request's blocks are cached: says what its root hash stands for."""
        if request.root_hash == hash_root():
            return
        adapter = request.adapter
        root = PLAIN
        alone = hash_root()
        if adapter is not None:
            root = RootInfo(adapter.request.lora_int_id, adapter.name)
            alone = hash_root(("adapter", adapter.content_hash))
        if request.root_hash != alone:
            root = RootInfo(root.lora_id, root.lora_name, request.root_hash[:16].hex())
        self.log.name_root(request.root_hash, root)

    def flush(self) -> None:
        """Hands the events since the last call over to the thread. Beyond `max_queue_size` the
        oldest batches are lost; subscribers see a gap in the numbers."""
        events = self.log.take()
        if not events:
            return
        self._queue.append((time.time(), events))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Sends what is left and ends the thread. May be called again."""
        if self._ending:
            return
        self.flush()
        self._ending = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_SECONDS_TO_END)

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._ending or self._queue:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            try:
                self._send_all()
                if self._replay in ready:
                    self._send_again()
            except Exception:  # of one batch or request: the next one may work
                logger.exception("an event of the KV cache could not be sent")
        self._context.destroy(linger=int(_SECONDS_TO_END * 1e3))
        os.close(self._wake)

    def _send_all(self) -> None:
        config = self._config
        while self._queue:
            ts, events = self._queue.popleft()
            number = self._next_number
            self._next_number += 1
            if len(self._queue) > config.max_queue_size:
                self._note_drop()
                continue
            batch = encode_batch(
                events, ts=ts, rank=self._rank, block_size=self._block_size,
                event_format=config.event_format,
            )  # fmt: skip
            self._kept.append((number, batch))
            frames = (config.topic.encode(), number.to_bytes(_SEQUENCE_BYTES, "big"), batch)
            self._publisher.send_multipart(frames)

    def _note_drop(self) -> None:
        if not self._num_dropped:
            logger.warning(
                "events of the KV cache come faster than they can be sent: some are lost"
            )
        self._num_dropped += 1

    def _send_again(self) -> None:
        """Answers one request to the replay socket."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            logger.warning("a request for earlier KV events has no sequence number")
            return
        client, empty, start = frames
        first = int.from_bytes(start, "big")
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart(
                    (client, empty, number.to_bytes(_SEQUENCE_BYTES, "big"), batch)
                )
        self._replay.send_multipart((client, empty, END_OF_REPLAY, b""))


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
