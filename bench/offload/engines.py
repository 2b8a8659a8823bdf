"""What the benches of the host tier share: engines by name, prompts that no cache has seen, and
counters that say where a prompt's blocks came from."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from bench.generation import first_token_ms, greedy
from bench.shapes import SHAPES, Prompts, start, write_config
from hetero_llm import LLM
from hetero_llm.core.request import Request
from hetero_llm.core.step import ModelRunnerOutput, SchedulerOutput
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.kv_cache import KVCacheShape
from hetero_llm.utils.gc_control import prompt_wakeups

BLOCK = 16
GIB = 1 << 30
GPU_BLOCKS = 4736
"""75,776 tokens, 9.25 GiB of the 8B shape: a prompt of 64K and little more fits."""
_SCALE_UP_VOCAB = 4096  # of the demo pair: ids beyond it are padding
_PATIENCE = 20.0  # seconds for stores to end


class WrongTier(RuntimeError):
    """Blocks came from elsewhere than the bench says; its figures would be of something else."""


@dataclass(frozen=True)
class Tally:
    """Growth of an engine's counters between two readings: blocks, bytes, transfers."""

    gpu: int
    cpu: int
    total: int
    cached_tokens: int
    h2d: int
    d2h: int
    failed: int
    dropped: int

    def expect_host(self, least: int, most: int, block_bytes: int) -> None:
        """Check that `least` to `most` blocks came from host memory, each copied once (long
        prefixes in two parts), and that none was on the GPU.

        Raises:
            WrongTier: they did not.
        """
        fine = least <= self.cpu <= most and self.h2d == self.cpu * block_bytes
        if not fine or self.gpu or self.failed:
            raise WrongTier(f"wanted {least} to {most} blocks of host memory, got {self}")

    def expect_device(self, tokens: int) -> None:
        """Check that `tokens` were in the GPU's prefix cache, and nothing was copied.

        Raises:
            WrongTier: they were not.
        """
        if self.cached_tokens != tokens or self.h2d or self.cpu:
            raise WrongTier(f"wanted {tokens} tokens of the GPU's cache, got {self}")

    def expect_nothing(self) -> None:
        """Check that every token was computed.

        Raises:
            WrongTier: some were found.
        """
        if self.cached_tokens or self.cpu or self.gpu or self.h2d:
            raise WrongTier(f"wanted no hit, got {self}")


_COUNTERS = {
    "gpu": "prefix_blocks_gpu",
    "cpu": "prefix_blocks_cpu",
    "total": "prefix_blocks_total",
    "cached_tokens": "prefix_cache_hits",
    "h2d": "kv_offload_bytes_h2d",
    "d2h": "kv_offload_bytes_d2h",
    "failed": "kv_offload_failed_loads",
    "dropped": "kv_offload_dropped_stores",
}


