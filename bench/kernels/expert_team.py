"""Milliseconds of one layer's exchange with the CPU team of experts, beside a plain read.

    python -m bench.kernels.expert_team [--threads 15] [--kinds bf16 fp8] [--rows 1,4,16,64]

A thread of this process posts requests as a device would. Weights fill one block of memory, in
huge pages or page-locked: layers of `experts` experts of a shape, which all kinds read in turn, so
that a request finds its weights out of the caches. `routing` is "spread": each token chooses its
experts at random, of the layer's; or "same": all tokens choose the same ones, so that an expert has
`rows` tokens, which shows from how many on AMX tiles pay (`tiles`: from one token on, or never).
`experts`: those that a request reads, mean. `gb_s`: their bytes over the median time; `of_read`:
that as a share of a plain read by as many threads, the better one of before and after.
`best_gb_s`: of the fastest request.

`hand_over`: microseconds from a request's release to its answer: "nothing" asks for no expert,
"little" for one with next to no weights, which all threads compute.
"""

from __future__ import annotations

import argparse
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch

from bench.common import Rows, bench_parser, numbers, print_table, report, say
from bench.cpu_limits import ReadProbe
from hetero_llm.bridge.expert_mailbox import (
    ON_DEVICE,
    ExpertMailbox,
    open_mailbox,
    order_for,
    ordered_inputs,
)
from hetero_llm.bridge.host_experts import HostExperts, HostKind, HostLayer, HostMatrices
from hetero_llm.cpu import native
from hetero_llm.cpu.expert_team import ExpertTeam, post
from hetero_llm.utils.topology import compute_cpus


@dataclass(frozen=True)
class Shape:
    """Of a layer's experts."""

    hidden: int
    inner: int
    experts: int = 128
    chosen: int = 8

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.inner


@dataclass(frozen=True)
class Kind:
    """Weights: bits of one, and columns that share a scale (0: a row; none where there is none)."""

    name: HostKind
    bits: int
    group: int = 0
    scale_rows: int = 1
    scale: torch.dtype | None = None


SHAPES = {"qwen3-235b-a22b": Shape(4096, 1536), "qwen3-30b-a3b": Shape(2048, 768)}
KINDS = {
    "bf16": Kind("bfloat16", 16),
    "int8": Kind("int8", 8, scale=torch.float32),
    "fp8": Kind("fp8", 8, 128, 128, torch.float32),
    "int4": Kind("int4", 4, 128, scale=torch.float16),
    "fp4": Kind("fp4", 4, 32, scale=torch.bfloat16),
}
_LEAST_BYTES = 1 << 30  # of weights that take turns
_PATTERN = 1 << 25
_HAND_OVERS = 5000
_TOO_FEW = 5


def fill_with_weights(memory: torch.Tensor) -> None:
    """Small bf16 numbers, whose bytes are fit for all kinds."""
    pattern = torch.randn(_PATTERN // 2).mul_(0.02).bfloat16().view(torch.uint8)
    for begin in range(0, len(memory), _PATTERN):
        part = memory[begin : begin + _PATTERN]
        part.copy_(pattern[: len(part)])


def allocate(size: int, *, pinned: bool) -> torch.Tensor:
    """[size] uint8: page-locked, or in huge pages where the system grants them."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


def layers_of(shape: Shape, kind: Kind, experts: int, memory: torch.Tensor) -> HostExperts:
    """As many layers as the memory has room for, or as are enough."""
    per_layer = experts * shape.weights * kind.bits // 8
    assert per_layer <= len(memory), (per_layer, len(memory))
    count = max(1, min(len(memory) // per_layer, -(-_LEAST_BYTES // per_layer)))
    dtype = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(
        kind.name, torch.uint8
    )
    at, layers = 0, []
    for _ in range(count):
        parts = []
        for rows, columns in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)):
            size = experts * rows * columns * kind.bits // 8
            data = memory[at : at + size].view(dtype).view(experts, rows, -1)
            at += size
            if kind.scale is None:
                parts.append(HostMatrices(kind.name, data))
                continue
            group = kind.group or columns
            shape_of_scales = (experts, -(-rows // kind.scale_rows), columns // group)
            scale = torch.full(shape_of_scales, 0.01, dtype=kind.scale)
            parts.append(HostMatrices(kind.name, data, scale, group, kind.scale_rows))
        layers.append(HostLayer(parts[0], parts[1]))
    return HostExperts(tuple(layers), "silu")


@contextmanager
def poster_apart(cpus: list[int]) -> Iterator[None]:
    """This thread off the team's cores, if there are others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(before) - set(cpus) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def choose(
    mailbox: ExpertMailbox, rows: int, experts: int, routing: str, rng: np.random.Generator
) -> int:
    """Writes ids; returns how many different experts they name."""
    k = mailbox.ids.shape[1]
    if routing == "same":
        ids = np.tile(rng.permutation(experts)[:k], (rows, 1))
    else:
        ids = np.stack([rng.permutation(experts)[:k] for _ in range(rows)])
    mailbox.ids[:rows] = torch.from_numpy(ids.astype(np.int32))
    return len(np.unique(ids))


