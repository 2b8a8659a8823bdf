"""Two processes, one a GPU, in one group, that run functions one after another."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZE = 2
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Started:
    """Processes by rank, each with the file that its output goes to.

    Attributes:
        folder: of the outputs, and of a file for each function that a rank has run.
    """

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]
    folder: Path

    @property
    def live(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def send(self, number: int, act: Callable[..., None], *arguments: str) -> None:
        """Lets both run `act(rank, group, device, *arguments)` of a module."""
        line = json.dumps([number, f"{act.__module__}:{act.__name__}", *arguments]) + "\n"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line.encode())
            process.stdin.flush()

    def wait(self, number: int, seconds: float) -> None:
        """Waits until both have run function `number`.

        Raises:
            AssertionError: one failed, or they took longer. The text has the ends of all outputs.
        """
        limit = time.monotonic() + seconds
        marks = [self.folder / f"done{number}-{rank}" for rank in range(SIZE)]
        while not all(mark.exists() for mark in marks) and time.monotonic() < limit:
            if not self.live:
                limit = min(limit, time.monotonic() + _END_SECONDS)
            time.sleep(0.01)
        if not all(mark.exists() for mark in marks):
            self.kill()
            codes = [process.wait() for process in self.processes]
            raise AssertionError(f"exit codes {codes}\n{self.text()}")

    def kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()

    def text(self) -> str:
        ends = (path.read_text(errors="replace")[-4000:] for path in self.outputs)
        return "\n".join(f"rank {rank}:\n{end}" for rank, end in enumerate(ends))


def start(folder: Path) -> Started:
    """Starts both processes."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    folder = Path(tempfile.mkdtemp(dir=folder))
    outputs = [folder / f"rank{rank}.log" for rank in range(SIZE)]
    processes = []
    for rank, output in enumerate(outputs):
        command = [sys.executable, "-m", "tests.two_gpus.ranks", str(rank), str(folder)]
        with output.open("wb") as file:
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    return Started(processes, outputs, folder)


class Pair:
    """Two processes for all functions; new ones where the last two have ended.

    Attributes:
        started: the present ones.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.started = start(folder)

    def send(self, act: Callable[..., None], *arguments: str) -> int:
        """See `Started.send`; returns the number for `Started.wait`."""
        if not self.started.live:
            self.started = start(self._folder)
        self._count += 1
        self.started.send(self._count, act, *arguments)
        return self._count

    def run(self, act: Callable[..., None], *arguments: str, seconds: float = 120.0) -> None:
        """Runs a function in both and prints the ends of their outputs.

        Raises:
            AssertionError: see `Started.wait`.
        """
        self.started.wait(self.send(act, *arguments), seconds)
        print(self.started.text())


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), SIZE)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=SIZE, timeout=limit
    )
    group = dist.group.WORLD
    assert group is not None
    for line in sys.stdin:
        number, name, *arguments = json.loads(line)
        module, function = name.split(":")
        getattr(importlib.import_module(module), function)(rank, group, device, *arguments)
        (folder / f"done{number}-{rank}").touch()


if __name__ == "__main__":
    main()
