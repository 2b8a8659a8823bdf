"""One engine process as the front end sees it, and several as one: places and figures."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from hetero_llm.core.errors import ConfigError, EngineDeadError, EngineHungError
from hetero_llm.core.histogram import Histogram
from hetero_llm.engine.processes import messages
from hetero_llm.engine.processes.engine_launcher import EngineProcess, ReplicaPlace
from hetero_llm.utils.topology import split_cpus

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MEANS = frozenset((
    "num_iters", "hit_iters", "hit_len", "invalid_len", "global_average_hit_len",
    "valid_average_hit_len", "draft_worker_up", "lookahead_warmup_is_over",
))  # fmt: skip
_MEAN_ENDS = ("_perc", "_rate", "_ratio")
_MAXIMA = frozenset(("last_step_timestamp_seconds", "max_loras", "kv_offload_broken"))


def places(
    num_replicas: int, *, device: str, devices_each: int, visible: str | None = None
) -> list[ReplicaPlace]:
    """Where each replica runs: cores are divided, and each replica has GPUs of its own, in order.

    Args:
        device: "cpu", "cuda" or "auto", the GPU if there is one.
        devices_each: GPUs of one replica.
        visible: this process's CUDA_VISIBLE_DEVICES; None: that of the environment.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names too few GPUs.
    """
    if num_replicas == 1:
        return [ReplicaPlace()]
    cpus = split_cpus(num_replicas)
    visible = os.environ.get(_VISIBLE) if visible is None else visible
    hidden = visible is not None and not visible.strip()
    if device == "cpu" or (hidden and device == "auto"):
        return [ReplicaPlace(index, cpus[index]) for index in range(num_replicas)]
    wanted = num_replicas * devices_each
    names = [str(number) for number in range(wanted)]
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if len(names) < wanted:
            reason = f"needs {wanted} GPUs; {_VISIBLE}={visible!r} names {len(names)}"
            raise ConfigError("data_parallel_size", num_replicas, reason)
    return [
        ReplicaPlace(index, cpus[index], ",".join(names[first : first + devices_each]))
        for index, first in enumerate(range(0, wanted, devices_each))
    ]


def _check_devices(ready: Sequence[messages.Ready]) -> None:
    """Raises ConfigError: the replicas run on different devices, because there are too few GPUs."""
    devices = [one.device.partition(":")[0] for one in ready]
    if len(set(devices)) > 1:
        reason = (
            f"needs a GPU for each replica, and only {devices.count('cuda')} found one; "
            "give fewer, or device='cpu'"
        )
        raise ConfigError("data_parallel_size", len(ready), reason)


def merge_figures(all_figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of all replicas as those of one engine: sums, but means of shares and rates, and
    the largest of timestamps and switches. A figure counts where a replica has it."""
    if len(all_figures) == 1:
        return dict(all_figures[0])
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for figures in all_figures for name in figures):
        values = [figures[name] for figures in all_figures if name in figures]
        if name in _MAXIMA:
            merged[name] = max(values)
        elif name in _MEANS or name.endswith(_MEAN_ENDS):
            merged[name] = sum(values) / len(values)
        else:
            merged[name] = sum(values)
    return merged


def merge_histograms(all_histograms: Sequence[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    """The sums of all replicas' histograms, which have the same bounds."""
    if len(all_histograms) == 1:
        return dict(all_histograms[0])
    merged: dict[str, Histogram] = {}
    for histograms in all_histograms:
        for name, one in histograms.items():
            whole = merged.setdefault(name, Histogram.empty(tuple(one.bounds)))
            whole.counts = [a + b for a, b in zip(whole.counts, one.counts, strict=True)]
            whole.total += one.total
    return merged


def name_of(index: int, num_replicas: int) -> str:
    """A replica's name for messages."""
    return "the engine" if num_replicas == 1 else f"engine {index} of {num_replicas}"


def wait_until_ready(processes: Sequence[EngineProcess]) -> list[messages.Ready]:
    """Waits while the replicas load the model.

    Raises:
        HeteroLLMError: as `EngineProcess.wait_until_ready`.
        ConfigError: there are too few GPUs.
    """
    ready: list[messages.Ready] = []
    for index, process in enumerate(processes):
        try:
            ready.append(process.wait_until_ready())
        except ConfigError as error:
            if index and error.field == "device":  # the first replica has found a device
                reason = f"engine {index} has no GPU: {error.reason}"
                raise ConfigError("data_parallel_size", len(processes), reason) from None
            raise
        except EngineDeadError as error:
            name = name_of(index, len(processes))
            raise EngineDeadError(str(error).replace("the engine", name, 1)) from None
    _check_devices(ready)
    return ready


class Replica:
    """The messages of one engine process, its last figures, and whether it lives. Everything runs
    in the event loop's thread.

    Args:
        process: ready.
        name: for messages.
        handle: called with every message but heartbeats.
        fail: called with a sentence once the process has ended, a step has failed, or a message
            cannot be read.

    Attributes:
        metrics, histograms: of the last heartbeat.
        hung: the engine was found to show no life; its threads' stacks were asked for.
    """

    def __init__(
        self,
        process: EngineProcess,
        name: str,
        *,
        handle: Callable[[messages.Message], None],
        fail: Callable[[str], None],
    ) -> None:
        self.process = process
        self._name = name
        self.metrics: dict[str, float] = {}
        self.histograms: dict[str, Histogram] = {}
        self._handle, self._fail = handle, fail
        self._last_message = time.monotonic()
        self.hung = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes a loop the one that reads from the process."""
        self._loop = loop
        loop.add_reader(self.process.socket.fileno(), self.receive)

    def detach(self) -> None:
        """The loop reads and writes no more."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.process.socket.fileno())
            self._loop.remove_writer(self.process.socket.fileno())
        self._loop = None

    def send(self, message: messages.Message) -> None:
        socket = self.process.socket
        socket.send(messages.encode(message))
        if socket.num_unsent and self._loop is not None:
            self._loop.add_writer(socket.fileno(), self._flush)

    def _flush(self) -> None:
        socket = self.process.socket
        socket.flush()
        if not socket.num_unsent and self._loop is not None:
            self._loop.remove_writer(socket.fileno())

    def receive(self) -> None:
        """Handles the messages that have arrived."""
        socket = self.process.socket
        for data in socket.receive():
            self._last_message = time.monotonic()
            try:
                message = messages.decode_from_engine(data)
            except Exception as error:  # else the messages behind it would be lost in silence
                self._fail(f"{self._name} is dead: it sent what cannot be read: {error}")
                return
            if isinstance(message, messages.Heartbeat):
                self.metrics, self.histograms = message.metrics, message.histograms
            elif isinstance(message, messages.Dead):
                self._fail(f"{self._name} is dead: a step failed: {message.text}")
            else:
                self._handle(message)
        if socket.closed:
            self._fail(f"{self._name} is dead: {self.process.how_it_ended()}")

    @property
    def age(self) -> float:
        """Seconds since the engine last showed life."""
        return time.monotonic() - self._last_message

    def check_life(self, step_timeout: float) -> None:
        """A hung engine is asked for its threads' stacks, once, on stderr.

        Raises:
            EngineHungError: it has shown no life for `step_timeout` seconds.
        """
        age = self.age
        if age <= step_timeout:
            self.hung = False
            return
        if not self.hung:
            self.hung = True
            logger.error("%s has shown no life for %.1f s", self._name, age)
            self.process.popen.send_signal(signal.SIGUSR1)
        raise EngineHungError(
            f"{self._name} has shown no life for {age:.1f} s (step_timeout={step_timeout:g})"
        )
