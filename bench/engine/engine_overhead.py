"""Host time of the engine per decode step, with a runner that does nothing.

Everything of a step but the model: schedule, the step's arrays, update, outputs. Detokenization is
off. Batches are in steady decode; a step is timed as (total time) / (steps). Drafted: chains of 7
nodes for every sequence, of which 3 are accepted.
"""

from __future__ import annotations

import time

import numpy as np

from bench.common import bench_parser, report
from bench.generation import add_requests, greedy
from bench.speculation.synthetic_drafter import SyntheticDrafter
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.sampling_params import RequestOutputKind
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import InputProcessor
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.scheduler.scheduler import Scheduler

PROMPT = 128
STEPS = 512
_NODES, _ACCEPTED = 7, 3


class FakeRunner:
    """Samples token 7 for every request, and accepts three draft nodes."""

    def launch(self, step: SchedulerOutput) -> SchedulerOutput:
        return step

    def finish(self, pending: SchedulerOutput) -> ModelRunnerOutput:
        if pending.drafts is None:
            return ModelRunnerOutput([7] * int(pending.num_samples.sum()), None, {}, {})
        num_tokens = np.minimum(pending.num_scheduled_tokens, _ACCEPTED + 1).tolist()
        return ModelRunnerOutput([7] * sum(num_tokens), None, {}, {}, num_tokens)


def build(batch: int, drafter: SyntheticDrafter | None = None) -> Engine:
    config = SchedulerConfig(max(batch, 1), 1 << 16, 4096, True, 16)
    blocks = BlockManager(batch * 256, 16, PrefixCache())
    scheduler = Scheduler(config, blocks, drafter=drafter)
    inputs = InputProcessor(
        None, vocab_size=128256, max_model_len=4096, eos_ids=(2,), max_logprobs=20, seed=0
    )
    return Engine(inputs, scheduler, FakeRunner(), OutputProcessor(None, scheduler.stop_sequence))


def milliseconds_per_step(batch: int, kind: RequestOutputKind, drafted: bool = False) -> float:
    """Median over five runs of the mean step time, in ms."""
    rng = np.random.default_rng(0)
    tokens = STEPS * (_ACCEPTED + 1) if drafted else STEPS
    params = greedy(tokens, output_kind=kind)
    times = []
    for _ in range(5):
        prompts = [rng.integers(3, 1000, PROMPT).tolist() for _ in range(batch)]
        drafter = None
        if drafted:
            record = {tuple(ids): [7] * tokens for ids in prompts}
            drafter = SyntheticDrafter(record, right=_ACCEPTED, nodes=_NODES, vocab_size=1000)
        engine = build(batch, drafter)
        add_requests(engine, "r", prompts, params)
        engine.step()  # the prompts
        begin = time.perf_counter()
        for _ in range(STEPS - 2):
            engine.step()
        times.append((time.perf_counter() - begin) / (STEPS - 2))
    return float(np.median(times)) * 1e3


def main() -> None:
    args = bench_parser(__doc__).parse_args()
    rows = [
        {
            "batch": batch,
            "final_only_ms": milliseconds_per_step(batch, RequestOutputKind.FINAL_ONLY),
            "delta_stream_ms": milliseconds_per_step(batch, RequestOutputKind.DELTA),
            "drafted_ms": milliseconds_per_step(batch, RequestOutputKind.FINAL_ONLY, True),
        }
        for batch in (1, 8, 64, 256)
    ]
    report("engine_overhead", {"steps": STEPS, "prompt": PROMPT}, rows, args.out)


if __name__ == "__main__":
    main()
