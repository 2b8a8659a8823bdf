"""The engine in a process of its own: `python -m hetero_llm.engine.processes.engine_process`.

One thread: handle the messages that have arrived, run a step, send its outputs. A second thread
would compete with the step loop for the interpreter lock.

Signals to the whole process group are ignored: the API process drains first. This process ends on
its parent's message or when its parent ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError, EngineDeadError, HeteroLLMError, RequestError
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.pooling.pooling_engine import PoolingEngine
from hetero_llm.engine.processes import child_process, messages
from hetero_llm.engine.processes.fault_injection import with_faults
from hetero_llm.lora.no_adapters import NoAdapters
from hetero_llm.utils import env
from hetero_llm.utils.gc_control import prompt_wakeups
from hetero_llm.utils.message_socket import MessageSocket

if TYPE_CHECKING:
    from hetero_llm.engine.builders.build_pooling import BuiltPooling
    from hetero_llm.engine.factory import BuiltEngine
    from hetero_llm.spec_decode.lookahead.store import Store

logger = logging.getLogger(__name__)

EXIT_BAD_START = 2
EXIT_DEAD = 1
HEARTBEAT_SECONDS = 0.1
_SECONDS_TO_FLUSH = 1.0
_POLL_SECONDS = 0.005  # of host memory's copies while no request runs


class EngineLoop:
    """Runs one engine for the process at the other end of the socket.

    Args:
        parent: the socket.
        built: the engine, of a model that generates or of one that pools.
        most_unsent: bytes; no step runs while the other end leaves more than this unread.
    """

    def __init__(
        self,
        parent: MessageSocket,
        built: BuiltEngine | BuiltPooling,
        *,
        most_unsent: int = 64 << 20,
    ) -> None:
        self._parent = parent
        self._most_unsent = most_unsent
        self._built = built
        self._engine = built.engine
        self._step: Callable[[], list[Any]] = with_faults(built.engine.step, env.faults())
        self._started: set[str] = set()  # unfinished requests of which an output was sent
        self._last_beat = 0.0
        self._running = True
        self._poll = select.poll()

    def run(self) -> int:
        """Runs until a `Shutdown` message or the parent's end; returns the exit code."""
        while self._running and not self._parent.closed:
            try:
                arrived = self._receive()
            except EngineDeadError as error:  # while no request runs
                return self._report_death(error)
            for data in arrived:
                self._handle_data(data)
            if self._engine.has_unfinished and self._parent.num_unsent < self._most_unsent:
                try:
                    outputs = self._step()
                except EngineDeadError as error:
                    return self._report_death(error)
                except BaseException as error:
                    logger.exception("a step failed")
                    self._send(messages.Dead(f"{type(error).__name__}: {error}"))
                    return EXIT_DEAD
                if outputs:
                    self._send(self._outputs_message(outputs))
            self._send_heartbeat()
        return 0

    def _report_death(self, error: EngineDeadError) -> int:
        """Says why the engine cannot go on, in one line. Returns the exit code."""
        logger.error("%s", error)
        self._send(messages.Dead(str(error)))
        return EXIT_DEAD

    def _receive(self) -> list[bytes]:
        """Returns the messages that have arrived; waits only if no step can run."""
        unsent = self._parent.num_unsent
        if not self._engine.has_unfinished or unsent >= self._most_unsent:
            wait = self._last_beat + HEARTBEAT_SECONDS - time.monotonic()
            if not self._engine.has_unfinished and self._engine.poll_host_memory():
                wait = min(wait, _POLL_SECONDS)
            self._poll.register(self._parent, select.POLLIN | (select.POLLOUT if unsent else 0))
            self._poll.poll(max(wait, 0.0) * 1e3 + 1.0)
        if unsent:
            self._parent.flush()
        return self._parent.receive()

    def _handle_data(self, data: bytes) -> None:
        """Handles a message. A request that cannot be read fails alone."""
        try:
            message = messages.decode_to_engine(data)
        except Exception as error:
            key = messages.key_of_request(data)
            if key is None:
                raise
            logger.error("a request could not be read: %s", error)
            self._send(messages.RequestFailed(key, messages.error_to_wire(error)))
            return
        self._handle(message)

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.AddRequest):
            self._add(message.key, lambda: messages.request_from_wire(message))
        elif isinstance(message, messages.AddPooling):
            self._add(message.request.key, lambda: message.request)
        elif isinstance(message, messages.Abort):
            last = self._engine.abort(message.key)
            if last is not None:
                self._send(messages.StepOutputs([self._packed(last)]))
        elif isinstance(message, messages.Call):
            self._send(self._call_result(message))
        elif isinstance(message, messages.Shutdown):
            self._running = False
        else:
            raise TypeError(f"{type(message).__name__} after the start")

    def _add(self, key: str, make: Callable[[], Any]) -> None:
        """Starts a request. The API process has checked it, but for what only the scheduler knows:
        how many sequences and KV blocks there are."""
        engine: Any = self._engine
        try:
            request = make()
            engine.check_request(request)
        except Exception as error:  # nothing was started: the engine is unchanged
            if not isinstance(error, RequestError):
                logger.error("a request could not be checked", exc_info=error)
            self._send(messages.RequestFailed(key, messages.error_to_wire(error)))
            return
        engine.add_request(request)

    def _call_result(self, call: messages.Call) -> messages.CallResult:
        try:
            return messages.CallResult(call.number, CALLS[call.name](self._built, *call.arguments))
        except Exception as error:
            if not isinstance(error, HeteroLLMError):
                logger.exception("%s failed", call.name)
            return messages.CallResult(call.number, error=messages.error_to_wire(error))

    def _outputs_message(self, outputs: list[Any]) -> messages.Message:
        """The message for what a step of the engine has returned."""
        if isinstance(self._engine, PoolingEngine):
            return messages.PooledOutputs(outputs)
        return messages.StepOutputs([self._packed(one) for one in outputs])

    def _packed(self, output: RequestOutput) -> messages.Output:
        key = output.request_id
        first = key not in self._started
        if output.finished:
            self._started.discard(key)
        elif first:
            self._started.add(key)
        return messages.Output(
            key,
            output.finished,
            output.outputs,
            output.num_cached_tokens,
            output.prompt_logprobs if first else None,
            output.metrics if first or output.finished else None,
            output.error,
        )

    def _send_heartbeat(self) -> None:
        """Sends a heartbeat if it is due and the parent has read all earlier messages."""
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_SECONDS:
            self._last_beat = now
            if not self._parent.num_unsent:
                figures = self._built.metrics() | {"cpu_seconds": time.process_time()}
                histograms = self._built.engine.histograms()
                self._send(messages.Heartbeat(figures, histograms))

    def _send(self, message: messages.Message) -> None:
        self._parent.send(messages.encode(message))


