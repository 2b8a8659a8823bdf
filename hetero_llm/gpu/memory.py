"""Shares of the GPU's memory: weights, the largest step, the KV cache.

Every way to run out of it at start ends in a `ConfigError` that names the argument to change, in
which direction, and the figures in GiB behind the advice.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.core.errors import ConfigError, ContextTooLongError
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, ModelRunnerOutput, SchedulerOutput
from hetero_llm.gpu.compile_ahead import compiling_ahead, log_compiled
from hetero_llm.gpu.weight_offload import GIB, OffloadPlan, stage_products, weights_on_host
from hetero_llm.models.layers import CausalLM
from hetero_llm.runner.kv_cache import KVCacheShape

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = TypeVar("P")


class StepRunner(Protocol[P]):
    """The methods of a runner that the profile run calls."""

    def launch(self, step: SchedulerOutput) -> P: ...

    def finish(self, pending: P) -> ModelRunnerOutput: ...


class AlsoRuns(Generic[P]):
    """A `StepRunner` that runs another step before the one that it is given.

    Args:
        step: that other one, whose KV blocks are among those of the given one.
    """

    def __init__(self, runner: StepRunner[P], step: SchedulerOutput) -> None:
        self._runner, self._step = runner, step

    def launch(self, step: SchedulerOutput) -> P:
        self._runner.finish(self._runner.launch(self._step))
        return self._runner.launch(step)

    def finish(self, pending: P) -> ModelRunnerOutput:
        return self._runner.finish(pending)


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """Bytes that the profile run found.

    Attributes:
        total: of the GPU.
        utilization: share of `total` that may be used in all.
        used: weights, the CUDA context and anything else on the GPU, without what torch holds for
            tensors to come.
        step: the largest step and the runner's own buffers, beside `used`.
    """

    total: int
    utilization: float
    used: int
    step: int

    @property
    def pool_bytes(self) -> int:
        """Room for the KV cache; may be negative."""
        return int(self.total * self.utilization) - self.used - self.step

    def __str__(self) -> str:
        return (
            f"{gib(int(self.total * self.utilization))} of {gib(self.total)} may be used, "
            f"{gib(self.used)} hold weights and what else is on the GPU, "
            f"{gib(self.step)} the largest step"
        )


@contextmanager
def kernels_ahead(make_bodies: Callable[[], Sequence[Callable[[], None]]]) -> Iterator[None]:
    """Compiles the kernels of steps beside the block, which finds them compiled or waits for each:
    the profile run would compile its own one after the other, and libraries that it tries first
    take seconds in which threads can compile.

    Args:
        make_bodies: makes the steps' bodies; what they hold is freed before the block begins.
    """
    with compiling_ahead() as ahead:
        _unless_out_of_memory(lambda: ahead.add(make_bodies()))  # else the block runs out of it
        free_unreachable()
        yield
    log_compiled(ahead.num_compiled)


def measure_room(
    runner_with: Callable[[int], StepRunner[P]],
    config: SchedulerConfig,
    shape: KVCacheShape,
    *,
    utilization: float,
    conservative: bool,
) -> PoolRoom:
    """Runs the largest step once and measures its memory.

    Args:
        runner_with: builds a runner with a cache of a number of blocks and without CUDA graphs.
        utilization: share of the card's memory that the process may use in all.
        conservative: judge by the driver's count at the fullest moment instead of by torch's
            count of tensors: memory that kernels allocate for themselves and what the allocator
            loses to fragments is then part of the step.

    Raises:
        ConfigError: the step ran out of memory.
    """
    step = largest_step(config)
    num_blocks = int(step.block_table_writes[2].max()) + 1
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()

    def profile() -> tuple[int, int]:
        runner = runner_with(num_blocks)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with _lowest_free_memory() as lowest:
            runner.finish(runner.launch(step))
            lowest()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), lowest()

    measured = _unless_out_of_memory(profile)
    free_unreachable()
    if measured is None:
        raise ConfigError(
            "max_num_batched_tokens",
            config.max_num_batched_tokens,
            f"the largest step does not fit into the GPU: of {gib(total)}, {gib(free)} were free "
            f"after loading ({gib(before)} of weights); lower max_num_batched_tokens, or "
            f"max_num_seqs ({config.max_num_seqs}), or raise cpu_offload_gb",
        )
    peak, lowest_free = measured
    free, total = torch.cuda.mem_get_info()
    cache = num_blocks * shape.block_bytes  # allocated for the profile, but not part of a step
    taken = peak - before - cache
    used = total - free
    if conservative:
        taken = max(taken, free - lowest_free - cache)
    else:
        # A small tensor that outlives the profile run keeps a large piece, which steps then use.
        used -= torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return PoolRoom(total, utilization, used, max(taken, 0))


def memory_left(utilization: float) -> int:
    """Bytes of the share `utilization` of the GPU that nothing holds yet; may be negative."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total * utilization) - (total - free)


