"""Fixtures that several folders of tests import into their conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero_llm import LLM
from tests.models.tiny import make_tiny_checkpoint


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer: ids 0-2 special, id 3 + b is byte b."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return make_tiny_checkpoint(folder, "llama", with_tokenizer=True)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), dtype="float32", device="cpu", block_size=8) as llm:
        yield llm
