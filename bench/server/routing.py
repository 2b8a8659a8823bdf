"""`hetero-llm route` over two servers on CPUs: prompts with shared beginnings against round robin,
and what the hop costs.

    python -m bench.server.routing [--model demo] [--urls URL,URL] [--out FILE]

Groups of prompts share a long beginning; each request ends in words of its own. The servers' KV
caches hold half of the groups each: a server that gets all of them computes most beginnings again.
"round robin" sends requests to the servers in turn, without a proxy; "least load" is the router
with --prefix-weight 0. Closed loads: C streams keep C requests in flight.

The hop is measured with an echo server: one connection, one request after the other, once directly
and once through the router; the difference of the medians is the hop.

--urls: servers that run already, instead of two of one core each.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.common import bench_parser, report
from bench.server.processes import HOST, free_port, serving
from hetero_llm.utils.topology import split_cpus

if TYPE_CHECKING:
    import aiohttp

TOKENS = 16
WARM = 1  # rounds over all groups before the clock starts
HOP_REQUESTS = 3000
_BODY = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"x" * 2000 + b'"}]}'


@dataclass
class Arm:
    """Where requests go, and how they fared. Seconds."""

    name: str
    urls: Sequence[str]
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        return {
            "arm": self.name,
            "tokens_per_s": len(self.whole) * TOKENS / self.seconds,
            "first_p50_ms": 1e3 * quantile(self.first, 0.5),
            "first_p99_ms": 1e3 * quantile(self.first, 0.99),
            "whole_p99_ms": 1e3 * quantile(self.whole, 0.99),
        }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@contextmanager
def servers(args: argparse.Namespace) -> Iterator[list[str]]:
    if args.urls:
        yield args.urls.split(",")
        return
    with ExitStack() as stack:
        words = ["serve", args.model, "--device=cpu", f"--num-gpu-blocks-override={args.blocks}",
                 "--disable-log-requests", "--max-num-seqs=16"]  # fmt: skip
        yield [stack.enter_context(serving(*words, cpus=cpus)).url for cpus in split_cpus(2)]


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """Token ids: `requests` of them, of random groups, in the order in which they are sent."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(300, args.vocab) for _ in range(count)]

    heads = [ids(args.shared) for _ in range(args.groups)]
    order = [group for _ in range(args.requests // args.groups) for group in range(args.groups)]
    rng.shuffle(order)
    warm = list(range(args.groups)) * WARM
    return [[*heads[group], *ids(args.own)] for group in [*warm, *order]]


async def run(arm: Arm, requests: Sequence[list[int]], args: argparse.Namespace) -> None:
    """Sends all requests, `streams` at a time."""
    waiting = iter(enumerate(requests))
    begun = 0.0
    num_warm = args.groups * WARM

    async def stream(session: aiohttp.ClientSession) -> None:
        nonlocal begun
        for number, prompt in waiting:
            if number == num_warm:
                begun = time.perf_counter()
            url = arm.urls[number % len(arm.urls)]
            body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                    "temperature": 0}  # fmt: skip
            sent = time.perf_counter()
            first = 0.0
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content.iter_any():
                    first = first or time.perf_counter() - sent
            if number >= num_warm:
                arm.first.append(first)
                arm.whole.append(time.perf_counter() - sent)

    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for url in arm.urls:
            async with session.post(f"{url}/reset_prefix_cache"):
                pass  # where there is such a route
        await asyncio.gather(*(stream(session) for _ in range(args.streams)))
    arm.seconds = time.perf_counter() - begun


# the hop


class Echo(asyncio.Protocol):
    """Answers every POST with a small JSON body."""

    _ANSWER = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"hello": true}'

    def connection_made(self, transport: Any) -> None:
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        if found and len(body) >= length:
            self._data = b""
            self._transport.write(self._ANSWER)


def echo(port: int) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Echo, HOST, port)
        await server.serve_forever()

    asyncio.run(serve())


def wait_for_port(port: int) -> None:
    """Until something listens there, a minute at most."""
    deadline = time.perf_counter() + 60
    while True:
        try:
            socket.create_connection((HOST, port)).close()
            return
        except OSError:
            if time.perf_counter() > deadline:
                raise
            time.sleep(0.1)


def round_trips(port: int, count: int) -> list[float]:
    """Seconds of requests over one connection, one after the other."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(_BODY) + _BODY
    found: list[float] = []
    with socket.create_connection((HOST, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            sent = time.perf_counter()
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1 << 16)
            found.append(time.perf_counter() - sent)
    return found


def hop() -> dict[str, float]:
    """Milliseconds, directly and through the router, in turns."""
    port = free_port()
    code = f"from bench.server.routing import echo; echo({port})"
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        try:
            wait_for_port(port)
            with serving("route", f"http://{HOST}:{port}") as router:
                direct: list[float] = []
                proxied: list[float] = []
                for _ in range(10):
                    direct += round_trips(port, HOP_REQUESTS // 10)
                    proxied += round_trips(router.port, HOP_REQUESTS // 10)
        finally:
            server.terminate()
    return {
        "direct_p50_ms": 1e3 * quantile(direct, 0.5),
        "router_p50_ms": 1e3 * quantile(proxied, 0.5),
        "hop_p50_ms": 1e3 * (quantile(proxied, 0.5) - quantile(direct, 0.5)),
        "hop_p90_ms": 1e3 * (quantile(proxied, 0.9) - quantile(direct, 0.9)),
    }


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--urls", help="two servers, with a comma between")
    parser.add_argument("--blocks", type=int, default=1000, help="KV blocks of a server")
    parser.add_argument("--groups", type=int, default=16, help="shared beginnings")
    parser.add_argument("--shared", type=int, default=1600, help="tokens of each")
    parser.add_argument("--own", type=int, default=32, help="tokens of a request besides")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    requests = prompts(args)
    arms: list[Arm] = []
    with servers(args) as urls:
        with serving("route", *urls, "--prefix-weight=0") as router:
            arms.append(Arm("least load", [router.url]))
            asyncio.run(run(arms[-1], requests, args))
        arms.append(Arm("round robin", urls))
        asyncio.run(run(arms[-1], requests, args))
        with serving("route", *urls) as router:
            arms.append(Arm("router", [router.url]))
            asyncio.run(run(arms[-1], requests, args))
    rows = [arm.row() for arm in arms]
    by_name = {row["arm"]: row for row in rows}
    ratio = by_name["router"]["tokens_per_s"] / by_name["round robin"]["tokens_per_s"]
    hops = hop()
    print(f"router over round robin: {ratio:.2f}x; hop p50 {hops['hop_p50_ms']:.2f} ms")
    about = {"arguments": vars(args), "router_over_round_robin": ratio, "hop": hops}
    report("routing", about, rows, args.out)


if __name__ == "__main__":
    main()
