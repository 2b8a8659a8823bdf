"""One process of a group on CPUs, for tests: `python -m tests.distributed.group_member RANK SIZE
STORE`.

Each process makes the same random parts of all ranks, exchanges its own, and compares.
"""

from __future__ import annotations

import sys

import torch

from hetero_llm.distributed.agreement import GroupAgreement
from hetero_llm.distributed.group_collectives import GroupCollectives
from hetero_llm.distributed.process_group import group_within, process_group
from hetero_llm.models.collectives import Rank

# Rows and columns: one exchange, two exchanges, rows that no number of ranks divides.
SHAPES = ((1, 8), (5, 64), (3, 200_000), (1001, 129), (0, 8))


def check_joined(rank: Rank, device: torch.device) -> None:
    """Exchanges of a process that has joined the group."""
    collectives, agreement = GroupCollectives(rank), GroupAgreement(rank.size)
    assert collectives.rank == rank
    for seed, shape in enumerate(SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            made = torch.Generator().manual_seed(seed)
            parts = torch.randn(rank.size, *shape, generator=made).to(device, dtype)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            own = parts[rank.index]
            assert torch.equal(collectives.all_reduce(own), total.to(dtype)), shape
            wide = collectives.gather_columns(own)
            assert torch.equal(wide, torch.cat(list(parts), 1)), shape
    check_within(rank, device)
    assert agreement.least(10 - rank.index) == 10 - (rank.size - 1)
    assert agreement.of_first([rank.index, 5 + rank.index]) == [0, 5]


def check_within(rank: Rank, device: torch.device) -> None:
    """Exchanges of even ranks among themselves, and of odd ones."""
    members = [range(first, rank.size, 2) for first in range(2)]
    own = members[rank.index % 2]
    collectives = GroupCollectives(
        Rank(own.index(rank.index), len(own)), group_within(members, rank.index)
    )
    x = torch.full((2, 3), float(rank.index), device=device)
    assert (collectives.all_reduce(x) == sum(own)).all()
    wide = torch.tensor(list(own), dtype=x.dtype, device=device).repeat_interleave(3)
    assert torch.equal(collectives.gather_columns(x), wide.expand(2, -1))


if __name__ == "__main__":
    number, size, descriptor = map(int, sys.argv[1:4])
    rank, cpu = Rank(number, size), torch.device("cpu")
    torch.set_num_threads(1)
    with process_group(rank, descriptor, cpu, timeout=500.0):
        check_joined(rank, cpu)
