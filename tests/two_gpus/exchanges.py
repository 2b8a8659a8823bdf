"""What the ranks of `test_exchanges` run: functions of (rank, group, device, ...)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from hetero_llm.gpu.collectives import (
    GATHERED_BYTES_OF_ROWS,
    PeerCollectives,
    open_peer_collectives,
)
from hetero_llm.gpu.kernels.collectives import sum_reference
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.peer_memory import MAKERS, GroupExchange
from hetero_llm.models.collectives import Rank
from hetero_llm.runner.sequence_parallel import gather_rows
from hetero_llm.runner.split_step import RowPlaces
from tests.distributed.group_member import check_joined

HIDDEN = 4096
KINDS = (
    (HIDDEN, torch.bfloat16),
    (HIDDEN, torch.float16),
    (HIDDEN // 2, torch.float32),
    (HIDDEN, torch.float32),  # more than a row of the buffers
    (77, torch.bfloat16),
    (2, torch.float32),
)
"""Widths and types: few, since each is compiled."""

TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-22}
MAX_PAUSE = 100  # microseconds
PATIENCE = 2.0

Ranks = tuple[PeerCollectives, GroupExchange]


@triton.jit(do_not_specialize=["microseconds"])
def pause_kernel(microseconds):
    for _ in range(microseconds):
        tl.inline_asm_elementwise(
            "nanosleep.u32 1000; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def pause(microseconds: int) -> None:
    """Keeps the current stream busy for about that long."""
    pause_kernel[(1,)](microseconds, num_warps=1)


def opened(group: dist.ProcessGroup, device: torch.device, maker: str = "") -> Ranks:
    """`maker`: a part of its name; empty: that of TWO_GPUS_MAKER, or the first that works."""
    exchange = GroupExchange(group)
    maker = maker or os.environ.get("TWO_GPUS_MAKER", "")
    makers = [one for one in MAKERS if maker in one[0]]
    collectives = open_peer_collectives(2 * HIDDEN, device, exchange, makers=makers)
    return collectives, exchange


def parts_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> list[Tensor]:
    """What each rank has; every rank draws the same."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(size)]


def poison(x: Tensor) -> None:
    """What the next tensor of this size is likely to hold."""
    torch.full_like(x, torch.nan)


def num_far(normed: Tensor, plain: Tensor) -> Tensor:
    """Norms that differ by more than the order of a sum of squares explains."""
    limit = TOLERANCES[plain.dtype] * plain.float().abs() + 2**-20
    return (~((normed.float() - plain.float()).abs() <= limit)).sum()


def num_different(collectives: PeerCollectives, found: Tensor) -> Tensor:
    """Elements that are not the same on all ranks."""
    first, *others = collectives.gather_columns(found).chunk(collectives.rank.size, dim=1)
    return torch.stack([(first != other).sum() for other in others]).sum()


def finish(collectives: PeerCollectives, exchange: GroupExchange) -> None:
    torch.cuda.synchronize()
    exchange.gather(None)
    assert not collectives.gave_up
    collectives.check_integrity()
    collectives.close()


def map_and_sum(rank: int, group: dist.ProcessGroup, device: torch.device, maker: str) -> None:
    """One maker alone."""
    collectives, exchange = opened(group, device, maker)
    parts = parts_of(1, (3, HIDDEN), torch.bfloat16, exchange.size)
    assert torch.equal(collectives.all_reduce(parts[rank]), sum_reference(parts))
    finish(collectives, exchange)


