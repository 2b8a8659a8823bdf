"""The small kernels around a captured step, on a CUDA device: fetching the step input buffer,
applying the inputs, sending the results, joining two parts of a context, and waiting for
layer-ready flags.

Kernel-only figures: a call's share of a CUDA graph of 100. `copy_us`: for the transfers, memory
copies captured in such a graph; for the join, the same by torch operators; for flags that are set,
torch adding 1 to a number. For the flags `rows` is the number of loads they belong to. "a look" is
one polling round on a flag that is never set, from the time until the kernel gives up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.common import Rows, bench_parser, report
from bench.gpu_timing import CALLS, call_us, event_ms
from hetero_llm.gpu.kernels.exchange import apply_step_inputs, fetch_pinned, send_results
from hetero_llm.gpu.kernels.join_parts import join_parts, join_parts_reference
from hetero_llm.gpu.kernels.layer_ready import ARMED_WORDS, PLACES, wait_for_loads

LOOKS = 1 << 16
RING = 4
DEVICE = torch.device("cuda")


def on_device(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def row_of(
    name: str, rows: int, ours: Callable[[], object], copy: Callable[[], object]
) -> dict[str, Any]:
    return {"kernel": name, "rows": rows, "ours_us": call_us(ours), "copy_us": call_us(copy)}


def transfers(rows: int) -> Rows:
    """A verify step's input buffer and results."""
    words, results = 200 + 40 * rows, 2 * rows
    buffers = torch.zeros(RING, words, dtype=torch.int32, pin_memory=True)
    places = torch.zeros(RING, results, dtype=torch.int64, pin_memory=True)
    buffer, tokens, turn = on_device(words), on_device(results, dtype=torch.int64), on_device(1)
    writes, used = on_device(3, 2 * rows), torch.full((1,), rows // 4, device=DEVICE).int()
    writes[1] = torch.arange(2 * rows)
    last = on_device(512, dtype=torch.int64)
    inputs = (on_device(rows), on_device(rows), last, on_device(512, 4096), writes, used)
    out = on_device(rows)
    calls = {
        "fetch_pinned": (
            lambda: fetch_pinned(buffers, turn, out=buffer),
            lambda: buffer.copy_(buffers[0], non_blocking=True),
        ),
        "send_results": (
            lambda: send_results(tokens, turn, ring=places),
            lambda: places[0].copy_(tokens, non_blocking=True),
        ),
        "apply_step_inputs": (
            lambda: apply_step_inputs(*inputs, turn=turn, ring_size=RING, out=out),
            lambda: out.copy_(inputs[0]),
        ),
    }
    return [row_of(name, rows, *pair) for name, pair in calls.items()]


def join(rows: int) -> dict[str, Any]:
    """32 heads of 128 in bf16."""
    first, second = (torch.randn(rows, 32, 128, device=DEVICE).bfloat16() for _ in "ab")
    weights = [torch.randn(rows, 32, device=DEVICE) for _ in "ab"]
    return row_of(
        "join_parts", rows, lambda: join_parts(first, second, *weights),
        lambda: join_parts_reference(first, second, *weights),
    )  # fmt: skip


def ready_flags(count: int) -> dict[str, Any]:
    """`count` loads whose layer has landed."""
    flags, armed, number = on_device(PLACES), on_device(ARMED_WORDS), on_device(1)
    errors = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    flags[:count] = 5
    armed[PLACES : PLACES + count] = 1
    row = row_of(
        "wait_for_loads", count, lambda: wait_for_loads(flags, armed, errors, layer=4),
        lambda: number.add_(1),
    )  # fmt: skip
    assert not errors.item()
    return row


def look() -> dict[str, Any]:
    """A layer-ready flag that is never set."""
    flags, armed = on_device(PLACES), on_device(ARMED_WORDS)
    errors = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    waiting = torch.zeros(ARMED_WORDS, dtype=torch.int32, device=DEVICE)
    waiting[PLACES] = 1

    def wait() -> None:
        armed.copy_(waiting)
        wait_for_loads(flags, armed, errors, layer=0, most_looks=LOOKS)

    wait()
    us = event_ms(wait) * 1e3 / LOOKS
    assert errors.item() == 1
    return {"kernel": "a look", "rows": 1, "ours_us": us, "copy_us": None}


def main() -> None:
    args = bench_parser(__doc__).parse_args()
    rows = [row for count in (8, 64, 512) for row in transfers(count)]
    rows += [join(count) for count in (16, 1024, 16384)]
    rows += [ready_flags(count) for count in (0, 1, PLACES)]
    rows.append(look())
    report("kernels_step_parts", {"calls": CALLS}, rows, args.out)


if __name__ == "__main__":
    main()