def free_unreachable() -> None:
    """Returns the memory of unreferenced engines to the GPU. Runners are part of reference cycles
    through their graphs, so dropping the last reference alone frees nothing."""
    gc.collect()
    torch.cuda.empty_cache()


def too_small_error(
    num_blocks: int, config: SchedulerConfig, shape: KVCacheShape, room: PoolRoom
) -> ContextTooLongError:
    """The profiled pool does not hold one sequence of `max_model_len`."""
    needed = -(-config.max_model_len // config.block_size)
    fits = max(num_blocks, 0) * config.block_size
    shorter = f"lower max_model_len to at most {fits}, " if fits > 1 else ""
    return ContextTooLongError(
        "gpu_memory_utilization",
        room.utilization,
        f"leaves {gib(max(room.pool_bytes, 0))} or {max(num_blocks, 0)} KV blocks ({room}); one "
        f"sequence of max_model_len ({config.max_model_len}) needs {needed} blocks or "
        f"{gib(needed * shape.block_bytes)}; {shorter}raise gpu_memory_utilization or "
        f"cpu_offload_gb, or lower max_num_batched_tokens ({config.max_num_batched_tokens})",
        fits=fits,
    )


def build_runner(
    runner_with: Callable[[int], T], num_blocks: int, shape: KVCacheShape, room: PoolRoom | None
) -> T:
    """`runner_with(num_blocks)`, the final one.

    Args:
        room: None if the user fixed the number of blocks.

    Raises:
        ConfigError: the GPU has no memory for it.
    """
    runner = _unless_out_of_memory(lambda: runner_with(num_blocks))
    if runner is not None:
        return runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    wanted = f"{num_blocks} KV blocks take {gib(num_blocks * shape.block_bytes)}"
    if room is None:
        fit = free // shape.block_bytes
        raise ConfigError(
            "num_gpu_blocks_override",
            num_blocks,
            f"{wanted} and {gib(free)} of {gib(total)} are free; lower it (at most {fit} fit), or "
            "leave it out",
        )
    raise ConfigError(
        "gpu_memory_utilization",
        room.utilization,
        f"{wanted} ({room}), and the GPU ran out of memory with them and what CUDA graphs need; "
        "lower gpu_memory_utilization or max_num_seqs, or set conservative_dry_run or "
        "enforce_eager",
    )


def load_weights(load: Callable[[], CausalLM], device: torch.device, plan: OffloadPlan) -> CausalLM:
    """`load()`, with the plan's weights in host memory and all others on the GPU.

    Args:
        load: builds and fills the plan's model on `device`.

    Raises:
        ConfigError: the GPU, or the host, has no memory for them.
    """

    def load_and_stage() -> CausalLM:
        with weights_on_host(plan) as moved:
            model = load()
        stage_products(moved, device, plan)
        return model

    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    model = _unless_out_of_memory(load_and_stage)
    if model is None:
        torch.cuda.empty_cache()
        raise no_room_for_weights(free, total, plan)
    if plan.chosen:
        logger.info(
            "cpu_offload_gb: %s of %s of weights stay in host memory, which saves %s on the GPU",
            gib(plan.moved_bytes),
            gib(plan.weight_bytes),
            gib(plan.freed_bytes),
        )
    if plan.budget_gb * GIB > plan.movable_bytes:
        logger.warning(
            "cpu_offload_gb=%g: only %s of the weights can be moved, and are",
            plan.budget_gb,
            gib(plan.movable_bytes),
        )
    return model


def no_room_for_weights(free: int, total: int, plan: OffloadPlan) -> ConfigError:
    """The weights that stay on the GPU do not fit into `free` of `total` bytes."""
    figures = (
        f"{gib(plan.weight_bytes - plan.freed_bytes)} of weights do not fit into the GPU, which "
        f"has {gib(free)} of {gib(total)} free"
    )
    if plan.moved_bytes < plan.movable_bytes:
        advice = f"raise it (up to {gib(plan.movable_bytes)} can stay in host memory)"
    else:
        advice = "no more can be moved; take a smaller model or free memory on the GPU"
    return ConfigError("cpu_offload_gb", plan.budget_gb, f"{figures}; {advice}")


def gib(count: int) -> str:
    """A number of bytes as text in GiB."""
    return f"{count / GIB:.2f} GiB"


def largest_step(config: SchedulerConfig) -> SchedulerOutput:
    """The step that needs the most memory: `max_num_seqs` new sequences, each of which samples a
    token (sampling works on a row of the vocabulary each). Most have one token; as few as possible
    share the rest of the token budget (attention needs most memory for long chunks)."""
    lengths = [1] * config.max_num_seqs
    left = config.max_num_batched_tokens - config.max_num_seqs
    longest = max(1, config.max_model_len - 1)
    for i in range(config.max_num_seqs):
        more = min(left, longest - 1)
        lengths[i] += more
        left -= more
    counts = np.array(lengths, np.int32)
    slots = np.arange(len(counts), dtype=np.int32)
    per_sequence = -(-counts // config.block_size)
    columns = np.concatenate([np.arange(n, dtype=np.int32) for n in per_sequence])
    blocks = np.arange(len(columns), dtype=np.int32)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    return SchedulerOutput(
        request_slots=slots,
        num_computed_tokens=np.zeros(len(counts), np.int32),
        num_scheduled_tokens=counts,
        token_ids=np.zeros(int(counts.sum()), np.int32),
        num_samples=np.ones(len(counts), np.int32),
        prompt_logprob_spans=(),
        admitted=tuple(AdmittedSequence(int(s), (0,), 1, params, 0, 0) for s in slots),
        block_table_writes=np.stack([np.repeat(slots, per_sequence), columns, blocks]),
        block_copies=np.zeros((2, 0), np.int32),
    )


@contextmanager
def _lowest_free_memory() -> Iterator[Callable[[], int]]:
    """A function that returns the least free memory (bytes, as the driver counts) seen so far.

    Reads it after every module of the model and whenever the function is called.
    """
    lowest = torch.cuda.mem_get_info()[0]

    def look() -> int:
        nonlocal lowest
        lowest = min(lowest, torch.cuda.mem_get_info()[0])
        return lowest

    def after_module(*_: object) -> None:
        look()

    handle = register_module_forward_hook(after_module)
    try:
        yield look
    finally:
        handle.remove()


def _unless_out_of_memory(make: Callable[[], T]) -> T | None:
    """`make()`, or None if the GPU ran out of memory, with nothing kept alive by the exception.

    Libraries that allocate by themselves (cuBLAS, Triton) raise messages of their own.
    """
    try:
        return make()
    except RuntimeError as error:
        text = str(error)
        if "out of memory" in text.lower() or "STATUS_ALLOC_FAILED" in text:
            return None
        raise
