"""The engine's side of the draft worker's process: starts it, talks to it, replaces it.

The worker may die, hang or talk nonsense at any moment. Nobody waits for it but `wait_ready`, at
start; `poll` returns what has come, and notices when it is gone.
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

from hetero_llm.bridge.ipc.messages import Kind, Outbox, Records, put_stop, read_hello
from hetero_llm.bridge.ipc.rings import Consumer, Producer, Ring, RingStatus, create_ring
from hetero_llm.core.errors import ConfigError, RingError
from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""In which a worker has to be ready."""
SILENCE = 5.0
"""Seconds without a beat after which a worker counts as hung."""

_BACK_OFF, _LONGEST_BACK_OFF = 1.0, 60.0
_MOST_DEATHS, _DEATHS_WITHIN = 5, 600.0  # then it stays off
_ANSWER_SLOTS = 1 << 15
_STOP_SECONDS = 2.0
_MOST_SAID = 1 << 14  # bytes
_MOST_WAITING = 1 << 16  # records that the ring has no room for
_MOST_POPS = 64  # of a poll that meets nothing but beats: twice what the ring holds
_NODES, _OK, _CORRUPT = Kind.NODES, RingStatus.OK, RingStatus.CORRUPT  # looking them up takes long

PROGRAM = (sys.executable, "-m", "hetero_llm.cpu.draft_worker.worker")
"""What is run; the settings follow as JSON."""


