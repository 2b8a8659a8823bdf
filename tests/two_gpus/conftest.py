"""These tests need two GPUs, else they are skipped. With HETERO_LLM_RANKS_ON_ONE_GPU=1 one will do:
two processes take turns on it, which shows what is computed but not how fast."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = 1 if os.environ.get("HETERO_LLM_RANKS_ON_ONE_GPU") == "1" else 2
    missing = pytest.mark.skip(reason="needs two CUDA devices")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if torch.cuda.device_count() < wanted:
                item.add_marker(missing)
