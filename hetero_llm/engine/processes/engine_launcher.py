"""Starts the engine's process and ends it: the parent's side of `engine_process`."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from hetero_llm.core.errors import EngineDeadError
from hetero_llm.engine.processes import messages
from hetero_llm.utils.env import child_environment
from hetero_llm.utils.log_sink import kind_of_root
from hetero_llm.utils.message_socket import MessageSocket

MODULE = "hetero_llm.engine.processes.engine_process"
_SECONDS_TO_REAP = 0.5


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where one of several engines of a model runs.

    Attributes:
        index: its number, from 0.
        cpus: logical CPUs that its process may use; empty: all of this process.
        devices: its value of CUDA_VISIBLE_DEVICES; None: that of this process.
    """

    index: int = 0
    cpus: tuple[int, ...] = ()
    devices: str | None = None


@dataclass(frozen=True)
class EngineProcess:
    """A running engine process. It ends when `life`, an end of a pipe, is closed."""

    popen: subprocess.Popen[bytes]
    socket: MessageSocket
    life: BinaryIO

    def wait_until_ready(self) -> messages.Ready:
        """Waits while the model is loaded.

        Raises:
            HeteroLLMError: the error of a failed start, as `LLM` raises it.
            EngineDeadError: the process ended without a message.
        """
        data = self.socket.wait()
        if data is None:
            raise EngineDeadError(f"the engine did not start: {self.how_it_ended()}")
        message = messages.decode_from_engine(data)
        if isinstance(message, messages.StartFailed):
            raise messages.error_from_wire(message.error)
        assert isinstance(message, messages.Ready)
        return message

    def how_it_ended(self) -> str:
        """How the process ended, for messages; call it once the socket is closed."""
        try:
            code = self.popen.wait(_SECONDS_TO_REAP)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if code < 0:
            return f"its process was ended by signal {-code}"
        return f"its process ended with code {code}"

    def kill(self) -> None:
        """Ends the process now. May be called again."""
        self.popen.kill()
        self.popen.wait()
        self.life.close()
        self.socket.close()


def launch(args: Mapping[str, Any], place: ReplicaPlace | None = None) -> EngineProcess:
    """Starts a process that builds an engine.

    A fresh interpreter: a fork would break CUDA and thread pools, and multiprocessing would run
    the main script of users again.

    Args:
        args: engine arguments by name, plain data.
        place: None: of the only engine, which may use all of this machine.
    """
    place = place or ReplicaPlace()
    ours, theirs = socket.socketpair()
    alive, life = os.pipe()
    in_main_thread = threading.current_thread() is threading.main_thread()
    given = [str(theirs.fileno()), str(alive), str(int(in_main_thread))]
    try:
        with _affinity(place.cpus):
            # -P: a module of the working folder must not shadow one of Python's own.
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *given],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), alive),
                env=_environment_of(place),
            )
    except BaseException:
        ours.close()
        os.close(life)
        raise
    finally:
        theirs.close()
        os.close(alive)
    to_engine = MessageSocket(ours)
    level = logging.getLogger("hetero_llm").getEffectiveLevel()
    start = messages.Start(dict(args), level, kind_of_root(), place.index)
    to_engine.send(messages.encode(start))
    return EngineProcess(popen, to_engine, os.fdopen(life, "wb", buffering=0))


@contextmanager
def _affinity(cpus: tuple[int, ...]) -> Iterator[None]:
    """Processes started meanwhile by this thread may use these CPUs only; its other threads keep
    theirs. Empty: nothing changes."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _environment_of(place: ReplicaPlace) -> dict[str, str]:
    environment = child_environment()
    if place.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place.devices
    return environment
