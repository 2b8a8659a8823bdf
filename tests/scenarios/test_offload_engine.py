"""The whole way of a block to host memory and back, on a CPU: engine, scheduler, block manager and
`PinnedHostTier` as in service, over a copier whose streams stand still until moved at random,
and a runner that draws other tokens where its memory holds a wrong byte."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload.host_block_index import HostBlockIndex
from hetero_llm.bridge.kv_offload.pinned_host_tier import LoadRule, PinnedHostTier
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.request import Request
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.core.step_times import StepTimes
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.kv_events import KvEventPublisher
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.block_transfers import BlockTransfers, OffloadLimits
from hetero_llm.kv_cache.hit_log import hit_line
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.scheduler.kv_loads import KVLoadQueue
from hetero_llm.scheduler.scheduler import Scheduler
from tests.bridge.kv_offload.model_copier import ModelCopier
from tests.helpers import offload_traffic as traffic
from tests.helpers.harness import VOCAB, FakeRunner, expected_output, make_request

BLOCK = LAYERS = 8  # every token of a block is a layer of its own: a layer that is late shows
MAX_LEN = 176
LONGEST = 130
SEEDS = range(4)
MODES = pytest.mark.parametrize("asynchronous", [False, True])


class HostRunner(FakeRunner):
    """Moves the streams a little at every call, as time does; steps wait for their loads.

    Tokens whose sequence was aborted in flight, or whose load failed, may read anything: no user
    gets them. So a wrong byte is no failed assertion here: it makes tokens wrong.

    Attributes:
        time_stands_still: no copy advances but those that a step waits for.
        gated: negative control: False, and steps run whether their loads have landed or not.
        num_waits: operations of a stream that steps had to wait for.
        num_wrong: sequences' contexts that were read wrong.
    """

    def __init__(self, seed: int, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gated = True
        self.num_waits = 0
        self.num_wrong = 0
        self.copier: ModelCopier
        self.time_stands_still = False
        self._rng = random.Random(seed)

    def bytes_of(self) -> np.ndarray:
        """[blocks, layers, bytes of a layer], the same memory."""
        return self.memory.view(np.uint8).reshape(len(self.memory), LAYERS, -1)

    def launch(self, step: SchedulerOutput) -> int:
        self._pass_time()
        return super().launch(step)

    def finish(self, pending: int) -> ModelRunnerOutput:
        self._pass_time()
        copier = self.copier
        for transfer_id in self._queue[0][1].kv_loads if self.gated else ():
            for layer in range(LAYERS):
                while not copier.landed(transfer_id, layer):
                    self.num_waits += 1
                    assert copier.advance(True), "a load waits for a step that waits for it"
        output = super().finish(pending)
        copier.finish_step()
        return output

    def _context(self, slot: int, length: int) -> list[int]:
        try:
            return super()._context(slot, length)
        except AssertionError:
            self.num_wrong += 1
            return [VOCAB] * length

    def _pass_time(self) -> None:
        if self.time_stands_still:
            return
        for _ in range(self._rng.choice((0, 1, 5, 40))):
            self.copier.advance(self._rng.random() < 0.5)


@dataclass
class Served:
    engine: Engine
    blocks: BlockManager
    runner: HostRunner
    copier: ModelCopier


def build(
    seed: int,
    asynchronous: bool,
    *,
    gpu_blocks: int = 40,
    host_blocks: int = 110,
    max_num_batched_tokens: int = 48,
    limits: OffloadLimits | None = None,
    min_uses: int = 1,
    policy: str = "lru",
    events: KvEventPublisher | None = None,
) -> Served:
    config = SchedulerConfig(6, max_num_batched_tokens, MAX_LEN, True, BLOCK)
    runner = HostRunner(seed, gpu_blocks, BLOCK, 6, MAX_LEN // BLOCK)
    device = runner.bytes_of()
    host = np.zeros((host_blocks, *device.shape[1:]), np.uint8)
    copier = runner.copier = ModelCopier(device, host, host_blocks, random.Random(seed))
    times = StepTimes()
    rule = LoadRule(BLOCK, device[0].nbytes, LAYERS, lambda count, start: float(count), 0)
    log = None if events is None else events.log
    index = HostBlockIndex(policy=policy, min_uses=min_uses, events=log)
    tier = PinnedHostTier(index, copier, rule)
    prefix = PrefixCache(log)
    transfers = BlockTransfers(tier, prefix, limits or OffloadLimits(8), gpu_blocks)
    blocks = BlockManager(gpu_blocks, BLOCK, prefix, transfers)
    scheduler = Scheduler(config, blocks, loads=KVLoadQueue(blocks, transfers, LAYERS, times))
    inputs: Any = None  # requests come ready-made
    output_processor = OutputProcessor(None, scheduler.stop_sequence)
    engine = Engine(
        inputs, scheduler, runner, output_processor, asynchronous=asynchronous, kv_events=events
    )
    return Served(engine, blocks, runner, copier)


def request_of(job: traffic.Job) -> Request:
    return make_request(job.name, job.prompt, job.params, MAX_LEN)


def compare(served: Served, seed: int, count: int = 30) -> int:
    """Random traffic; its tokens are those that the stand-in for a model gives by itself."""
    jobs = traffic.traffic(seed, count, longest=LONGEST, vocab=VOCAB)
    expected = {job.name: expected_output(job.prompt, job.params) for job in jobs}
    return traffic.check_same(jobs, traffic.serve(served.engine, jobs, make=request_of), expected)


CASES: dict[str, dict[str, Any]] = {
    "victims": {},
    "all leave": {"limits": OffloadLimits(8, cached=0)},
    "few stay": {"limits": OffloadLimits(4, cached=6), "policy": "slru"},
    "written through": {"limits": OffloadLimits(8, write_through=True), "policy": "cost"},
    "used twice": {"min_uses": 2, "limits": OffloadLimits(8, cached=0)},
    "tiny host": {"host_blocks": 9, "limits": OffloadLimits(8, cached=0)},
}


@MODES
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_books(case: str, asynchronous: bool) -> None:
    loads = 0.0
    for seed in SEEDS:
        served = build(seed, asynchronous, **CASES[case])
        if seed % 2:
            traffic.join_at_once(served.engine)
        assert compare(served, seed) > 100
        traffic.check_over(served.engine)
        metrics = served.engine.metrics()
        assert metrics["kv_offload_stores"] > 0
        assert not metrics["kv_offload_failed_loads"]
        hits = served.blocks.hits
        assert hits.gpu + hits.cpu + hits.missed == hits.total == metrics["prefix_blocks_total"]
        loads += metrics["kv_offload_loads"]
    assert loads > 0


@MODES
def test_without_aborts_and_faults_no_row_reads_a_wrong_byte(asynchronous: bool) -> None:
    waits = 0
    for seed in SEEDS:
        served = build(seed, asynchronous, limits=OffloadLimits(8, cached=0))
        traffic.join_at_once(served.engine)
        whole = traffic.traffic(seed, longest=LONGEST, vocab=VOCAB)
        jobs = [replace(job, abort=None) for job in whole]
        traffic.serve(served.engine, jobs, make=request_of)
        waits += served.runner.num_waits
        assert not served.runner.num_wrong
    assert waits


@MODES
def test_failing_copies_change_no_token(asynchronous: bool) -> None:
    spoiled = {"loads": 0, "stores": 0}
    waits = 0
    for seed in SEEDS:
        served = build(seed, asynchronous, limits=OffloadLimits(8, cached=0))
        traffic.join_at_once(served.engine)
        copier = traffic.spoil(served.engine, seed, 0.4)
        compare(served, seed, 60)
        traffic.check_over(served.engine)
        spoiled = {kind: count + copier.spoiled[kind] for kind, count in spoiled.items()}
        waits += served.runner.num_waits
    assert spoiled["loads"] > 3 and spoiled["stores"] > 3 and waits > 0


def broken_by(change: Any, asynchronous: bool, first_seed: int = 0) -> bool:
    """Whether one of some random traffics gets wrong tokens after a change."""
    for seed in range(first_seed, first_seed + 15):
        served = build(seed, asynchronous, limits=OffloadLimits(8, cached=0))
        traffic.join_at_once(served.engine)
        change(served)
        try:
            compare(served, seed)
        except traffic.WrongTokens:
            return True
    return False


def open_gates(served: Served) -> None:
    served.runner.gated = False


def drop_waits(served: Served) -> None:
    served.copier.drop_waits = True


@MODES
def test_steps_that_do_not_wait_for_loads_go_wrong(asynchronous: bool) -> None:
    assert broken_by(open_gates, asynchronous)
    assert not broken_by(lambda served: None, asynchronous)


def test_copies_that_do_not_wait_for_steps_go_wrong() -> None:
    """A store may then read what the step in flight has not written, and a load may overwrite what
    it still reads. Loads begin behind the launch, so one traffic in sixteen only finds out."""
    assert broken_by(drop_waits, True, first_seed=33)


@MODES
def test_a_cleared_cache_finds_nothing(asynchronous: bool) -> None:
    served = build(5, asynchronous, limits=OffloadLimits(8, cached=0))
    for seed in (5, 6):
        compare(served, seed, 10)
        served.engine.reset_prefix_cache()
        hits = replace(served.blocks.hits)
        job = traffic.traffic(seed + 50, 1, longest=LONGEST, vocab=VOCAB)[0]
        job = replace(job, abort=None)
        traffic.serve(served.engine, [job], make=request_of)
        assert (served.blocks.hits.gpu, served.blocks.hits.cpu) == (hits.gpu, hits.cpu)
    traffic.check_over(served.engine)


@MODES
def test_the_manuals_example(asynchronous: bool) -> None:
    """100 blocks of 8 tokens, prompts of 10 full blocks and a token."""
    served = build(
        0, asynchronous, gpu_blocks=100, host_blocks=200, max_num_batched_tokens=96,
        limits=OffloadLimits(24),
    )  # fmt: skip
    rng = np.random.default_rng(8)
    prompts = rng.integers(1, VOCAB, (11, 10 * BLOCK + 1)).tolist()
    for number, prompt in enumerate([*prompts, prompts[0]]):
        job = traffic.Job(str(number), prompt, traffic.GREEDY, 0)
        expected = {job.name: expected_output(prompt, job.params)}
        seen = traffic.serve(served.engine, [job], make=request_of)
        traffic.check_same([job], seen, expected)
        traffic.rest(served.engine)
    assert hit_line(served.blocks.hits) == traffic.GOLDEN
    traffic.check_over(served.engine)