def fuzz(rank: int, group: dist.ProcessGroup, device: torch.device, launches: str) -> None:
    """Random collectives of random sizes, each rank late at random, against float64."""
    collectives, exchange = opened(group, device)
    rng = np.random.default_rng(3)  # the same on all ranks
    own_rng = np.random.default_rng(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    worst = torch.zeros((), dtype=torch.float64, device=device)
    for launch in range(int(launches)):
        width, dtype = KINDS[rng.integers(len(KINDS))]
        kind = rng.integers(4)
        rows = int(rng.choice([1, 2, 3, 8, 33, 64, 200, int(rng.integers(1, 3000))]))
        parts = parts_of(launch, (rows, width), dtype, exchange.size)
        if own_rng.random() < 0.5:
            pause(int(own_rng.integers(MAX_PAUSE)))
        poison(parts[0])
        if kind == 0:
            found = collectives.gather_columns(parts[rank])
            wrong += (found != torch.cat(parts, dim=1)).sum()
            continue
        expected = sum_reference(parts)
        if kind == 1 and collectives.norms(expected):
            weight = torch.ones(width, dtype=dtype, device=device)
            residual = parts[0].clone()
            normed, total = collectives.sum_norm(parts[rank], residual, weight, 1e-5, gemma=False)
            plain, plain_total = add_rms_norm(expected, parts[0].clone(), weight, 1e-5)
            wrong += (total != plain_total).sum() + num_far(normed, plain)
            wrong += num_different(collectives, normed)
            continue
        found = collectives.all_reduce(parts[rank])
        wrong += (found != expected).sum()
        exact = torch.stack([part.double() for part in parts])
        error = (found.double() - exact.sum(0)).abs() / exact.abs().sum(0).clamp_min(1e-30)
        worst = torch.maximum(worst, error.max() / TOLERANCES[dtype])
        if launch % 100 == 99:
            assert not collectives.gave_up, launch
    torch.cuda.synchronize()
    print(f"{launches} launches: {wrong.item()} wrong, worst error {worst.item():.3f} of 1")
    assert wrong.item() == 0 and worst.item() <= 1
    finish(collectives, exchange)


def gather_many_rows(
    rank: int, group: dist.ProcessGroup, device: torch.device, launches: str
) -> None:
    """Rows of tokens that ranks share, as many as a long prompt has: each where it belongs."""
    exchange = GroupExchange(group)
    collectives = open_peer_collectives(
        2 * HIDDEN, device, exchange, gathered_bytes=GATHERED_BYTES_OF_ROWS
    )
    rng = np.random.default_rng(4)  # the same on all ranks
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    seconds, moved = 0.0, 0
    for launch in range(int(launches)):
        count = int(rng.choice([2, 33, 4096, 16384, int(rng.integers(1, 20000))]))
        owners = rng.integers(0, exchange.size, count)
        owners[: exchange.size] = range(exchange.size)
        rows = RowPlaces.of(owners, exchange.size)
        width, dtype = KINDS[rng.integers(3)]
        (every,) = parts_of(launch, (count, width // 2), dtype, 1)
        own = every[torch.from_numpy(owners == rank).to(device)]
        poison(own)
        torch.cuda.synchronize()
        exchange.gather(None)
        began = time.perf_counter()
        found = gather_rows(own, rows, collectives)
        torch.cuda.synchronize()
        if count == 16384:
            seconds, moved = seconds + time.perf_counter() - began, moved + own.nbytes
        wrong += (found[torch.from_numpy(rows.places).to(device)] != every).sum()
    assert wrong.item() == 0 and not collectives.gave_up
    print(f"{launches} gathers; of 16384 rows {moved / max(seconds, 1e-9) / 1e9:.0f} GB/s a rank")
    finish(collectives, exchange)


def through_nccl(rank: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """What serves where peers are missing."""
    check_joined(Rank(rank, group.size()), device)


def captured_step(
    collectives: PeerCollectives, rank: int, size: int, wrong: Tensor
) -> Callable[[], None]:
    """Collectives whose inputs change from one run to the next, checked on the device; numbers are
    small whole ones, so sums are exact."""
    turn = torch.zeros((), dtype=torch.int64, device="cuda")
    column = torch.arange(HIDDEN, device="cuda")
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")

    def part(of: int, rows: int, salt: int) -> Tensor:
        row = torch.arange(rows, device="cuda")[:, None]
        return ((7 * column + 13 * turn + 31 * of + 3 * row + salt) % 61).to(torch.bfloat16)

    def step() -> None:
        turn.add_(1)
        for salt, rows in enumerate((1, 3)):
            expected = sum_reference([part(of, rows, salt) for of in range(size)])
            found = collectives.all_reduce(part(rank, rows, salt))
            wrong.add_((found != expected).sum())
            residual = part(size, rows, salt)
            plain, total = add_rms_norm(expected, residual.clone(), weight, 1e-5)
            normed, added = collectives.sum_norm(
                part(rank, rows, salt), residual, weight, 1e-5, gemma=False
            )
            wrong.add_((added != total).sum() + num_far(normed, plain))
            wrong.add_(num_different(collectives, normed))
        found = collectives.gather_columns(part(rank, 2, 5))
        wrong.add_((found != torch.cat([part(of, 2, 5) for of in range(size)], 1)).sum())

    return step


def replay(rank: int, group: dist.ProcessGroup, device: torch.device, replays: str) -> None:
    """A captured step replayed many times, eager ones in between, ranks late at random."""
    collectives, exchange = opened(group, device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    step = captured_step(collectives, rank, exchange.size, wrong)
    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    rng = np.random.default_rng(rank)
    began = time.monotonic()
    for count in range(int(replays)):
        graph.replay()
        if rng.random() < 0.01:
            pause(int(rng.integers(MAX_PAUSE)))
        if count % 1000 == 999:
            step()
            torch.cuda.synchronize()
            assert not collectives.gave_up and wrong.item() == 0, (count, wrong.item())
    torch.cuda.synchronize()
    print(f"{replays} replays in {time.monotonic() - began:.1f} s: {wrong.item()} wrong")
    assert wrong.item() == 0
    finish(collectives, exchange)


def lose_a_peer(rank: int, group: dist.ProcessGroup, device: torch.device, marks: str) -> None:
    """Replays until the other rank is killed: launches give up in time, or the driver says so."""
    collectives, exchange = opened(group, device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    step = captured_step(collectives, rank, exchange.size, wrong)
    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    collectives.set_patience(PATIENCE)
    torch.cuda.synchronize()
    exchange.gather(None)
    Path(marks, f"ready{rank}").touch()
    last = time.monotonic()
    while True:
        try:
            graph.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"the driver ended the step: {error}")
            break
        if collectives.gave_up:
            break
        last = time.monotonic()
    print(f"gave up after {time.monotonic() - last:.2f} s, set to {PATIENCE} s")
    Path(marks, f"ended{rank}").touch()
    os._exit(0)  # the group's other member is gone
