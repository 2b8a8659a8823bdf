"""Client of the draft worker: starts its process, exchanges messages with it, restarts it.

The worker may die, hang or send garbage at any moment. Only `wait_ready`, at start, waits for it;
`poll` returns what has come, and `check_health` detects that it died or hangs.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import IO

import numpy as np

from hetero_llm.bridge.ipc.messages import MessageKind, Messages, Outbox, put_stop, read_hello
from hetero_llm.bridge.ipc.rings import Consumer, Producer, Ring, RingStatus, create_ring
from hetero_llm.core.errors import ConfigError, RingError
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Time within which a restarted worker must be ready."""
FIRST_START_SECONDS = 600.0
"""Time within which the first worker must be ready: it may compile, on a busy machine. A worker
that ends is noticed at once."""
HANG_SECONDS = 5.0
"""A worker without a message for so long counts as hung."""

_ANSWER_SLOTS = 1 << 15
_MAX_STDERR_BYTES = 1 << 14
_MAX_POPS = 64  # of a poll that finds only heartbeats: twice what the ring holds
# Attribute access on an enum class is slow.
_NODES, _OK, _CORRUPT = MessageKind.NODES, RingStatus.OK, RingStatus.CORRUPT

PROGRAM = (sys.executable, "-m", "hetero_llm.cpu.draft_worker.worker")
"""Command line of the worker, without the settings."""


