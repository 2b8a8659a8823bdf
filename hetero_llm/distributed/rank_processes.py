"""The rank processes of an engine: starts, watches and ends them.

The engine's process is rank 0. Each other rank is a fresh interpreter that inherits the descriptors
of a control socket, of the channel of steps and of the file through which the ranks find each
other. A thread here watches them: a rank that ends, or gives no sign of life for `HANG_SECONDS`, is
a failure, for which all ranks are killed. Collectives that wait for a killed rank end with an
error, and the engine raises the failure instead.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_llm.bridge.ipc.shared_memory import allocate_shared
from hetero_llm.core.errors import ConfigError, HeteroLLMError, RankDeadError, RingError
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.distributed.control_socket import ControlSocket, RankFailed, RankReached
from hetero_llm.distributed.process_group import create_store
from hetero_llm.distributed.step_channel import StepWriter
from hetero_llm.distributed.step_codec import (
    FINISH_MESSAGE,
    StepMessage,
    moves_to_bytes,
    promotions_to_bytes,
    step_to_bytes,
    transfer_to_bytes,
    value_to_bytes,
)

logger = logging.getLogger(__name__)

HANG_SECONDS = 3.0
"""Seconds without a sign of life after which a rank counts as hung. It gives ten a second, from a
thread that needs no lock of Python's."""

