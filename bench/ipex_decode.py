"""Decoding through `cpu_backend="ipex"` beside transformers' eager `generate` in one environment.

Each round starts one process per runner, in turns: transformers, and `LLM.generate` on each of our
backends. All load the same checkpoint of seeded random weights; `bench.cpu_peers.method` says what
is timed. Ratios are medians of the rounds' ratios, so that a slow spell of the machine hits both
sides of one. Run it in the environment of `make test-ipex`:

    .venv-ipex/bin/python -m bench.ipex_decode
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import print_table, write_results
from bench.cpu_offline import Runner, run
from bench.cpu_peers import method
from bench.cpu_shapes import CPU_SHAPES
from hetero_llm.cpu import native
from hetero_llm.cpu.ipex_version import PACKAGE

EAGER = "transformers"
OURS = ("ipex", "torch", "native")
GOAL = 2.5
"""ipex over transformers in decoding one sequence."""


def runners(args: argparse.Namespace, folder: Path) -> list[Runner]:
    """transformers first, then our backends."""
    common = [
        *(str(folder), "--threads", str(args.threads), "--work", ",".join(args.work)),
        *("--repeats", str(args.repeats), "--patience", str(args.patience)),
    ]
    python = [sys.executable, "-m"]
    eager = Runner(EAGER, [*python, "bench.cpu_peers.transformers_eager", *common], 0.0)
    hetero = [*python, "bench.cpu_peers.hetero", *common, "--backend"]
    return [eager, *(Runner(name, [*hetero, name], 0.0) for name in OURS)]


def summarize(found: dict[str, list[dict[str, Any]]], work: list[str]) -> list[dict[str, Any]]:
    """One row per runner and kind of work."""
    table = []
    for kind in work:
        key = f"{kind}_tok_s"
        for name, rounds in found.items():
            rates = [figures[key] for figures in rounds]
            ratios = [a[key] / b[key] for a, b in zip(rounds, found[EAGER], strict=True)]
            table.append(
                {"work": kind, "runner": name, "tok/s": statistics.median(rates),
                 "slowest": min(rates), "fastest": max(rates),
                 f"over {EAGER}": statistics.median(ratios), "least": min(ratios),
                 "disturbed": sum(figures["disturbed"] for figures in rounds)}
            )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(CPU_SHAPES), default="draft-68m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=method.work_list, default=list(method.WORK))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each runner")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions in a process")
    parser.add_argument("--patience", type=float, default=30.0, help="s a process waits for quiet")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    native.load()  # so that no process's start-up is a compiler's
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, "-m", "bench.cpu_peers.make_checkpoint", args.shape, folder]
        subprocess.run(make, check=True, capture_output=True)
        every = runners(args, Path(folder))
        found: dict[str, list[dict[str, Any]]] = {runner.name: [] for runner in every}
        for _ in range(args.rounds):
            for runner in every:
                found[runner.name].append(run(runner))
    table = summarize(found, args.work)
    ipex = importlib.metadata.version(PACKAGE)
    print(f"{args.shape}, bfloat16, {args.threads} threads, IPEX {ipex}")
    print_table(table)
    results = {
        "shape": args.shape,
        "dtype": "bfloat16",
        "threads": args.threads,
        "ipex": ipex,
        "goal": GOAL,
        "rows": table,
        "rounds": found,
    }
    write_results("ipex_decode", results, args.out)


if __name__ == "__main__":
    main()
