"""Host time of a prompt of token ids through `LLM.generate`, with a runner that does nothing.

Each prompt is sent twice, for one token: cold, then wholly in the prefix cache. Everything but the
model is in it: checks, copies, prefix look-up, block tables, the step's arrays, the output.
Stepping is asynchronous, as on a GPU, where part of a call runs beside the device; what cannot is
shown apart: from the call to the first launch, and from the end of the last step to the return.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from unittest import mock

import numpy as np

from bench.common import bench_parser, print_table, write_results
from bench.generation import greedy
from hetero_llm import LLM
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.factory import BuiltEngine
from hetero_llm.engine.inputs.input_processor import InputProcessor
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.scheduler.scheduler import Scheduler

LENGTHS = (1024, 4096, 16384, 32768)
BLOCK = 16
NUM_BLOCKS = 1 << 15
CONTEXT = 1 << 16
MOST_ROWS = 16384
VOCAB = 128256


class TimedRunner:
    """Samples token 7 for every request; notes when it is called."""

    def __init__(self) -> None:
        self.first_launch = 0.0
        self.last_finish = 0.0

    def launch(self, step: SchedulerOutput) -> int:
        self.first_launch = self.first_launch or time.perf_counter()
        return int(step.num_samples.sum())

    def finish(self, pending: int) -> ModelRunnerOutput:
        self.last_finish = time.perf_counter()
        return ModelRunnerOutput([7] * pending, None, {}, {})


def build(runner: TimedRunner) -> LLM:
    """An `LLM` around `runner`, with prefix caching, a full-size pool and no tokenizer."""
    config = SchedulerConfig(256, MOST_ROWS, CONTEXT, True, BLOCK)
    scheduler = Scheduler(config, BlockManager(NUM_BLOCKS, BLOCK, PrefixCache()))
    inputs = InputProcessor(
        None, vocab_size=VOCAB, max_model_len=CONTEXT, eos_ids=(2,), max_logprobs=20, seed=0
    )
    outputs = OutputProcessor(None, scheduler.stop_sequence)
    engine = Engine(inputs, scheduler, runner, outputs, asynchronous=True)
    built = BuiltEngine(engine, None, CONTEXT, NUM_BLOCKS, "none", "none", "none", None)
    with mock.patch("hetero_llm.engine.llm.build_engine", lambda config, show_progress: built):
        return LLM("none", skip_tokenizer_init=True)


def milliseconds(llm: LLM, runner: TimedRunner, prompt: list[int]) -> tuple[list[float], int]:
    """Of one call: the whole, until the first launch, since the last finish; cached tokens."""
    runner.first_launch = 0.0
    begin = time.perf_counter()
    (output,) = llm.generate(prompt_token_ids=prompt, sampling_params=greedy(1), use_tqdm=False)
    end = time.perf_counter()
    spans = (end - begin, runner.first_launch - begin, end - runner.last_finish)
    return [1e3 * span for span in spans], output.num_cached_tokens


def measure(length: int, rounds: int) -> dict[str, float]:
    """Medians over `rounds` prompts."""
    rng = np.random.default_rng(length)
    runner = TimedRunner()
    llm = build(runner)
    cold, hit = [], []
    for round_ in range(-1, rounds):  # the first one warms up
        prompt = rng.integers(3, VOCAB, length).tolist()
        first, cached = milliseconds(llm, runner, prompt)
        assert cached == 0
        second, cached = milliseconds(llm, runner, prompt)
        assert length - cached <= BLOCK, (length, cached)
        if round_ >= 0:
            cold.append(first)
            hit.append(second)
    cold_ms, hit_ms = np.median(cold, axis=0), np.median(hit, axis=0)
    return {
        "tokens": length,
        "cold_ms": float(cold_ms[0]),
        "hit_ms": float(hit_ms[0]),
        "hit_to_launch_ms": float(hit_ms[1]),
        "hit_from_finish_ms": float(hit_ms[2]),
    }


def profile(length: int, calls: int) -> None:
    """Prints where the time of a hit goes, by cProfile."""
    runner = TimedRunner()
    llm = build(runner)
    prompt = np.random.default_rng(0).integers(3, VOCAB, length).tolist()
    milliseconds(llm, runner, prompt)
    profiler = cProfile.Profile()
    for _ in range(calls):
        profiler.enable()
        milliseconds(llm, runner, prompt)
        profiler.disable()
    print(f"{calls} hits of {length} tokens:")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", type=int, metavar="TOKENS", help="profile hits instead")
    args = parser.parse_args()
    if args.profile:
        profile(args.profile, args.rounds)
        return
    rows = [measure(length, args.rounds) for length in LENGTHS]
    write_results(
        "prompt_overhead", {"rows": rows, "block_size": BLOCK, "rounds": args.rounds}, args.out
    )
    print_table(rows)


if __name__ == "__main__":
    main()
