"""Sampling on a CUDA device: two fused kernels beside sorting in torch, and beside torch.argmax.

    python -m bench.kernels.sample [--vocab N] [--out FILE]

Microseconds of one call inside a captured graph of several, on bf16 logits that the L2 cache holds
where it can, as the head leaves them. "over greedy" is what a decode step pays for sampling; the
goal at 32 rows is 200. Logits are normal with spread 1 (flat: top-p alone keeps most of the
vocabulary, the hard case) and 4. "masked us": every row has a token mask in page-locked memory that
allows one token in two; "us": none has one, though the kernel is the one that could read them, as
in a step; "no masks us": the kernel without that code. "same" counts the rows whose token equals
the torch reference's; the rounding of sums and noise may decide a row differently now and then.
"""

from __future__ import annotations

import numpy as np
import torch

from bench.common import Rows, bench_parser, numbers, report
from bench.gpu_timing import call_us, event_ms
from hetero_llm.gpu.kernels.sample import (
    MASK_PLACE,
    SampleRows,
    make_mask_places,
    make_sample_workspace,
    pack_rows,
    sample_tokens,
    sample_tokens_reference,
)

DEVICE = torch.device("cuda")
ROWS = (1, 8, 32, 128, 512)
CALLS = 16  # of a graph
LARGEST_SORTED = 128  # rows; sorting more takes long and proves nothing
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sample": {},
    "k50 p.95": {"top_k": 50, "top_p": 0.95},
    "k1000": {"top_k": 1000},
    "p.95": {"top_p": 0.95},
    "min_p.05": {"min_p": 0.05},
}


def make_rows(count: int, vocab: int, kind: dict[str, float]) -> SampleRows:
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
    return SampleRows(torch.from_numpy(packed).to(DEVICE))


def measure(count: int, vocab: int, spread: float) -> Rows:
    """A table row for each kind, at `count` rows of logits of that spread."""
    logits = torch.empty(count, vocab, dtype=torch.bfloat16, device=DEVICE).normal_(std=spread)
    workspace = make_sample_workspace(count, vocab, DEVICE)
    out = torch.empty(count, dtype=torch.int64, device=DEVICE)
    places = make_mask_places(count, vocab, pin=True)
    places.words.fill_(0x55555555)
    places.ready.fill_(1)
    table: Rows = []
    for name, kind in KINDS.items():
        rows = make_rows(count, vocab, kind)
        bare = call_us(lambda rows=rows: sample_tokens(logits, rows, workspace, out=out), CALLS)

        def sample(rows: SampleRows = rows, values: torch.Tensor = logits) -> None:
            sample_tokens(values, rows, workspace, masks=places, out=out)

        masked_rows = SampleRows(rows.packed.clone())
        masked_rows.packed[MASK_PLACE] = torch.arange(1, count + 1)
        own = logits.clone()  # of whose forbidden tokens some are overwritten
        masked = call_us(lambda rows=masked_rows, own=own: sample(rows, own), CALLS)
        us = call_us(sample, CALLS)
        sorting: float | str = "-"
        if name == "k50 p.95" and count <= LARGEST_SORTED:
            sample_tokens_reference(logits, rows)
            ms = event_ms(lambda rows=rows: sample_tokens_reference(logits, rows), replays=3)
            sorting = ms * 1e3
        argmax = "-" if table else call_us(lambda: logits.argmax(dim=-1), CALLS)
        same = int((out == sample_tokens_reference(logits, rows)).sum())
        table.append(
            {
                "rows": count,
                "spread": spread,
                "kind": name,
                "us": us,
                "no masks us": bare,
                "masked us": masked,
                "over greedy": us - table[0]["us"] if table else 0.0,
                "argmax us": argmax,
                "sorting us": sorting,
                "same": f"{same}/{count}",
            }
        )
    return table


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=numbers, default=list(ROWS))
    args = parser.parse_args()
    torch.manual_seed(0)
    table: Rows = []
    for count in args.rows:
        for spread in (1.0, 4.0):
            table += measure(count, args.vocab, spread)
    report("kernels_pick", {"vocab": args.vocab}, table, args.out)


if __name__ == "__main__":
    main()
