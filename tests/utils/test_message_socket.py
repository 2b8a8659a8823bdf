"""Messages over a socket pair: whole, in order, and without waiting unless that is asked for."""

from __future__ import annotations

import os
import socket
from threading import Thread

from hetero_llm.utils.message_socket import MessageSocket


def test_messages_of_any_size_arrive_whole() -> None:
    left, right = map(MessageSocket, socket.socketpair())
    sizes = [0, 1, 5, 70_000, 3_000_000, 2, 1 << 18, 0]
    sent = [os.urandom(size) for size in sizes]
    for message in sent:
        left.send(message)
    assert left.num_unsent > 0
    received: list[bytes] = []
    while len(received) < len(sent):
        received += right.receive()
        left.flush()
    assert received == sent and left.num_unsent == 0
    assert right.receive() == []
    left.close()
    assert right.receive() == [] and right.closed
    right.send(b"x" * (1 << 20))  # the other end is closed
    assert right.num_unsent == 0
    right.close()


def test_one_message_after_the_other_is_waited_for() -> None:
    left, right = map(MessageSocket, socket.socketpair())
    for message in (b"1", b"", b"3", b"4"):
        left.send(message)
    assert [right.wait(), right.wait()] == [b"1", b""]
    assert right.receive() == [b"3", b"4"]
    left.close()
    assert right.wait() is None and right.closed
    right.close()


def test_unsent_bytes_are_waited_for_as_long_as_is_said() -> None:
    left, right = map(MessageSocket, socket.socketpair())
    data = os.urandom(3_000_000)
    left.send(data)
    left.drain(0.0)
    assert left.num_unsent > 0, "the other end has not read"
    received: list[bytes | None] = []
    reader = Thread(target=lambda: received.append(right.wait()))
    reader.start()
    left.drain()
    assert left.num_unsent == 0
    reader.join()
    assert received == [data]
    left.send(data)
    right.close()
    left.drain()  # dropped
    assert left.num_unsent == 0
    left.close()
