"""What the lookahead cache gains where requests have a LoRA adapter, beside what it gains without.

    python -m bench.speculation.with_adapter --device cuda --model {models}/mistral-7b --batches 1,8

One engine with `enable_lora` serves all runs, which take turns: without and with one adapter of all
requests, without drafts and with the cache. The adapter is of rank 16 in all linear layers and so
small that the text is nearly the base model's: drafts are as good, and what differs is what steps
cost. "gain" is the cache's tokens/s over those without drafts, "kept" the gain with the adapter
over the gain without; medians over the rounds.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench.common import bench_parser, print_table, write_results
from bench.made_adapters import MadeAdapters, adapters_of
from bench.speculation.arms import ARMS, Bench, add_arguments, batches_of

RANK = 16
B_SIZE = 1e-6


def measure(
    bench: Bench, sizes: list[int], prompt: int, arm: str, rounds: int
) -> list[dict[str, Any]]:
    """One row for each number of prompts."""
    (adapter,) = adapters_of(1)
    arms = ("none", arm)
    for owned in (None, adapter):  # compiles what is compiled at first use, and learns step times
        bench.set_adapter(owned)
        for name in arms:
            bench.run(name, [[[5 + i % 90 for i in range(64)]] * 2])
    rows = []
    for size, batches in zip(sizes, batches_of(sizes, prompt), strict=True):
        rates: dict[str, list[float]] = {}
        for turn in range(rounds + 1):  # the first compiles kernels of this many rows
            for owned in (None, adapter):
                bench.set_adapter(owned)
                for name in arms:
                    _, figures = bench.run(name, batches)
                    if turn == 0:
                        continue
                    key = f"{name}{' + adapter' if owned else ''}"
                    rates.setdefault(key, []).append(figures["tok/s"])
                    rates.setdefault(f"tokens/step, {key}", []).append(figures["tokens/step"])
        base = [a / b for a, b in zip(rates[arm], rates["none"], strict=True)]
        ours = [
            a / b for a, b in zip(rates[f"{arm} + adapter"], rates["none + adapter"], strict=True)
        ]
        row = {"batch": size, **{name: median(values) for name, values in rates.items()}}
        row |= {"gain": median(base), "gain with adapter": median(ours)}
        row["kept"] = median(a / b for a, b in zip(ours, base, strict=True))
        rows.append(row)
        print_table([row])
    return rows


def main() -> None:
    parser = bench_parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--model", default="demo", help="the demo target or a scale-up of it")
    parser.add_argument(
        "--arm", choices=[name for name in ARMS if name != "none"], default="hybrid"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(prompt=768)
    args = parser.parse_args()
    made = MadeAdapters(1, RANK, args.device, b_size=B_SIZE)
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    with made.in_place():
        bench = Bench(args, engine_args=lora)
        rows = measure(bench, args.batches, args.prompt, args.arm, args.rounds)
        bench.close()
    about = {"model": Path(args.model).name, "device": args.device, "dtype": args.dtype,
             "arm": args.arm, "rank": RANK, "prompt": args.prompt, "tokens": args.tokens,
             "rounds": args.rounds}  # fmt: skip
    write_results(f"lookahead_with_adapter.{args.device}", {**about, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