_LOOK_SECONDS = 0.1  # between two looks of the watch
_EXPLAIN_SECONDS = 2.0  # in which the watch finds what has ended a collective
_STOP_SECONDS = 2.0  # that ranks have to end by themselves
_NO_BLOCKS = np.zeros(0, np.int64)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankProgram:
    """How rank processes are started.

    Attributes:
        command: the rank's own arguments follow it.
        environment: of the processes.
        shared_bytes: of zero-filled memory that all ranks share; 0: none.
        argument: that asks for ranks, which errors name, and its value; None: the number of ranks.
        fault_bytes: of more such memory, for `RankProcesses.faults`; 0: none.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    shared_bytes: int = 0
    argument: tuple[str, int] | None = None
    fault_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankArguments:
    """Command line of a rank process.

    Attributes:
        rank, size: its index, 1 to size - 1, and the number of ranks.
        control, channel, store: descriptors of its control socket, the channel of steps and the
            file of `create_store`.
        parent: process id of the engine.
        dies_with_thread: the kernel may kill the rank when the thread that started it ends.
    """

    rank: int
    size: int
    control: int
    channel: int
    store: int
    parent: int
    dies_with_thread: int

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.control, self.channel, self.store

    def words(self) -> list[str]:
        return [str(getattr(self, name)) for name in self.__slots__]

    @staticmethod
    def of(words: list[str]) -> RankArguments:
        return RankArguments(*map(int, words))


class NoRanks:
    """In the place of `RankProcesses` where one process runs the model."""

    def check(self) -> None:
        pass

    def compile_grammar(self, grammar: Grammar) -> None:
        pass

    def move_kv(self, moves: NDArray[np.int64]) -> None:
        pass

    def why(self, error: BaseException) -> BaseException:
        return error

    def shut_down(self) -> None:
        pass


@dataclass(slots=True)
class _Holder:
    """Holds the processes for a finalizer, which must not reference their `RankProcesses`."""

    popens: list[subprocess.Popen[bytes]] = field(default_factory=list)
    owner: int = field(default_factory=os.getpid)
    leave: Callable[[], None] | None = None

    def end(self) -> None:
        """Kills the processes and leaves their group."""
        # A forked child of the engine's process has a copy of this, but does not own the ranks.
        if os.getpid() != self.owner:
            return
        self.kill()
        leave, self.leave = self.leave, None
        if leave is not None:
            leave()

    def kill(self) -> None:
        for popen in self.popens:
            if popen.poll() is None:
                popen.kill()
        for popen in self.popens:
            popen.wait()


# large: start, steps, watch and end of the same processes.
class RankProcesses:
    """Ranks 1 to size - 1 of one engine. One thread at a time.

    Args:
        size: number of ranks, this process included; at least 2.
        program: what the others run.
        abort: ends this process's own collectives that wait on a device; called by the watch.

    Attributes:
        size: see Args.
        store: descriptor for `process_group`.
        shared: descriptor of the memory that all ranks share, the same number in all of them; -1:
            there is none.
        faults: the same of memory in which ranks say that what they have sent is garbage.
        pids: process ids of ranks 1 to size - 1.

    Raises:
        ConfigError: no process can be started.
    """

    def __init__(self, size: int, program: RankProgram, abort: Callable[[], None]) -> None:
        self.size = size
        self._abort = abort
        self._failure: HeteroLLMError | None = None
        self._failed = threading.Event()
        self._one_ended = False
        self._ended = threading.Event()
        self._reached: list[set[str]] = [set() for _ in range(size - 1)]
        self._lock = threading.Lock()  # of the sockets, which the watch reads
        self._serving = False
        self._holder = _Holder()
        weakref.finalize(self, self._holder.end)
        self._sockets: list[ControlSocket] = []
        argument = program.argument or ("tensor_parallel_size", size)
        self.store = self.shared = self.faults = -1
        try:
            self._writer = StepWriter(size)
        except (RingError, OSError) as error:
            raise _not_started(argument, error) from error
        try:
            self.store = create_store()
            if program.shared_bytes:
                self.shared = allocate_shared(program.shared_bytes)
            if program.fault_bytes:
                self.faults = allocate_shared(program.fault_bytes)
            for rank in range(1, size):
                self._start(rank, program)
        except (RingError, OSError) as error:
            self._release()
            raise _not_started(argument, error) from error
        self._watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._ended), name="hetero-llm-ranks",
            daemon=True,
        )  # fmt: skip
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        return [popen.pid for popen in self._holder.popens]

    def _start(self, rank: int, program: RankProgram) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ControlSocket(ours))
        given = RankArguments(
            rank=rank,
            size=self.size,
            control=theirs.fileno(),
            channel=self._writer.channel.fd,
            store=self.store,
            parent=os.getpid(),
            dies_with_thread=int(threading.current_thread() is threading.main_thread()),
        )
        with theirs:
            self._holder.popens.append(
                subprocess.Popen(
                    [*program.command, *given.words()],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*given.descriptors, *self._memories),
                    env=dict(program.environment),
                )
            )

    @property
    def _memories(self) -> list[int]:
        """Descriptors of memory that all ranks share."""
        return [fd for fd in (self.shared, self.faults) if fd >= 0]

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed and all are ended."""
        return self._failed.is_set()

    # -- start ------------------------------------------------------------------------------

    def send_settings(self, settings: bytes) -> None:
        """Sends every rank its settings."""
        for control in self._sockets:
            control.send_bytes(settings)  # dropped by a dead rank, which the watch reports

    def wait_for(self, point: str) -> None:
        """Waits until every rank has reached a point of its start.

        Raises:
            HeteroLLMError: a rank has failed, as the error that it would have raised here.
        """
        while not all(point in reached for reached in self._reached):
            self.check()
            self._failed.wait(_LOOK_SECONDS)
            self._receive()

    def run_watched(self, act: Callable[[], T]) -> T:
        """The result of `act`, which waits for the ranks where no failure of theirs ends it: torch
        waits ten minutes for a rank that does not join a group. It runs in a thread, which is left
        behind when a rank fails.

        Raises:
            HeteroLLMError: a rank has failed.
        """
        results: list[T | BaseException] = []
        ended = threading.Event()

        def run() -> None:
            try:
                results.append(act())
            except BaseException as error:
                results.append(error)
            ended.set()

        threading.Thread(target=run, name="hetero-llm-join", daemon=True).start()
        while not ended.wait(_LOOK_SECONDS):
            self.check()
        (result,) = results
        if isinstance(result, BaseException):
            raise result
        return result

    def joined(self, leave: Callable[[], None], abort: Callable[[], None]) -> None:
        """This process has joined the group of all ranks.

        Args:
            leave: leaves it in the end.
            abort: takes the place of that given at the start.
        """
        self._holder.leave, self._abort = leave, abort

    def begin_serving(self) -> None:
        """From now on a rank that gives no sign of life is a failure."""
        self._serving = True

    # -- steps ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises HeteroLLMError if a rank has failed."""
        if self._failure is not None:
            raise self._failure

    def launch(self, step: SchedulerOutput) -> None:
        """Lets the ranks launch a step."""
        self._announce(step_to_bytes(step))

    def finish(self) -> None:
        """Lets the ranks finish their oldest launched step."""
        self._announce(FINISH_MESSAGE)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Lets the ranks compile a grammar beside their steps."""
        self._announce(value_to_bytes(StepMessage.GRAMMAR, grammar))

    def move_kv(self, moves: NDArray[np.int64]) -> None:
        """Lets the stages before the last one move KV of accepted draft nodes.

        Args:
            moves: [2, M] KV slots to read and to write.
        """
        self._announce(moves_to_bytes(moves))

    def promote(self, rows: NDArray[np.int32]) -> None:
        """Lets the ranks promote their parts of experts, as this process does.

        Args:
            rows: [P, 5] of `core.promotion.promotions_to_rows`.
        """
        self._announce(promotions_to_bytes(rows))

    def open_adapter(self, request: LoRARequest) -> None:
        """Lets the ranks read an adapter, as this process has read it."""
        self._announce(value_to_bytes(StepMessage.ADAPTER, request))

    def forget_adapter(self, name: str) -> None:
        """Lets the ranks forget the name of an adapter."""
        self._announce(value_to_bytes(StepMessage.FORGET_ADAPTER, name))

    def load_blocks(self, order: TransferOrder) -> None:
        """Lets the ranks load their part of KV blocks."""
        self._announce(transfer_to_bytes(StepMessage.LOAD_BLOCKS, order))

    def store_blocks(self, order: TransferOrder) -> None:
        """Lets the ranks store their part of KV blocks."""
        self._announce(transfer_to_bytes(StepMessage.STORE_BLOCKS, order))

    def abort_load(self, transfer_id: int) -> None:
        """Lets the ranks abort a load."""
        order = TransferOrder(transfer_id, _NO_BLOCKS, _NO_BLOCKS, 0)
        self._announce(transfer_to_bytes(StepMessage.ABORT_LOAD, order))

    def _announce(self, message: bytes) -> None:
        """Raises HeteroLLMError: a rank has failed."""
        self.check()
        self._writer.write(message, self.check)

    def why(self, error: BaseException) -> BaseException:
        """The failure of a rank that has made a step here fail with `error`; `error` if all ranks
        live."""
        if not isinstance(error, HeteroLLMError):
            self._failed.wait(_EXPLAIN_SECONDS)
        return error if self._failure is None else self._failure

    # -- watch ------------------------------------------------------------------------------

    def look(self, silent_since: list[tuple[int, float]]) -> None:
        """One look at all ranks, by the watch.

        Args:
            silent_since: for each rank its last known sign of life and when that was new; updated.
        """
        if self._failure is not None:  # a rank has said why it ends
            self._end_all()
            return
        beats, _ = self._writer.beats()
        now = time.monotonic()
        codes = [popen.poll() for popen in self._holder.popens]
        for index, code in enumerate(codes):
            if code is not None and code < 0:  # others may have failed for want of it
                self._fail(index + 1, _how_it_ended(code), said_why=False)
                return
        if any(code is not None for code in codes) and not self._one_ended:
            self._one_ended = True  # for want of one that is being killed? The next look shows it
            return
        for index, popen in enumerate(self._holder.popens):
            if popen.poll() is not None:
                self._fail(index + 1, _how_it_ended(popen.returncode))
                return
            if beats[index] != silent_since[index][0] or not self._serving:
                silent_since[index] = (beats[index], now)
            elif now - silent_since[index][1] > HANG_SECONDS:
                self._fail(index + 1, f"has shown no life for {HANG_SECONDS:g} s")
                return

    def _receive(self) -> None:
        """Takes in what the ranks have sent."""
        with self._lock:
            for rank, control in enumerate(self._sockets, 1):
                for message in control.receive():
                    if isinstance(message, RankReached):
                        self._reached[rank - 1].add(message.point)
                    elif isinstance(message, RankFailed) and self._failure is None:
                        self._failure = message.as_error(rank)

    def _fail(self, rank: int, how: str, *, said_why: bool = True) -> None:
        """A rank has ended or hangs: ends the others, and what waits for them.

        Args:
            said_why: it may have.
        """
        self._holder.kill()
        if said_why:
            self._receive()
        if self._failure is None:
            pid = self._holder.popens[rank - 1].pid
            self._failure = RankDeadError(f"rank {rank} (process {pid}) {how}")
        self._end_all()

    def _end_all(self) -> None:
        self._holder.kill()
        try:
            self._abort()
        except Exception:
            logger.exception("collectives cannot be aborted")
        self._failed.set()

    # -- end --------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Ends the ranks; calling it again has no effect."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._watch is not threading.current_thread():
            self._watch.join()
        self._writer.end()
        deadline = time.monotonic() + (0.0 if self._failed.is_set() else _STOP_SECONDS)
        for popen in self._holder.popens:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(max(deadline - time.monotonic(), 0.0))
        self._release()

    def _release(self) -> None:
        """Kills what still runs, and closes everything."""
        self._holder.end()
        self._writer.close()
        for control in self._sockets:
            control.close()
        for fd in (self.store, *self._memories):
            if fd >= 0:
                os.close(fd)


def _watch(owner: weakref.ref[RankProcesses], ended: threading.Event) -> None:
    """Looks at the ranks until the first failure, or their end."""
    ranks = owner()
    silent_since = [] if ranks is None else [(-1, time.monotonic())] * (ranks.size - 1)
    del ranks
    while not ended.wait(_LOOK_SECONDS):
        ranks = owner()
        if ranks is None:
            return
        ranks.look(silent_since)
        if ranks.has_failed:
            return
        del ranks


def _not_started(argument: tuple[str, int], error: Exception) -> ConfigError:
    return ConfigError(*argument, f"its processes cannot be started: {error}")


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with code {code}"
