"""Steps whose prefix arrives while they run, in Triton's interpreter: the runner of kernels and
that of torch against steps without loads. On a GPU: `tests/gpu/scenarios/test_kv_load_cuda.py`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import (
    AdmittedSequence,
    ModelRunnerOutput,
    PromptLogprobSpan,
    SchedulerOutput,
)
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.graph_set import GraphSet
from hetero_llm.gpu.kernels.launch import INTERPRETED
from hetero_llm.gpu.kernels.layer_ready import MOST_LOOKS
from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
from hetero_llm.runner.model_runner import TorchModelRunner
from tests.gpu.test_model_runner import step_of
from tests.models.tiny import make_tiny_checkpoint

TICKET, PLACE, BASE = 3, 41, 2**31 - 2
"""The flag passes the largest number while the layers land."""
PREFIX, BLOCKS = 32, 8
LOADED, OWN, OTHERS = (5, 2), 6, 0
"""Blocks of the prefix, of what follows it, and of the other sequence."""
PROMPT = np.random.default_rng(0).integers(3, 90, PREFIX + 6).tolist()
OTHER = [9, 8, 7, 6, 5]
KINDS = ("kernels", "torch", "torch, row by row")
Runner = GpuModelRunner | TorchModelRunner


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", "heads_of_16")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("opt"), "opt", "heads_of_16")


@pytest.fixture
def checkpoint(kind: str, llama: Path, opt: Path) -> Path:
    """Rotary embedding takes seconds a step in the interpreter."""
    return opt if kind == "kernels" and INTERPRETED else llama


@dataclasses.dataclass(frozen=True)
class Setup:
    """One arm: its model, an empty cache, and its runner."""

    cache: PagedKVCache
    runner: Runner


def build(
    checkpoint: Path,
    device: torch.device,
    kind: str,
    layer_ready: DeviceLayerReadyFlags | None = None,
    *,
    graphs: bool = False,
    most_rows: int = 64,
) -> Setup:
    config = load_model_config(checkpoint)
    model: CausalLM = load_model(
        checkpoint, config, dtype=torch.float32, device=device, show_progress=False
    )
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    cache = PagedKVCache(shape, BLOCKS, device)
    if kind != "kernels":
        runner = TorchModelRunner(
            model, config, cache,
            max_num_seqs=2, max_model_len=64, device=device, batch_invariant=kind != "torch",
        )  # fmt: skip
        runner.layer_ready = layer_ready
        return Setup(cache, runner)
    speed_up(model)
    return Setup(
        cache,
        GpuModelRunner(
            model, config, cache,
            max_num_seqs=2, max_model_len=64, max_num_batched_tokens=most_rows, graphs=graphs,
            layer_ready=layer_ready,
        ),
    )  # fmt: skip


def run(runner: Runner, step: SchedulerOutput) -> ModelRunnerOutput:
    return runner.finish(runner.launch(step))  # type: ignore[arg-type]


# -- the steps ------------------------------------------------------------------------------------


def states(num_logprobs: int | None) -> tuple[AdmittedSequence, AdmittedSequence]:
    params = SamplingParams(temperature=0.0, prompt_logprobs=num_logprobs)
    wanted = num_logprobs or 0
    return (
        AdmittedSequence(0, tuple(PROMPT), len(PROMPT), params, 0, 0, num_logprobs, wanted),
        AdmittedSequence(1, tuple(OTHER), len(OTHER), SamplingParams(temperature=0.0), 0, 0),
    )


def prefix_steps(late: bool) -> list[SchedulerOutput]:
    """The other sequence's prompt, and unless it comes late the prefix."""
    state, other = states(None)
    steps = [step_of([(1, 0, OTHER, 1)], (other,), [(1, 0, OTHERS)])]
    if not late:
        writes = [(0, column, block) for column, block in enumerate(LOADED)]
        steps.append(step_of([(0, 0, PROMPT[:PREFIX], 0)], (state,), writes))
    return steps


def joining_step(num_logprobs: int | None) -> SchedulerOutput:
    """The rows behind the prefix, beside a row of the other sequence."""
    writes = [(0, column, block) for column, block in enumerate((*LOADED, OWN))]
    work = [(0, PREFIX, PROMPT[PREFIX:], 1), (1, len(OTHER), [-1], 1)]
    step = step_of(work, states(num_logprobs)[:1], writes)
    if num_logprobs is None:
        return step
    return dataclasses.replace(
        step, prompt_logprob_spans=(PromptLogprobSpan(0, 0, len(PROMPT) - PREFIX - 1),)
    )


def copying_step() -> SchedulerOutput:
    """All of the first 32 tokens are there: the last one is computed again, in a copy of its
    block."""
    state = AdmittedSequence(
        0, tuple(PROMPT[:PREFIX]), PREFIX, SamplingParams(temperature=0.0), 0, 0, 2
    )
    writes = [(0, 0, LOADED[0]), (0, 1, OWN)]
    work = [(0, PREFIX - 1, PROMPT[PREFIX - 1 : PREFIX], 1), (1, len(OTHER), [-1], 1)]
    step = step_of(work, (state,), writes)
    return dataclasses.replace(step, block_copies=np.array([[LOADED[1]], [OWN]], np.int32))


