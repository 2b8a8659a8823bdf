"""Tests of this folder need a CUDA device and are skipped without one; those of `kernels/` run
anywhere: on the device where there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        parents = item.path.parents
        if _HERE not in parents or _HERE / "kernels" in parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)
