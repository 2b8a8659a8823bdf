"""Steps whose prefix arrives while they run: layers are copied on a stream of their own, late and
at random times, and the flags are written behind them as the copier writes them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.demo_models import heldout_prompts
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from tests.gpu.scenarios.serving import DEMO
from tests.gpu.test_layer_ready_steps import (
    BASE,
    KINDS,
    LOADED,
    PLACE,
    STEPS,
    TICKET,
    Setup,
    build,
    equal,
    expect,
    following_step,
    joining_step,
    landed,
    prefix_steps,
    put_layer,
    run,
    spoil,
)
from tests.gpu.test_model_runner import step_of
from tests.models.tiny import make_tiny_checkpoint

DEVICE = torch.device("cuda")
ROUNDS = 4
"""The first one may be slow enough to find everything landed: it loads kernels."""
MILLISECOND = 1_700_000
"""In cycles of the device, about."""
ARMS = [
    (kind, graphs) for kind in KINDS for graphs in (False, True) if kind == "kernels" or not graphs
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", "heads_of_16")


class StreamLoader(DeviceLayerReadyFlags):
    """Flags whose loads run on a stream. Load `TICKET + r` is the r-th to use the place."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.stream = torch.cuda.Stream()
        super().__init__(DEVICE, lambda ticket: LayerReadyFlag(PLACE, self.base(ticket)))
        self.flags[PLACE] = BASE
        self.write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
        self.write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def base(self, ticket: int) -> int:
        return landed((ticket - TICKET) * (self.layers + 1) - 1)

    def load(
        self,
        cache: PagedKVCache,
        content: torch.Tensor,
        ticket: int,
        delays: Sequence[int],
        blocks: Sequence[int] = LOADED,
    ) -> None:
        """Submits it all: cycles to sleep, bytes from page-locked memory and flag of each layer."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for layer, delay in enumerate(delays):
                torch.cuda._sleep(delay)
                put_layer(cache, content, layer, blocks)
                flag = landed(layer, self.base(ticket)) % 2**32
                address = self.flags_address + 4 * PLACE
                error = self.write(self.stream.cuda_stream, address, flag, 0)
                assert error == 0, f"cuStreamWriteValue32: error {error}"


class BlindLoader(StreamLoader):
    """Its flags are always ready, and a load begins only when `start_loads` is called."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._held: list[tuple[Any, ...]] = []

    def wait(self, layer: int) -> None:
        pass

    def load(self, *order: Any) -> None:
        self._held.append(order)

    def start_loads(self) -> None:
        for order in self._held:
            super().load(*order)
        self._held.clear()


@dataclasses.dataclass
class Replays:
    """Which graphs ran."""

    keys: list[Any]

    @classmethod
    def of(cls, runner: Any) -> Replays:
        found = cls([])
        if runner.graphs is not None:
            graphs = runner.graphs.captured
            replay = graphs.replay

            def note(key: Any) -> None:
                found.keys.append(key)
                replay(key)

            graphs.replay = note
        return found

    def take(self) -> set[str]:
        names = {name for name, _ in self.keys}
        self.keys.clear()
        return names


def late_round(
    arm: Setup, loader: StreamLoader, step: SchedulerOutput, content: torch.Tensor, index: int
) -> SchedulerOutput:
    """Spoils the prefix, brings the other sequence to its place, submits the load.

    Returns:
        The step that waits for it.
    """
    torch.cuda.synchronize()
    spoil(arm)
    for before in prefix_steps(late=True):
        run(arm.runner, before)
    rng = np.random.default_rng(index)
    delays = rng.integers(0, 2 * MILLISECOND, loader.layers)
    delays[0] += 30 * MILLISECOND  # any step that does not wait is over by then
    loader.load(arm.cache, content, TICKET + index, delays.tolist())
    return dataclasses.replace(step, kv_loads=(TICKET + index,))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("kind", "graphs"), ARMS)
