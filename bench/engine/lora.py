"""What LoRA adapters cost an engine, beside one that was started without them.

    python -m bench.engine.lora --shape llama-3.1-8b --arms none,decode,prefill,cold
    python -m bench.engine.lora --shape llama-3.1-8b --arms zipf
    python -m bench.engine.lora --shape tiny --device cpu --dtype float32 --prompt 64 --steps 8 \\
        --requests 32 --streams 8 --zipf-slots 4 --adapters 50 --batches 1,8

Two engines of one process, with and without `enable_lora`, take turns; figures are medians of
rounds, ratios medians of the rounds' ratios. Random weights; adapters of all linear layers below
the head; prompts are all distinct, greedy, no detokenization. Arms:

- none: ms of a decode step in which no request has an adapter, by batch.
- decode: the same where the requests have `--different` (8) adapters by turns.
  ms/step = (T(1 + steps) - T(1)) / steps, prompts of 128 tokens.
- prefill: first token of a prompt (`--prompt`, 4096) with an adapter that is on the device.
- cold: first token of a prompt of 512 tokens with an adapter that is in host memory only, beside
  one that is on the device, and (on a GPU) the copy of an adapter alone, at once (`copy_ms`): what
  of it `cold_adds_ms` does not have is hidden.
- zipf: `--streams` requests (64) at a time of `--requests` (256) with 256 tokens in and 128 out,
  each with one of `--adapters` (1,000) by Zipf's law with exponent 1.1: output tokens a second over
  those of the base model. Its engine has `--zipf-slots` slots.

Adapters are made on the device instead of read from files, and their names share the numbers of
`--contents` ones (8) in host memory, of which each is 84 MB at rank 16 with the 8B shape. Copies
into slots are as many and as large as if all differed; how long files take to read is not in it.
On a CPU both engines run on torch, as an engine with adapters does there (`--cpu-backend`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.common import (
    Rows,
    bench_parser,
    machine_of,
    median_ratio,
    names_of,
    numbers,
    print_table,
    settings_of,
    write_results,
)
from bench.generation import Adapters, first_token_ms, greedy, seconds
from bench.made_adapters import MadeAdapters, adapters_of
from bench.shapes import CPU_SHAPES, SHAPES, Config, Prompts, start
from hetero_llm import LLM, LoRARequest

ARMS = ("none", "decode", "prefill", "cold", "zipf")
DECODE_PROMPT, COLD_PROMPT = 128, 512
ZIPF_IN, ZIPF_OUT, ZIPF_EXPONENT = 256, 128, 1.1
BLOCK = 16


def zipf(count: int, requests: int) -> list[int]:
    """An adapter's index, 0 to `count` - 1, for each of the requests."""
    shares = np.arange(1, count + 1, dtype=float) ** -ZIPF_EXPONENT
    drawn = np.random.default_rng(3).choice(count, requests, p=shares / shares.sum())
    return drawn.tolist()


def by_turns(rounds: int, *arms: Callable[[], float]) -> list[list[float]]:
    """For each arm its figure of every round; the arms of a round follow one another."""
    found = [[arm() for arm in arms] for _ in range(rounds)]
    return [list(column) for column in zip(*found, strict=True)]