def _reset_prefix_cache(built: BuiltEngine | BuiltPooling) -> None:
    if isinstance(built.engine, Engine):  # a pooling model caches no prefixes
        built.engine.reset_prefix_cache()


def _open_adapter(
    built: BuiltEngine | BuiltPooling,
    name: str,
    number: int,
    path: str,
    base_model_name: str | None,
    load_inplace: bool,
) -> list[Any]:
    """Content hash and rank of an adapter, which is read if it is new."""
    request = LoRARequest(
        name, number, path, base_model_name=base_model_name, load_inplace=load_inplace
    )
    ref = _adapters(built).open(request)
    return [ref.content_hash, ref.rank]


def _adapters(built: BuiltEngine | BuiltPooling) -> Any:
    return built.engine.adapters if isinstance(built.engine, Engine) else NoAdapters()


def _store(built: BuiltEngine | BuiltPooling) -> Store:
    store: Store | None = getattr(built, "store", None)
    if store is None:
        raise ConfigError("use_lookahead", False, "this engine has no lookahead cache")
    return store


CALLS: dict[str, Callable[..., Any]] = {
    "metrics": lambda built: built.metrics(),
    "reset_prefix_cache": _reset_prefix_cache,
    "save_lookahead_cache": lambda built, path: _store(built).save(path),
    "load_lookahead_cache": lambda built, path: _store(built).load(path),
    "open_adapter": _open_adapter,
    "forget_adapter": lambda built, name: _adapters(built).forget(name),
}
"""Functions that the API process can call between two steps. Arguments and results are plain
data."""


