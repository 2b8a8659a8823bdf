"""Tests of `scenarios/` and of files named `*_cuda.py` need a CUDA device, else they are skipped;
the others run anywhere: on the device where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_configure() -> None:
    """Gives each of several workers cores of its own: compute threads spin and are pinned, so two
    engines on the same cores stand still."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not torch.cuda.is_available():
        return
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    first = int(worker.removeprefix("gw")) * share % len(cpus)
    os.sched_setaffinity(0, cpus[first : first + share])
    torch.set_num_threads(share)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if _HERE not in item.path.parents:
            continue
        if _HERE / "scenarios" not in item.path.parents and not item.path.stem.endswith("_cuda"):
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
