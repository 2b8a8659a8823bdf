"""Workers of chat templates, forked from one process that has imported transformers already.

A worker of its own takes 0.7 s of CPU to start, and nearly every server of the tests starts one;
how they start is tested in tests/server/test_templates.py and with whole servers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NUMBER_BYTES = 8


@dataclass(frozen=True)
class Fork:
    """A worker, as `subprocess.Popen` shows it."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The process that forked it does not let it become a zombie."""
        return 0


class Forks:
    """In the place of the module `subprocess` in `server.templates`. A context manager."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: socket.socket | None = None
        self._origin: subprocess.Popen[bytes] | None = None

    def Popen(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> Fork:  # noqa: N802
        """`command` names the worker's module, which the origin knows."""
        with self._lock:
            if self._end is None:
                self._start()
            assert self._end is not None
            socket.send_fds(self._end, [b"f"], list(pass_fds))
            return Fork(int.from_bytes(self._end.recv(_NUMBER_BYTES), "little"))

    def _start(self) -> None:
        self._end, theirs = socket.socketpair()
        with theirs:
            number = str(theirs.fileno())
            program = "import sys; from tests.helpers.template_forks import serve; serve(sys.argv)"
            self._origin = subprocess.Popen(
                [sys.executable, "-c", program, number], cwd=Path(__file__).parents[2],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._end is not None and self._origin is not None:
            self._end.close()
            self._origin.wait()


def serve(argv: list[str]) -> None:
    """The origin: forks a worker for each socket that it is sent, until the tests end."""
    for name in ("torch", "PIL"):  # as the worker does
        sys.modules[name] = None  # type: ignore[assignment]
    import transformers

    from hetero_llm.server import template_worker

    assert transformers.PreTrainedTokenizerFast  # loads what the worker imports
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(argv[1])) as end:
        while True:
            message, descriptors, _, _ = socket.recv_fds(end, 1, 1)
            if not message:
                return
            (descriptor,) = descriptors
            pid = os.fork()
            if pid == 0:
                end.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                argv[1:] = [str(descriptor)]
                template_worker.main()
                os._exit(0)
            os.close(descriptor)
            end.sendall(pid.to_bytes(_NUMBER_BYTES, "little"))
