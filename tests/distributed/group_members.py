"""Starts all processes of a group and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hetero_llm.distributed.process_group import create_store

ROOT = Path(__file__).parents[2]
_SECONDS = 500.0  # only a hang comes near


def check_exchanges(size: int) -> None:
    """Every process of a group of `size` finds the sums and gathers that it expects."""
    store = create_store()
    module = [sys.executable, "-m", "tests.distributed.group_member"]
    children = [
        subprocess.Popen(
            [*module, str(rank), str(size), str(store)],
            pass_fds=[store], cwd=ROOT, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    os.close(store)
    for child in children:
        _, errors = child.communicate(timeout=_SECONDS)
        assert child.returncode == 0, errors.decode()
