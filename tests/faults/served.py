"""A whole server, `hetero-llm serve` with its engine's process, and what it must leave behind:
nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds until what must come counts as missed
ENGINE = "hetero_llm.engine.processes.engine_process"
COMPLETIONS = "/v1/completions"
_LIVE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_BEATS = 0.35  # seconds: more than three heartbeats of the engine
PROMPT = "def add(a, b):\n    return"
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}


@dataclass
class ServerProcess:
    """A running server. `pids` are those of its children, of which one is the engine's."""

    popen: subprocess.Popen[str]
    log_path: Path
    url: str
    pids: list[int]
    http: httpx.Client
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self.port = int(self.url.rpartition(":")[2])

    @property
    def engine(self) -> int:
        (pid,) = (pid for pid in self.pids if ENGINE in psutil.Process(pid).cmdline())
        return pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def post(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(COMPLETIONS, json=body, headers=named)

    def probe(self) -> None:
        """An ordinary request is answered."""
        answer = self.post({"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4

    def status(self, path: str) -> int:
        return self.http.get(path).status_code

    def metric(self, name: str, **labels: str) -> float:
        """The sum over a metric's samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(one in series for one in wanted):
                total += float(value)
        return total

    def wait(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"in vain; the server's log:\n{self.log()}"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """Nothing runs or waits any more, and nothing of what ran is left: no block, no slot.

        What /metrics says of the engine is as old as its last heartbeat, so it has to be so for
        a while.
        """
        since = time.monotonic()

        def idle() -> bool:
            nonlocal since
            live = any(map(self.metric, _LIVE)) or self.http.get("/load").json()["server_load"]
            since = time.monotonic() if live else since
            return time.monotonic() - since > _BEATS

        self.wait(idle)

    def running(self) -> float:
        return self.metric("vllm:num_requests_running")

    def ended(self, seconds: float) -> int:
        """The exit code. No process and no shared memory is left then."""
        segments = shared_memory([self.popen.pid, *self.pids])
        code = self.popen.wait(seconds)
        deadline = time.monotonic() + 5.0
        while any(map(is_running, self.pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(is_running, self.pids)), "a child outlived the server"
        assert not any(map(os.path.exists, segments))
        return code

    def stream(self, body: dict[str, Any], *, small: bool = False) -> socket.socket:
        """A connection over which a streamed request was sent, and nothing read."""
        content = json.dumps({**body, "stream": True}).encode()
        return self.raw(head(len(content)) + content, small=small)

    def raw(self, data: bytes, *, small: bool = False) -> socket.socket:
        """A connection over which these bytes were sent. `small`: it takes few unread ones."""
        connection = socket.socket()
        if small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection


@contextmanager
def server(
    folder: Path,
    *flags: str,
    faults: str = "",
    before_exec: Callable[[], None] | None = None,
    wrap: Sequence[str] = (),
) -> Iterator[ServerProcess]:
    """A server of the demo model with one CPU thread.

    Args:
        folder: for its log.
        faults: see `utils.env.faults`.
        before_exec: called in the child.
        wrap: a command that starts it.
    """
    log_path = folder / f"log {len(list(folder.iterdir()))}"
    with log_path.open("w") as log:
        popen = subprocess.Popen(
            [*wrap, *command(*flags)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HETERO_LLM_FAULTS": faults},
            preexec_fn=before_exec,
        )
    pids: list[int] = []
    try:
        url = _url_when_ready(popen, log_path)
        pids = [child.pid for child in psutil.Process(popen.pid).children(recursive=True)]
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
            yield ServerProcess(popen, log_path, url, pids, http)
    finally:
        popen.kill()
        popen.wait()
        assert popen.stdout is not None
        popen.stdout.close()
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def command(*flags: str, model: str = "demo") -> list[str]:
    words = [sys.executable, "-m", "hetero_llm.cli", "serve", model, "--device", "cpu"]
    return [*words, "--port", "0", "--cpu-threads", "1", "--dtype", "float32", *flags]


def _url_when_ready(popen: subprocess.Popen[str], log_path: Path) -> str:
    assert popen.stdout is not None
    said = ""
    for line in popen.stdout:
        said += line
        if line.startswith("Ready on "):
            return line.split()[2]
    raise AssertionError(f"not ready:\n{said}\n{log_path.read_text(errors='replace')}")


def head(length: int, path: str = COMPLETIONS) -> bytes:
    text = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{text}content-length: {length}\r\n\r\n".encode()


def rest_of(connection: socket.socket) -> tuple[str, bool]:
    """What comes until the connection's end, and whether that is the clean end of a chunked
    answer."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        return data.decode(), False
    return data.decode(), data.endswith(b"0\r\n\r\n")


def frames(text: str) -> list[Any]:
    """The data of a stream's whole events."""
    found = re.findall(r"^data: (.*?)\r?$", text, re.MULTILINE)
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def error_code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def is_running(pid: int) -> bool:
    """Whether a process is there and not just waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(pids: Sequence[int]) -> set[str]:
    """The named shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return {name for name in found if not name.endswith(" (deleted)")}
