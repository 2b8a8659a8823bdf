"""Sums and gathers over gloo, between processes: bits of the sum in rank order in float32."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from hetero_llm.core.errors import ConfigError
from hetero_llm.distributed.agreement import ALONE
from hetero_llm.distributed.process_group import close_group, create_store, open_group
from hetero_llm.models.collectives import Rank
from tests.distributed.group_members import check_exchanges
from tests.helpers.forks import Forks


def test_exchanges_of_all_sizes(engine_forks: Forks) -> None:
    """Of four processes, and of two and two of them."""
    check_exchanges(4, engine_forks)


def test_a_process_with_a_group_of_its_own_is_refused() -> None:
    store = create_store()
    cpu = torch.device("cpu")
    before = dict(os.environ)
    group = open_group(Rank(0, 1), store, cpu)
    try:
        assert group.size() == 1 and os.environ == before
        with pytest.raises(ConfigError, match=r"^tensor_parallel_size=2: torch\.distributed is in"):
            open_group(Rank(0, 2), store, cpu)
    finally:
        close_group()
        close_group()
        os.close(store)
    assert not dist.is_initialized()


def test_a_process_agrees_with_itself() -> None:
    assert ALONE.least(7) == 7 and ALONE.of_first((1, 2)) == [1, 2] and ALONE.size == 1
