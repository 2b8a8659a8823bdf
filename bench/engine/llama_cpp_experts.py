"""Decode and prefill of a mixture with experts on the CPU, beside llama.cpp's CPU-expert mode.

    python -m bench.engine.llama_cpp_experts FILE.gguf --llama-bench LLAMA_BENCH
        [--shape qwen3-30b-a3b] [--layers N] [--resident 0,0.5] [--popularity uniform,zipf]
        [--threads 8,15,16] [--depths 16,1024] [--prompts 512,4096] [--cpu-only] [--until S]
        [--out FILE]

Both engines read the same file in Q4_0 (`bench.made_gguf` writes it if it is not there); attention,
norms and the head are on the GPU. `--resident` is the share of experts there: llama.cpp keeps those
of the last layers (`-ncmoe`), ours as many of those in demand, of any layer (`moe_expert_memory`;
`moe_cpu_experts="all"` for 0). `--popularity` rewrites the routers of the file: all experts of a
layer are equally popular, which takes from our placement what it is for, or popular by 1 / rank.
llama.cpp's speed at one token does not depend on it, so it runs with the first only. LLAMA_BENCH is
llama.cpp's program of that name, built with CUDA; `LD_LIBRARY_PATH` has to lead to cuBLAS.

- llama.cpp: `llama-bench -fa on -lm none` (as its loader advises with experts on the CPU), the best
  of `--threads`; it feeds random tokens. Prompts run with batches as long as they are, the better
  one of `--repack` 0 and 1.
- Ours: (T(1 + steps) - T(1)) / steps, prompts of random tokens as long as the depth, sampled at
  temperature 1, which with these weights is nearly random, too; 512 tokens before warm the bank up.
  First tokens for prompts. Medians of three. `hit`: share of the pairs of the last up to 32 steps
  that the bank computed.
- `--cpu-only`: our engine without the GPU (`device="cpu"`, `cpu_weight_dtype="int4"`).

`over`: our tokens/s over llama.cpp's of the same line. Every engine runs in a process of its own,
one after the other; those that fail, or for which --until leaves no time, are named in the results
("failed"), which are written after each. `dram`: what plain reads of all threads but one reach,
GB/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.common import Rows, bench_parser, names_of, numbers, print_table, say, write_results
from bench.cpu_limits import ReadProbe
from bench.generation import first_token_ms, greedy, seconds
from bench.made_gguf import POPULARITIES, expert_bytes, write_gguf, write_routers
from bench.shapes import MOE_SHAPES, Config, Prompts
from hetero_llm import LLM
from hetero_llm.utils.topology import compute_cpus

NAME = "llama_cpp_experts"
_SAMPLED = {"temperature": 1.0, "seed": 1}
_WARM_TOKENS = 512
_ROUNDS = 3
_GIB = 1 << 30
_PROBE_BYTES = 1 << 30
_LEAST_S = 20
"""No process is started with less time left."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured: `steps` tokens at each of `depths`, and `prompts` of these lengths."""

    steps: int
    depths: Sequence[int]
    prompts: Sequence[int]

    @property
    def longest(self) -> int:
        """Tokens of a sequence, at most."""
        decoded = max(*self.depths, 1) + max(self.steps, _WARM_TOKENS) + 1
        return max(decoded, *self.prompts, 1) + 8


# our side: in a process of its own


def our_arguments(config: Config, resident: float | None) -> dict[str, Any]:
    """Of `LLM`, for a share of experts on the GPU; None: no GPU."""
    if resident is None:
        return {"device": "cpu", "cpu_weight_dtype": "int4"}
    if resident in (0.0, 1.0):
        return {"moe_cpu_experts": "off" if resident else "all"}
    total = config["num_hidden_layers"] * config["num_experts"] * expert_bytes(config)
    return {"moe_expert_memory": resident * total / _GIB}


def run_ours(path: Path, config: Config, resident: float | None, work: Work) -> dict[str, Any]:
    """`decode`: tokens/s by depth; `prefill`: tokens/s by length; `startup_s`; `hit` or None."""
    begin = time.perf_counter()
    with LLM(
        str(path), skip_tokenizer_init=True, max_model_len=work.longest, max_num_seqs=4,
        max_num_batched_tokens=max(*work.prompts, 512), enable_prefix_caching=False,
        use_lookahead=False, **our_arguments(config, resident),
    ) as llm:  # fmt: skip
        startup = time.perf_counter() - begin
        prompts = Prompts(config["vocab_size"])
        seconds(llm, prompts.draw(1, 16), greedy(_WARM_TOKENS, **_SAMPLED))
        decode = {depth: decode_rate(llm, prompts, depth, work.steps) for depth in work.depths}
        hit = hit_share(llm)
        prefill = {length: prefill_rate(llm, prompts, length) for length in work.prompts}
    return {"startup_s": startup, "decode": decode, "hit": hit, "prefill": prefill}


def prefill_rate(llm: LLM, prompts: Prompts, length: int) -> float:
    """Tokens/s; see the module."""
    first_token_ms(llm, prompts.one(length))
    times = [first_token_ms(llm, prompts.one(length))[0] for _ in range(_ROUNDS)]
    return 1e3 * length / statistics.median(times)


