"""Sums of the ranks' rows with a norm behind them, sums alone, and columns gathered: microseconds
of a launch in a captured graph, over peer memory (ours), over torch's symmetric memory and NCCL.

Starts one process a GPU. All ranks replay at the same time; figures are rank 0's, medians of
replays. `floor_us`: bytes that leave a GPU at the speed of a large copy to its peer (printed).
`norm_us` is the norm alone, so `ours_norm_us - norm_us` is what a sum adds to a step. Columns with
`nccl` and `symmetric` have our norm behind them, in a launch of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.common import Rows, bench_parser, numbers, print_table, write_results
from bench.gpu_timing import event_ms, graph_ms
from hetero_llm.gpu.collectives import PeerCollectives, open_peer_collectives
from hetero_llm.gpu.kernels.norm import add_rms_norm
from hetero_llm.gpu.peer_memory import MAKERS, GroupExchange, PeersUnreachable

WIDTHS = (4096, 8192)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
MOST_BYTES = 64 << 20
COLUMNS = 64_128  # half of Llama 3's vocabulary
GATHERED_ROWS = (1, 8, 64)
BF16 = torch.bfloat16
COPY_BYTES = 256 << 20


class Timer:
    """Times calls that all ranks make together."""

    def __init__(self, exchange: GroupExchange) -> None:
        self.exchange = exchange

    def us(self, call: Callable[..., object], x: Tensor, *arguments: Any) -> float | None:
        """Microseconds of `call(x, *arguments)` in a graph of many; None if it fails, which must be
        so on all ranks."""
        calls = 50 if x.nbytes < 1 << 20 else 10

        def body() -> None:
            for _ in range(calls):
                call(x, *arguments)

        try:
            self.exchange.gather(None)
            return graph_ms(body, replays=15) / calls * 1e3
        except Exception as error:
            if self.exchange.rank == 0:
                print(f"not timed: {type(error).__name__}: {str(error).splitlines()[0]}")
            return None


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    add_rms_norm(x, residual, weight, 1e-5)


def norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor, collectives: PeerCollectives) -> None:
    if collectives.norms(x):
        collectives.sum_norm(x, residual, weight, 1e-5, gemma=False)
    else:
        plain_norm(collectives.all_reduce(x), residual, weight)


def symmetric_one(x: Tensor, residual: Tensor, weight: Tensor, group: str) -> None:
    plain_norm(torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group), residual, weight)


def symmetric_two(x: Tensor, residual: Tensor, weight: Tensor, group: str) -> None:
    plain_norm(torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group), residual, weight)


def nccl_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    dist.all_reduce(x)
    plain_norm(x, residual, weight)


def nccl_columns(x: Tensor, parts: Tensor) -> Tensor:
    dist.all_gather_into_tensor(parts, x)
    return parts.view(-1, *x.shape).permute(1, 0, 2).flatten(1)


def inputs(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight."""
    x, residual = torch.randn(2, count, width, device="cuda", dtype=BF16)
    return x, residual, torch.randn(width, device="cuda", dtype=BF16)


def ours_rows(
    timer: Timer, collectives: PeerCollectives, shapes: list[tuple[int, int]], bytes_per_us: float
) -> Rows:
    size, table = timer.exchange.size, []
    for count, width in shapes:
        x, residual, weight = inputs(count, width)
        sent = x.nbytes * min(size - 1, 2 * (size - 1) / size)
        table.append({
            "width": width,
            "rows": count,
            "floor_us": sent / bytes_per_us,
            "norm_us": timer.us(plain_norm, x, residual, weight),
            "ours_norm_us": timer.us(norm_of_sum, x, residual, weight, collectives),
            "ours_us": timer.us(collectives.all_reduce, x),
        })  # fmt: skip
    return table


