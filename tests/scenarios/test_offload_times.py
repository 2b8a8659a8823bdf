"""Hidden and exposed time of loads, by a clock that only copies and computation move: the whole
engine over the native copier and the driver that is played on host memory. What the counters say
is compared with when something was computed while a load was under way, and with sums by hand."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload import copier_library
from hetero_llm.bridge.kv_offload.copier import NUM_FLAGS, CopyOptions, DeviceRows, NativeCopier
from hetero_llm.bridge.kv_offload.copier_library import CopierError, Method
from hetero_llm.bridge.kv_offload.copy_calibration import FixedRows
from hetero_llm.bridge.kv_offload.copy_rates import Calibration, Rate
from hetero_llm.bridge.kv_offload.host_block_index import HostBlockIndex
from hetero_llm.bridge.kv_offload.pinned_host_tier import LoadRule, PinnedHostTier
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.request import Request
from hetero_llm.core.step import ModelRunnerOutput
from hetero_llm.core.step_times import StepTimes
from hetero_llm.engine import engine as engine_module
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.block_transfers import BlockTransfers, OffloadLimits
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.scheduler import kv_loads
from hetero_llm.scheduler.kv_loads import KVLoadQueue
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.utils.native_build import find_compiler, open_both_ways
from tests.bridge.kv_offload.conftest import FakeCuda, fake, fake_cuda_library, until  # noqa: F401
from tests.helpers import offload_traffic as traffic
from tests.helpers.harness import VOCAB, FakeRunner, expected_output, make_request

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

HEADER = Path(__file__).parents[1] / "bridge/kv_offload/fake_clock.h"
BLOCK = LAYERS = 8
LAYER_BYTES = 16
PREFIX = 10  # blocks
MS = 1_000_000
BYTE_NS = MS // (PREFIX * LAYER_BYTES)
"""A layer of a prefix takes a millisecond, all of it eight."""
ROW_NS = MS // 2
"""A row takes half a millisecond, whatever is before it."""
MAX_LEN = 176


@dataclass
class Machine:
    """Time, a link that copies one operation after the other, and what happened when.

    Attributes:
        now: ns.
        open: loads to when they began; loads, computed: from when to when, ns.
    """

    copier: NativeCopier
    library: Any
    fake: FakeCuda
    lane: int
    now: int = 0
    open: dict[int, int] = field(default_factory=dict)
    loads: list[tuple[int, int]] = field(default_factory=list)
    computed: list[tuple[int, int]] = field(default_factory=list)
    _landing: int | None = None  # when the operation at the front of the stream will be over
    _num_over: int = 0

    def run_to(self, end: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass until `end`, or until `stop()` is true after a copy has landed."""
        while not stop():
            self._settle()
            if self._landing is None and (size := self.fake.next_bytes(self.lane)) > 0:
                self._landing = self.now + size * BYTE_NS
            if self._landing is None or self._landing > end:
                self.set_time(end)
                return
            self.set_time(self._landing)
            self._landing = None
            self._run_one()
            while self.fake.next_bytes(self.lane) == 0:  # flags and events
                self._run_one()
            self._settle()

    def compute(self, duration: int) -> None:
        self.computed.append((self.now, self.now + duration))
        self.run_to(self.now + duration)

    def nap(self, seconds: float) -> None:
        """Lets time pass until a load is over, at most `seconds`."""
        self._settle()
        count = len(self.loads)
        self.run_to(self.now + round(seconds * 1e9), lambda: len(self.loads) > count)

    def begin(self, transfer_id: int) -> None:
        self.open[transfer_id] = self.now

    def hidden_and_exposed(self) -> tuple[float, float]:
        """Seconds in which a load was under way, by whether something was computed."""
        assert not self.open
        edges = sorted({edge for span in (*self.loads, *self.computed) for edge in span})
        times = [0, 0]
        for begin, end in zip(edges, edges[1:]):
            covered = [
                any(first <= begin and end <= last for first, last in spans)
                for spans in (self.loads, self.computed)
            ]
            times[covered[1]] += (end - begin) * covered[0]
        return times[1] * 1e-9, times[0] * 1e-9

    def set_time(self, now: int) -> None:
        self.now = now
        self.library.waiting.fake_clock_set(now)

    def _run_one(self) -> None:
        before = self.fake.run(self.lane)
        self.fake.hold(self.lane, 1, 1)
        until(lambda: self.fake.run(self.lane) > before)

    def _settle(self) -> None:
        """Waits until the copy thread has nothing more to do at this moment."""
        reads = self.library.waiting.fake_clock_reads()
        until(lambda: not self._is_open() or self.library.waiting.fake_clock_reads() > reads + 60)
        over = [transfer_id for transfer_id in self.open if not self._left(transfer_id)]
        self._num_over += len(over)
        until(lambda: self._num_reported() == self._num_over)
        self.loads += [(self.open.pop(transfer_id), self.now) for transfer_id in over]

    def _is_open(self) -> bool:
        return any(self._left(transfer_id) for transfer_id in self.open)

    def _num_reported(self) -> float:
        ended = self.copier.metrics()
        return sum(ended[f"kv_offload_{kind}loads"] for kind in ("", "failed_", "aborted_"))

    def _left(self, transfer_id: int) -> float:
        return self.copier.seconds_left([transfer_id])