def decode_rate(llm: LLM, prompts: Prompts, depth: int, steps: int) -> float:
    """Tokens/s; see the module."""
    one, many = (greedy(count, **_SAMPLED) for count in (1, 1 + steps))
    seconds(llm, prompts.draw(1, depth), greedy(4, **_SAMPLED))
    short, long = [], []
    for _ in range(_ROUNDS):
        short.append(seconds(llm, prompts.draw(1, depth), one))
        long.append(seconds(llm, prompts.draw(1, depth), many))
    return steps / (statistics.median(long) - statistics.median(short))


def hit_share(llm: LLM) -> float | None:
    """See the module; None without a bank."""
    bank = getattr(getattr(llm.engine.runner, "experts", None), "bank", None)
    if bank is None or not int(bank.hits.sum()):
        return None
    return float(bank.hits[bank.table >= 0].sum() / bank.hits.sum())


def our_process(args: argparse.Namespace, resident: float | None, timeout: float) -> dict[str, Any]:
    where = "none" if resident is None else str(resident)
    command = [sys.executable, "-m", f"bench.engine.{NAME}", str(args.file), "--ours", where]
    command += ["--shape", args.shape, "--layers", str(args.layers), "--steps", str(args.steps)]
    for name in ("depths", "prompts"):
        command += [f"--{name}", _listed(getattr(args, name))]
    found: dict[str, Any] = json.loads(_output(command, timeout).strip().splitlines()[-1])
    return found


# llama.cpp's


def llama_command(args: argparse.Namespace, config: Config, resident: float) -> list[str]:
    """What its runs have in common."""
    on_cpu = round((1 - resident) * config["num_hidden_layers"])
    return [
        *(str(args.llama_bench), "-m", str(args.file), "-o", "json", "-r", str(_ROUNDS)),
        *("-ngl", "999", "-fa", "on", "-lm", "none", "-ncmoe", str(on_cpu)),
    ]


def llama_decode(
    args: argparse.Namespace, config: Config, resident: float, timeout: float
) -> dict[str, Any]:
    """`decode`: tokens/s by depth, with the best number of `threads`; `decode_by`: by depth and
    threads; `build`: what llama-bench says of itself and the machine."""
    command = [*llama_command(args, config, resident), "-p", "0", "-n", str(args.steps)]
    command += ["-t", _listed(args.threads), "-d", _listed(args.depths)]
    rows = json.loads(_output(command, timeout))
    found: dict[str, Any] = {"decode": {}, "threads": {}, "decode_by": {}}
    for row in rows:
        by_threads = found["decode_by"].setdefault(row["n_depth"], {})
        by_threads[row["n_threads"]] = row["avg_ts"]
    for depth, by_threads in found["decode_by"].items():
        best = max(by_threads, key=by_threads.__getitem__)
        found["threads"][depth], found["decode"][depth] = best, by_threads[best]
    about = ("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_size")
    return {**found, "build": {name: rows[0].get(name) for name in about}}


def llama_prefill(
    args: argparse.Namespace, config: Config, resident: float, timeout: float
) -> dict[str, Any]:
    """`prefill`: tokens/s by length, the better one of weights repacked for the CPU, which computes
    them, and of weights that the GPU reads; `prefill_by`: by length and whether repacked."""
    command = [*llama_command(args, config, resident), "-p", _listed(args.prompts), "-n", "0"]
    longest = str(max(args.prompts))
    command += ["-t", str(max(args.threads)), "-b", longest, "-ub", longest, "--repack", "0,1"]
    by: dict[int, dict[str, float]] = {}
    for row in json.loads(_output(command, timeout)):
        by.setdefault(row["n_prompt"], {})[str(row["repack"])] = row["avg_ts"]
    return {
        "prefill": {length: max(rates.values()) for length, rates in by.items()},
        "prefill_by": by,
    }


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _output(command: Sequence[str], timeout: float) -> str:
    """What a process wrote to stdout.

    Raises:
        RuntimeError: it failed or took too long; with the end of what it said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]}: not done after {timeout:.0f} s") from error
    if done.returncode or not done.stdout.strip():
        said = (done.stderr or done.stdout).strip().splitlines()[-12:]
        raise RuntimeError(f"{command[0]}: exit {done.returncode}\n" + "\n".join(said))
    return done.stdout


# both


@dataclass(frozen=True, slots=True)
class Run:
    """One process: `engine` is "ours", "llama.cpp" or "llama.cpp prompts"; `resident`: see
    `our_arguments`; `popularity`: of the experts, for ours with a bank."""

    engine: str
    resident: float | None
    popularity: str = POPULARITIES[0]

    @property
    def name(self) -> str:
        where = "CPU alone" if self.resident is None else f"{self.resident:g}"
        return f"{self.engine}, {where}, {self.popularity}"


def runs_of(args: argparse.Namespace) -> list[Run]:
    """In the order of what they are worth, should time run out."""
    llama = [Run("llama.cpp", share) for share in args.resident if args.llama_bench]
    first = [Run("ours", share) for share in args.resident]
    banks = [share for share in args.resident if 0 < share < 1]
    others = [Run("ours", s, p) for p in args.popularity if p != POPULARITIES[0] for s in banks]
    paired = [run for pair in zip_longest(llama, first) for run in pair if run is not None]
    alone = [Run("ours", None)] if args.cpu_only else []
    prompts = [dataclasses.replace(run, engine="llama.cpp prompts") for run in llama]
    return [*paired, *others, *(prompts if args.prompts else []), *alone]


def measured(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Runs everything and keeps what was found in the results file after every process."""
    end = time.monotonic() + args.until
    with ReadProbe(_PROBE_BYTES, max(1, len(compute_cpus(reserve=0)) - 1)) as probe:
        results: dict[str, Any] = {"dram": probe.gigabytes_per_s(3)}
    results |= {"shape": args.shape, "layers": args.layers, "file_bytes": args.file.stat().st_size}
    results |= {"failed": {}, "runs": []}
    written = ""
    for run in runs_of(args):
        if run.popularity != written:
            write_routers(args.file, config, run.popularity)
            written = run.popularity
        left = end - time.monotonic()
        try:
            if left < _LEAST_S:
                raise RuntimeError("no time is left")
            found = outcome(args, config, run, left)
        except RuntimeError as error:
            results["failed"][run.name] = str(error)
            print(f"{run.name}: {error}", flush=True)
            continue
        found["process_s"] = left - (end - time.monotonic())
        found = {**dataclasses.asdict(run), **found}
        say(found)
        results["runs"].append(found)
        results["rows"] = rows_of(results["runs"])
        write_results(NAME, results, args.out)
    return results


