"""The server's log: its handlers, the console, and a regular line about throughput."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from hetero_llm.engine.engine_client import EngineClient, EngineStats
from hetero_llm.server.metrics import POLLED
from hetero_llm.utils.log_sink import LineFormatter, Pump, Sink, lost_notice

logger = logging.getLogger(__name__)

_ROLE = "api"


class Console:
    """Prints what the person who starts the server should read, on standard output."""

    def __init__(self, fd: int, formatter: LineFormatter) -> None:
        self._formatter = formatter
        self._pump = Pump(fd, lambda lost: lost_notice(formatter, lost))

    def say(self, text: str) -> None:
        """Prints the text, or, if the log is JSON, one object."""
        if self._formatter.kind == "json":
            name = "hetero_llm.server"
            text = self._formatter.line(text, level="INFO", name=name, created=time.time())
        self._pump.put(text)

    def close(self) -> None:
        self._pump.close()


def _descriptor(stream: TextIO, usual: int) -> int:
    """The descriptor of a stream, or `usual` if the stream is an object without one."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return usual


@contextmanager
def server_log(kind: str, *, secrets: Sequence[str] = (), polls: bool = False) -> Iterator[Console]:
    """All loggers write to standard error, through a queue, until the end of the context.

    Args:
        kind: "text" or "json".
        secrets: API keys, which are removed from all lines.
        polls: log the successful HTTP requests of monitors, too.
    """
    root, ours = logging.getLogger(), logging.getLogger("hetero_llm")
    accesses = logging.getLogger("uvicorn.access")
    writers = [
        root,
        logging.getLogger("uvicorn"),
        accesses,
    ]  # uvicorn may have been set up
    before = [(one, one.handlers[:], one.propagate) for one in writers]
    level = ours.level
    formatter = LineFormatter(kind, _ROLE, secrets)
    sink = Sink(_descriptor(sys.stderr, 2), formatter)
    console = Console(_descriptor(sys.stdout, 1), formatter)
    sys.stdout.flush()
    for one in writers:
        one.handlers[:], one.propagate = [], True
    root.handlers[:] = [sink]
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if not polls:
        accesses.addFilter(_is_no_poll)
    try:
        yield console
    finally:
        accesses.removeFilter(_is_no_poll)
        logging.captureWarnings(False)
        ours.setLevel(level)
        for one, handlers, propagate in before:
            one.handlers[:], one.propagate = handlers, propagate
        sink.stop()
        console.close()


def _is_no_poll(record: logging.LogRecord) -> bool:
    """A filter for uvicorn's records, whose arguments are client, method, path, version, status:
    what monitors get with status 200 is not logged."""
    arguments = record.args
    if not isinstance(arguments, tuple) or len(arguments) != 5:
        return True
    path, status = str(arguments[2]).partition("?")[0], arguments[4]
    return status != 200 or path not in POLLED


class StatsLine:
    """Throughput and load since the previous line, in vLLM's words.

    Args:
        stats: at the start.
        now: seconds of the monotonic clock.
    """

    def __init__(self, stats: EngineStats, now: float) -> None:
        self._before, self._time = stats.metrics, now
        self._hit_rate = 0.0

    def next(self, stats: EngineStats, now: float) -> str | None:
        """The line; None if nothing was generated and no request runs or waits."""
        after, before = stats.metrics, self._before
        seconds = max(now - self._time, 1e-9)
        self._before, self._time = after, now

        def grown(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        prompt, generated = grown("prompt_tokens"), grown("generation_tokens")
        running, waiting = (
            int(after.get(f"num_requests_{name}", 0)) for name in ("running", "waiting")
        )
        if not (prompt or generated or running or waiting):
            return None
        queries = grown("prefix_cache_queries")
        if queries:
            self._hit_rate = grown("prefix_cache_hits") / queries
        line = (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {running} reqs, Waiting: {waiting} reqs, "
            f"KV cache usage: {after.get('kv_cache_usage_perc', 0.0):.1%}, "
            f"Prefix cache hit rate: {self._hit_rate:.1%}"
        )
        drafts, drafted = grown("spec_decode_num_drafts"), grown("spec_decode_num_draft_tokens")
        if drafts and drafted:
            accepted = grown("spec_decode_num_accepted_tokens")
            line += (
                f", Mean acceptance length: {1 + accepted / drafts:.2f}, "
                f"Draft acceptance rate: {accepted / drafted:.1%}"
            )
        return line


async def log_stats(client: EngineClient, interval: float) -> None:
    """Logs a `StatsLine` every `interval` seconds until it is cancelled."""
    lines = StatsLine(client.stats(), time.monotonic())
    while True:
        await asyncio.sleep(interval)
        line = lines.next(client.stats(), time.monotonic())
        if line is not None:
            logger.info("%s", line)