@dataclass(slots=True)
class WorkerCounters:
    """Totals since start, for metrics. `generations`: sequences sent, repetitions included."""

    starts: int = 0
    deaths: int = 0
    hangs: int = 0
    corrupt: int = 0
    generations: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How long the client puts up with a worker that fails.

    Attributes:
        back_off: seconds before the first restart; doubled with every further death.
        max_back_off: most seconds before a restart.
        max_deaths, deaths_within: a number of deaths within seconds after which none starts.
        max_waiting: unsent messages that do not fit into the ring before the worker counts as dead.
        stop_seconds: time to end by itself after STOP.
    """

    back_off: float = 1.0
    max_back_off: float = 60.0
    max_deaths: int = 5
    deaths_within: float = 600.0
    max_waiting: int = 1 << 16
    stop_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class _Process:
    """A worker's process with its rings and its standard error."""

    popen: subprocess.Popen[bytes]
    errors: IO[bytes]
    rings: tuple[Ring, Ring]
    requests: Producer
    answers: Consumer

    def end(self) -> None:
        """Kill the process if it runs, and release everything."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self.requests.close()
        self.answers.close()
        for ring in self.rings:
            ring.close()
        self.errors.close()

    def stderr_lines(self) -> list[str]:
        """The last lines of its standard error."""
        # pread: the process shares the file position with us.
        size = os.fstat(self.errors.fileno()).st_size
        text = os.pread(self.errors.fileno(), _MAX_STDERR_BYTES, max(size - _MAX_STDERR_BYTES, 0))
        return text.decode(errors="replace").strip().splitlines()


@dataclass(slots=True)
class _ProcessHolder:
    """Holds the process for a finalizer, which must not reference its `DraftWorkerClient`."""

    process: _Process | None = None
    owner: int = field(default_factory=os.getpid)

    def end(self) -> None:
        # A forked child of the engine's process has a copy of this, but does not own the worker.
        if self.process is not None and os.getpid() == self.owner:
            self.process.end()


class DraftWorkerClient:
    """Runs one worker process at a time. One thread at a time.

    Args:
        settings: without ring handles.
        vocab_size: vocabulary size of the target; a worker with another one is refused.
        clock: returns seconds.
        program: see `PROGRAM`.
        limits: see `WorkerLimits`.

    Attributes:
        clock, limits: see Args; may be replaced at any time.
        is_up: the worker has sent its hello and is alive. Read only.
        outbox: messages for the next `push`; cleared when a worker starts.
        counters: see `WorkerCounters`.
        why_off: why no worker will be started any more; None: one runs or may be started. Read
            only.

    Raises:
        ConfigError: no worker can be started here.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        program: tuple[str, ...] = PROGRAM,
        limits: WorkerLimits | None = None,
    ) -> None:
        self._settings, self._vocab_size, self._program = settings, vocab_size, program
        self.clock = clock
        self.limits = limits or WorkerLimits()
        self.counters = WorkerCounters()
        self.is_up = False
        self.why_off: str | None = None
        self._deaths: deque[float] = deque(maxlen=self.limits.max_deaths)
        self._last_alive = 0.0
        self._restart_at = 0.0
        self._full_since: float | None = None
        self._holder = _ProcessHolder()
        # Ends the process if the owner never calls `close`.
        weakref.finalize(self, self._holder.end)
        try:
            self.outbox = Outbox()
            self._holder.process = self._start()
        except (RingError, OSError) as error:
            raise ConfigError("cpu_draft_worker", True, f"cannot be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._process is None else self._process.popen.pid

    @property
    def rings(self) -> tuple[Ring, Ring] | None:
        """Shared memory of the messages to the worker, and of those from it; None if no process
        runs."""
        return None if self._process is None else self._process.rings

    @property
    def _process(self) -> _Process | None:
        return self._holder.process

    def next_generation(self) -> int:
        """A positive number that no recent sequence was sent with."""
        generation = self.counters.generations % 0x7FFFFFFF + 1
        self.counters.generations += 1
        return generation

    def wait_ready(self) -> None:
        """Wait until the first worker is up.

        Raises:
            ConfigError: the worker does not fit the target, or could not load its model.
        """
        deadline = self.clock() + FIRST_START_SECONDS
        while not self.is_up:
            process = self._process
            if process is None or process.popen.poll() is not None:
                raise ConfigError("speculative_model", self._settings.folder, self._exit_reason())
            for kind, run in process.answers.pop(50_000).messages.runs():
                if kind == MessageKind.HELLO and not self.is_up:
                    self._on_hello(run)
            if self.clock() > deadline:
                self.close()
                reason = f"the draft worker was not ready after {FIRST_START_SECONDS:g} s"
                raise ConfigError("speculative_model", self._settings.folder, reason)

    def poll(self, timeout_us: int = 0) -> Messages | None:
        """Return the worker's messages in order, without hellos and heartbeats; None if there are
        none.

        Args:
            timeout_us: how long to wait for the first one.
        """
        until = time.monotonic() + timeout_us / 1e6
        for _ in range(_MAX_POPS):
            process = self._process
            if process is None:
                return None
            popped = process.answers.pop(timeout_us)
            if popped.status is _CORRUPT:
                self.counters.corrupt += 1
            if not len(popped.messages.headers):
                return None
            self._last_alive = self.clock()
            kept = self._filter_control(popped.messages)
            if kept is None or len(kept):
                return kept
            # Only heartbeats: keep waiting, and read what may follow them.
            timeout_us = max(int((until - time.monotonic()) * 1e6), 0)
        return None

    def _filter_control(self, messages: Messages) -> Messages | None:
        """The messages without hellos and heartbeats; None if a hello shows an unusable worker."""
        if messages.kind == _NODES:  # the usual case
            return messages
        kinds = messages.headers["kind"]
        control = (kinds == MessageKind.HELLO) | (kinds == MessageKind.HEARTBEAT)
        if not control.any():
            return messages
        hellos = messages.only(kinds == MessageKind.HELLO)
        if len(hellos) and not self.is_up:
            try:
                self._on_hello(hellos)
            except ConfigError as error:
                self._give_up(error.reason)
                return None
        return messages.only(~control)

    def push(self) -> None:
        """Send the messages in `outbox`; those that do not fit into the ring stay there."""
        process = self._process
        if process is None or not self.is_up:
            self.outbox.clear()
            return
        waiting = len(self.outbox)
        if process.requests.push(self.outbox) is _OK:
            self._full_since = None
            return
        now = self.clock()
        if self._full_since is None or len(self.outbox) < waiting:
            self._full_since = now
        if now - self._full_since > HANG_SECONDS or len(self.outbox) > self.limits.max_waiting:
            self._on_failure("does not take its messages")

    def check_health(self) -> None:
        """Detect a dead or hung worker, and start a new one once its back-off is over."""
        process, now = self._process, self.clock()
        if process is not None:
            if process.popen.poll() is not None:
                self._on_failure(f"ended: {self._exit_reason()}")
            elif self.is_up and now - self._last_alive > HANG_SECONDS:
                self.counters.hangs += 1
                self._on_failure("is silent")
            elif not self.is_up and now - self._last_alive > START_SECONDS:
                self._on_failure("did not get ready")
        elif self.why_off is None and now >= self._restart_at:
            try:
                self._holder.process = self._start()
            except (RingError, OSError) as error:
                self._give_up(str(error))

    def close(self) -> None:
        """End the worker for good."""
        process, was_up = self._process, self.is_up
        self._holder.process, self.is_up = None, False
        if self.why_off is None:
            self.why_off = "closed"
        if process is None:
            return
        self.outbox.clear()
        put_stop(self.outbox)
        # A worker that still loads its model, or has let the ring fill up, would not react to STOP.
        if was_up and process.requests.push(self.outbox) is RingStatus.OK:
            try:
                process.popen.wait(self.limits.stop_seconds)
            except subprocess.TimeoutExpired:
                logger.warning("the draft worker did not end by itself")
        process.end()

    # -- one process ------------------------------------------------------------------------

    def _start(self) -> _Process:
        with ExitStack() as stack:  # releases everything if one step fails
            requests = stack.enter_context(create_ring())
            answers = stack.enter_context(create_ring(_ANSWER_SLOTS))
            producer = stack.enter_context(Producer(requests))
            consumer = stack.enter_context(
                Consumer(answers, spin_us=2000, max_messages=1024, max_words=1 << 16)
            )
            # A file: a full pipe would block the worker.
            errors = stack.enter_context(tempfile.TemporaryFile())
            settings = replace(
                self._settings, requests=requests.handle, answers=answers.handle,
                parent=os.getpid(),
            ).to_json()  # fmt: skip
            threads = str(self._settings.threads)
            popen = subprocess.Popen(
                [*self._program, settings],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads},
                pass_fds=(requests.fd, answers.fd),
            )  # fmt: skip
            stack.pop_all()
        self.counters.starts += 1
        self._last_alive, self._full_since = self.clock(), None
        self.outbox.clear()
        return _Process(popen, errors, (requests, answers), producer, consumer)

    def _on_hello(self, messages: Messages) -> None:
        """Process the first hello; later ones are ignored."""
        hello = read_hello(messages.only(np.arange(len(messages)) == 0))
        if hello is None or hello.vocab_size != self._vocab_size:
            size = "unknown" if hello is None else hello.vocab_size
            raise ConfigError(
                "speculative_model", self._settings.folder,
                f"its vocabulary has {size} tokens, the target's {self._vocab_size}: a draft model "
                "must share the target's tokenizer",
            )  # fmt: skip
        self.is_up = True
        self._last_alive = self.clock()
        self._log_output()

    def _log_output(self) -> None:
        """Copy what the worker has written to its standard error to our log."""
        assert self._process is not None
        for line in self._process.stderr_lines():
            logger.info("%s", line)

    def _exit_reason(self) -> str:
        """Why the process ended: its signal, or the last line of its standard error."""
        if self._process is None:
            return self.why_off or "it is not running"
        lines, code = self._process.stderr_lines(), self._process.popen.poll()
        if code is not None and code < 0:  # it could not write a reason
            return f"signal {-code}"
        return lines[-1][:500] if lines else f"the draft worker ended with {code}"

    def _on_failure(self, what: str) -> None:
        """End the failed worker and schedule its restart."""
        assert self._process is not None
        process, now, limits = self._process, self.clock(), self.limits
        process.end()
        self._holder.process, self.is_up = None, False
        self.outbox.clear()
        self.counters.deaths += 1
        self._deaths.append(now)
        recent = [death for death in self._deaths if now - death < limits.deaths_within]
        if len(recent) >= limits.max_deaths:
            self._give_up(f"died {limits.max_deaths} times within {limits.deaths_within:g} s")
            return
        wait = min(limits.back_off * 2 ** (len(recent) - 1), limits.max_back_off)
        self._restart_at = now + wait
        logger.warning(
            "the draft worker %s; decoding goes on, a new one starts in %g s", what, wait
        )

    def _give_up(self, reason: str) -> None:
        if self._process is not None:
            self._process.end()
        self._holder.process, self.is_up, self.why_off = None, False, reason
        self.outbox.clear()
        logger.error("no draft worker any more: %s", reason)