def following_step(step: SchedulerOutput) -> SchedulerOutput:
    """A row for each sequence, without loads."""
    return step_of(
        [
            (0, int(step.num_computed_tokens[0] + step.num_scheduled_tokens[0]), [-1], 1),
            (1, 6, [-1], 1),
        ]
    )


def equal(ours: ModelRunnerOutput, wanted: ModelRunnerOutput) -> bool:
    """The tokens, and log-probabilities as far as rounding allows."""
    if ours.token_ids != wanted.token_ids:
        return False
    pairs = list(zip(ours.logprobs or (), wanted.logprobs or (), strict=True))
    for slot, rows in wanted.prompt_logprobs.items():
        pairs += zip(ours.prompt_logprobs[slot], rows, strict=True)
    return all(
        (a is None) == (b is None) and (a is None or b is None or abs(a.sampled - b.sampled) < 1e-4)
        for a, b in pairs
    )


@dataclasses.dataclass(frozen=True)
class Expected:
    """Without loads: both steps' results, and the prefix' KV [2 blocks, layers, ...]."""

    joined: ModelRunnerOutput
    followed: ModelRunnerOutput
    content: torch.Tensor


def reference(kind: str) -> str:
    """Who says what is right."""
    return "torch" if kind == "kernels" else kind


def expect(arm: Setup, step: SchedulerOutput) -> Expected:
    for before in prefix_steps(late=False):
        run(arm.runner, before)
    content = arm.cache.data[list(LOADED)].cpu()
    joined = run(arm.runner, step)
    return Expected(joined, run(arm.runner, following_step(step)), content)


def spoil(arm: Setup) -> None:
    """Before the load its blocks hold something else, as after another sequence."""
    arm.cache.data[list(LOADED)] = 0.5


# -- a host thread that loads ---------------------------------------------------------------------


class Loader(DeviceLayerReadyFlags):
    """Flags, and a thread that brings a layer only once the step has begun to wait for it."""

    def __init__(self, device: torch.device, layers: int, *, blind: bool = False) -> None:
        self._asked = [threading.Event() for _ in range(layers)]
        self._blind = blind
        super().__init__(device, lambda ticket: {TICKET: LayerReadyFlag(PLACE, BASE)}.get(ticket))
        self.flags[PLACE] = BASE
        self.waits = 0

    def wait(self, layer: int) -> None:
        if not self.is_armed:  # no load is running
            super().wait(layer)
            return
        self.waits += 1
        if not self._blind:
            for asked in self._asked[: layer + 1]:
                asked.set()
            super().wait(layer)

    def load(self, arm: Setup, content: torch.Tensor) -> threading.Thread:
        def bring() -> None:
            for layer, asked in enumerate(self._asked):
                asked.wait()
                put_layer(arm.cache, content, layer)
                self.flags[PLACE] = landed(layer)

        thread = threading.Thread(target=bring)
        thread.start()
        return thread

    def hurry(self) -> None:
        for asked in self._asked:
            asked.set()


def landed(layer: int, base: int = BASE) -> int:
    """The flag once a layer has landed."""
    return (base + layer + 1 + 2**31) % 2**32 - 2**31


def put_layer(
    cache: PagedKVCache, content: torch.Tensor, layer: int, blocks: Sequence[int] = LOADED
) -> None:
    for block, row in zip(blocks, content, strict=True):
        cache.data[block, layer].copy_(row[layer], non_blocking=True)


on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_kv_load_cuda plays the loader with streams"
)
STEPS: dict[str, Callable[[], SchedulerOutput]] = {
    "drawn by kernels": lambda: joining_step(None),
    "log-probabilities": lambda: joining_step(2),
    "a copied block": copying_step,
}


@on_cpu
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in STEPS if kind != "kernels" or "copied" in name],
)
def test_a_step_sees_what_comes_while_it_runs(
    checkpoint: Path, kind: str, name: str, device: torch.device
) -> None:
    step = STEPS[name]()
    expected = expect(build(checkpoint, device, reference(kind)), step)
    layers = expected.content.shape[1]
    loader = Loader(device, layers)
    arm = build(checkpoint, device, kind, loader)
    spoil(arm)
    for before in prefix_steps(late=True):
        run(arm.runner, before)
    assert loader.waits == 0  # steps without loads wait at no flag
    thread = loader.load(arm, expected.content)
    joined = run(arm.runner, dataclasses.replace(step, kv_loads=(TICKET, 9)))
    thread.join()
    assert loader.waits == layers + (name == "a copied block")
    assert equal(joined, expected.joined) and not joined.kv_loads_timed_out
    followed = run(arm.runner, following_step(step))
    assert equal(followed, expected.followed) and not followed.kv_loads_timed_out
    assert loader.waits == layers + (name == "a copied block")


