"""The engine in a process of its own: `python -m hetero_llm.engine.engine_process`.

One thread: take what has arrived, step, send what came of it. There is no thread beside it, since
one that wakes against a busy step loop waits for the interpreter lock, and so does the loop.

Signals that a terminal or a service manager sends to all processes of a group are left to the API
process, which drains first. This process ends when that one says so or ends, for whatever reason.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError, HeteroLLMError, RequestError
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.engine import messages
from hetero_llm.engine.fault_injection import with_faults
from hetero_llm.engine.message_socket import Link
from hetero_llm.utils import env
from hetero_llm.utils.gc_control import prompt_wakeups, serve_promptly
from hetero_llm.utils.log_sink import LineFormatter, Sink

if TYPE_CHECKING:
    from hetero_llm.engine.factory import BuiltEngine
    from hetero_llm.spec_decode.lookahead.store import Store

logger = logging.getLogger(__name__)

EXIT_BAD_START = 2
EXIT_DEAD = 1
HEARTBEAT_SECONDS = 0.1
_MOST_UNSENT = 64 << 20
"""Bytes. Steps pause while the API process leaves more than this unread."""
_SECONDS_TO_FLUSH = 1.0
_SECONDS_TO_TEND = 0.005  # between looks at copies that go on while nothing runs
_PR_SET_PDEATHSIG = 1


class EngineLoop:
    """Serves one engine to the process at the other end of the link."""

    def __init__(self, link: Link, built: BuiltEngine) -> None:
        self._link = link
        self._built = built
        self._engine = built.engine
        self._step = with_faults(built.engine.step, env.faults())
        self._begun: set[str] = set()  # requests with an output on its way
        self._last_beat = 0.0
        self._running = True
        self._poll = select.poll()

    def run(self) -> int:
        """Returns the exit code, when told to stop or when the other process has ended."""
        while self._running and not self._link.closed:
            for data in self._receive():
                self._take(messages.decode_to_engine(data))
            if self._engine.has_unfinished and self._link.num_unsent < _MOST_UNSENT:
                try:
                    outputs = self._step()
                except BaseException as error:
                    logger.exception("a step failed")
                    self._post(messages.Dead(f"{type(error).__name__}: {error}"))
                    return EXIT_DEAD
                if outputs:
                    self._post(messages.StepOutputs([self._packed(one) for one in outputs]))
            self._beat()
        return 0

    def _receive(self) -> list[bytes]:
        """What has arrived; waits only if there is nothing else to do."""
        unsent = self._link.num_unsent
        if not self._engine.has_unfinished or unsent >= _MOST_UNSENT:
            wait = self._last_beat + HEARTBEAT_SECONDS - time.monotonic()
            if not self._engine.has_unfinished and self._engine.poll_host_memory():
                wait = min(wait, _SECONDS_TO_TEND)
            self._poll.register(self._link, select.POLLIN | (select.POLLOUT if unsent else 0))
            self._poll.poll(max(wait, 0.0) * 1e3 + 1.0)
        if unsent:
            self._link.flush()
        return self._link.receive()

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.AddRequest):
            self._add(message)
        elif isinstance(message, messages.Abort):
            last = self._engine.abort(message.key)
            if last is not None:
                self._post(messages.StepOutputs([self._packed(last)]))
        elif isinstance(message, messages.Call):
            self._post(self._answer(message))
        elif isinstance(message, messages.Shutdown):
            self._running = False
        else:
            raise TypeError(f"{type(message).__name__} after the start")

    def _add(self, message: messages.AddRequest) -> None:
        """Starts a request. The API process has checked it, but for what only the scheduler knows:
        how many sequences and KV blocks there are."""
        try:
            request = messages.request_from_wire(message)
            self._engine.check_request(request)
        except Exception as error:  # nothing has been started: the engine is as it was
            if not isinstance(error, RequestError):
                logger.exception("a request could not be checked")
            self._post(messages.RequestFailed(message.key, messages.error_to_wire(error)))
            return
        self._engine.add_request(request)

    def _answer(self, call: messages.Call) -> messages.CallResult:
        try:
            return messages.CallResult(call.number, CALLS[call.name](self._built, *call.arguments))
        except Exception as error:
            if not isinstance(error, HeteroLLMError):
                logger.exception("%s failed", call.name)
            return messages.CallResult(call.number, error=messages.error_to_wire(error))

    def _packed(self, output: RequestOutput) -> messages.Output:
        key = output.request_id
        first = key not in self._begun
        if output.finished:
            self._begun.discard(key)
        elif first:
            self._begun.add(key)
        return messages.Output(
            key,
            output.finished,
            output.outputs,
            output.num_cached_tokens,
            output.prompt_logprobs if first else None,
            output.metrics if first or output.finished else None,
            output.error,
        )

    def _beat(self) -> None:
        """Shows life, unless the other side has not read what was sent before."""
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_SECONDS:
            self._last_beat = now
            if not self._link.num_unsent:
                figures = _metrics(self._built) | {"cpu_seconds": time.process_time()}
                histograms = self._built.engine.histograms()
                self._post(messages.Heartbeat(figures, histograms))

    def _post(self, message: messages.Message) -> None:
        self._link.send(messages.encode(message))


def _metrics(built: BuiltEngine) -> dict[str, float]:
    figures = built.engine.metrics()
    return figures if built.store is None else figures | built.store.metrics()


def _reset_prefix_cache(built: BuiltEngine) -> None:
    built.engine.reset_prefix_cache()


def _save_lookahead_cache(built: BuiltEngine, path: str) -> None:
    _store(built).save(path)


def _load_lookahead_cache(built: BuiltEngine, path: str) -> None:
    _store(built).load(path)


def _store(built: BuiltEngine) -> Store:
    if built.store is None:
        raise ConfigError("use_lookahead", False, "this engine has no lookahead cache")
    return built.store


CALLS: dict[str, Callable[..., Any]] = {
    "metrics": _metrics,
    "reset_prefix_cache": _reset_prefix_cache,
    "save_lookahead_cache": _save_lookahead_cache,
    "load_lookahead_cache": _load_lookahead_cache,
}
"""What the API process can ask for between two steps. Arguments and results are plain data."""


# -- start and end --------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Runs the engine; the arguments are those that `engine_launcher.launch` gives."""
    link_end, life_end, dies_with_thread = map(int, arguments)
    _end_with_parent(life_end, dies_with_thread=bool(dies_with_thread))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the parent's, for its results
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, and not SIG_IGN, which processes started from here would inherit.
        signal.signal(number, lambda *_: None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # for an engine that hangs
    serve_promptly()
    _set_title()
    os.set_inheritable(link_end, False)
    link = Link(socket.socket(fileno=link_end))
    with prompt_wakeups():
        built = _build(link)
        code = built if isinstance(built, int) else EngineLoop(link, built).run()
    if not isinstance(built, int) and built.offload and not code:
        built.engine.shut_down()  # unpins host memory, which takes the kernel long at a kill
    _flush(link)
    return code


def _build(link: Link) -> BuiltEngine | int:
    """The engine that the first message asks for, or the exit code."""
    start = _first_message(link)
    if start is None:
        return EXIT_BAD_START
    root = logging.getLogger()
    root.handlers[:] = [Sink(sys.stderr.fileno(), LineFormatter(start.log_format, "engine"))]
    root.setLevel(max(start.log_level, logging.WARNING))
    logging.getLogger("hetero_llm").setLevel(start.log_level)
    logging.captureWarnings(True)
    begun = time.monotonic()
    try:
        config = EngineConfig.from_args(resolve_engine_args(start.args))
        env.faults()  # a mistake in it is better told now
        import torch  # noqa: F401  # by far the longest import: its time is shown apart
        from tqdm import tqdm

        from hetero_llm.engine.factory import build_engine

        tqdm.monitor_interval = 0  # else a thread of its own stays behind each bar

        imported = time.monotonic()
        built = build_engine(config, serving=True, show_progress=sys.stderr.isatty())
    except Exception as error:
        if not isinstance(error, HeteroLLMError):
            logger.exception("the engine could not be built")
        link.send(messages.encode(messages.StartFailed(messages.error_to_wire(error))))
        return EXIT_BAD_START
    gc.collect()
    gc.freeze()  # or collections in mid-stream walk through all that was loaded, again and again
    seconds = {"import": imported - begun, "load": time.monotonic() - imported}
    ready = messages.Ready(
        built.max_model_len, built.num_blocks, built.device, built.dtype, built.backend, seconds,
        built.offload,
    )  # fmt: skip
    link.send(messages.encode(ready))
    return built


def _first_message(link: Link) -> messages.Start | None:
    """None if the parent ended before it sent one."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while not link.closed:
        poll.poll()
        for data in link.receive():
            start = messages.decode_to_engine(data)
            assert isinstance(start, messages.Start)
            return start
    return None


def _flush(link: Link) -> None:
    """Last words."""
    poll = select.poll()
    poll.register(link, select.POLLOUT)
    deadline = time.monotonic() + _SECONDS_TO_FLUSH
    while link.num_unsent and not link.closed and time.monotonic() < deadline:
        poll.poll((deadline - time.monotonic()) * 1e3)
        link.flush()
    link.close()


def _end_with_parent(life_end: int, *, dies_with_thread: bool) -> None:
    """The kernel ends this process, in the middle of a step too, when the parent has ended.

    The parent holds the other end of a pipe that nobody writes to. When it ends, by whatever
    signal, SIGIO comes, whose default action is to terminate. PR_SET_PDEATHSIG does the same where
    a fork of the parent keeps the pipe open, but it means the thread that started us, so it serves
    only if that was the main thread.
    """
    os.set_inheritable(life_end, False)
    fcntl.fcntl(life_end, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(life_end, fcntl.F_GETFL)
    fcntl.fcntl(life_end, fcntl.F_SETFL, flags | os.O_ASYNC)
    if dies_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([life_end], [], [], 0)[0]:  # before the signal was asked for
        sys.exit(EXIT_DEAD)


def _set_title() -> None:
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle("hetero-llm: engine")


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    # The kernel frees everything faster than the interpreter does, device memory included.
    os._exit(exit_code)