class Bench:
    """The arms over two engines.

    Args:
        base, adapted: without and with `enable_lora`.
        rounds: of each figure.
        different: adapters in a step of `decode`; the slots of `adapted`.
    """

    def __init__(
        self, base: LLM, adapted: LLM, prompts: Prompts, rounds: int, different: int
    ) -> None:
        self._base = base
        self._adapted = adapted
        self._prompts = prompts
        self._rounds = rounds
        self._different = different

    def decode(self, batches: list[int], steps: int, arms: list[str]) -> Rows:
        """One row of the table per batch."""
        rows = []
        for batch in batches:
            several = adapters_of(self._different)
            mixed: Adapters = [several[index % len(several)] for index in range(batch)]
            ours: dict[str, Adapters] = {"none": None, "decode": mixed}
            wanted = [arm for arm in arms if arm in ours]
            for arm in wanted:  # warms up
                self._ms_per_step(self._adapted, batch, 4, ours[arm])
            self._ms_per_step(self._base, batch, 4, None)
            base, *found = by_turns(
                self._rounds,
                partial(self._ms_per_step, self._base, batch, steps, None),
                *(partial(self._ms_per_step, self._adapted, batch, steps, ours[a]) for a in wanted),
            )
            row: dict[str, Any] = {"batch": batch, "base_ms": median(base)}
            for arm, times in zip(wanted, found, strict=True):
                name = "no_adapter" if arm == "none" else "adapters"
                row[f"{name}_ms"], row[f"{name}/base"] = median(times), median_ratio(times, base)
            rows.append(row)
        return rows

    def prefill(self, length: int) -> Rows:
        (adapter,) = adapters_of(1)
        for _ in range(2):  # warms up
            self._first(self._base, length)
            self._first(self._adapted, length)
            self._first(self._adapted, length, adapter)
        base, none, ours = by_turns(
            self._rounds,
            partial(self._first, self._base, length),
            partial(self._first, self._adapted, length),
            partial(self._first, self._adapted, length, adapter),
        )
        return [
            {
                "prompt": length,
                "base_ms": median(base),
                "no_adapter_ms": median(none),
                "no_adapter/base": median_ratio(none, base),
                "adapter_ms": median(ours),
                "adapter/base": median_ratio(ours, base),
            }
        ]

    def cold(self, length: int) -> Rows:
        """Twice as many adapters as slots take turns, so each has lost its slot when it returns.
        A step of the base model comes before each measured one, so both find the card alike."""
        adapters = adapters_of(2 * self._different)
        for adapter in adapters:  # into host memory
            self._first(self._adapted, length, adapter)
        base, cold, warm = [], [], []
        for before, adapter in zip(adapters[-1:] + adapters[:-1], adapters, strict=True):
            loads = self._adapted.metrics()["lora_loads"]
            base.append(self._first(self._base, length))
            warm.append(self._first(self._adapted, length, before))
            assert self._adapted.metrics()["lora_loads"] == loads
            base.append(self._first(self._base, length))
            cold.append(self._first(self._adapted, length, adapter))
            assert self._adapted.metrics()["lora_loads"] == loads + 1
        added = [a - b for a, b in zip(cold, warm, strict=True)]
        return [
            {
                "prompt": length,
                "base_ms": median(base),
                "on_device_ms": median(warm),
                "cold_ms": median(cold),
                "cold_adds_ms": median(added),
            }
        ]

    def zipf(self, count: int, requests: int, streams: int) -> Rows:
        """The table's one row."""
        adapters = adapters_of(count)
        drawn = zipf(count, requests)
        for adapter in adapters:
            self._adapted.engine.adapters.open(adapter)  # into host memory
        mixed = [adapters[index] for index in drawn]
        self._rate(self._base, streams, 4, None)
        self._rate(self._adapted, streams, 4, mixed[:streams])
        before = self._adapted.metrics()["lora_loads"]
        base, ours = by_turns(
            max(1, self._rounds // 2),
            partial(self._rate, self._base, requests, ZIPF_OUT, None),
            partial(self._rate, self._adapted, requests, ZIPF_OUT, mixed),
        )
        loads = self._adapted.metrics()["lora_loads"] - before
        return [
            {
                "adapters": count,
                "different": len(set(drawn)),
                "streams": streams,
                "requests": f"{requests} x ({ZIPF_IN} in, {ZIPF_OUT} out)",
                "base_tok_per_s": median(base),
                "adapters_tok_per_s": median(ours),
                "adapters/base": median_ratio(ours, base),
                "loads_per_request": loads / (len(ours) * requests),
            }
        ]

    def _ms_per_step(self, llm: LLM, batch: int, steps: int, adapters: Adapters) -> float:
        def took(count: int) -> float:
            prompts = self._prompts.draw(batch, DECODE_PROMPT)
            return seconds(llm, prompts, greedy(count), adapters=adapters)

        short = took(1)
        return (took(1 + steps) - short) / steps * 1e3

    def _first(self, llm: LLM, length: int, adapter: LoRARequest | None = None) -> float:
        ms, cached = first_token_ms(llm, self._prompts.one(length), adapter=adapter)
        assert cached == 0
        return ms

    def _rate(self, llm: LLM, requests: int, count: int, adapters: Adapters) -> float:
        prompts = self._prompts.draw(requests, ZIPF_IN)
        return requests * count / seconds(llm, prompts, greedy(count), adapters=adapters)


def run(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """The tables by arm, `none` and `decode` in one; with a slot for each of a step's adapters, and
    for `zipf` another engine."""
    tokens = {
        "none": max(args.batches) * (DECODE_PROMPT + args.steps + 1),
        "prefill": args.prompt + BLOCK,
        "cold": COLD_PROMPT + BLOCK,
        "zipf": args.streams * (ZIPF_IN + ZIPF_OUT + BLOCK),
    }
    longest = max(args.prompt, COLD_PROMPT, DECODE_PROMPT + args.steps, ZIPF_IN + ZIPF_OUT)
    shared: dict[str, Any] = {
        "dtype": args.dtype,
        "device": args.device,
        "max_num_seqs": max(args.streams, *args.batches),
        "max_num_batched_tokens": max(2048, args.prompt),
        "max_model_len": longest + BLOCK,
        "num_gpu_blocks_override": 2 * max(tokens.values()) // BLOCK + longest // BLOCK,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if args.device == "cpu":
        shared |= {"cpu_backend": args.cpu_backend}
        torch.set_num_threads(args.threads)
    results: dict[str, Any] = {"ready_s": {}}
    base, results["ready_s"]["base"] = start(config, **shared)
    made = MadeAdapters(args.contents, args.rank, args.device)

    def adapted(slots: int, in_memory: int) -> LLM:
        with made.in_place():
            llm, ready = start(
                config, **shared, enable_lora=True, max_lora_rank=args.rank, max_loras=slots,
                max_cpu_loras=max(slots, in_memory),
            )  # fmt: skip
        results["ready_s"][f"{slots} slots"] = ready
        print(f"{slots} slots: ready after {ready:.1f} s", flush=True)
        return llm

    def add(arm: str, rows: Rows) -> None:
        results[arm] = rows
        print_table(rows)

    prompts = Prompts(config["vocab_size"])
    with base:
        if set(args.arms) - {"zipf"}:
            with adapted(args.different, 2 * args.different) as llm, made.in_place():
                bench = Bench(base, llm, prompts, args.rounds, args.different)
                if {"none", "decode"} & set(args.arms):
                    add("decode", bench.decode(args.batches, args.steps, args.arms))
                if "prefill" in args.arms:
                    add("prefill", bench.prefill(args.prompt))
                if "cold" in args.arms:
                    rows = bench.cold(COLD_PROMPT)
                    if torch.device(args.device).type == "cuda":
                        rows[0]["copy_ms"] = made.copy_ms(args.device)
                    add("cold", rows)
        if "zipf" in args.arms:
            with adapted(args.zipf_slots, args.adapters) as llm, made.in_place():
                bench = Bench(base, llm, prompts, args.rounds, args.different)
                add("zipf", bench.zipf(args.adapters, args.requests, args.streams))
    return results


def main() -> None:
    parser = bench_parser(__doc__)
    shapes = SHAPES | CPU_SHAPES
    parser.add_argument("--shape", choices=list(shapes), default="llama-3.1-8b")
    parser.add_argument("--arms", type=names_of(ARMS), default=list(ARMS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=128, help="none, decode: of a figure")
    parser.add_argument("--prompt", type=int, default=4096, help="prefill: its tokens")
    parser.add_argument("--different", type=int, default=8, help="decode: adapters in a step")
    parser.add_argument("--adapters", type=int, default=1000, help="zipf: names")
    parser.add_argument("--requests", type=int, default=256, help="zipf: of a round")
    parser.add_argument("--streams", type=int, default=64, help="zipf: requests at a time")
    parser.add_argument("--zipf-slots", type=int, default=64, help="zipf: max_loras")
    parser.add_argument("--contents", type=int, default=8, help="different ones in host memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-backend", default="torch")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    args = parser.parse_args()
    results = run(args, shapes[args.shape])
    about = settings_of(args, "shape dtype rank device different")
    write_results(f"lora.{args.shape}.{machine_of(args.device)}", {**about, **results}, args.out)


if __name__ == "__main__":
    main()
