"""Events on the wire, byte by byte, and the two sockets."""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from hetero_llm.config.kv_events_config import KvEventsConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.kv_events import CPU, GPU
from hetero_llm.core.lora import AdapterRef, LoRARequest
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.engine.kv_event_stream import KvEventStream, encode_batch
from hetero_llm.engine.kv_events import NoKvEventPublisher, open_kv_events
from hetero_llm.kv_cache.kv_event_log import AllCleared, BlocksRemoved, BlocksStored, RootInfo
from hetero_llm.kv_cache.prefix_cache import hash_block, hash_root, token_bytes
from tests.helpers.harness import make_request

PATIENCE = 120_000  # milliseconds; only a hang comes near
ONE, TWO = bytes(24) + bytes(range(1, 9)), bytes(24) + b"\xff" * 8
SHORT_ONE, SHORT_TWO = 0x0102030405060708, 0xFFFFFFFFFFFFFFFF
STORED = BlocksStored(
    GPU, None, RootInfo(), [ONE, TWO], [token_bytes([5, 6]), token_bytes([7, 300])]
)


def packed(events: list[Any], event_format: str = "array", rank: int = 0) -> bytes:
    return encode_batch(events, ts=1.5, rank=rank, block_size=2, event_format=event_format)


def u64(value: int) -> bytes:
    return b"\xcf" + struct.pack(">Q", value)


def text(value: str) -> bytes:
    return bytes([0xA0 | len(value)]) + value.encode()


def test_arrays_byte_by_byte() -> None:
    """[ts, [event...], rank]; an event is [tag, its fields in vLLM's order]."""
    hashes = b"\x92" + u64(SHORT_ONE) + u64(SHORT_TWO)
    tokens = b"\x94\x05\x06\x07\xcd\x01\x2c"
    stored = (
        b"\x99" + text("BlockStored") + hashes + b"\xc0" + tokens + b"\x02" + b"\xc0"
        + text("GPU") + b"\xc0" + b"\xc0"
    )  # fmt: skip
    removed = b"\x93" + text("BlockRemoved") + b"\x91" + u64(SHORT_ONE) + text("CPU")
    cleared = b"\x91" + text("AllBlocksCleared")
    expected = b"\x93\xcb" + struct.pack(">d", 1.5) + b"\x93" + stored + removed + cleared + b"\x03"
    assert packed([STORED, BlocksRemoved(CPU, [ONE]), AllCleared()], rank=3) == expected


def test_maps_name_their_fields() -> None:
    """vLLM after 0.23: the batch is an array, its events are maps with a "type"."""
    found = msgspec.msgpack.decode(packed([STORED, BlocksRemoved(CPU, [ONE]), AllCleared()], "map"))
    assert found == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [SHORT_ONE, SHORT_TWO],
                "parent_block_hash": None,
                "token_ids": [5, 6, 7, 300],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [SHORT_ONE], "medium": "CPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


# The types of vLLM's documented subscriber, which decodes events strictly.
class _Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def test_vllms_documented_subscriber_reads_them() -> None:
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    child = BlocksStored(CPU, TWO, RootInfo(4, "sql"), [ONE], [token_bytes([1, 2])])
    batch = decoder.decode(packed([STORED, child, BlocksRemoved(GPU, [TWO]), AllCleared()]))
    assert batch.events == [
        BlockStored([SHORT_ONE, SHORT_TWO], None, [5, 6, 7, 300], 2, None, "GPU"),
        BlockStored([SHORT_ONE], SHORT_TWO, [1, 2], 2, 4, "CPU"),
        BlockRemoved([SHORT_TWO], "GPU"),
        AllBlocksCleared(),
    ]


def test_what_else_a_prefix_depends_on() -> None:
    salted = BlocksStored(GPU, None, RootInfo(extra="ab"), [ONE, TWO], [token_bytes([1, 2])] * 2)
    behind = BlocksStored(GPU, ONE, RootInfo(extra="ab"), [TWO], [token_bytes([1, 2])])
    lora = BlocksStored(GPU, None, RootInfo(7, "sql"), [ONE], [token_bytes([1, 2])])
    _, events, _ = msgspec.msgpack.decode(packed([salted, behind, lora]))
    assert events[0][7:] == [None, [["ab"], None]]
    assert events[1][7:] == [None, None]
    assert (events[2][5], events[2][7]) == (7, "sql")


# sockets


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def entry(number: int) -> tuple[bytes, bytes]:
    tokens = [number, number]
    return hash_root() + token_bytes(tokens), hash_block(hash_root(), tokens)


