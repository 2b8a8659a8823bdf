"""Starts two processes, one a GPU, with a gloo group over a file, and runs a function in each."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
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
    """Processes by rank, each with the file that its output goes to."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]

    def finish(self, seconds: float) -> None:
        """Waits for all that still run; one that fails ends the others.

        Raises:
            AssertionError: One failed, or they took longer. The text has the ends of all outputs.
        """
        limit = time.monotonic() + seconds
        try:
            waiting = list(self.processes)
            while waiting and time.monotonic() < limit:
                if any(process.poll() for process in waiting):
                    limit = min(limit, time.monotonic() + _END_SECONDS)
                waiting = [process for process in waiting if process.poll() is None]
                time.sleep(0.05)
        finally:
            self.kill()
        codes = [process.wait() for process in self.processes]
        assert not any(codes), f"exit codes {codes}\n{self.text()}"

    def kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()

    def text(self) -> str:
        ends = (path.read_text(errors="replace")[-4000:] for path in self.outputs)
        return "\n".join(f"rank {rank}:\n{end}" for rank, end in enumerate(ends))


def start(act: Callable[..., None], folder: Path, *arguments: str) -> Started:
    """Runs `act(rank, group, device, *arguments)` of a module in a process for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    outputs = [folder / f"rank{rank}.log" for rank in range(SIZE)]
    name = f"{act.__module__}:{act.__name__}"
    processes = []
    for rank, output in enumerate(outputs):
        command = [sys.executable, "-m", "tests.two_gpus.ranks", name, str(rank), str(folder)]
        with output.open("wb") as file:
            processes.append(
                subprocess.Popen(
                    [*command, *arguments], env=environment, stdout=file, stderr=subprocess.STDOUT
                )
            )
    return Started(processes, outputs)


def main() -> None:
    name, rank, folder, *arguments = sys.argv[1:]
    module, function = name.split(":")
    device = torch.device("cuda", int(rank) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder) / "store"), SIZE)
    seconds = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=SIZE, timeout=seconds)
    group = dist.group.WORLD
    assert group is not None
    getattr(importlib.import_module(module), function)(int(rank), group, device, *arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
