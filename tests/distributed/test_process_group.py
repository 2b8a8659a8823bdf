"""The group of ranks leaves nothing behind that touches other files."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from hetero_llm.distributed.process_group import close_group, create_store, open_group
from hetero_llm.models.collectives import Rank


def test_a_group_that_is_freed_late_does_not_touch_other_files(tmp_path: Path) -> None:
    store = create_store()
    group = open_group(Rank(0, 1), store, torch.device("cpu"))
    os.close(store)
    content = bytes(range(256)) * 16
    (tmp_path / "other").write_bytes(content)
    other = os.open(tmp_path / "other", os.O_RDWR)
    assert other == store, "the file has the store's number now"
    close_group()
    del group
    gc.collect()
    os.close(other)
    assert (tmp_path / "other").read_bytes() == content