@pytest.fixture
def stream(tmp_path: Any) -> Iterator[KvEventStream]:
    config = KvEventsConfig(
        f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", buffer_steps=3, topic="kv"
    )
    made = KvEventStream(config, rank=1, block_size=2)
    yield made
    made.close()


def replayed(context: zmq.Context, address: str, first: int) -> list[tuple[int, bytes]]:
    with context.socket(zmq.DEALER) as socket:  # a REQ socket takes one answer only
        socket.connect(address)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert socket.poll(PATIENCE), "no answer"
            _, number, batch = socket.recv_multipart()
            if number == b"\xff" * 8:
                assert batch == b""
                return found
            found.append((int.from_bytes(number, "big"), batch))


def test_batches_are_numbered_and_can_be_had_again(
    stream: KvEventStream, context: zmq.Context, tmp_path: Any
) -> None:
    socket = context.socket(zmq.SUB)
    socket.connect(f"ipc://{tmp_path}/events")
    socket.subscribe("kv")
    seen: list[tuple[int, list[Any]]] = []
    sent = 0
    while not seen:  # until the subscription has arrived
        stream.log.stored(GPU, [entry(sent)])
        stream.flush()
        sent += 1
        if socket.poll(20):
            topic, number, batch = socket.recv_multipart()
            assert topic == b"kv"
            seen.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)))
    stream.flush()  # nothing new: nothing is sent
    stream.log.cleared()
    stream.flush()
    while seen[-1][0] != sent:
        assert socket.poll(PATIENCE), "a batch is missing"
        _, number, batch = socket.recv_multipart()
        seen.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)))
    numbers = [number for number, _ in seen]
    assert numbers == list(range(numbers[0], sent + 1)), "in order, without a gap"
    assert seen[-1][1][1] == [["AllBlocksCleared"]] and seen[-1][1][2] == 1
    again = replayed(context, f"ipc://{tmp_path}/replay", 0)
    assert [number for number, _ in again] == list(range(sent + 1))[-3:]
    assert msgspec.msgpack.decode(again[-1][1]) == seen[-1][1]
    assert replayed(context, f"ipc://{tmp_path}/replay", sent)[0][0] == sent
    assert replayed(context, f"ipc://{tmp_path}/replay", sent + 1) == []


def test_a_wrong_request_is_no_end(
    stream: KvEventStream, context: zmq.Context, tmp_path: Any
) -> None:
    with context.socket(zmq.REQ) as socket:
        socket.connect(f"ipc://{tmp_path}/replay")
        socket.send(b"short")
        assert replayed(context, f"ipc://{tmp_path}/replay", 0) == []


def test_roots_of_requests(stream: KvEventStream) -> None:
    def root_of(**changes: Any) -> RootInfo:
        request = dataclasses.replace(make_request("a", [1, 2], SamplingParams(), 64), **changes)
        stream.note_request(request)
        key = request.root_hash + token_bytes([1, 2])
        stream.log.stored(GPU, [(key, hash_block(request.root_hash, [1, 2]))])
        (event,) = stream.log.take()
        assert isinstance(event, BlocksStored) and event.parent_hash is None
        return event.root

    ref = AdapterRef(LoRARequest("sql", 3, "/a"), "content", 8)
    assert root_of(root_hash=hash_root()) == RootInfo()
    assert root_of(root_hash=hash_root(("adapter", "content")), adapter=ref) == RootInfo(3, "sql")
    both = root_of(root_hash=hash_root(("adapter", "content", "salt", "x")), adapter=ref)
    assert (both.lora_id, both.lora_name) == (3, "sql") and len(both.extra) == 32
    salted = root_of(root_hash=hash_root(("salt", "secret")))
    assert salted.lora_name is None and "secret" not in salted.extra and salted.extra


def test_a_taken_address_is_one_line(stream: KvEventStream) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        config = KvEventsConfig(replay_endpoint=f"tcp://127.0.0.1:{port}", endpoint="inproc://x")
        with pytest.raises(ConfigError, match="replay_endpoint=.*cannot be used"):
            KvEventStream(config, rank=0, block_size=2)


def test_without_a_configuration_there_is_no_stream() -> None:
    stream = open_kv_events(None, replica=0, block_size=16)
    assert isinstance(stream, NoKvEventPublisher) and not stream.log.is_on
    stream.flush()
    stream.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hetero_llm.engine.kv_event_stream", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"needs pyzmq: pip install 'hetero-llm\[kv-events\]'"):
        open_kv_events(KvEventsConfig(), replica=0, block_size=16)