def outcome(args: argparse.Namespace, config: Config, run: Run, timeout: float) -> dict[str, Any]:
    """Raises RuntimeError: see `_output`."""
    if run.engine == "ours":
        return our_process(args, run.resident, timeout)
    assert run.resident is not None
    if run.engine == "llama.cpp":
        return llama_decode(args, config, run.resident, timeout)
    return llama_prefill(args, config, run.resident, timeout)


def rows_of(runs: list[dict[str, Any]]) -> Rows:
    """A line for each depth and length of every run of ours."""
    rows = []
    for ours in (run for run in runs if run["engine"] == "ours"):
        peers: dict[str, Any] = {"decode": {}, "prefill": {}, "threads": {}}
        for run in runs:
            if run["engine"] != "ours" and run["resident"] == ours["resident"]:
                peers |= run
        for kind in ("decode", "prefill"):
            for size, rate in ours[kind].items():
                peer = peers[kind].get(int(size))
                rows.append({
                    "work": kind, "tokens": int(size),
                    "resident": "CPU alone" if ours["resident"] is None else ours["resident"],
                    "popularity": ours["popularity"], "ours": rate, "llama.cpp": peer or "-",
                    "over": rate / peer if peer else "-",
                    "threads": peers["threads"].get(int(size), "-") if kind == "decode" else "-",
                    "hit": "-" if ours["hit"] is None else ours["hit"],
                })  # fmt: skip
    return rows


def shares(text: str) -> list[float]:
    """Type of an argument: "0,0.5" -> [0.0, 0.5]."""
    found = [float(word) for word in text.split(",")]
    if any(not 0 <= share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"{text}: shares from 0 to 1")
    return found


def arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("file", type=Path, help="a GGUF file of the shape; written if not there")
    parser.add_argument("--llama-bench", type=Path, help="without: ours alone")
    known = [name for name, one in MOE_SHAPES.items() if one["model_type"] == "qwen3_moe"]
    parser.add_argument("--shape", choices=known, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--resident", type=shares, default=[0.0, 0.5])
    parser.add_argument("--popularity", type=names_of(POPULARITIES), default=list(POPULARITIES))
    parser.add_argument("--threads", type=numbers, default=[8, 15, 16], help="of llama.cpp")
    parser.add_argument("--depths", type=numbers, default=[16, 1024])
    parser.add_argument("--prompts", type=numbers, default=[512, 4096])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--cpu-only", action="store_true")
    parser.add_argument("--until", type=float, default=3600.0, help="seconds that all may take")
    parser.add_argument("--ours", metavar="SHARE", help="run this alone, JSON on stdout")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = MOE_SHAPES[args.shape]
    args.layers = args.layers or config["num_hidden_layers"]
    config = {**config, "num_hidden_layers": args.layers}
    if args.ours:
        resident = None if args.ours == "none" else float(args.ours)
        work = Work(args.steps, args.depths, args.prompts)
        print(json.dumps(run_ours(args.file, config, resident, work)), flush=True)
        return
    if not args.file.exists():
        begin = time.perf_counter()
        write_gguf(args.file, config)
        print(f"{args.file}: {os.path.getsize(args.file) / 1e9:.1f} GB in", end=" ")
        print(f"{time.perf_counter() - begin:.1f} s", flush=True)
    results = measured(args, config)
    print_table(results.get("rows") or [{"rows": "none"}])
    write_results(NAME, results, args.out)


if __name__ == "__main__":
    main()