def test_a_step_sees_what_comes_while_it_runs(
    checkpoint: Path, kind: str, graphs: bool, name: str
) -> None:
    step = STEPS[name]()
    expected = expect(build(checkpoint, DEVICE, kind, graphs=graphs), step)
    content = expected.content.pin_memory()
    loader = StreamLoader(content.shape[1])
    arm = build(checkpoint, DEVICE, kind, loader, graphs=graphs)
    replays = Replays.of(arm.runner) if graphs else Replays([])
    for index in range(ROUNDS):
        waiting = late_round(arm, loader, step, content, index)
        assert "waiting model" not in replays.take()
        joined = run(arm.runner, waiting)
        if graphs:
            drawn = {"head"} if name == "drawn by kernels" else set()
            assert replays.take() == {"waiting model"} | drawn
        assert not joined.kv_loads_timed_out
        assert equal(joined, expected.joined), f"round {index}"
        assert equal(run(arm.runner, following_step(step)), expected.followed), f"round {index}"
        assert "waiting model" not in replays.take()
        assert torch.equal(arm.cache.data[list(LOADED)].cpu(), content)
    assert loader.flags[PLACE] == landed(loader.layers - 1, loader.base(TICKET + ROUNDS - 1))


@pytest.mark.parametrize(("kind", "graphs"), ARMS)
def test_without_waiting_the_results_are_others(checkpoint: Path, kind: str, graphs: bool) -> None:
    """So the test above can fail."""
    step = joining_step(2)
    expected = expect(build(checkpoint, DEVICE, kind, graphs=graphs), step)
    content = expected.content.pin_memory()
    loader = BlindLoader(content.shape[1])
    arm = build(checkpoint, DEVICE, kind, loader, graphs=graphs)
    joined = run(arm.runner, late_round(arm, loader, step, content, 0))
    loader.start_loads()
    assert not equal(joined, expected.joined)
    torch.cuda.synchronize()
    assert torch.equal(arm.cache.data[list(LOADED)].cpu(), content)


def test_a_step_is_launched_ahead_of_one_that_waits(checkpoint: Path) -> None:
    """The next step, of tokens that only the device knows, waits in line behind the loads."""
    step = joining_step(None)
    expected = expect(build(checkpoint, DEVICE, "kernels", graphs=True), step)
    content = expected.content.pin_memory()
    loader = StreamLoader(content.shape[1])
    arm = build(checkpoint, DEVICE, "kernels", loader, graphs=True)
    for index in range(ROUNDS):
        waiting = late_round(arm, loader, step, content, index)
        first = arm.runner.launch(waiting)
        second = arm.runner.launch(following_step(step))
        landing = not loader.stream.query()
        assert landing or index == 0, "launching waited for the load"
        assert equal(arm.runner.finish(first), expected.joined)  # type: ignore[arg-type]
        assert equal(arm.runner.finish(second), expected.followed)  # type: ignore[arg-type]


def test_two_loads_of_one_step(checkpoint: Path) -> None:
    """The second block of the prefix is another load's, whose layers come in between."""
    step = joining_step(None)
    expected = expect(build(checkpoint, DEVICE, "kernels", graphs=True), step)
    content = expected.content.pin_memory()
    layers = content.shape[1]
    loader = StreamLoader(layers)
    places = {1: LayerReadyFlag(PLACE, BASE), 2: LayerReadyFlag(7, 0)}
    loader.flag_of = places.__getitem__
    arm = build(checkpoint, DEVICE, "kernels", loader, graphs=True)
    spoil(arm)
    for before in prefix_steps(late=True):
        run(arm.runner, before)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    rng = np.random.default_rng(5)
    delays = rng.integers(0, 4 * MILLISECOND, (2, layers)).tolist()
    loader.load(arm.cache, content[:1], TICKET, delays[0], LOADED[:1])
    with torch.cuda.stream(other):
        for layer in range(layers):
            torch.cuda._sleep(delays[1][layer])
            put_layer(arm.cache, content[1:], layer, LOADED[1:])
            address = loader.flags_address + 4 * 7
            assert loader.write(other.cuda_stream, address, layer + 1, 0) == 0
    joined = run(arm.runner, dataclasses.replace(step, kv_loads=(1, 2)))
    assert equal(joined, expected.joined) and not joined.kv_loads_timed_out
    torch.cuda.synchronize()


