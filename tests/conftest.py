"""Set before anything imports Triton: without a CUDA device its kernels run in the interpreter.

Hypothesis has no deadlines here: a busy machine would fail tests, as other wall-clock limits do.
"""

from __future__ import annotations

import os
import sys

import torch
from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Where a collected file has imported Triton, which takes a second."""
    if "triton" in sys.modules and not torch.cuda.is_available():
        from tests.helpers import fast_interpreter

        fast_interpreter.install()
