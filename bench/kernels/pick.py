"""Token picking on a CUDA device: two fused kernels against sorting in torch, and torch.argmax.

    python -m bench.kernels.pick [--vocab N] [--out FILE]

Microseconds of one call inside a captured graph of several, on bf16 logits in turn among tensors
of more than the L2 cache together ("cold"), or on one tensor, as the head leaves it there ("warm").
Rows are normal logits of spread 1 (flat: the hard case of top-p alone) and 4. The cost of the
sampled kinds against greedy is what a decode step pays for sampling.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.common import print_table, write_results
from bench.gpu_timing import graph_ms
from hetero_llm.gpu.kernels.pick import (
    PickRows,
    make_pick_workspace,
    pack_rows,
    pick_tokens,
    pick_tokens_reference,
)

DEVICE = torch.device("cuda")
ROWS = (1, 8, 32, 128, 512)
COLD_BYTES = 128 << 20
CALLS = 8  # of a graph
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sample": {},
    "k50 p.95": {"top_k": 50, "top_p": 0.95},
    "k1000": {"top_k": 1000},
    "p.95": {"top_p": 0.95},
    "min_p.05": {"min_p": 0.05},
}


def make_rows(count: int, vocab: int, kind: dict[str, float]) -> PickRows:
    values = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0} | kind
    columns = {name: np.full(count, value) for name, value in values.items()}
    packed = pack_rows(
        columns["temperature"],
        columns["top_k"],
        columns["top_p"],
        min_p=columns["min_p"],
        seeds=np.arange(count, dtype=np.int64) * 0x9E3779B97F4A7C1,
        sample_indices=np.zeros(count, np.int32),
        positions=np.full(count, 1000),
    )
    return PickRows(torch.from_numpy(packed).to(DEVICE))


def microseconds(call: Callable[[torch.Tensor], object], sources: list[torch.Tensor]) -> float:
    """Of one call, the sources in turn."""
    calls = max(CALLS, len(sources))

    def body() -> None:
        for index in range(calls):
            call(sources[index % len(sources)])

    return graph_ms(body) / calls * 1e3


def agreement(logits: torch.Tensor, rows: PickRows, tokens: torch.Tensor) -> str:
    same = int((tokens == pick_tokens_reference(logits, rows)).sum())
    return f"{same}/{len(tokens)}"


def measure(count: int, vocab: int, spread: float) -> list[dict[str, Any]]:
    """A table row for each kind, at `count` rows of logits of that spread."""
    size = count * vocab * 2
    copies = max(1, min(CALLS * 2, -(-COLD_BYTES // size)))
    sources = [
        torch.empty(count, vocab, dtype=torch.bfloat16, device=DEVICE).normal_(std=spread)
        for _ in range(copies)
    ]
    workspace = make_pick_workspace(count, vocab, DEVICE)
    out = torch.empty(count, dtype=torch.int64, device=DEVICE)
    table = []
    for name, kind in KINDS.items():
        rows = make_rows(count, vocab, kind)

        def ours(logits: torch.Tensor, rows: PickRows = rows) -> torch.Tensor:
            return pick_tokens(logits, rows, workspace, out=out)

        row: dict[str, Any] = {
            "rows": count,
            "spread": spread,
            "kind": name,
            "cold us": microseconds(ours, sources),
            "warm us": microseconds(ours, sources[:1]),
            "torch us": "-",
            "argmax us": "-",
            "same as torch": agreement(sources[0], rows, ours(sources[0]).clone()),
        }
        if name == "greedy":
            row["argmax us"] = microseconds(lambda logits: logits.argmax(dim=-1), sources)
        if name == "k50 p.95" and count <= 128:
            row["torch us"] = event_microseconds(sources[0], rows)
        table.append(row)
    return table


def event_microseconds(logits: torch.Tensor, rows: PickRows) -> float:
    """The sorting twin, in a graph of one call: it takes milliseconds and much memory."""
    return graph_ms(lambda: pick_tokens_reference(logits, rows), replays=5) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    table = []
    for count in ROWS:
        for spread in (1.0, 4.0):
            table += measure(count, args.vocab, spread)
    write_results("kernels_pick", {"vocab": args.vocab, "rows": table}, args.out)
    print_table(table)


if __name__ == "__main__":
    main()
