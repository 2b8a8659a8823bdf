"""`hetero-llm serve demo` in processes of its own, as users start it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

KEY = "sk-client-matrix"
MODEL = "demo"
_START_SECONDS = 180.0
_STOP_SECONDS = 30.0
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


@contextmanager
def server(log: Path, *flags: str) -> Iterator[str]:
    """A server's address. It has to end cleanly, and may not have logged any traceback."""
    command = [sys.executable, "-m", "hetero_llm.cli", "serve", MODEL, "--device", "cpu"]
    command += ["--dtype", "float32", "--port", "0", "--api-key", KEY, *flags]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    killer = threading.Timer(_START_SECONDS, process.kill)
    killer.start()
    try:
        url = _ready_url(process, log)
        killer.cancel()
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(_STOP_SECONDS) == 0, log.read_text()[-4000:]
        assert "Traceback" not in log.read_text(), log.read_text()[-8000:]
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.match(r"Ready on (\S+)", line)
        if found:
            # What it still prints must not fill the pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return found.group(1)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")


def samples(url: str, name: str) -> dict[str, float]:
    """The values of one metric by its labels, as text."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    found = filter(None, map(_SAMPLE.match, text.splitlines()))
    return {
        one.group("labels") or "": float(one.group("value"))
        for one in found
        if one.group("name") == name
    }
