"""Commands of `hetero-llm` that serve, for the benches that send them requests."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

HOST = "127.0.0.1"
_PATIENCE = 300.0  # seconds until a server is ready


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that answers at `url`, its id, and the seconds it took to be ready."""

    url: str
    port: int
    pid: int
    ready: float


@contextmanager
def serving(*words: str, cpus: Sequence[int] = ()) -> Iterator[Serving]:
    """Runs `hetero-llm WORDS` on a port of its own; ends it with the context.

    Args:
        cpus: cores that it is bound to; none: all.

    Raises:
        SystemExit: it ends, or is not ready in time.
    """
    port = free_port()
    pinned = ["taskset", "-c", ",".join(map(str, cpus))] if cpus else []
    command = [*pinned, sys.executable, "-m", "hetero_llm.cli", *words, f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://{HOST}:{port}"
        yield Serving(url, port, process.pid, _wait_until_ready(process, url))
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
    return port


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> float:
    """Seconds until `/ready` answers."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < _PATIENCE:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return time.perf_counter() - begin
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {_PATIENCE:g} s")
