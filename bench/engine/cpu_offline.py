"""Prefill, decode at batch 1 and 8, memory and start-up of our engine on a CPU, and of a peer.

Each round starts our engine in a process of its own, then the peer in one from its environment
(`bench.cpu_peers` says how to make it), and probes the machine before and after each: a plain read
of as many bytes as the weights of one step, and torch's bfloat16 product. Figures are medians over
rounds; fractions compare with the mean of the two probes around a process. See
`bench.cpu_peers.method` for what is timed.

    python -m bench.engine.cpu_offline --model L --peer llama_cpp --peer-python ENV/bin/python \
        --peer-model MODELS/L.bf16.gguf
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import (
    Rows,
    bench_parser,
    median_ratio,
    print_table,
    settings_of,
    write_results,
)
from bench.cpu_limits import ReadProbe, gemm_gflops
from bench.cpu_peers import method
from bench.shapes import (
    CPU_SHAPES,
    INT4_BYTES,
    layer_parameters,
    linear_sizes,
    step_bytes,
    streamed_parameters,
    write_config,
)
from hetero_llm.cpu import native

PEERS = ("openvino", "llama_cpp", "vllm_cpu")
# Bytes of one weight; llama.cpp's q8_0 has a 2-byte scale for 32 of them.
_WEIGHT_BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": INT4_BYTES}
_Q8_0_BYTES = 34 / 32
_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Runner:
    """One engine's process: its command, and the bytes that its decode step reads."""

    name: str
    command: list[str]
    step_bytes: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine gave around a process."""

    read_gb_s: float
    gemm_gflops: float


class Machine:
    """Probes for a model, made once. `read_bytes`: of our decode step."""

    def __init__(self, config: dict[str, Any], read_bytes: float, threads: int) -> None:
        layer, _ = linear_sizes(config)
        self._outputs, self._depth = max(layer)
        self._threads = threads
        self._read_bytes = int(read_bytes)

    def limits(self) -> Limits:
        """As they are at this moment."""
        with ReadProbe(self._read_bytes, self._threads) as probe:
            read = probe.gigabytes_per_s()
        return Limits(read, gemm_gflops(self._depth, self._outputs, self._threads))


def run(runner: Runner) -> dict[str, Any]:
    """Runs a process to its end; the figures it printed.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run(runner.command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise RuntimeError(f"{runner.name}: exit {done.returncode}\n" + "\n".join(said))
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def measure(runners: list[Runner], machine: Machine, rounds: int) -> dict[str, list[dict]]:
    """Alternating processes: runner -> its figures of every round, with "limits"."""
    found: dict[str, list[dict]] = {runner.name: [] for runner in runners}
    before = machine.limits()
    for _ in range(rounds):
        for runner in runners:
            figures = run(runner)
            after = machine.limits()
            figures["limits"] = {
                "read_gb_s": (before.read_gb_s + after.read_gb_s) / 2,
                "gemm_gflops": (before.gemm_gflops + after.gemm_gflops) / 2,
            }
            before = after
            found[runner.name].append(figures)
    return found


def fraction(
    figures: dict[str, Any], work: str, config: dict[str, Any], step_bytes: float
) -> float:
    """Of the limit: multiplying in a prefill, reading the weights in decoding."""
    rate, limits = figures[f"{work}_tok_s"], figures["limits"]
    if work == "prefill":
        return float(rate * 2e-9 * layer_parameters(config) / limits["gemm_gflops"])
    steps = rate / int(work.removeprefix("decode"))
    return float(steps * step_bytes / 1e9 / limits["read_gb_s"])


def summarize(
    found: dict[str, list[dict]], runners: list[Runner], config: dict[str, Any], work: list[str]
) -> Rows:
    """One row per kind of work; with two runners, the median of the rounds' ratios too."""
    table = []
    for kind in work:
        row: dict[str, Any] = {"work": kind}
        for runner in runners:
            rounds = found[runner.name]
            rates = [figures[f"{kind}_tok_s"] for figures in rounds]
            shares = [fraction(figures, kind, config, runner.step_bytes) for figures in rounds]
            row[f"{runner.name} tok/s"] = statistics.median(rates)
            row[f"{runner.name} of limit"] = statistics.median(shares)
        if len(runners) == 2:
            ours, peer = ([f[f"{kind}_tok_s"] for f in found[one.name]] for one in runners)
            row["ratio"] = median_ratio(ours, peer)
        table.append(row)
    return table


def footprint(found: dict[str, list[dict]]) -> Rows:
    """Memory, start-up and how undisturbed each runner's repetitions were."""
    return [
        {
            "runner": name,
            "engine": rounds[0]["engine"],
            "rss_mb": max(figures["rss_mb"] for figures in rounds),
            "startup_s": statistics.median(figures["startup_s"] for figures in rounds),
            "read_gb_s": statistics.median(f["limits"]["read_gb_s"] for f in rounds),
            "gemm_gflops": statistics.median(f["limits"]["gemm_gflops"] for f in rounds),
            "repetitions": sum(figures["clean"] + figures["disturbed"] for figures in rounds),
            "disturbed": sum(figures["disturbed"] for figures in rounds),
        }
        for name, rounds in found.items()
    ]


def our_runner(
    args: argparse.Namespace, folder: Path, config: dict[str, Any], name: str, dtype: str
) -> Runner:
    command = [sys.executable, "-m", "bench.cpu_peers.hetero", str(folder)]
    command += [*_common(args, dtype), "--backend", args.backend]
    return Runner(name, command, step_bytes(config, _WEIGHT_BYTES[dtype]))


def peer_runner(args: argparse.Namespace, config: dict[str, Any]) -> Runner:
    per_weight = _WEIGHT_BYTES[args.dtype]
    if args.peer == "llama_cpp" and args.dtype == "int8":
        per_weight = _Q8_0_BYTES
    command = [args.peer_python, "-m", f"bench.cpu_peers.{args.peer}", args.peer_model]
    read = streamed_parameters(config) * per_weight
    return Runner(args.peer, [*command, *_common(args, args.dtype)], read)


def _common(args: argparse.Namespace, dtype: str) -> list[str]:
    return [
        *("--threads", str(args.threads), "--dtype", dtype, "--work", ",".join(args.work)),
        *("--repeats", str(args.repeats), "--patience", str(args.patience)),
    ]


def arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    shapes = ", ".join(CPU_SHAPES)
    parser.add_argument("--model", default="S", help=f"{shapes}, or a checkpoint folder")
    parser.add_argument("--dtype", choices=list(_WEIGHT_BYTES), default="bfloat16")
    parser.add_argument("--backend", choices=("native", "torch"), default="native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=method.work_list, default=list(method.WORK))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each engine")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions in a process")
    parser.add_argument("--patience", type=float, default=60.0, help="s a process waits for quiet")
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--peer-python", help="interpreter of the peer's environment")
    parser.add_argument("--peer-model", help="the same shape in the peer's format")
    parser.add_argument("--beside", choices=list(_WEIGHT_BYTES), help="ours again, in this type")
    args = parser.parse_args()
    if args.peer and (args.beside or args.dtype == "int4"):
        parser.error("--peer goes neither with --beside nor with int4")
    if args.peer and not (args.peer_python and args.peer_model):
        parser.error("--peer needs --peer-python and --peer-model")
    return args


def main() -> None:
    args = arguments()
    native.load()  # so that no process's start-up is a compiler's
    with tempfile.TemporaryDirectory() as folder:
        named = args.model in CPU_SHAPES
        model = write_config(CPU_SHAPES[args.model], Path(folder)) if named else Path(args.model)
        config = method.read_config(model)
        runners = [our_runner(args, model, config, "ours", args.dtype)]
        if args.peer:
            runners.append(peer_runner(args, config))
        if args.beside:
            runners.append(our_runner(args, model, config, f"ours {args.beside}", args.beside))
        machine = Machine(config, runners[0].step_bytes, args.threads)
        found = measure(runners, machine, args.rounds)
    table, sizes = summarize(found, runners, config, args.work), footprint(found)
    print(f"{args.model}, {args.dtype}, {args.threads} threads, backend {args.backend}")
    print_table(table)
    print_table(sizes)
    about = settings_of(args, "model dtype backend threads")
    results = {**about, "rows": table, "processes": sizes, "rounds": found}
    write_results(f"cpu_offline.{about['model']}.{args.dtype}", results, args.out)


if __name__ == "__main__":
    main()
