"""What Triton compiles, in a process of its own: this one may have Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def printed_kernels(module: str) -> list[str]:
    """The PTX of each kernel that `print_ptx` of a module of tests prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import print_ptx; print_ptx()"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(".visible .entry")[1:]
