"""One connection to a replica: answers, and who may stop reading them."""

from __future__ import annotations

import asyncio

from hetero_llm.server.router.replica_link import Exchange, ReplicaConnection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Transport(asyncio.Transport):
    """Notes whether it reads and whether it was ended."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.ended = True, False

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.ended = True


def asked() -> tuple[ReplicaConnection, Transport, Exchange]:
    """A connection with a request under way."""
    connection = ReplicaConnection(released=lambda _: None, lost=lambda _: None)
    transport = Transport()
    connection.connection_made(transport)
    return connection, transport, connection.start(b"GET", b"/", [(b"host", b"x")], b"")


def test_a_slow_client_pauses_its_own_answer_only() -> None:
    """The last bytes of an answer may fill the client's buffer when the connection is free again:
    paused then, it would never bring the next request's answer."""

    async def run() -> None:
        connection, transport, exchange = asked()
        connection.data_received(ANSWER[:-1])
        exchange.pause(True)
        assert not transport.reads
        exchange.pause(False)
        connection.data_received(ANSWER[-1:])
        assert exchange.is_over and exchange.take() == [b"o", b"k"]
        exchange.pause(True)
        assert transport.reads

    asyncio.run(run())


def test_stopping_ends_an_unfinished_answer() -> None:
    async def run() -> None:
        connection, transport, exchange = asked()
        connection.data_received(ANSWER)
        exchange.stop()
        assert not transport.ended
        unfinished = connection.start(b"GET", b"/", [(b"host", b"x")], b"")
        unfinished.stop()
        assert transport.ended

    asyncio.run(run())