class TimedRunner(FakeRunner):
    """Computes layer by layer, each once its loads have landed."""

    machine: Machine
    flags: np.ndarray

    def finish(self, pending: int) -> ModelRunnerOutput:
        machine, step = self.machine, self._queue[0][1]
        for layer in range(LAYERS):
            for transfer_id in step.kv_loads:
                landed = lambda: self._landed(transfer_id, layer)  # noqa: B023, E731
                machine.run_to(machine.now + 60_000 * MS, landed)
            machine.compute(int(step.num_scheduled_tokens.sum()) * ROW_NS // LAYERS)
        return super().finish(pending)

    def _context(self, slot: int, length: int) -> list[int]:
        """May be wrong for sequences whose load failed: no user gets their tokens."""
        try:
            return super()._context(slot, length)
        except AssertionError:
            return [VOCAB] * length

    def _landed(self, transfer_id: int, layer: int) -> bool:
        flag = self.machine.copier.layer_ready_flag(transfer_id)
        return flag is None or int(self.flags[flag.place]) - (flag.base + layer + 1) >= 0


@dataclass
class Served:
    engine: Engine
    machine: Machine
    loads: KVLoadQueue

    def add(self, name: str, prompt: list[int], max_tokens: int = 1) -> Request:
        params = replace(traffic.GREEDY, max_tokens=max_tokens)
        request = make_request(name, prompt, params, MAX_LEN)
        self.engine.add_request(request)
        return request

    def finish(self, *requests: Request) -> None:
        """Steps until these requests are over, and checks their tokens."""
        while self.engine.has_unfinished:
            self.engine.step()
        for request in requests:
            expected = expected_output(request.prompt_token_ids, request.params)
            assert request.sequences[0].output_ids == expected

    def forget(self) -> None:
        """Drops what was recorded so far."""
        traffic.rest(self.engine)
        self.machine.loads.clear()
        self.machine.computed.clear()

    def ended(self) -> tuple[float, float]:
        metrics = self.engine.metrics()
        return tuple(metrics[f"kv_offload_{name}_seconds_total"] for name in ("hidden", "exposed"))


def clocked_library() -> Any:
    """The copier, compiled with a clock that the test sets."""

    def recipe(*, sanitize: bool = False) -> Any:
        known = copier_library.recipe(sanitize=sanitize)
        digest = hashlib.sha256(HEADER.read_bytes()).hexdigest()
        flags = (*known.flags, "-include", str(HEADER), f"-DHEADER_{digest}")
        return replace(known, name="kv-copier-clocked", flags=flags)

    functions = [
        *copier_library.FUNCTIONS,
        ("fake_clock_set", None, [ctypes.c_int64]),
        ("fake_clock_reads", ctypes.c_int64, []),
    ]
    return open_both_ways("copier with a clock", recipe, functions, CopierError)


@pytest.fixture
def served(
    fake: FakeCuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Served]:
    """An engine whose device keeps nothing that is not used, with time at 0."""
    config = SchedulerConfig(6, MAX_LEN, MAX_LEN, True, BLOCK)
    runner = TimedRunner(100, BLOCK, 6, MAX_LEN // BLOCK)
    library = clocked_library()
    monkeypatch.setattr(copier_library, "load", lambda: library)
    host = np.zeros((200, LAYERS, LAYER_BYTES), np.uint8)
    flags = np.zeros(NUM_FLAGS, np.int32)
    copier = NativeCopier(
        DeviceRows(runner.memory.ctypes.data, 100, LAYERS * LAYER_BYTES, LAYERS, flags.ctypes.data),
        FixedRows(host.ctypes.data, LAYERS * LAYER_BYTES, len(host)),
        CopyOptions(libcuda=fake.path, ahead_bytes=0),
        current_stream=lambda: 0,
    )
    copier.force = (Method.BATCH, 1)
    rate = 1e9 / BYTE_NS
    copier.use(Calibration(LAYER_BYTES, (Rate(Method.BATCH, 1, rate, rate),)))
    machine = Machine(copier, library, fake, fake.stream(0))
    machine.set_time(0)
    fake.hold(machine.lane, 1, 0)
    runner.machine, runner.flags = machine, flags
    begin = copier.load
    monkeypatch.setattr(
        copier,
        "load",
        lambda order: (begin(order), machine.begin(order.transfer_id)),
    )
    monkeypatch.setattr(copier, "wait", machine.nap)
    clock = SimpleNamespace(monotonic=lambda: machine.now * 1e-9)
    monkeypatch.setattr(kv_loads, "time", clock)
    monkeypatch.setattr(engine_module, "perf_counter", clock.monotonic)
    times = StepTimes()
    rule = LoadRule(BLOCK, LAYERS * LAYER_BYTES, LAYERS, times.predict, 0)
    tier = PinnedHostTier(HostBlockIndex(), copier, rule)
    prefix = PrefixCache()
    transfers = BlockTransfers(tier, prefix, OffloadLimits(40, cached=0), 100)
    blocks = BlockManager(100, BLOCK, prefix, transfers)
    loads = KVLoadQueue(blocks, transfers, LAYERS, times)
    scheduler = Scheduler(config, blocks, loads=loads)
    inputs: Any = None
    engine = Engine(inputs, scheduler, runner, OutputProcessor(None, scheduler.stop_sequence))
    yield Served(engine, machine, loads)
    fake.hold(machine.lane, 0, 0)
    engine.shut_down()


def prompts(served: Served, count: int) -> list[list[int]]:
    """That begin with a prefix in host memory, and go on with nine tokens."""
    rng = np.random.default_rng(4)
    heads = rng.integers(1, VOCAB, (count, PREFIX * BLOCK)).tolist()
    for number, head in enumerate(heads):
        served.finish(served.add(f"first {number}", [*head, *range(1, 10)]))
    served.forget()
    assert served.ended() == (0.0, 0.0)
    return [[*head, *range(11, 20)] for head in heads]


def check(served: Served) -> tuple[float, float]:
    """That the counters are what happened; hidden and exposed milliseconds."""
    ended, metrics = served.ended(), served.engine.metrics()
    assert ended == pytest.approx(served.machine.hidden_and_exposed(), abs=1e-9)
    each = sum(end - begin for begin, end in served.machine.loads) * 1e-9
    assert metrics["kv_offload_load_seconds_total"] == pytest.approx(each, abs=1e-9)
    assert metrics["kv_offload_h2d_busy_seconds_total"] == pytest.approx(sum(ended), abs=1e-9)
    return round(ended[0] * 1e3, 6), round(ended[1] * 1e3, 6)


def test_a_load_that_is_waited_for(served: Served) -> None:
    (prompt,) = prompts(served, 1)
    served.loads.wait_whole = True
    served.finish(served.add("again", prompt))
    assert check(served) == (0.0, 8.0)


def test_a_load_behind_which_the_prompt_itself_computes(served: Served) -> None:
    """Its nine rows take 4.5 ms: all layers but the first one hide as much."""
    (prompt,) = prompts(served, 1)
    served.finish(served.add("again", prompt))
    assert check(served) == (4.5 * 7 / 8, 8.0 - 4.5 * 7 / 8)


def test_a_load_beside_others(served: Served) -> None:
    """They decode all the time."""
    (prompt,) = prompts(served, 1)
    other = served.add("other", [3, 4, 5], 40)
    served.engine.step()
    served.finish(served.add("again", prompt), other)
    assert check(served) == (8.0, 0.0)


@pytest.mark.parametrize("wait_whole", [True, False])
def test_loads_at_the_same_time_count_once(served: Served, wait_whole: bool) -> None:
    """Three of them, one behind the other on one link."""
    served.loads.wait_whole = wait_whole
    requests = [served.add(str(n), prompt) for n, prompt in enumerate(prompts(served, 3))]
    served.finish(*requests)
    hidden, exposed = check(served)
    assert hidden + exposed == pytest.approx(24.0)
    assert hidden > 0.0


def test_counters_only_grow(served: Served) -> None:
    """Also in the middle of a load, and of one that fails."""
    texts = prompts(served, 3)
    served.machine.fake.fail(b"cuMemcpyBatchAsync", 12, 1, 1)
    requests = [served.add(str(n), prompt) for n, prompt in enumerate(texts)]
    before = (0.0, 0.0)
    while served.engine.has_unfinished:
        served.engine.step()
        ended = served.ended()
        assert all(now >= then for now, then in zip(ended, before)), (ended, before)
        before = ended
    served.finish(*requests)
    assert served.engine.metrics()["kv_offload_failed_loads"] == 1
    assert sum(ended) == pytest.approx(sum(served.machine.hidden_and_exposed()))