def tally_of(before: dict[str, float], after: dict[str, float], *, offload: bool) -> Tally:
    """The difference of two readings of `Engine.metrics`.

    Raises:
        WrongTier: an engine with offload lacks a counter.
    """
    missing = [name for name in _COUNTERS.values() if name not in after]
    if offload and missing:
        raise WrongTier(f"the engine does not count {', '.join(missing)}")
    grown = {
        field: int(after.get(name, 0) - before.get(name, 0)) for field, name in _COUNTERS.items()
    }
    return Tally(**grown)


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A finished step: when it ended, whether it had rows of a prompt, whether it waited for
    loads."""

    end: float
    has_chunks: bool
    has_loads: bool


class StepWatch:
    """A runner between the engine and its own; notes the steps between `begin` and `end`.

    Attributes:
        num_plain: steps noted that had neither prompt rows nor loads.
    """

    def __init__(self, runner: Any) -> None:
        self.inner = runner
        self.num_plain = 0
        self._steps: list[SeenStep] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self) -> None:
        self._steps, self.num_plain = [], 0

    def end(self) -> list[SeenStep]:
        steps, self._steps = self._steps, None
        assert steps is not None
        return steps

    def launch(self, step: SchedulerOutput) -> tuple[SchedulerOutput, Any]:
        return step, self.inner.launch(step)

    def finish(self, pending: tuple[SchedulerOutput, Any]) -> ModelRunnerOutput:
        step, launched = pending
        output = self.inner.finish(launched)
        if self._steps is not None:
            seen = SeenStep(time.perf_counter(), step.has_chunks, bool(step.kv_loads))
            self._steps.append(seen)
            self.num_plain += not (seen.has_chunks or seen.has_loads)
        return output


def plain_intervals(steps: list[SeenStep]) -> list[float]:
    """Seconds from the end of one step to the end of the next, for those without prompt rows and
    without loads: what a running sequence waits for its token."""
    pairs = zip(steps, steps[1:], strict=False)
    return [b.end - a.end for a, b in pairs if not (b.has_chunks or b.has_loads)]


class Served:
    """One engine of the bench.

    Attributes:
        block_bytes: of one KV block over all layers.
        watch: sees all its steps.
    """

    def __init__(self, llm: LLM, config: ModelConfig, *, offload: bool) -> None:
        self.llm = llm
        self.engine: Engine = llm.engine
        self.watch = StepWatch(self.engine.runner)
        self.engine.runner = self.watch
        self.block_bytes = KVCacheShape(
            config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, torch.bfloat16
        ).block_bytes
        self._offload = offload
        self._num_requests = 0

    @property
    def loads(self) -> Any:
        """The scheduler's part that decides when a loading sequence runs."""
        return self.engine.scheduler.loads

    def counters(self) -> dict[str, float]:
        return self.engine.metrics()

    def since(self, before: dict[str, float]) -> Tally:
        return tally_of(before, self.counters(), offload=self._offload)

    def first_token(self, prompt: list[int]) -> tuple[float, Tally]:
        """Milliseconds of `LLM.generate` for one token, and where the prompt's blocks were."""
        before = self.counters()
        ms, _ = first_token_ms(self.llm, prompt)
        return ms, self.since(before)

    def request(self, prompt: list[int], tokens: int) -> Request:
        """Ready to be added; greedy, `tokens` tokens."""
        self._num_requests += 1
        name = f"b{self._num_requests}"
        return self.engine.make_request(name, Prompt(None, prompt), greedy(tokens))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Steps as `LLM` does."""
        while not done():
            with prompt_wakeups():
                self.engine.step()

    def wait_idle(self) -> None:
        """Wait until nothing is being copied to host memory.

        Raises:
            WrongTier: that takes more than 20 s.
        """
        self.engine.step()  # one launched step may be left whose output nothing needs
        deadline = time.perf_counter() + _PATIENCE
        while self.engine.poll_host_memory():
            if time.perf_counter() > deadline:
                raise WrongTier("stores do not end")

    def wait_stored(self, before: dict[str, float], blocks: int) -> None:
        """Wait until nothing is being copied; `blocks` more must be in host memory than `before`.

        Raises:
            WrongTier: they are not.
        """
        self.wait_idle()
        found = self.since(before)
        if self._offload and found.d2h < blocks * self.block_bytes:
            raise WrongTier(f"{blocks} blocks were to be stored: {found}")

    def keep(self, prompt: list[int]) -> float:
        """Computes a prompt that no cache has and moves it to host memory; milliseconds to its
        first token."""
        before = self.counters()
        ms, found = self.first_token(prompt)
        found.expect_nothing()
        self.wait_stored(before, len(prompt) // BLOCK)
        return ms


def token_seconds(request: Request, begin: float) -> float:
    """From `begin` (monotonic clock) to a request's first token, which is there."""
    first = request.metrics.first_token_time
    assert first is not None
    return first - begin


def share_for(gib: float) -> float:
    """`cpu_prefill_memory_utilization` that asks for `gib` GiB."""
    return gib * GIB / psutil.virtual_memory().total