# -- more rows than a graph has -------------------------------------------------------------------

LONG_PREFIX, LONG_SUFFIX = 256, 600


def long_arm(loader: DeviceLayerReadyFlags | None) -> Setup:
    """The demo model in 16 bits, whose long chunks go through libraries."""
    config = load_model_config(DEMO)
    model = load_model(DEMO, config, dtype=torch.bfloat16, device=DEVICE, show_progress=False)
    speed_up(model)
    shape = KVCacheShape(
        config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.bfloat16
    )
    cache = PagedKVCache(shape, 80, DEVICE)
    runner = GpuModelRunner(
        model, config, cache,
        max_num_seqs=2, max_model_len=1024, max_num_batched_tokens=640, graphs=True,
        layer_ready=loader,
    )  # fmt: skip
    return Setup(cache, runner)


def long_steps(blocks: list[int]) -> tuple[SchedulerOutput, SchedulerOutput]:
    prompt = heldout_prompts().prompts[0, : LONG_PREFIX + LONG_SUFFIX].tolist()
    params = SamplingParams(temperature=0.0)
    state = AdmittedSequence(0, tuple(prompt), len(prompt), params, 0, 0, 1)
    writes = [(0, column, block) for column, block in enumerate(blocks)]
    prefix = step_of([(0, 0, prompt[:LONG_PREFIX], 0)], (state,), writes)
    return prefix, step_of([(0, LONG_PREFIX, prompt[LONG_PREFIX:], 1)], (state,), writes)


def test_a_long_chunk_waits_outside_of_graphs() -> None:
    blocks = np.random.default_rng(1).permutation(80)[: -(-(LONG_PREFIX + LONG_SUFFIX) // 16)]
    prefix, step = long_steps(blocks.tolist())
    loaded = blocks[: LONG_PREFIX // 16].tolist()
    plain = long_arm(None)
    run(plain.runner, prefix)
    content = plain.cache.data[loaded].cpu().pin_memory()
    expected = run(plain.runner, step)
    loader = StreamLoader(content.shape[1])
    arm = long_arm(loader)
    replays = Replays.of(arm.runner)
    for index in range(ROUNDS):
        torch.cuda.synchronize()
        arm.cache.data[loaded] = 0.5
        rng = np.random.default_rng(index)
        delays = rng.integers(0, 2 * MILLISECOND, loader.layers)
        delays[0] += 30 * MILLISECOND
        loader.load(arm.cache, content, TICKET + index, delays.tolist(), loaded)
        joined = run(arm.runner, dataclasses.replace(step, kv_loads=(TICKET + index,)))
        assert replays.take() == set() and not joined.kv_loads_timed_out
        assert joined == expected  # the same kernels over the same shapes: the same bits
    blind = BlindLoader(content.shape[1])
    arm = long_arm(blind)
    arm.cache.data[loaded] = 0.5
    blind.load(arm.cache, content, TICKET, [0] * blind.layers, loaded)
    joined = run(arm.runner, dataclasses.replace(step, kv_loads=(TICKET,)))
    blind.start_loads()
    assert joined != expected, "the step would have had the same result without the load"
    torch.cuda.synchronize()


def test_a_failed_load_lets_the_step_through_and_the_next_one_is_right(checkpoint: Path) -> None:
    """The flag jumps to the end without bytes; what is computed anew does not wait at all."""
    step = joining_step(None)
    expected = expect(build(checkpoint, DEVICE, "kernels", graphs=True), step)
    content = expected.content.pin_memory()
    loader = StreamLoader(content.shape[1])
    arm = build(checkpoint, DEVICE, "kernels", loader, graphs=True)
    spoil(arm)
    for before in prefix_steps(late=True):
        run(arm.runner, before)
    loader.flags[PLACE] = landed(loader.layers - 1)
    torch.cuda.synchronize()
    assert not run(arm.runner, dataclasses.replace(step, kv_loads=(TICKET,))).kv_loads_timed_out
    for again in prefix_steps(late=False):
        run(arm.runner, again)
    assert equal(run(arm.runner, step), expected.joined)
    assert equal(run(arm.runner, following_step(step)), expected.followed)
