"""The verify path on a CUDA device, with a drafter that knows the answer.

    python -m bench.speculation.verify [--shape llama-3.1-8b] [--batches 1,8,64] [--out FILE]

Greedy, random prompts of 128 ids. A run whose drafts are all wrong is recorded; then chains of 7
nodes are drafted whose first `right` are true. (A plain run would not do as the record: with random
weights the best logits lie so close that other kernels, for other row counts, choose differently.)
Device milliseconds of a step are between events around its graph, launch included; the gap is from
the end of one step's graph to the launch of the next one's: results, all host work and packing.
"alone" is an early step's graph replayed back to back, so that steps (wall) less alone is all that
a step costs beside the device's own work, launching included. "same": the share of tokens before
the first difference from the record.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import bench_parser, numbers, print_table, write_results
from bench.generation import add_requests, greedy, step_outputs
from bench.shapes import SHAPES, Prompts, write_config
from bench.speculation.arms import SwitchedDrafter
from bench.speculation.graph_clock import GraphClock, same_share
from bench.speculation.synthetic_drafter import SyntheticDrafter
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import build_engine
from hetero_llm.gpu.model_runner import GpuModelRunner

_PROMPT, _TOKENS, _NODES = 128, 97, 7
_RIGHT = (0, 3, 7)


def run(engine: Engine, prompts: list[list[int]], name: str) -> tuple[list[list[int]], float]:
    """Tokens of each prompt, and seconds from the first step to the last."""
    ids = add_requests(engine, name, prompts, greedy(_TOKENS))
    done: dict[str, list[int]] = {}
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while engine.has_unfinished:
        done |= step_outputs(engine)
    seconds = time.perf_counter() - begin
    return [done[request_id] for request_id in ids], seconds


def measure(engine: Engine, drafter: SwitchedDrafter, shape: str, batch: int) -> dict[str, Any]:
    """One row of the table."""
    runner = engine.runner
    assert isinstance(runner, GpuModelRunner)
    prompts = Prompts(SHAPES[shape]["vocab_size"], seed=batch).draw(batch, _PROMPT)
    clock = GraphClock(runner, keeps=True)
    drafter.inner = None
    run(engine, prompts, f"warm-{batch}")
    clock.events.clear()
    plain, seconds = run(engine, prompts, f"plain-{batch}")
    plain_ms, _ = clock.medians(("decode", "short decode"))
    row: dict[str, Any] = {"batch": batch, "plain device ms": plain_ms}
    row["plain tok/s"] = batch * _TOKENS / seconds
    vocab = SHAPES[shape]["vocab_size"]
    record = _by_prompt(prompts, plain)
    for right in (0, *_RIGHT):  # the first run makes the record, of which it accepts nothing
        drafter.inner = SyntheticDrafter(record, right=right, nodes=_NODES, vocab_size=vocab)
        clock.events.clear()
        drafted, seconds = run(engine, prompts, f"draft-{batch}-{right}")
        if right == 0:
            record = _by_prompt(prompts, drafted)
            row["plain: same"] = same_share(plain, drafted)
        alone_ms = clock.alone()
        step_ms, gap_ms = clock.medians(("verify", "short verify"))
        row[f"{right} right: step ms"] = step_ms
        row[f"{right} right: gap ms"] = gap_ms
        row[f"{right} right: wall less alone ms"] = step_ms + gap_ms - alone_ms
        row[f"{right} right: tok/s"] = batch * _TOKENS / seconds
        row[f"{right} right: same"] = same_share(list(record.values()), drafted)
    row["8 rows/1 row"] = row["0 right: step ms"] / plain_ms
    drafter.inner = None
    clock.stop()
    return row


def _by_prompt(
    prompts: list[list[int]], tokens: list[list[int]]
) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): t for p, t in zip(prompts, tokens, strict=True)}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    args = parser.parse_args()
    drafter = SwitchedDrafter()
    with tempfile.TemporaryDirectory() as folder:
        write_config(SHAPES[args.shape], Path(folder))
        given = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}
        config = EngineConfig.from_args(resolve_engine_args(given))
        built = build_engine(config, show_progress=False, drafter=drafter)
    rows = [measure(built.engine, drafter, args.shape, batch) for batch in args.batches]
    for row in rows:
        print_table([{"quantity": name, "value": value} for name, value in row.items()])
    write_results("verify", {"shape": args.shape, "nodes": _NODES, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
