"""The host tier of the prefix cache: what a hit in host memory costs, and what storing costs.

    python -m bench.offload.suite --model llama-3.1-8b [--parts ttft,decode] [--out FOLDER]

Parts, each with a table and a JSON file of its own as soon as it is done:
  pool    30 GiB of host memory pinned, before serving and in the background
  ttft    first token by length of the prefix and of what follows: computed again, and loaded by
          three arms, "blocking" (runs when all has landed; only this bench does that), "not_lazy"
          (all layers submitted at once) and "lazy". "C": the same with the prefix on the GPU.
          "link": the prefix's bytes at the link's rate, measured in the run. "bound" =
          max(link, C) + min(link, C)/32 + 3 ms
  busy    a hit beside a busy Python thread
  shared  50 requests on one prefix that is being loaded
  behind  a hit of 1K tokens that comes while 64K are being loaded
  decode  steps of 32 running rows while prefixes are being loaded
  stores  throughput while every block is stored and none is found again
  trace   conversations with a working set of three times the GPU's cache
  spec    draft worker, lookahead cache and host tier together (needs --target and --draft)

Which tier served is read from the engine's counters in every run; a part that measured something
else fails. `--model` is a shape of `bench.shapes`, with random weights, or a folder. Blocks
leave the GPU as soon as no request uses them (apc_offload_gpu_evictor_limit=0), but in "trace",
where they leave when their place is needed. "stores" has twice the GPU's cache: with less, some
blocks are needed again before they are stored.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import RESULTS, bench_parser, names_of, numbers, print_table, write_results
from bench.offload import load as offload_load
from bench.offload import trace as offload_trace
from bench.offload import ttft as offload_ttft
from bench.offload.engines import Engines, Settings


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        engines: that it takes; others are closed before, unless a later part takes them.
        seconds: expected, without the start of engines.
    """

    measure: Callable[[Engines, Settings], dict[str, Any]]
    engines: frozenset[str]
    seconds: float


def part_of(measure: Callable[..., dict[str, Any]], seconds: float, *engines: str) -> Part:
    return Part(measure, frozenset(engines), seconds)


PARTS = {
    "pool": part_of(offload_trace.pool, 25),
    "ttft": part_of(offload_ttft.ttft, 60, "off", "lazy", "not lazy"),
    "busy": part_of(offload_ttft.busy, 4, "off", "lazy"),
    "shared": part_of(offload_load.shared, 5, "lazy"),
    "behind": part_of(offload_load.behind, 12, "lazy"),
    "decode": part_of(offload_load.decode, 12, "lazy"),
    "stores": part_of(offload_load.stores, 25, "off", "wide"),
    "trace": part_of(offload_trace.trace, 40, "off", "victims"),
    "spec": part_of(offload_trace.spec, 80),
}
START_SECONDS = 22.0
"""Of an engine of the 8B shape."""


def expected_seconds(name: str, started: set[str]) -> float:
    """Seconds of a part, including the start of engines that are not running yet."""
    part = PARTS[name]
    return part.seconds + START_SECONDS * len(part.engines - started)


def run_parts(engines: Engines, settings: Settings, args: argparse.Namespace) -> list[str]:
    """Measures and writes each part; returns those that failed or did not fit."""
    begin = time.monotonic()
    missed: list[str] = []
    started: set[str] = set()
    for place, name in enumerate(args.parts):
        later = {engine for other in args.parts[place:] for engine in PARTS[other].engines}
        engines.close(but=later)
        started &= later
        spent, needed = time.monotonic() - begin, expected_seconds(name, started)
        if spent + needed > args.budget:
            print(f"== {name}: left out, {spent:.0f} + {needed:.0f} s of {args.budget:.0f} s")
            missed.append(name)
            continue
        print(f"== {name} (after {spent:.0f} s)", flush=True)
        try:
            results = PARTS[name].measure(engines, settings)
        except Exception:  # the other parts' figures are worth having all the same
            traceback.print_exc()
            missed.append(name)
            engines.close()  # a failed step leaves an engine that refuses everything
            started = set()
            continue
        started |= PARTS[name].engines
        print_table(results["rows"])
        write_results(
            "offload",
            {"part": name, "model": Path(settings.model).name, "dtype": "bf16",
             "runs": settings.runs, "seed": settings.seed, **results},
            str(Path(args.out) / f"offload.{name}.json"),
        )  # fmt: skip
    return missed


def main() -> None:
    parser = bench_parser(__doc__, out="folder of the JSON files")
    parser.set_defaults(out=str(RESULTS))
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--target", help="model of the part 'spec', a scale-up of the demo target")
    parser.add_argument("--draft", help="its draft model")
    parser.add_argument("--parts", type=names_of(tuple(PARTS)), default=None)
    parser.add_argument("--runs", type=int, default=12, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", type=numbers, default=[4096, 16384, 32768])
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all parts")
    args = parser.parse_args()
    if args.parts is None:
        pair = args.target and args.draft
        args.parts = [name for name in PARTS if name != "spec" or pair]
    if "spec" in args.parts and not (args.target and args.draft):
        parser.error("part 'spec' needs --target and --draft")
    if args.runs < 10:
        parser.error("--runs: at least 10, else a 99th percentile means nothing")
    settings = Settings(
        args.model, args.runs, args.seed, tuple(args.lengths), target=args.target, draft=args.draft
    )
    engines = Engines(settings)
    try:
        missed = run_parts(engines, settings, args)
    finally:
        engines.close()
    if missed:
        raise SystemExit(f"without figures: {', '.join(missed)}")


if __name__ == "__main__":
    main()
