"""Ranks and the null object of one rank; `tests.helpers.rank_threads` against the definition."""

from __future__ import annotations

import pytest
import torch

from hetero_llm.models.collectives import ONE_RANK, Rank
from tests.helpers.rank_threads import ThreadRanks


def test_one_rank_returns_what_it_gets() -> None:
    x = torch.ones(2, 3)
    assert ONE_RANK.rank == Rank(0, 1)
    assert ONE_RANK.all_reduce(x) is x and ONE_RANK.gather_columns(x) is x


@pytest.mark.parametrize(("index", "size"), [(-1, 1), (1, 1), (0, 0)])
def test_a_rank_is_one_of_all(index: int, size: int) -> None:
    with pytest.raises(AssertionError):
        Rank(index, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_columns_are_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    parts = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    total = (parts[0].float() + parts[1] + parts[2] + parts[3]).to(dtype)
    ranks = ThreadRanks(4)
    for result in ranks.run(lambda own: own.all_reduce(parts[own.rank.index])):
        assert torch.equal(result, total)
    for result in ranks.run(lambda own: own.gather_columns(parts[own.rank.index])):
        assert torch.equal(result, torch.cat(list(parts), dim=1))


def test_the_error_of_one_rank_ends_all() -> None:
    ranks = ThreadRanks(2)
    with pytest.raises(ZeroDivisionError):
        ranks.run(lambda own: own.all_reduce(torch.ones(1)) if own.rank.index else 1 / 0)
