"""What the engine's own process costs: streams through `AsyncLLMEngine` beside `LLM.generate`.

The same held-out prompts, greedy, with text, 128 new tokens each, all sent at once; one output of
each stream per step is read. Output tokens/s, median of three rounds after one that warms up, and
the milliseconds to the first token of one request alone, median of 20. Prompts differ from round
to round, so that no prefix is found in the cache.

The model is the demo target, or a folder made from it by tools/scale_up.py. With `--engines N`
(`data_parallel_size`) "async/llm" is what N engines bring: GPUs for each, or on CPUs as many cores
(`--cpu-threads`) for one engine alone as for each of several.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.common import bench_parser, numbers, report
from bench.generation import greedy
from hetero_llm import LLM, RequestOutputKind, SamplingParams
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.engine.inputs.input_processor import Prompt

if TYPE_CHECKING:  # what it imports is not on every machine
    from hetero_llm import AsyncLLMEngine

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


def figures(
    generate: Callable[[list[list[int]], int], None], streams: list[int], tokens: int
) -> tuple[list[float], float]:
    """Tokens/s for each number of streams, and the ms to the first token.

    Args:
        generate: returns when all prompts have as many tokens as it is told.
    """
    number = itertools.count(1)

    def seconds(count: int, tokens: int) -> float:
        prompts = prompts_of(count, next(number))
        begun = time.perf_counter()
        generate(prompts, tokens)
        return time.perf_counter() - begun

    rates = []
    for count in streams:
        times = [seconds(count, tokens) for _ in range(1 + ROUNDS)]
        rates.append(count * tokens / median(times[1:]))
    return rates, median(seconds(1, 1) for _ in range(FIRST_TOKENS)) * 1e3


def offline(llm: LLM, prompts: list[list[int]], tokens: int) -> None:
    outputs = llm.generate(
        prompt_token_ids=prompts, sampling_params=params_for(tokens), use_tqdm=False
    )
    assert all(len(one.outputs[0].token_ids) == tokens for one in outputs)


async def online(engine: AsyncLLMEngine, prompts: list[list[int]], tokens: int) -> None:
    async def read(name: str, ids: list[int]) -> int:
        count = 0
        async for output in engine.generate(Prompt(token_ids=ids), params_for(tokens), name):
            count += len(output.outputs[0].token_ids)
        return count

    counts = await asyncio.gather(*(read(str(i), ids) for i, ids in enumerate(prompts)))
    assert counts == [tokens] * len(prompts)


def measure(
    engine_args: dict[str, Any], streams: list[int], engines: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The rows of the table, and ms to the first token."""
    from hetero_llm import AsyncLLMEngine

    with LLM(**engine_args) as llm:
        rates, first = figures(partial(offline, llm), streams, TOKENS)
    engine = AsyncLLMEngine({**engine_args, "data_parallel_size": engines})
    with asyncio.Runner() as runner:

        def generate(prompts: list[list[int]], tokens: int) -> None:
            runner.run(online(engine, prompts, tokens))

        try:
            async_rates, async_first = figures(generate, streams, TOKENS)
        finally:
            runner.run(engine.shutdown(0))
    rows = [
        {"streams": count, "llm_tokens_per_s": plain, "async_tokens_per_s": ours,
         "async/llm": ours / plain}
        for count, plain, ours in zip(streams, rates, async_rates, strict=True)
    ]  # fmt: skip
    return rows, {"llm": first, "async": async_first}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 64], help="numbers of streams")
    parser.add_argument("--engines", type=int, default=1, help="of AsyncLLMEngine")
    parser.add_argument("--cpu-threads", type=int, help="of the engine; default: all cores")
    args = parser.parse_args()
    engine_args = {"model": args.model, "device": args.device, "max_model_len": 1024}
    if args.cpu_threads is not None:
        engine_args["cpu_threads"] = args.cpu_threads
    rows, firsts = measure(engine_args, args.streams, args.engines)
    print(f"first token: {firsts['llm']:.2f} ms offline, {firsts['async']:.2f} through the process")
    about = {**engine_args, "engines": args.engines, "first_token_ms": firsts}
    report("async_overhead", about, rows, args.out)


if __name__ == "__main__":
    main()
