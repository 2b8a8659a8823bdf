"""Row 20 of the fault matrix: a server that cannot start says why in a line and leaves nothing."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.faults.served import PATIENCE, ROOT, command, is_running
from tests.models.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.faults

CPU_SECONDS = 30.0
"""Of all processes. It is to take five seconds by the clock of a machine that has nothing else to
do; nearly all of it is importing torch."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny"
    make_tiny_checkpoint(made, "llama", with_tokenizer=True)
    return made


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def without_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def other_dtype(folder: Path) -> None:
    """The header says that the first tensor is of a type that no weights have."""
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    header[name]["dtype"] = "COMPLEX9"
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@contextmanager
def told(arguments: list[str]) -> Iterator[tuple[int, str]]:
    """The exit code and stderr of a server that does not start, and that it left no process."""
    begun, used_before = time.monotonic(), cpu_seconds()
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as popen:
        children: set[int] = set()
        while popen.poll() is None:
            children |= {one.pid for one in psutil.Process(popen.pid).children(recursive=True)}
            if time.monotonic() - begun > PATIENCE:
                popen.kill()
            time.sleep(0.02)
        _, text = popen.communicate()
    used = cpu_seconds() - used_before
    assert used < CPU_SECONDS, f"{used:.1f} s of CPU time"
    assert not any(map(is_running, children))
    yield popen.returncode, text


@pytest.mark.parametrize(
    ("harm", "flags", "said"),
    [
        (truncated, [], "model.safetensors: not a readable safetensors file, copy"),
        (without_header, [], "model.safetensors"),
        (other_dtype, [], "model.safetensors"),
        (without_weights, [], "safetensors"),
        (without_tokenizer, [], "--tokenizer"),
        (None, ["--dtype", "float12"], "dtype"),
        (None, ["--max-model-len", "100000"], "max_model_len"),
        (None, ["--num-gpu-blocks-override", "1"], "num_gpu_blocks_override"),
    ],
)
def test_row_20_a_bad_model(
    folder: Path, harm: Callable[[Path], None] | None, flags: list[str], said: str
) -> None:
    if harm is not None:
        harm(folder)
    with told([*command(model=str(folder)), *flags]) as (code, text):
        check(code, text, said)


def test_row_20_a_wrong_path(tmp_path: Path) -> None:
    with told(command(model=str(tmp_path / "nowhere"))) as (code, text):
        check(code, text, "nowhere")


def test_row_20_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with told([*command(), "--port", port]) as (code, text):
            check(code, text, f"127.0.0.1:{port}")
        with told([*command(), "--port", port, "--verbose"]) as (code, text):
            assert code == 2 and "Traceback" in text and "--port" in text


def cpu_seconds() -> float:
    """Of all children that have ended, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check(code: int, text: str, said: str) -> None:
    """Exit code 2, the cause in the last line, and no traceback."""
    print(text, file=sys.stderr)
    assert code == 2 and "Traceback" not in text
    (line,) = (line for line in text.splitlines() if line.startswith("hetero-llm: error: "))
    assert said in line and "\x1b" not in line and len(line) < 600
    assert text.splitlines()[-1] == line