@dataclass(slots=True)
class WorkerCounters:
    """Totals since start, for metrics."""

    starts: int = 0
    deaths: int = 0
    hangs: int = 0
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class _Process:
    """A running worker and what belongs to it alone."""

    popen: subprocess.Popen[bytes]
    errors: IO[bytes]
    rings: tuple[Ring, Ring]
    requests: Producer
    answers: Consumer

    def end(self) -> None:
        """Ends it, whatever state it is in, and gives everything back."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self.requests.close()
        self.answers.close()
        for ring in self.rings:
            ring.close()
        self.errors.close()

    def said(self) -> list[str]:
        """The last lines of what it wrote to its standard error."""
        # It shares the position of the file with us, so that must not move.
        size = os.fstat(self.errors.fileno()).st_size
        text = os.pread(self.errors.fileno(), _MOST_SAID, max(size - _MOST_SAID, 0))
        return text.decode(errors="replace").strip().splitlines()


@dataclass(slots=True)
class _Place:
    """Holds the process, for a finalizer that must not hold its `DraftWorker`."""

    process: _Process | None = None
    owner: int = field(default_factory=os.getpid)

    def end(self) -> None:
        # A forked child of the engine's process has this, too, but the worker is not its own.
        if self.process is not None and os.getpid() == self.owner:
            self.process.end()


class DraftWorker:
    """One worker at a time. One thread at a time.

    Args:
        settings: without tickets.
        vocab_size: of the target; a draft model of another one is refused.
        clock: seconds since some moment.
        program: see `PROGRAM`.

    Attributes:
        is_up: it has said hello and lives. Read only.
        outbox: what it is told next, see `push`; emptied when a new worker starts.
        counters: see there.
        why_off: why there is none any more; None as long as there may be one. Read only.

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
    ) -> None:
        self._settings, self._vocab_size, self._clock = settings, vocab_size, clock
        self._program = program
        self.counters = WorkerCounters()
        self.is_up = False
        self.why_off: str | None = None
        self._generation = 0
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._last_life = 0.0
        self._try_at = 0.0
        self._full_since: float | None = None
        self._place = _Place()
        # Who forgets `close`, or is interrupted before it, leaves nothing behind either.
        weakref.finalize(self, self._place.end)
        try:
            self.outbox = Outbox()
            self._place.process = self._start()
        except (RingError, OSError) as error:
            raise ConfigError("cpu_draft_worker", True, f"cannot be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none at the moment."""
        return None if self._process is None else self._process.popen.pid

    @property
    def _process(self) -> _Process | None:
        return self._place.process

    def next_generation(self) -> int:
        """A number that no text was told by before, or not for long."""
        self._generation = self._generation % 0x7FFFFFFF + 1
        return self._generation

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Until the first worker is up.

        Raises:
            ConfigError: it cannot serve this target, or could not load its model.
        """
        deadline = self._clock() + seconds
        while not self.is_up:
            process = self._process
            if process is None or process.popen.poll() is not None:
                raise ConfigError("speculative_model", self._settings.folder, self._last_words())
            for kind, run in process.answers.pop(50_000).records.runs():
                if kind == Kind.HELLO and not self.is_up:
                    self._greet(run)
            if self._clock() > deadline:
                self.close()
                reason = f"the draft worker was not ready after {seconds:g} s"
                raise ConfigError("speculative_model", self._settings.folder, reason)

    def poll(self, timeout_us: int = 0) -> Records | None:
        """What has come, in order, hellos and beats taken out; None if that is nothing.

        Args:
            timeout_us: how long to wait if nothing is there.
        """
        until = time.monotonic() + timeout_us / 1e6
        for _ in range(_MOST_POPS):
            process = self._process
            if process is None:
                return None
            popped = process.answers.pop(timeout_us)
            if popped.status is _CORRUPT:
                self.counters.corrupt += 1
            if not len(popped.records):
                return None
            self._last_life = self._clock()
            kept = self._keep_own(popped.records)
            if kept is None or len(kept):
                return kept
            # Beats are no reason to stop waiting, nor to leave what may lie behind them.
            timeout_us = max(int((until - time.monotonic()) * 1e6), 0)
        return None

    def _keep_own(self, records: Records) -> Records | None:
        """Records without hellos and beats; None if the worker turned out to be of no use."""
        if records.kind == _NODES:  # as nearly always
            return records
        kinds = records.headers["kind"]
        own = (kinds == Kind.HELLO) | (kinds == Kind.BEAT)
        if not own.any():
            return records
        hellos = records.only(kinds == Kind.HELLO)
        if len(hellos) and not self.is_up:
            try:
                self._greet(hellos)
            except ConfigError as error:
                self._give_up(error.reason)
                return None
        return records.only(~own)

    def push(self) -> None:
        """Tells the worker what waits in `outbox`; what the ring has no room for waits on."""
        process = self._process
        if process is None or not self.is_up:
            self.outbox.clear()
            return
        waiting = len(self.outbox)
        if process.requests.push(self.outbox) is _OK:
            self._full_since = None
            return
        now = self._clock()
        if self._full_since is None or len(self.outbox) < waiting:
            self._full_since = now
        if now - self._full_since > SILENCE or len(self.outbox) > _MOST_WAITING:
            self._lose("does not take what it is told")

    def look_after(self) -> None:
        """Notices a dead or hung worker, and starts a new one when its time has come."""
        process, now = self._process, self._clock()
        if process is not None:
            if process.popen.poll() is not None:
                self._lose(f"ended: {self._last_words()}")
            elif self.is_up and now - self._last_life > SILENCE:
                self.counters.hangs += 1
                self._lose("is silent")
            elif not self.is_up and now - self._last_life > START_SECONDS:
                self._lose("did not get ready")
        elif self.why_off is None and now >= self._try_at:
            try:
                self._place.process = self._start()
            except (RingError, OSError) as error:
                self._give_up(str(error))

    def close(self) -> None:
        """Ends the worker for good."""
        process, was_up = self._process, self.is_up
        self._place.process, self.is_up = None, False
        if self.why_off is None:
            self.why_off = "closed"
        if process is None:
            return
        self.outbox.clear()
        put_stop(self.outbox)
        # One that loads its model does not listen yet, nor one that has left the ring full.
        if was_up and process.requests.push(self.outbox) is RingStatus.OK:
            try:
                process.popen.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("the draft worker did not end by itself")
        process.end()

    # -- one process ------------------------------------------------------------------------

    def _start(self) -> _Process:
        with ExitStack() as stack:  # gives all back if one of them cannot be had
            requests = stack.enter_context(create_ring())
            answers = stack.enter_context(create_ring(_ANSWER_SLOTS))
            producer = stack.enter_context(Producer(requests))
            consumer = stack.enter_context(
                Consumer(answers, spin_us=2000, max_records=1024, max_words=1 << 16)
            )
            # A pipe that nobody reads would stop the worker one day.
            errors = stack.enter_context(tempfile.TemporaryFile())
            settings = replace(
                self._settings, requests=requests.ticket, answers=answers.ticket,
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
        self._last_life, self._full_since = self._clock(), None
        self.outbox.clear()
        return _Process(popen, errors, (requests, answers), producer, consumer)

    def _greet(self, records: Records) -> None:
        """Takes the first hello in; whatever is said later, it has been."""
        hello = read_hello(records.only(np.arange(len(records)) == 0))
        if hello is None or hello.vocab_size != self._vocab_size:
            size = "unknown" if hello is None else hello.vocab_size
            raise ConfigError(
                "speculative_model", self._settings.folder,
                f"its vocabulary has {size} tokens, the target's {self._vocab_size}: a draft model "
                "must share the target's tokenizer",
            )  # fmt: skip
        self.is_up = True
        self._last_life = self._clock()
        self._relay()

    def _relay(self) -> None:
        """What the worker has said of itself so far, into our log."""
        assert self._process is not None
        for line in self._process.said():
            logger.info("%s", line)

    def _last_words(self) -> str:
        """The last line of what the process wrote to its standard error."""
        if self._process is None:
            return self.why_off or "it is not running"
        lines, code = self._process.said(), self._process.popen.poll()
        if code is not None and code < 0:  # it had no time to say why
            return f"signal {-code}"
        return lines[-1][:500] if lines else f"the draft worker ended with {code}"

    def _lose(self, what: str) -> None:
        """The worker is of no use any more: the next one starts after a while."""
        assert self._process is not None
        process, now = self._process, self._clock()
        process.end()
        self._place.process, self.is_up = None, False
        self.outbox.clear()
        self.counters.deaths += 1
        self._deaths.append(now)
        recent = [death for death in self._deaths if now - death < _DEATHS_WITHIN]
        if len(recent) >= _MOST_DEATHS:
            self._give_up(f"died {_MOST_DEATHS} times within {_DEATHS_WITHIN:g} s")
            return
        wait = min(_BACK_OFF * 2 ** (len(recent) - 1), _LONGEST_BACK_OFF)
        self._try_at = now + wait
        logger.warning(
            "the draft worker %s; decoding goes on, a new one starts in %g s", what, wait
        )

    def _give_up(self, reason: str) -> None:
        if self._process is not None:
            self._process.end()
        self._place.process, self.is_up, self.why_off = None, False, reason
        self.outbox.clear()
        logger.error("no draft worker any more: %s", reason)