@dataclass(frozen=True)
class Settings:
    """Of all parts: the models and how much is measured.

    Attributes:
        model: one of `bench.shapes.SHAPES` (random weights) or a folder.
        runs: of each arm and case.
        target, draft: folders of the pair that "spec" runs; None: that part is left out.
    """

    model: str
    runs: int = 12
    seed: int = 0
    lengths: tuple[int, ...] = (4096, 16384, 32768)
    device: str = "cuda"
    target: str | None = None
    draft: str | None = None

    def ids(self, part: str) -> Prompts:
        """Prompts of one part: other ones in every part."""
        return Prompts(self.vocab, [self.seed, *part.encode()])

    @property
    def vocab(self) -> int:
        shape = SHAPES.get(self.model)
        return _SCALE_UP_VOCAB if shape is None else int(shape["vocab_size"])


_POOL_GIB = {"lazy": 20, "not lazy": 14, "victims": 32, "wide": 20}
_OFFLOAD: dict[str, dict[str, Any]] = {
    "off": {},
    "lazy": {"apc_offload_gpu_evictor_limit": 0},
    "not lazy": {"apc_offload_gpu_evictor_limit": 0, "apc_offload_not_lazy": True},
    "victims": {},
    "wide": {"apc_offload_gpu_evictor_limit": 0, "num_gpu_blocks_override": 2 * GPU_BLOCKS},
}
"""Engines by name. "lazy" and "not lazy": every block leaves the GPU as soon as no request uses it.
"victims": blocks leave when others need their place, as in service. "wide": as "lazy", with room
for what is being stored beside what runs; with less, blocks are lost, as no step waits for stores.
"off": no host tier."""


class Engines:
    """Starts engines when they are asked for and keeps them until they are closed."""

    def __init__(self, settings: Settings, **engine_args: Any) -> None:
        self._settings = settings
        self._own = engine_args
        self._open: dict[str, Served] = {}

    def get(self, name: str) -> Served:
        if name not in self._open:
            begin = time.perf_counter()
            self._open[name] = self._start(name)
            print(f"engine {name!r} after {time.perf_counter() - begin:.1f} s", flush=True)
        return self._open[name]

    def close(self, *, but: set[str] | frozenset[str] = frozenset()) -> None:
        """Closes all engines except those named."""
        for name in [name for name in self._open if name not in but]:
            self._open.pop(name).llm.close()

    def _start(self, name: str) -> Served:
        model, offload = self._settings.model, name != "off"
        args: dict[str, Any] = {
            "dtype": "bfloat16", "device": self._settings.device, "max_num_batched_tokens": 16384,
            "max_model_len": 65536 + 2048, "num_gpu_blocks_override": GPU_BLOCKS,
            "block_size": BLOCK, "enable_prefix_caching": True,
        }  # fmt: skip
        if offload:
            args |= {
                "enable_prefix_cache_offload": True, "apc_offload_background_pin": False,
                "cpu_prefill_memory_utilization": share_for(_POOL_GIB[name]), **_OFFLOAD[name],
            }  # fmt: skip
        args |= self._own
        if model in SHAPES:
            llm, _ = start(SHAPES[model], **args)
            with tempfile.TemporaryDirectory() as folder:
                config = load_model_config(write_config(SHAPES[model], Path(folder)))
        else:
            llm, config = LLM(model, **args), load_model_config(Path(model))
        served = Served(llm, config, offload=offload)
        try:
            for length in (20, 300, 1100):  # first use of what is compiled or captured late
                served.first_token(Prompts(self._settings.vocab, length).one(length))
            served.wait_idle()
        except BaseException:
            llm.close()  # its pool would be missing to the next engine
            raise
        return served


def summary(values: list[float], name: str) -> dict[str, float]:
    """Median and 99th percentile as two columns."""
    return {
        f"{name}_p50": float(np.median(values)),
        f"{name}_p99": float(np.percentile(values, 99)),
    }