# -- start and end --------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Runs the engine; the arguments are those that `engine_launcher.launch` gives."""
    socket_end, life_end, dies_with_thread = map(int, arguments)
    _end_with_parent(life_end, dies_with_thread=bool(dies_with_thread))
    child_process.begin("engine")
    os.set_inheritable(socket_end, False)
    parent = MessageSocket(socket.socket(fileno=socket_end))
    with prompt_wakeups():
        built = _build(parent)
        code = built if isinstance(built, int) else EngineLoop(parent, built).run()
    if not isinstance(built, int) and built.offload and not code:
        built.engine.shut_down()  # unpins host memory, which takes the kernel long at a kill
    flush_and_close(parent)
    return code


def _build(parent: MessageSocket) -> BuiltEngine | BuiltPooling | int:
    """The engine that the first message asks for, or the exit code."""
    first = parent.wait()
    if first is None:
        return EXIT_BAD_START
    start = messages.decode_to_engine(first)
    assert isinstance(start, messages.Start)
    child_process.open_log(_name_of(start), start.log_format, start.log_level)
    begun = time.monotonic()
    try:
        config = EngineConfig.from_args(resolve_engine_args(start.args))
        env.faults()  # a mistake in the variable should be an error of the start
        import torch  # noqa: F401  # by far the longest import, timed apart
        from tqdm import tqdm

        from hetero_llm.engine.factory import build
        from hetero_llm.engine.resolve import resolve_device

        on_cpu = resolve_device(config.load.device).type == "cpu"
        config = config.of_one_replica(start.replica, on_cpu=on_cpu)
        tqdm.monitor_interval = 0  # else each progress bar leaves a thread behind

        imported = time.monotonic()
        built = build(config, serving=True, show_progress=sys.stderr.isatty())
    except Exception as error:
        if not isinstance(error, HeteroLLMError):
            logger.exception("the engine could not be built")
        parent.send(messages.encode(messages.StartFailed(messages.error_to_wire(error))))
        return EXIT_BAD_START
    child_process.freeze_objects()
    seconds = {"import": imported - begun, "load": time.monotonic() - imported}
    ready = messages.Ready(
        built.max_model_len, built.num_blocks, built.device, built.dtype, built.backend, seconds,
        built.offload,
    )  # fmt: skip
    parent.send(messages.encode(ready))
    return built


def _name_of(start: messages.Start) -> str:
    """The process's name in the log."""
    several = start.args.get("data_parallel_size", 1) != 1
    return f"engine {start.replica}" if several else "engine"


def flush_and_close(parent: MessageSocket) -> None:
    """Sends unsent bytes, for a second at most, and closes the socket."""
    parent.drain(_SECONDS_TO_FLUSH)
    parent.close()


def _end_with_parent(life_end: int, *, dies_with_thread: bool) -> None:
    """Makes the kernel end this process when its parent ends, in the middle of a step too.

    The parent holds the other end of a pipe to which no one writes. When the parent ends, by
    whatever signal, SIGIO comes, whose default action is to terminate. PR_SET_PDEATHSIG does the
    same where a fork of the parent keeps the pipe open; but it watches the thread that started
    this process, so it is set only if that was the main thread.
    """
    os.set_inheritable(life_end, False)
    fcntl.fcntl(life_end, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(life_end, fcntl.F_GETFL)
    fcntl.fcntl(life_end, fcntl.F_SETFL, flags | os.O_ASYNC)
    if dies_with_thread:
        child_process.die_with_parent_thread()
    if select.select([life_end], [], [], 0)[0]:  # the parent ended before SIGIO was set up
        sys.exit(EXIT_DEAD)


if __name__ == "__main__":
    child_process.end(main(sys.argv[1:]))