def requests(
    team: ExpertTeam, mailbox: ExpertMailbox, library: Any, layers: int, experts: int,
    *, rows: int, routing: str, seconds: float,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """Seconds of each request, and the mean number of experts."""
    rng = np.random.default_rng(rows)
    x = torch.randn(rows, mailbox.y.shape[1]).to(mailbox.x.dtype)
    mailbox.x[:rows] = ordered_inputs(mailbox, x)
    mailbox.weights[:rows] = 1 / mailbox.ids.shape[1]
    times, used = [], []
    begin = perf_counter()
    while perf_counter() - begin < seconds or len(times) < _TOO_FEW:
        used.append(choose(mailbox, rows, experts, routing, rng))
        team.wake()
        times.append(post(mailbox, library, len(times) % layers, rows, gap_us=20)[0])
    return np.array(times[1:]), float(np.mean(used))


def measure(args: argparse.Namespace, library: Any, cpus: list[int], probe: ReadProbe) -> Rows:
    """One line for each shape, kind, routing, number of rows, and with or without tiles."""
    shapes = [SHAPES[name] for name in args.shapes]
    kinds = [KINDS[name] for name in args.kinds]
    wanted = max(
        shape.experts * shape.weights * kind.bits // 8 for shape in shapes for kind in kinds
    )
    limit = int(psutil.virtual_memory().available * 0.5)
    memory = allocate(
        min(max(wanted, 2 * _LEAST_BYTES), limit) // mmap.PAGESIZE * mmap.PAGESIZE,
        pinned=args.memory == "pinned",
    )
    fill_with_weights(memory)
    tiles = native.isa_level(library) == native.ISA_NAMES.index("amx")
    table: Rows = []
    rate = probe.gigabytes_per_s(tries=1)
    for name, shape in zip(args.shapes, shapes, strict=True):
        for kind_name, kind in zip(args.kinds, kinds, strict=True):
            room = len(memory) * 8 // (shape.weights * kind.bits)
            experts = min(shape.experts, room)
            host = layers_of(shape, kind, experts, memory)
            mailbox = open_mailbox(
                *(max(args.rows), shape.hidden, shape.chosen, torch.bfloat16),
                pin=False,
                order=order_for(kind.name, torch.bfloat16),
            )
            for by_tiles in (False, True) if tiles else (False,):
                team = ExpertTeam(
                    host, mailbox, library, threads=len(cpus), cpus=cpus,
                    tile_tokens=int(by_tiles),
                )  # fmt: skip
                for rows in args.rows:
                    for routing in ("spread", "same") if rows > 1 else ("same",):
                        times, used = requests(
                            team, mailbox, library, host.num_layers, experts,
                            rows=rows, routing=routing, seconds=args.seconds,
                        )  # fmt: skip
                        before, rate = rate, probe.gigabytes_per_s(tries=1)
                        read = max(before, rate)
                        size = used * shape.weights * kind.bits / 8e9
                        table.append(
                            {"shape": name, "kind": kind_name, "rows": rows, "routing": routing,
                             "tiles": by_tiles, "experts": used,
                             "ms": float(np.median(times)) * 1e3,
                             "best_ms": float(times.min()) * 1e3,
                             "gb_s": size / float(np.median(times)),
                             "best_gb_s": size / float(times.min()), "read_gb_s": read,
                             "of_read": size / float(np.median(times)) / read}
                        )  # fmt: skip
                        say(table[-1])
                team.stop()
                mailbox.answer.zero_()
                mailbox.request.zero_()
    return table


def hand_over(library: Any, cpus: list[int]) -> Rows:
    """Percentiles of requests with next to no work."""
    data = (
        torch.zeros(2, 64, 64, dtype=torch.bfloat16),
        torch.zeros(2, 64, 32, dtype=torch.bfloat16),
    )
    parts = [HostMatrices("bfloat16", each) for each in data]
    host = HostExperts((HostLayer(parts[0], parts[1]),), "silu")
    table = []
    for work in ("nothing", "little"):
        mailbox = open_mailbox(1, 64, 1, torch.bfloat16, pin=False)
        mailbox.ids[:] = ON_DEVICE if work == "nothing" else 0
        team = ExpertTeam(host, mailbox, library, threads=len(cpus), cpus=cpus)
        post(mailbox, library, 0, 1, count=100)
        times = post(mailbox, library, 0, 1, count=_HAND_OVERS, gap_us=30) * 1e6
        team.stop()
        p50, p99 = np.percentile(times, (50, 99))
        table.append({"work": work, "p50_us": float(p50), "p99_us": float(p99),
                      "max_us": float(times.max())})  # fmt: skip
    return table


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--threads", type=int, help="default: all cores but the poster's")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=["bf16", "int8", "fp8", "int4"]
    )
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 64], help="comma-separated")
    parser.add_argument("--seconds", type=float, default=0.25, help="of requests, for each line")
    parser.add_argument("--memory", choices=("huge", "pinned"), default="huge")
    args = parser.parse_args()
    library = native.load()
    if library is None:
        parser.error("the library could not be built")
    cpus = list(compute_cpus(reserve=1))
    cpus = cpus[: args.threads or len(cpus)]
    # On a machine with few cores the poster shares one with the team's last thread.
    if args.threads and args.threads > len(cpus):
        cpus = list(compute_cpus(reserve=0))[: args.threads]
    with poster_apart(cpus), ReadProbe(1 << 29, len(cpus)) as probe:
        overs = hand_over(library, cpus)
        print_table(overs)
        table = measure(args, library, cpus, probe)
    about = {"threads": len(cpus), "isa": native.ISA_NAMES[native.isa_level(library)]}
    about |= {"memory": args.memory, "hand_over": overs}
    report("expert_team", about, table, args.out)


if __name__ == "__main__":
    main()
