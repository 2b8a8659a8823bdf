"""These tests need two GPUs, else they are skipped. With HETERO_LLM_RANKS_ON_ONE_GPU=1 one will do
for those of collectives: two processes take turns on it, which shows what is computed but not how
fast.

    python -m pytest tests/two_gpus -s -x --durations=0

An engine starts for a few tests each, since starts take most of the time. What takes longer than
`SLOW_SECONDS` writes the stacks of all processes to standard error (`-s` shows it).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.models.tiny import make_tiny_checkpoint
from tests.two_gpus.engines import MODEL, Expected, expected_on_one_gpu

SLOW_SECONDS = 75.0
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = 1 if os.environ.get("HETERO_LLM_RANKS_ON_ONE_GPU") == "1" else 2
    missing = pytest.mark.skip(reason="needs two CUDA devices")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if torch.cuda.device_count() < wanted:
                item.add_marker(missing)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watches a test with the fixtures that it makes."""
    timer = threading.Timer(SLOW_SECONDS, write_stacks, (item.nodeid,))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def write_stacks(name: str) -> None:
    """Of this process and of the ranks, which write theirs at SIGUSR1."""
    print(f"\n{name} has taken {SLOW_SECONDS:.0f} s", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr.fileno())
    for child in psutil.Process().children():
        if "rank_process" in " ".join(child.cmdline()):
            child.send_signal(signal.SIGUSR1)


def pytest_sessionstart() -> None:
    """Compiles the lookahead cache, which takes half a minute, beside the first tests."""
    if torch.cuda.device_count() >= 2:
        code = "from tests.two_gpus.engines import compile_drafts; compile_drafts()"
        subprocess.Popen([sys.executable, "-c", code])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for most tests, so that kernels are compiled once: heads of 64, as the kernels take
    them; three layers, of which a first stage has two."""
    path = tmp_path_factory.mktemp("two_gpus") / "llama"
    return make_tiny_checkpoint(path, "llama", "tied", with_tokenizer=True, layers=3, changes=MODEL)


@pytest.fixture(scope="session")
def expected(folder: Path) -> Expected:
    return expected_on_one_gpu(folder)
