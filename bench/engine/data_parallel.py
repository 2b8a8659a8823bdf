"""What a second engine brings: streams through `AsyncLLMEngine` with `data_parallel_size` 1 and N.

    python -m bench.engine.data_parallel [--model demo] [--replicas 2] [--streams 64] [--out FILE]

Distinct prompts of random token ids, greedy, `--tokens` new tokens each; `--streams` requests of
each engine are in flight, so N engines get N times as many. Output tokens/s, median of three rounds
after one that warms up. Needs a GPU for each engine; on CPUs the cores are divided, so that one
engine alone should get as many threads as each of several: --cpu-threads.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from statistics import median
from typing import Any

from bench.common import bench_parser, print_table, write_results
from bench.generation import greedy
from hetero_llm import AsyncLLMEngine, RequestOutputKind
from hetero_llm.engine.inputs.input_processor import Prompt

ROUNDS = 3


async def round_of(
    engine: AsyncLLMEngine, name: str, prompts: list[list[int]], tokens: int
) -> float:
    """Seconds until all prompts are answered."""
    params = greedy(tokens, detokenize=True, output_kind=RequestOutputKind.DELTA)

    async def one(number: int) -> None:
        count = 0
        async for output in engine.generate(
            Prompt(None, prompts[number]), params, f"{name} {number}"
        ):
            count += len(output.outputs[0].token_ids)
        assert count == tokens

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(len(prompts))))
    return time.perf_counter() - begun


def rate(args: argparse.Namespace, replicas: int) -> dict[str, Any]:
    """Tokens a second of this many engines."""
    flags: dict[str, Any] = {
        "model": args.model, "data_parallel_size": replicas, "device": args.device,
        "max_num_seqs": args.streams, "load_format": args.load_format,
    }  # fmt: skip
    if args.cpu_threads:
        flags["cpu_threads"] = args.cpu_threads
    engine = AsyncLLMEngine(flags)
    rng = random.Random(replicas)
    vocab = engine.info.vocab_size

    async def run() -> list[float]:
        seconds = []
        for number in range(1 + ROUNDS):
            prompts = [
                [rng.randrange(300, vocab) for _ in range(args.prompt)]
                for _ in range(args.streams * replicas)
            ]
            seconds.append(await round_of(engine, str(number), prompts, args.tokens))
        finished = [int(one["num_requests_finished"]) for one in engine.stats().replicas]
        print(f"{replicas} engines on {engine.info.device}; requests of each: {finished or 'all'}")
        await engine.shutdown(0.0)
        return seconds[1:]

    seconds = median(asyncio.run(run()))
    total = args.streams * replicas * args.tokens
    return {
        "engines": replicas,
        "streams": args.streams * replicas,
        "tokens_per_s": total / seconds,
    }


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto", help="dummy for a folder without weights")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64, help="of each engine")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cpu-threads", type=int)
    args = parser.parse_args()
    rows = [rate(args, 1), rate(args, args.replicas)]
    print_table(rows)
    ratio = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    print(f"{args.replicas} engines over one: {ratio:.2f}x")
    write_results(
        "data_parallel", {"arguments": vars(args), "rows": rows, "ratio": ratio}, args.out
    )


if __name__ == "__main__":
    main()
