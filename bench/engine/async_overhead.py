"""What the engine's own process costs: streams through `AsyncLLMEngine` beside `LLM.generate`.

The same held-out prompts, greedy, with text, 128 new tokens each, all sent at once; one output of
each stream per step is read. Output tokens/s, median of three rounds after one that warms up, and
the milliseconds to the first token of one request alone, median of 20. Prompts differ from round
to round, so that no prefix is found in the cache.

The model is the demo target, or a folder made from it by tools/scale_up.py.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from bench.common import bench_parser, numbers, print_table, write_results
from bench.generation import greedy
from hetero_llm import LLM, AsyncLLMEngine, RequestOutputKind, SamplingParams
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.engine.inputs.input_processor import Prompt

PROMPT = 64
TOKENS = 128
ROUNDS = 3
FIRST_TOKENS = 20


def params_for(tokens: int) -> SamplingParams:
    return greedy(tokens, detokenize=True, output_kind=RequestOutputKind.DELTA)


def prompts_of(count: int, number: int) -> list[list[int]]:
    """`count` prompts, others for each number: their second token is replaced by it."""
    rows = heldout_prompts().prompts
    chosen = [rows[i % len(rows), :PROMPT].tolist() for i in range(count)]
    return [[ids[0], 4 + number, 4 + i, *ids[3:]] for i, ids in enumerate(chosen)]


def offline(llm: LLM, streams: list[int], tokens: int) -> tuple[list[float], float]:
    """Tokens/s for each number of streams, and the ms to the first token."""
    rates, number = [], 0
    for count in streams:
        times = []
        for _ in range(1 + ROUNDS):
            number += 1
            prompts = prompts_of(count, number)
            begun = time.perf_counter()
            outputs = llm.generate(
                prompt_token_ids=prompts, sampling_params=params_for(tokens), use_tqdm=False
            )
            times.append(time.perf_counter() - begun)
            assert all(len(one.outputs[0].token_ids) == tokens for one in outputs)
        rates.append(count * tokens / median(times[1:]))
    firsts = []
    for _ in range(FIRST_TOKENS):
        number += 1
        (ids,) = prompts_of(1, number)
        begun = time.perf_counter()
        next(llm.stream({"prompt_token_ids": ids}, params_for(1)))
        firsts.append((time.perf_counter() - begun) * 1e3)
    return rates, median(firsts)


async def online(
    engine: AsyncLLMEngine, streams: list[int], tokens: int
) -> tuple[list[float], float]:
    """As `offline`."""

    async def read(name: str, ids: list[int]) -> int:
        count = 0
        async for output in engine.generate(Prompt(token_ids=ids), params_for(tokens), name):
            count += len(output.outputs[0].token_ids)
        return count

    rates, number = [], 0
    for count in streams:
        times = []
        for _ in range(1 + ROUNDS):
            number += 1
            prompts = prompts_of(count, number)
            begun = time.perf_counter()
            counts = await asyncio.gather(*(read(str(i), ids) for i, ids in enumerate(prompts)))
            times.append(time.perf_counter() - begun)
            assert counts == [tokens] * count
        rates.append(count * tokens / median(times[1:]))
    firsts = []
    for _ in range(FIRST_TOKENS):
        number += 1
        (ids,) = prompts_of(1, number)
        begun = time.perf_counter()
        await anext(engine.generate(Prompt(token_ids=ids), params_for(1), "first"))
        firsts.append((time.perf_counter() - begun) * 1e3)
    return rates, median(firsts)


async def measure_online(
    engine_args: dict[str, Any], streams: list[int], tokens: int
) -> tuple[list[float], float]:
    engine = await asyncio.to_thread(AsyncLLMEngine, engine_args)
    try:
        return await online(engine, streams, tokens)
    finally:
        await engine.shutdown(0)


def measure(engine_args: dict[str, Any], streams: list[int], tokens: int = TOKENS) -> Any:
    """The rows of the table, and ms to the first token (offline, online)."""
    with LLM(**engine_args) as llm:
        rates, first = offline(llm, streams, tokens)
    async_rates, async_first = asyncio.run(measure_online(engine_args, streams, tokens))
    rows = [
        {
            "streams": count,
            "llm_tokens_per_s": plain,
            "async_tokens_per_s": ours,
            "async/llm": ours / plain,
        }
        for count, plain, ours in zip(streams, rates, async_rates, strict=True)
    ]
    return rows, (first, async_first)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 64], help="numbers of streams")
    parser.add_argument("--cpu-threads", type=int, help="of the engine; default: all cores")
    args = parser.parse_args()
    engine_args = {"model": args.model, "device": args.device, "max_model_len": 1024}
    if args.cpu_threads is not None:
        engine_args["cpu_threads"] = args.cpu_threads
    rows, firsts = measure(engine_args, args.streams)
    print_table(rows)
    print(f"first token: {firsts[0]:.2f} ms offline, {firsts[1]:.2f} ms through the process")
    write_results(
        "async_overhead",
        {**engine_args, "rows": rows, "first_token_ms": {"llm": firsts[0], "async": firsts[1]}},
        args.out,
    )


if __name__ == "__main__":
    main()
