"""A rank process that kills itself where it would join the group of all ranks."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from hetero_llm.engine.processes import rank_process


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("signals of this kind end a process")


if __name__ == "__main__":
    rank_process.join_group = die
    sys.exit(rank_process.main(sys.argv[1:]))
