"""The group of ranks leaves nothing behind that touches other files."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
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


def test_a_group_behind_one_that_no_rank_joined() -> None:
    """The other rank is a new process, whose first group it is."""
    cpu, abandoned = torch.device("cpu"), create_store()
    with pytest.raises(RuntimeError, match="(?i)time"):
        open_group(Rank(0, 2), abandoned, cpu, timeout=0.2)
    store = create_store()
    code = (
        "import torch\n"
        "from hetero_llm.distributed.process_group import close_group, open_group\n"
        "from hetero_llm.models.collectives import Rank\n"
        f"open_group(Rank(1, 2), {store}, torch.device('cpu'), timeout=500)\n"
        "close_group()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], pass_fds=(store,))
    try:
        assert open_group(Rank(0, 2), store, cpu, timeout=500).size() == 2
        assert other.wait() == 0  # it may still be connecting
    finally:
        close_group()
        os.close(store)
        os.close(abandoned)