def ours_columns(timer: Timer, collectives: PeerCollectives, bytes_per_us: float) -> Rows:
    size, table = timer.exchange.size, []
    for count in GATHERED_ROWS:
        x = torch.randn(count, 2 * COLUMNS // size, device="cuda", dtype=BF16)
        us = timer.us(collectives.gather_columns, x)
        floor = x.nbytes * (size - 1) / bytes_per_us
        table.append({"columns": x.shape[1], "rows": count, "floor_us": floor, "ours_us": us})
    return table


def add_symmetric(timer: Timer, table: Rows) -> None:
    """torch's one-shot and two-shot sums of symmetric memory. Their input is there already."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = timer.exchange.group
    for row in table:
        _, residual, weight = inputs(row["rows"], row["width"])
        shared = symmetric_memory.empty(*residual.shape, dtype=BF16, device="cuda")
        symmetric_memory.rendezvous(shared, group)
        shared.normal_()
        more = (residual, weight, group.group_name)
        row["symmetric_one_us"] = timer.us(symmetric_one, shared, *more)
        row["symmetric_two_us"] = timer.us(symmetric_two, shared, *more)


def add_nccl(timer: Timer, rows: Rows, columns: Rows) -> None:
    for row in rows:
        row["nccl_us"] = timer.us(nccl_norm, *inputs(row["rows"], row["width"]))
    size = timer.exchange.size
    for row in columns:
        x = torch.randn(row["rows"], row["columns"], device="cuda", dtype=BF16)
        parts = x.new_empty(size * row["rows"], row["columns"])
        row["nccl_us"] = timer.us(nccl_columns, x, parts)


def run(rank: int, args: Any, folder: str, bytes_per_us: float) -> None:
    """A rank. Rank 0 writes what there is after each part, so a part that ends the process loses
    nothing of those before."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(f"{folder}/store", args.ranks),
        rank=rank,
        world_size=args.ranks,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    assert group is not None
    exchange = GroupExchange(group)
    timer = Timer(exchange)
    results: dict[str, Any] = {"ranks": args.ranks, "copy_gb_per_s": bytes_per_us / 1e3}

    def write() -> None:
        if rank == 0:
            write_results("kernels_collectives", results, args.out)

    for maker in [one for one in MAKERS if args.maker in one[0]]:
        try:
            collectives = open_peer_collectives(2 * max(WIDTHS), device, exchange, makers=[maker])
            break
        except PeersUnreachable as error:
            results[maker[0]] = str(error)
    else:
        write()
        return
    results["maker"] = maker[0]
    with torch.inference_mode():
        shapes = [(rows, width) for width in args.widths for rows in args.rows]
        shapes = [(rows, width) for rows, width in shapes if 2 * rows * width <= MOST_BYTES]
        rows = ours_rows(timer, collectives, shapes, bytes_per_us)
        columns = ours_columns(timer, collectives, bytes_per_us)
        results |= {"rows": rows, "columns": columns, "gave_up": collectives.gave_up}
        write()
        if rank == 0:
            print_table(rows)
            print_table(columns)
        for add in (lambda: add_symmetric(timer, rows), lambda: add_nccl(timer, rows, columns)):
            try:
                add()
            except Exception as error:
                print(f"rank {rank}: {type(error).__name__}: {error}")
            write()
    if rank == 0:
        print_table([dict.fromkeys(rows[0]) | row for row in rows])
        print_table(columns)
    sys.stdout.flush()
    os._exit(0)  # graphs of NCCL may outlive their group


def copy_speed() -> float:
    """Bytes a microsecond of a large copy from one GPU to another."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:0").random_()
    target = torch.empty_like(source, device="cuda:1")
    target.copy_(source)
    return COPY_BYTES / event_ms(lambda: target.copy_(source)) / 1e3


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--maker", default="", help="a part of its name; default: what works first")
    parser.add_argument("--widths", type=numbers, default=list(WIDTHS))
    parser.add_argument("--rows", type=numbers, default=list(ROWS))
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    bytes_per_us = copy_speed()
    print(f"copy from GPU 0 to GPU 1: {bytes_per_us / 1e3:.0f} GB/s")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args, folder, bytes_per_us), nprocs=args.ranks)


if __name__ == "__main__":
    main()
