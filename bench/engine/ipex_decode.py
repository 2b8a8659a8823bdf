"""Decoding through `cpu_backend="ipex"` beside transformers' eager `generate` in one environment.

One process per runner: transformers, and `LLM.generate` on each of our backends, all with the same
checkpoint of seeded random weights. They take turns of a second or so while the others sleep, so
that a slow spell of the machine hits all of them; ratios are medians of the turns' ratios. If at
least three turns were not disturbed by other processes, only those count. Each turn begins with a
plain read of as many bytes as a step's weights: transformers' product of one token, which lays the
weight out anew, gains less from fast memory than ours, so the ratio follows that figure. A turn's
decoding rate is batch * 128 / (T(129 new tokens) - T(1)) behind prompts of 32, its prefill rate
512 / T(1) behind prompts of 512; greedy, no early end. Run it in the environment of
`make test-ipex`:

    .venv-ipex/bin/python -m bench.engine.ipex_decode
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bench.common import Rows, bench_parser, report, settings_of
from bench.cpu_limits import ReadProbe
from bench.cpu_peers import hetero, method, transformers_eager
from bench.shapes import CPU_SHAPES, streamed_parameters
from hetero_llm.cpu import native
from hetero_llm.cpu.ipex_version import PACKAGE

EAGER = "transformers"
OURS = ("ipex", "torch", "native")
GOAL = 2.5
"""ipex over transformers in decoding one sequence."""

LEAST_S = 0.3
_LEAST_QUIET = 3
_WARM_UP_TOKENS = 16

Turn = dict[str, dict[str, float]]


class Repetition:
    """One turn's work of one engine."""

    def __init__(self, generate: method.Generate, vocab_size: int, patience: float) -> None:
        self._generate = generate
        self._prompts = method.Prompts(vocab_size)
        self._clock = method.QuietClock(patience)

    def warm_up(self, kind: str) -> None:
        count, length = _size(kind)
        self._generate(self._prompts.draw(count, length), _WARM_UP_TOKENS)

    def measure(self, kind: str) -> dict[str, float]:
        """Tokens per second, and how many timings other processes disturbed."""
        count, length = _size(kind)
        before = self._clock.disturbed
        first = self._seconds(count, length, 1)
        if kind == "prefill":
            rate = length / first
        else:
            whole = self._seconds(count, length, 1 + method.NEW_TOKENS)
            rate = count * method.NEW_TOKENS / (whole - first)
        return {"tok_s": rate, "disturbed": self._clock.disturbed - before}

    def _seconds(self, count: int, length: int, new_tokens: int) -> float:
        def call() -> None:
            self._generate(self._prompts.draw(count, length), new_tokens)

        return self._clock.seconds(call, LEAST_S)


def _size(kind: str) -> tuple[int, int]:
    """(prompts, tokens in each)."""
    if kind == "prefill":
        return 1, method.LONG_PROMPT
    return int(kind.removeprefix("decode")), method.SHORT_PROMPT


def serve(repetition: Repetition, orders: IO[str], answers: IO[str]) -> None:
    """Does one repetition per line of `orders`, and answers with a line of JSON."""
    for kind in method.WORK:
        repetition.warm_up(kind)
    print("{}", file=answers, flush=True)
    for line in orders:
        print(json.dumps(repetition.measure(line.strip())), file=answers, flush=True)


def serve_runner(args: argparse.Namespace) -> None:
    """The process of one runner."""
    folder = Path(args.folder)
    vocab_size = method.read_config(folder)["vocab_size"]

    def start(generate: method.Generate) -> None:
        serve(Repetition(generate, vocab_size, args.patience), sys.stdin, sys.stdout)

    if args.serve == EAGER:
        start(transformers_eager.generator(transformers_eager.load(folder, args.threads)))
        return
    with hetero.start(folder, backend=args.serve, threads=args.threads) as llm:
        assert llm.backend == args.serve, f"{llm.backend} serves"
        start(hetero.generator(llm))


class RunnerProcess:
    """Asks a runner's process for repetitions."""

    def __init__(self, name: str, folder: str, args: argparse.Namespace) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.engine.ipex_decode", "--serve", name, "--folder", folder,
             "--threads", str(args.threads), "--patience", str(args.patience)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def __call__(self, kind: str) -> dict[str, float]:
        assert self._process.stdin is not None
        print(kind, file=self._process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"{self._process.args}: exit {self._process.wait()}")


def take_turns(
    ask: dict[str, Callable[[str], dict[str, float]]],
    work: list[str],
    turns: int,
    read_gb_s: Callable[[], float],
) -> tuple[dict[str, list[Turn]], dict[str, list[float]]]:
    """By kind of work, of every turn: the figures by runner, and the memory's speed."""
    found: dict[str, list[Turn]] = {kind: [] for kind in work}
    reads: dict[str, list[float]] = {kind: [] for kind in work}
    for kind in work:
        for _ in range(turns):
            reads[kind].append(read_gb_s())
            found[kind].append({name: ask[name](kind) for name in ask})
    return found, reads


def summarize(found: dict[str, list[Turn]], reads: dict[str, list[float]]) -> Rows:
    """One row per kind of work and runner."""
    table = []
    for kind, every in found.items():
        quiet = [turn for turn in every if not any(f["disturbed"] for f in turn.values())]
        turns = quiet if len(quiet) >= _LEAST_QUIET else every
        for name in turns[0]:
            rates = [turn[name]["tok_s"] for turn in turns]
            ratios = sorted(turn[name]["tok_s"] / turn[EAGER]["tok_s"] for turn in turns)
            quarter = len(ratios) // 4
            table.append(
                {"work": kind, "runner": name, "tok/s": statistics.median(rates),
                 "slowest": min(rates), "fastest": max(rates),
                 f"over {EAGER}": statistics.median(ratios),
                 "middle half": f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}",
                 "turns": len(turns), "quiet": len(quiet),
                 "read GB/s": statistics.median(reads[kind])}
            )  # fmt: skip
    return table


def arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(CPU_SHAPES), default="draft-68m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=method.work_list, default=list(method.WORK))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--patience", type=float, default=60.0, help="s a runner waits for quiet")
    parser.add_argument("--serve", choices=(EAGER, *OURS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.serve:
        serve_runner(args)
        return
    native.load()  # so that no process's start-up is a compiler's
    ipex = importlib.metadata.version(PACKAGE)
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, "-m", "bench.cpu_peers.make_checkpoint", args.shape, folder]
        subprocess.run(make, check=True, capture_output=True)
        processes = {name: RunnerProcess(name, folder, args) for name in (EAGER, *OURS)}
        size = 2 * streamed_parameters(CPU_SHAPES[args.shape])
        with ReadProbe(size, args.threads) as probe:
            found, reads = take_turns(dict(processes), args.work, args.turns, probe.gigabytes_per_s)
        for process in processes.values():
            process.stop()
    table = summarize(found, reads)
    print(f"{args.shape}, bfloat16, {args.threads} threads, IPEX {ipex}, {args.turns} turns")
    about = {**settings_of(args, "shape threads"), "dtype": "bfloat16", "ipex": ipex, "goal": GOAL}
    report("ipex_decode", {**about, "turns": found, "read_gb_s": reads}, table, args.out)


if __name__ == "__main__":
    main()
