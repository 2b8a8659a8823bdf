"""Messages between the engine and a rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hetero_llm.core.errors import ConfigError, ModelLoadError, RankDeadError
from hetero_llm.distributed.control_socket import ControlSocket, RankFailed, RankReached


@pytest.fixture
def ends() -> Iterator[tuple[ControlSocket, ControlSocket]]:
    one, other = map(ControlSocket, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_come_in_order(ends: tuple[ControlSocket, ControlSocket]) -> None:
    one, other = ends
    assert other.receive() == []
    sent = [RankReached("a"), RankFailed("X", "why"), RankReached("b")]
    for message in sent:
        one.send(message)
    assert other.receive() == sent
    assert other.receive() == []


def test_long_bytes(ends: tuple[ControlSocket, ControlSocket]) -> None:
    one, other = ends
    data = bytes(range(256)) * 256
    one.send_bytes(data)
    one.send_bytes(b"")
    assert other.receive_bytes() == data
    assert other.receive_bytes() == b""
    one.close()
    with pytest.raises(EOFError):
        other.receive_bytes()


def test_a_users_mistake_stays_one() -> None:
    error = RankFailed.of(ConfigError("gpu_memory_utilization", 0.5, "too small")).as_error(3)
    assert isinstance(error, ConfigError)
    assert str(error) == "gpu_memory_utilization=0.5: rank 3: too small"
    assert "{1}" in str(RankFailed.of(ConfigError("a", {1}, "b")).as_error(1))
    error = RankFailed.of(ModelLoadError("no file")).as_error(1)
    assert isinstance(error, ModelLoadError) and str(error) == "rank 1: no file"


def test_other_errors_end_the_engine() -> None:
    error = RankFailed.of(RuntimeError("broken")).as_error(2)
    assert isinstance(error, RankDeadError)
    assert str(error) == "rank 2 has failed: RuntimeError: broken"
