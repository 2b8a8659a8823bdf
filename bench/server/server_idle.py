"""Short requests beside many open streams that send nothing.

The server is the real one with the fake engine of its tests, which costs next to nothing, so what
is measured is HTTP, request checks, tokenization and the event loop. The bench opens 1,000 streams,
each of which gets one token and then waits; meanwhile completions of one token arrive at 200 a
second, at random times. Latency is from the planned arrival to the last byte of the response, so a
client that falls behind its plan counts, too.

The client uses bare sockets, so that it fits on the second of two cores. The first row has no open
streams and the same arrivals. The table also shows the cores that other processes used meanwhile:
with two cores a busy neighbour is most of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from bench.common import Rows, bench_parser, report

RATE = 200.0
STREAMS = 1000
SECONDS = 20.0
WARM_SECONDS = 3.0
_SILENT_ABOVE = 100
_OPENED_AT_ONCE = 50
PATIENCE = 30.0
"""Seconds for an answer, for all streams to open, and for the server to end."""
_PROMPT = "def add(a, b):"
_PATH = "/v1/completions"


def serve(port_fd: int) -> int:
    """The server's process; `port_fd` is its bound socket."""
    from hetero_llm.config.args import resolve_server_args
    from hetero_llm.server.app import build_app
    from hetero_llm.server.serving import Server, freeze_collector, settings_of, uvicorn_config
    from tests.server.fake_engine import FakeEngine, demo_tokenizer

    args = resolve_server_args({"disable_log_requests": True, "disable_uvicorn_access_log": True})
    app = build_app(FakeEngine(demo_tokenizer(), silent_above=_SILENT_ABOVE), settings_of(args))
    server = Server(
        uvicorn_config(app, args),
        app.state.context,
        shutdown_timeout=0.0,
        drain_delay=0.0,
        ready="ready",
    )
    freeze_collector()
    with socket.socket(fileno=port_fd) as listener:
        return asyncio.run(server.run_until_stopped(listener))


@dataclass
class Load:
    """What came of the short requests. Latencies in seconds."""

    latencies: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    late: float = 0.0
    """The most that the client itself was behind its plan."""


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {_PATH} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


SHORT = request({"prompt": _PROMPT, "max_tokens": 1})
STREAM = request({"prompt": _PROMPT, "max_tokens": 1000, "stream": True})


class Short(asyncio.Protocol):
    """A connection that is used again and again for short requests."""

    def __init__(self) -> None:
        self.data = b""
        self.answered: asyncio.Future[str] | None = None
        self.transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self) -> str:
        """The status of one request, once its answer is here; "closed" or "none" without one."""
        assert self.transport is not None
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(SHORT)
        try:
            async with asyncio.timeout(PATIENCE):
                return await self.answered
        except TimeoutError:
            self.transport.abort()
            return "none"

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if found and len(body) >= _length(head) and self.answered is not None:
            self.data = b""
            self.answered.set_result(head[9:12].decode())

    def connection_lost(self, error: Exception | None) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result("closed")


def _length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


async def short_requests(port: int, rate: float, seconds: float, *, seed: int) -> Load:
    """Requests at random times for `seconds`, and their responses."""
    load, rng = Load(), random.Random(seed)
    loop = asyncio.get_running_loop()
    # The one that has waited longest goes first, so that none waits until the server closes it.
    idle: deque[Short] = deque()
    running: set[asyncio.Task[None]] = set()

    async def connected() -> Short:
        while idle:
            connection = idle.popleft()
            if connection.is_open:
                return connection
        return (await loop.create_connection(Short, "127.0.0.1", port))[1]

    async def one(due: float) -> None:
        load.late = max(load.late, loop.time() - due)
        try:
            connection = await connected()
            status = await connection.ask()
        except OSError:
            status = "refused"
        load.latencies.append(loop.time() - due)
        load.statuses[status] += 1
        if status == "200":
            idle.append(connection)

    due, end = loop.time(), loop.time() + seconds
    while (due := due + rng.expovariate(rate)) < end:
        await asyncio.sleep(due - loop.time())
        task = loop.create_task(one(due))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for connection in idle:
        if connection.transport is not None:
            connection.transport.close()
    return load


class Streams:
    """The open streams."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self, count: int) -> None:
        """Opens streams; each has its first token then."""
        places = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def one() -> None:
            async with places:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(STREAM)
                await reader.readuntil(b"\n\n")
                self._open.append((reader, writer))

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(one() for _ in range(count)))

    async def still_open(self) -> int:
        """Streams that have had no more than comments since, and have not ended."""
        count = 0
        for reader, _ in self._open:
            since = b""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0001):
                    while piece := await reader.read(1 << 16):
                        since += piece
            count += not reader.at_eof() and b"data:" not in since
        return count

    def close(self) -> None:
        for _, writer in self._open:
            writer.transport.abort()


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """Of all processes, ours included, and what the host kept for others (steal)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, *others = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


async def measure(args: argparse.Namespace, port: int, pid: int) -> Rows:
    """The rows of the table."""
    rows = []
    await short_requests(port, args.rate, WARM_SECONDS, seed=0)
    for count in (0, args.streams):
        streams = Streams(port)
        began = time.perf_counter()
        await streams.open(count)
        opening = time.perf_counter() - began
        before = cpu_seconds(pid), cpu_seconds(os.getpid()), machine_cpu_seconds()
        load = await short_requests(port, args.rate, args.seconds, seed=1)
        after = cpu_seconds(pid), cpu_seconds(os.getpid()), machine_cpu_seconds()
        server, client, all_cpu = (
            (b - a) / args.seconds for a, b in zip(before, after, strict=True)
        )
        cuts = quantiles(load.latencies, n=1000, method="inclusive")
        rows.append(
            {
                "idle_streams": count,
                "still_open": await streams.still_open(),
                "opening_s": opening,
                "requests": len(load.latencies),
                "errors": len(load.latencies) - load.statuses["200"],
                "p50_ms": cuts[499] * 1e3,
                "p95_ms": cuts[949] * 1e3,
                "p99_ms": cuts[989] * 1e3,
                "max_ms": max(load.latencies) * 1e3,
                "server_cpu": server,
                "client_cpu": client,
                "others_cpu": all_cpu - server - client,
                "client_late_ms": load.late * 1e3,
            }
        )
        streams.close()
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--rate", type=float, default=RATE, help="short requests a second")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--serve", type=int, metavar="FD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        sys.exit(serve(args.serve))
    # asyncio turns Nagle's delay off only where a socket says that it is TCP.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.server.server_idle", "--serve", str(listener.fileno())],
            pass_fds=(listener.fileno(),),
            stdout=subprocess.PIPE,
        )
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        rows = asyncio.run(measure(args, port, server.pid))
    finally:
        server.terminate()
        try:
            server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
            raise
    report("server_idle", {"rate": args.rate, "seconds": args.seconds}, rows, args.out)


if __name__ == "__main__":
    main()