class CalledGraphs(GraphSet[tuple[str, int]]):
    """Graphs whose replay calls what was to be captured."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[str, int], Callable[[], None]] = {}
        self.replayed: list[tuple[str, int]] = []

    def capture(self, key: tuple[str, int], body: Callable[[], None]) -> None:
        self.bodies[key] = body

    def replay(self, key: tuple[str, int]) -> None:
        self.replayed.append(key)
        self.bodies[key]()


@on_cpu
@pytest.mark.parametrize("kind", ["kernels"])  # whose draws by kernels are checked here
def test_only_steps_with_loads_replay_graphs_that_wait(
    checkpoint: Path, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_llm.gpu.model_runner.GraphSet", CalledGraphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step = joining_step(None)
    expected = expect(build(checkpoint, device, reference(kind)), step)
    loader = Loader(device, expected.content.shape[1])
    arm = build(checkpoint, device, kind, loader, graphs=True, most_rows=8)
    assert arm.runner.graphs is not None  # type: ignore[union-attr]
    graphs = arm.runner.graphs.captured  # type: ignore[union-attr]
    assert isinstance(graphs, CalledGraphs)
    waiting = {bucket for name, bucket in graphs.bodies if name == "waiting model"}
    assert waiting == {8} and ("model", 8) in graphs.bodies
    spoil(arm)
    for before in prefix_steps(late=True):
        run(arm.runner, before)
    assert graphs.replayed == [("model", 8), ("head", 1)]
    thread = loader.load(arm, expected.content)
    assert equal(run(arm.runner, dataclasses.replace(step, kv_loads=(TICKET,))), expected.joined)
    thread.join()
    assert graphs.replayed[2:] == [("waiting model", 8), ("head", 2)]
    waits = loader.waits
    following = following_step(step)
    assert equal(run(arm.runner, following), expected.followed)
    assert graphs.replayed[4:] == [("short decode", 2)] and loader.waits == waits
    # A step that would only decode, too: no graph that decodes ever waits.
    later = step_of([(0, int(following.num_computed_tokens[0]) + 1, [-1], 1), (1, 7, [-1], 1)])
    run(arm.runner, dataclasses.replace(later, kv_loads=(TICKET,)))
    assert graphs.replayed[5:] == [("waiting model", 8), ("head", 2)]
    plain = build(checkpoint, device, kind, graphs=True, most_rows=8).runner.graphs  # type: ignore[union-attr]
    assert not any(name == "waiting model" for name, _ in plain.captured.bodies)  # type: ignore[union-attr]


@on_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_without_waiting_the_results_are_others(
    checkpoint: Path, kind: str, device: torch.device
) -> None:
    """So the test above can fail."""
    step = joining_step(2)
    expected = expect(build(checkpoint, device, reference(kind)), step)
    loader = Loader(device, expected.content.shape[1], blind=True)
    arm = build(checkpoint, device, kind, loader)
    spoil(arm)
    for before in prefix_steps(late=True):
        run(arm.runner, before)
    thread = loader.load(arm, expected.content)
    joined = run(arm.runner, dataclasses.replace(step, kv_loads=(TICKET,)))
    loader.hurry()
    thread.join()
    assert not equal(joined, expected.joined)


@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_a_load_that_never_comes_is_reported(
    checkpoint: Path, kind: str, device: torch.device
) -> None:
    """By that step alone, and one that draws nothing tells it, too."""
    layer_ready = DeviceLayerReadyFlags(
        device, lambda ticket: LayerReadyFlag(ticket, 0), most_looks=3
    )
    arm = build(checkpoint, device, kind, layer_ready)
    layer_ready.flags[2] = 3  # layers
    for before in prefix_steps(late=True):
        assert not run(arm.runner, before).kv_loads_timed_out
    silent = dataclasses.replace(joining_step(None), num_samples=np.zeros(2, np.int32))
    first = arm.runner.launch(dataclasses.replace(silent, kv_loads=(2, 1)))
    rest = step_of([(0, len(PROMPT), [5], 1), (1, 6, [5], 1)])
    second = arm.runner.launch(dataclasses.replace(rest, kv_loads=(2,)))
    assert arm.runner.finish(first).kv_loads_timed_out  # type: ignore[arg-type]
    assert not arm.runner.finish(second).kv_loads_timed_out  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_loads_need_flags_and_bear_no_drafts(
    checkpoint: Path, kind: str, device: torch.device
) -> None:
    step = dataclasses.replace(joining_step(None), kv_loads=(TICKET,))
    with pytest.raises(AssertionError, match="nothing loads"):
        build(checkpoint, device, kind).runner.launch(step)
    layer_ready = DeviceLayerReadyFlags(device, lambda ticket: None, most_looks=MOST_LOOKS)
    none = np.zeros(0, np.int32)
    drafted = dataclasses.replace(step, drafts=DraftBatch(np.zeros(2, np.int32), none, none))
    with pytest.raises(AssertionError, match="has drafts"):
        build(checkpoint, device, kind, layer_ready).runner.launch(drafted)
