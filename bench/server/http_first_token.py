"""What HTTP adds to the first token: a stream's through a server, and `LLM.generate`'s, in turns.

Used by bench.server.http_serving. Both engines run in processes of their own on one device. Two
processes with the same engine may differ by more than HTTP costs, so each request's time inside its
engine (from first scheduled to the first token, by the engine's own clock) is reported separately.
"""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from hetero_llm import LLM, SamplingParams

ROUNDS = 20
PROMPT = 1024
_WARM_ROUNDS = 3
_STREAM_TOKENS = 8
_SECONDS_TO_ANSWER = 60.0
_ENGINE_SECONDS = re.compile(rb"^vllm:request_prefill_time_seconds_sum\{[^}]*\} (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class First:
    """One request's first token in ms: all of it, and what the engine took."""

    total: float
    engine: float


class Stream:
    """One connection that is kept, and no client library: the client must not be what is
    measured. `close` ends it."""

    def __init__(self, host: str, port: int) -> None:
        self._url = f"http://{host}:{port}"
        self._host = f"{host}:{port}"
        self._socket = socket.create_connection((host, port), _SECONDS_TO_ANSWER)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def first(self, ids: list[int]) -> First:
        """The first token of a stream of some; returns when the stream has ended."""
        before = self._engine_seconds()
        body = {"prompt": ids, "max_tokens": _STREAM_TOKENS, "stream": True, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\naccept: */*\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        request, received, first = head.encode() + content, b"", 0.0
        begin = time.perf_counter()
        self._socket.sendall(request)
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = self._socket.recv(1 << 16)
            now = time.perf_counter()
            received += piece
            if not piece or not received.startswith(b"HTTP/1.1 200 "[: len(received)]):
                raise RuntimeError(f"no stream: {received[:1000]!r}")
            if not first and b"data: {" in received:
                first = now
        return First((first - begin) * 1e3, (self._engine_seconds() - before) * 1e3)

    def close(self) -> None:
        self._socket.close()

    def _engine_seconds(self) -> float:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=_SECONDS_TO_ANSWER) as answer:
            found = _ENGINE_SECONDS.search(answer.read())
        assert found is not None
        return float(found[1])


def offline_first(llm: LLM, ids: list[int]) -> First:
    """`LLM.generate` for one token."""
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    (output,) = llm.generate(prompt_token_ids=[ids], sampling_params=one, use_tqdm=False)
    total = time.perf_counter() - begin
    times = output.metrics
    assert times is not None and times.first_scheduled_time and times.first_token_time
    return First(total * 1e3, (times.first_token_time - times.first_scheduled_time) * 1e3)


def in_turns(
    kinds: dict[str, Callable[[list[int]], First]], *, rounds: int, vocab: int, length: int
) -> dict[str, list[First]]:
    """Every kind once a round with a prompt of its own, in an order that turns around. Each is
    asked twice and the second counts, since another process had the device before the first."""
    rng = random.Random(7)
    found: dict[str, list[First]] = {name: [] for name in kinds}
    for number in range(_WARM_ROUNDS + rounds):
        names = list(kinds)[:: 1 if number % 2 else -1]
        for name in names:
            for counts in (False, True):
                measured = kinds[name]([rng.randrange(vocab) for _ in range(length)])
                if counts and number >= _WARM_ROUNDS:
                    found[name].append(measured)
    return found


def summary(found: dict[str, list[First]]) -> dict[str, Any]:
    """Medians in ms of "http" and "offline", and what the first adds: over all, and outside of the
    engine. The halves of a run show how far it can be trusted."""
    row: dict[str, Any] = {}
    outside = {}
    for name, firsts in found.items():
        totals = [one.total for one in firsts]
        half = len(totals) // 2
        row[name] = median(totals)
        row[f"{name} half 1"], row[f"{name} half 2"] = median(totals[:half]), median(totals[half:])
        row[f"{name} engine"] = median(one.engine for one in firsts)
        outside[name] = median(one.total - one.engine for one in firsts)
    row["http adds"] = row["http"] - row["offline"]
    row["adds outside of the engine"] = outside["http"] - outside["offline"]
    return row


def compare(
    llm: LLM, host: str, port: int, *, vocab: int, rounds: int = ROUNDS, length: int = PROMPT
) -> dict[str, Any]:
    """`summary` of a server and `llm`, which has the same settings."""
    stream = Stream(host, port)
    try:
        kinds = {"http": stream.first, "offline": lambda ids: offline_first(llm, ids)}
        return summary(in_turns(kinds, rounds=rounds, vocab=vocab, length=length))
    finally:
        stream.close()
