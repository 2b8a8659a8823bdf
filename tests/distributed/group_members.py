"""Starts all processes of a group and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from hetero_llm.distributed.process_group import create_store
from tests.helpers.forks import Forks

_SECONDS = 500.0  # only a hang comes near


def check_exchanges(size: int, forks: Forks) -> None:
    """Every process of a group of `size` finds the sums and gathers that it expects."""
    store = create_store()
    command = [sys.executable, "-m", "tests.distributed.group_member"]
    with tempfile.TemporaryFile() as errors:
        children = [
            forks.Popen(
                [*command, str(rank), str(size), str(store)],
                stdin=subprocess.DEVNULL, stderr=errors, pass_fds=[store], env=os.environ,
            )
            for rank in range(size)
        ]  # fmt: skip
        os.close(store)
        codes = [child.wait(_SECONDS) for child in children]
        errors.seek(0)
        assert codes == [0] * size, errors.read().decode()
