"""A log handler whose caller never waits: one line per record, written by a thread.

The calling thread formats the line and puts it into a queue of bounded size. If the reader of the
log stalls, lines beyond the bound are lost and counted; if it has gone, all lines are lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from queue import SimpleQueue

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request that the current task answers; added to the task's log lines."""

FORMATS = ("text", "json")
_MOST_BYTES = 4 << 20
_SECONDS_TO_FLUSH = 1.0

_CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x2028, 0x2029]
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _CONTROLS}
_CREDENTIALS = re.compile(
    r"(?i)\b(bearer\s+|(?:api[-_]?key|access[-_]?token|authorization)[\"']?\s*[=:]\s*[\"']?)"
    r"(?!bearer\b)[^\s&\"',;]+"
)
_HIDDEN = "***"


class Pump:
    """Writes to a file descriptor from a thread of its own.

    Args:
        fd: the file descriptor; stays open when the pump is closed.
        notice: returns the line that reports a number of lost lines.
        most_bytes: maximum size of the queue.
    """

    def __init__(
        self, fd: int, notice: Callable[[int], str], *, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._fd = fd
        self._notice = notice
        self._most = most_bytes
        self._lines: SimpleQueue[bytes | threading.Event | None] = SimpleQueue()
        self._lock = threading.RLock()  # a signal's handler may log while this thread does
        self._waiting = 0  # bytes
        self._lost = 0
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="hetero-llm-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queues a line, or counts it as lost. Thread-safe; never waits for the reader."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._waiting + len(data) > self._most:
                self._lost += 1
                return
            self._waiting += len(data)
        self._lines.put(data)

    def flush(self, seconds: float = _SECONDS_TO_FLUSH) -> bool:
        """Waits until all lines put before are written. Returns False after `seconds`."""
        done = threading.Event()
        self._lines.put(done)
        return done.wait(seconds)

    def close(self, seconds: float = _SECONDS_TO_FLUSH) -> None:
        """Ends the thread; lines that it cannot write within `seconds` are lost."""
        self._lines.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._write(item)
            with self._lock:
                self._waiting -= len(item)
                lost, self._lost = self._lost, 0
            if lost:
                self._write(self._notice(lost).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._broken:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # a process that shares it made it non-blocking
                select.select([], [self._fd], [])
            except OSError:
                self._broken = True


class LineFormatter(logging.Formatter):
    """Formats a record as one line; control characters in it are escaped. In the format "text" an
    exception follows as indented lines.

    Args:
        kind: one of `FORMATS`.
        role: role of this process, "api" or "engine".
        secrets: texts that are replaced by "***".
    """

    def __init__(self, kind: str, role: str, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self.kind = kind
        self._role = role
        known = sorted(filter(None, secrets), key=len, reverse=True)
        words = "|".join(map(re.escape, known))
        self._secrets = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])") if known else None

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        request_id = getattr(record, "request_id", None) or REQUEST_ID.get()
        return self.line(
            record.getMessage(),
            level=record.levelname,
            name=record.name,
            created=record.created,
            request_id=request_id,
            trace=trace,
        )

    def line(
        self,
        message: str,
        *,
        level: str,
        name: str,
        created: float,
        request_id: str | None = None,
        trace: str = "",
    ) -> str:
        """`created` is Unix time in seconds."""
        message, trace = self._without_secrets(message), self._without_secrets(trace)
        moment = time.gmtime(created)
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{int(created % 1 * 1000):03}Z"
        if self.kind == "json":
            fields = {"ts": stamp, "level": level, "logger": name, "process": self._role}
            fields["message"] = message
            if request_id:
                fields["request_id"] = request_id
            if trace:
                fields["exception"] = trace
            return json.dumps(fields)
        message = message.translate(_ESCAPES)
        if request_id and request_id not in message:
            message += f" (request {request_id})"
        text = f"{stamp} {level} {self._role}: {message}"
        for part in trace.splitlines():
            text += f"\n    {part.translate(_ESCAPES)}"
        return text

    def _without_secrets(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub(_HIDDEN, text)
        return _CREDENTIALS.sub(rf"\1{_HIDDEN}", text)


class Sink(logging.Handler):
    """A log handler over a pump. `stop` ends the pump; `close` does not, since `logging.config` and
    others call it on handlers still in use."""

    def __init__(self, fd: int, formatter: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.kind = formatter.kind
        self._pump = Pump(fd, lambda lost: lost_notice(formatter, lost))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a message that does not fit its arguments: our bug
            line = f"a line of {record.name} cannot be shown: {type(error).__name__}"
            assert isinstance(self.formatter, LineFormatter)
            line = self.formatter.line(
                line, level="ERROR", name=record.name, created=record.created
            )
        self._pump.put(line)

    def flush(self) -> None:
        self._pump.flush()

    def stop(self) -> None:
        """Writes the queued lines and closes the handler; later records are lost."""
        self._pump.close()
        self.close()


def lost_notice(formatter: LineFormatter, lost: int) -> str:
    """The line that reports a number of lost lines."""
    return formatter.line(
        f"{lost} lines were lost: nobody read the log",
        level="WARNING",
        name=__name__,
        created=time.time(),
    )


def kind_of_root() -> str:
    """The format in which this process logs."""
    sinks = [handler for handler in logging.getLogger().handlers if isinstance(handler, Sink)]
    return sinks[0].kind if sinks else "text"
