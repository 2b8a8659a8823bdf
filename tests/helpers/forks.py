"""Processes of our modules, forked from one that has imported what they need.

`python -m` of an engine, a rank or a draft worker takes two to four seconds of CPU before it does
anything, most of it imports, and the tests start a hundred of them. How such processes start is
tested with real ones: engine/processes/test_engine_process.py, server/test_serving.py and
test_templates.py, spec_decode/draft_model/test_worker_client.py, scenarios/test_first_start.py and
a test of scenarios/test_tensor_parallel.py.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_USED = (
    "hetero_llm.cpu.adapters", "hetero_llm.cpu.draft_worker.worker", "hetero_llm.cpu.model_runner",
    "hetero_llm.distributed.stage_link", "hetero_llm.engine.builders.build_pooling",
    "hetero_llm.engine.factory", "hetero_llm.engine.processes.engine_process",
    "hetero_llm.engine.processes.rank_process", "hetero_llm.lora.rank_adapters",
    "hetero_llm.models.configs.llama_like", "hetero_llm.quantization.formats.read",
    "hetero_llm.runner.adapters", "hetero_llm.runner.sequence_parallel",
    "hetero_llm.runner.split_step", "hetero_llm.runner.verify",
    "hetero_llm.spec_decode.draft_model.proposer", "hetero_llm.spec_decode.lookahead.store",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.configuration_llama",
)  # fmt: skip
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 64
_FAR = 500  # descriptors of a request wait behind this number for their places


class Fork:
    """A process that was forked for us, as `subprocess.Popen` shows it: a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                found = select.select([ended], [], [], timeout)[0]
            finally:
                os.close(ended)
            if not found:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """In the place of the module `subprocess` in a module that starts processes. A context manager;
    the origin starts with the first process.

    Args:
        prepare: what the origin does first, a function of this module.
    """

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare.__name__
        self._lock = threading.Lock()
        self._end: socket.socket | None = None
        self._origin: subprocess.Popen[bytes] | None = None

    # The name that `subprocess` gives it.
    def Popen(  # noqa: N802
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        stdin: int,
        stdout: int | None = None,
        stderr: IO[bytes] | None = None,
    ) -> Fork:
        """Starts `python [-P] -m MODULE ARGUMENTS`."""
        assert stdin == self.DEVNULL and stdout in (None, self.DEVNULL)
        *flags, module = command[1 : command.index("-m") + 2]
        assert set(flags) <= {"-P", "-m"} and max(pass_fds) < _FAR
        with open(os.devnull, "wb") as nothing:
            out = 1 if stdout is None else nothing.fileno()
            errors = 2 if stderr is None else stderr.fileno()
            request = {
                "argv": [module, *command[command.index(module) + 1 :]],
                "env": dict(env),
                "folder": os.getcwd(),
                "cpus": sorted(os.sched_getaffinity(0)),
                "descriptors": [1, 2, *pass_fds],
            }
            with self._lock:
                end = self._end or self._start()
                libc = ctypes.CDLL(None)
                # The process that forks it ends at once; the kernel makes it a child of this one.
                libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
                try:
                    data = json.dumps(request).encode()
                    socket.send_fds(end, [data], [out, errors, *pass_fds])
                    reply = end.recv(_MOST_BYTES)
                    assert reply, "the origin has ended"
                    return Fork(int(reply))
                finally:
                    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = f"from tests.helpers.forks import serve, {self._prepare} as prepare\n"
            code += f"serve({theirs.fileno()}, prepare)"
            self._origin = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=Path(__file__).parents[2], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._end = ours
        return ours

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._end is not None and self._origin is not None:
            self._end.close()
            self._origin.wait()


def serve(descriptor: int, prepare: Callable[[], None]) -> None:
    """The origin: forks a process for each request, until the tests end."""
    prepare()
    with socket.socket(fileno=descriptor) as end:
        while True:
            data, descriptors, _, _ = socket.recv_fds(end, _MOST_BYTES, _MOST_DESCRIPTORS)
            if not data:
                return
            reader, writer = os.pipe()
            between = os.fork()
            if between == 0:
                own = os.getpid()
                pid = os.fork()
                if pid:
                    os.write(writer, str(pid).encode())
                    os._exit(0)
                while os.getppid() == own:
                    time.sleep(0.0005)
                _become(json.loads(data), descriptors)
            os.waitpid(between, 0)
            end.sendall(os.read(reader, _MOST_BYTES))
            for one in (reader, writer, *descriptors):
                os.close(one)


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Runs a module as `python -m` does."""
    import fcntl

    far = [fcntl.fcntl(one, fcntl.F_DUPFD, _FAR) for one in descriptors]
    os.closerange(3, _FAR)
    for one, place in zip(far, request["descriptors"], strict=True):
        os.dup2(one, place)
    os.closerange(_FAR, max(far) + 1)
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cpus"])
    os.environ.clear()
    os.environ.update(request["env"])
    module, *arguments = request["argv"]
    sys.argv = [module, *arguments]
    Path("/proc/self/comm").write_text(module.rpartition(".")[2])
    code = 1
    try:
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def chat_templates() -> None:
    """Prepares for workers of chat templates."""
    for name in ("torch", "PIL"):  # as they do
        sys.modules[name] = None  # type: ignore[assignment]
    import transformers

    import hetero_llm.server.template_worker  # noqa: F401

    assert transformers.PreTrainedTokenizerFast  # loads what they need


def engines() -> None:
    """Prepares for engines, ranks and draft workers. Starts no thread: it would not be there after
    a fork."""
    import importlib

    for name in _USED:
        importlib.import_module(name)
    from hetero_llm.cpu.draft_worker.tree_pool import TreePool
    from hetero_llm.spec_decode.draft_model.tree_replica import TreeReplica

    TreePool.compile()  # numba's parts are loaded, too
    TreeReplica.compile()
    gc.freeze()
