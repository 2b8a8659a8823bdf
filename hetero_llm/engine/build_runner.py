"""Builds a model's runner with its KV cache, on any device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hetero_llm.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.models.configs.transformers_vision import ImageModelConfig

if TYPE_CHECKING:
    import torch

    from hetero_llm.core.acceptance import TypicalAcceptance
    from hetero_llm.cpu.backend import NativeBackend
    from hetero_llm.cpu.model_runner import NativeModelRunner
    from hetero_llm.gpu.adapters import GpuAdapters
    from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.layers import CausalLM
    from hetero_llm.runner.attention import RowKernel
    from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
    from hetero_llm.runner.layer_ready import LayerReadyFlags
    from hetero_llm.runner.model_runner import TorchModelRunner

logger = logging.getLogger(__name__)

_LARGE_TABLE = 1 << 30  # bytes
_TRIED_TOKENS = (1, 16)  # sizes of the steps that `_can_be_captured` tries


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner and its KV cache."""

    runner: ModelRunner[Any]
    cache: PagedKVCache


@dataclass(frozen=True, slots=True)
class RunnerInputs:
    """Everything a runner is built from. See `build_runner`."""

    model: CausalLM
    model_config: ModelConfig
    shape: KVCacheShape
    device: torch.device
    scheduler: SchedulerConfig
    cache: CacheConfig
    batch_invariant: bool
    enforce_eager: bool
    drafts: bool
    native: NativeBackend | None
    typical: TypicalAcceptance | None
    layer_ready: LayerReadyFlags | None
    adapters: GpuAdapters | None

    @property
    def blocks_per_sequence(self) -> int:
        """KV blocks of one sequence of `max_model_len` tokens."""
        return -(-self.scheduler.max_model_len // self.cache.block_size)


def build_runner(
    config: EngineConfig,
    scheduler_config: SchedulerConfig,
    model: CausalLM,
    *,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    drafts: bool,
    native: NativeBackend | None,
    layer_ready: LayerReadyFlags | None = None,
    adapters: GpuAdapters | None = None,
) -> BuiltRunner:
    """Builds the runner and its KV cache.

    Args:
        drafts: whether steps may have draft trees.
        native: settings of the native executor; None: it does not run the model.
        layer_ready: flags at which steps wait for KV loads from host memory; None: there are none.
        adapters: of the model's products on a GPU; None: it has none there.

    Raises:
        ConfigError: there is not enough memory.
    """
    inputs = RunnerInputs(
        model,
        model_config,
        cache_shape(config, model_config, dtype, device),
        device,
        scheduler_config,
        config.cache,
        config.batch_invariant,
        config.enforce_eager,
        drafts,
        native,
        None if config.speculation is None else config.speculation.typical,
        layer_ready,
        adapters,
    )
    if config.cache.num_blocks is not None:
        needed, length = inputs.blocks_per_sequence, scheduler_config.max_model_len
        _check_fixed_blocks(config.cache.num_blocks, needed, length)
    return _cuda_runner(inputs) if device.type == "cuda" else _cpu_runner(inputs)


def _cpu_runner(inputs: RunnerInputs) -> BuiltRunner:
    from hetero_llm.runner.kv_cache import PagedKVCache

    if inputs.cache.conservative:
        logger.warning("conservative_dry_run has no effect on a CPU: there is no profile run")
    num_blocks = inputs.cache.num_blocks
    if num_blocks is None:
        num_blocks = _blocks_in_host_memory(inputs.cache, inputs.scheduler, inputs.shape)
    cache = PagedKVCache(inputs.shape, num_blocks, inputs.device)
    if inputs.native is not None:
        assert inputs.layer_ready is None, "the native executor has its KV in host memory"
        return BuiltRunner(_native_runner(inputs, inputs.native, cache), cache)
    row_kernel = None
    if not inputs.batch_invariant:
        from hetero_llm.cpu.paged_attention import native_row_kernel
        from hetero_llm.runner.scored_attention import Scoring

        config = inputs.model_config
        row_kernel = native_row_kernel(cache, config.num_heads, Scoring.of(config))
    return BuiltRunner(_torch_runner(inputs, cache, row_kernel), cache)


def _blocks_in_host_memory(
    cache: CacheConfig, scheduler: SchedulerConfig, shape: KVCacheShape
) -> int:
    """KV blocks for the configured share of the free host memory, no more than `max_num_seqs`
    sequences can fill.

    Raises:
        ConfigError: they do not hold one sequence of `max_model_len`.
    """
    from hetero_llm.utils.topology import usable_memory_bytes

    share = cache.memory_utilization
    needed = -(-scheduler.max_model_len // cache.block_size)
    num_blocks = int(usable_memory_bytes() * share) // shape.block_bytes
    num_blocks = min(num_blocks, needed * scheduler.max_num_seqs)
    if num_blocks < needed:
        raise ConfigError(
            "gpu_memory_utilization",
            share,
            f"gives {num_blocks} KV blocks of the free host memory, one sequence of "
            f"max_model_len ({scheduler.max_model_len}) needs {needed}; lower "
            f"max_model_len or raise gpu_memory_utilization",
        )
    return num_blocks


def check_context(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks that a sequence of `max_model_len` tokens fits, before anything is loaded or
    allocated: the length may come from an unchecked config.json. A rotary table of
    more than 1 GiB is logged.

    Raises:
        ConfigError: it does not fit.
    """
    shape, cache = cache_shape(config, model_config, dtype, device), config.cache
    length = scheduler.max_model_len
    needed = -(-length // cache.block_size)
    if cache.num_blocks is not None:
        _check_fixed_blocks(cache.num_blocks, needed, length)
    elif device.type == "cpu":
        _blocks_in_host_memory(cache, scheduler, shape)
    else:
        _check_device_memory(cache, shape, length, device)
    table = 0 if model_config.rope is None else 4 * length * model_config.rope.rotary_dim
    if table > _LARGE_TABLE:
        logger.warning(
            "a context of %d tokens has a rotary table of %.1f GiB; max_model_len lowers it",
            *(length, table / 2**30),
        )


def _check_device_memory(
    cache: CacheConfig, shape: KVCacheShape, length: int, device: torch.device
) -> None:
    """Compares one sequence with all of the GPU's memory; `measure_room` does so with what is left
    after loading."""
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    needed = -(-length // cache.block_size) * shape.block_bytes
    if needed > total:
        raise ConfigError(
            "max_model_len",
            length,
            f"the KV cache of one such sequence takes {needed / 2**30:.1f} GiB, the GPU has "
            f"{total / 2**30:.1f} GiB; lower max_model_len",
        )


def _native_runner(
    inputs: RunnerInputs, native: NativeBackend, cache: PagedKVCache
) -> NativeModelRunner:
    from hetero_llm.cpu.model_runner import NativeModelRunner

    runner = NativeModelRunner(
        native.executor(inputs.model, inputs.model_config, cache),
        inputs.model_config,
        cache,
        max_num_seqs=inputs.scheduler.max_num_seqs,
        max_model_len=inputs.scheduler.max_model_len,
        max_num_batched_tokens=inputs.scheduler.max_num_batched_tokens,
        drafts=inputs.drafts,
    )
    runner.typical = inputs.typical
    return runner


def _cuda_runner(inputs: RunnerInputs) -> BuiltRunner:
    from hetero_llm.gpu.memory import build_runner as build_within
    from hetero_llm.gpu.memory import measure_room, too_small_error
    from hetero_llm.gpu.model_runner import GpuModelRunner
    from hetero_llm.runner.kv_cache import PagedKVCache

    takes_images = isinstance(inputs.model_config, ImageModelConfig)
    if takes_images:
        logger.info("a model with images runs without CUDA graphs")
    on_torch = inputs.batch_invariant or takes_images
    graphs = not on_torch and not inputs.enforce_eager and _can_be_captured(inputs.model)

    def runner_with(num_blocks: int, graphs: bool) -> BuiltRunner:
        cache = PagedKVCache(inputs.shape, num_blocks, inputs.device)
        if on_torch:
            return BuiltRunner(_torch_runner(inputs, cache, None), cache)
        runner = GpuModelRunner(
            inputs.model,
            inputs.model_config,
            cache,
            max_num_seqs=inputs.scheduler.max_num_seqs,
            max_model_len=inputs.scheduler.max_model_len,
            max_num_batched_tokens=inputs.scheduler.max_num_batched_tokens,
            graphs=graphs,
            drafts=inputs.drafts,
            layer_ready=cast("DeviceLayerReadyFlags | None", inputs.layer_ready),
            adapters=inputs.adapters,
        )
        runner.typical = inputs.typical
        return BuiltRunner(runner, cache)

    room, num_blocks = None, inputs.cache.num_blocks
    if num_blocks is None:
        room = measure_room(
            lambda blocks: runner_with(blocks, graphs=False).runner,
            inputs.scheduler,
            inputs.shape,
            utilization=inputs.cache.memory_utilization,
            conservative=inputs.cache.conservative,
        )
        num_blocks = room.pool_bytes // inputs.shape.block_bytes
        if num_blocks < inputs.blocks_per_sequence:
            raise too_small_error(num_blocks, inputs.scheduler, inputs.shape, room)
    final = partial(runner_with, graphs=graphs)
    return build_within(final, num_blocks, inputs.shape, room)


def _can_be_captured(model: CausalLM) -> bool:
    """Whether steps can be captured in CUDA graphs. Those of our own models can. A class of
    transformers may copy values to the host within a step (such as the number of tokens of an
    expert), so it is tried."""
    from hetero_llm.gpu.graph_set import why_not_captured
    from hetero_llm.models.transformers_backend import TransformersForCausalLM
    from hetero_llm.models.transformers_check import trial_step

    if not isinstance(model, TransformersForCausalLM):
        return True
    for count in _TRIED_TOKENS:
        reason = why_not_captured(trial_step(model, count))
        if reason is not None:
            name = type(model.causal).__name__
            logger.warning("%s of transformers runs without CUDA graphs: %s", name, reason)
            return False
    return True


def cache_shape(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> KVCacheShape:
    """The shape of the model's KV cache.

    Raises:
        ConfigError: the configured dtype does not fit the model, the device or another argument.
    """
    from hetero_llm.runner.kv_cache import KVCacheShape

    if config.cache.dtype != "auto" and isinstance(model_config, ImageModelConfig):
        raise ConfigError("kv_cache_dtype", config.cache.dtype, "a model with images needs auto")
    return KVCacheShape(
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        config.cache.block_size,
        _cache_dtype(config, dtype, device),
    )


def _cache_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    import torch

    wanted = config.cache.dtype
    if wanted == "auto":
        return dtype
    if device.type == "cpu":
        raise ConfigError("kv_cache_dtype", wanted, "needs a GPU; use auto on a CPU")
    if config.batch_invariant:
        raise ConfigError(
            "kv_cache_dtype", wanted, "cannot be combined with batch_invariant: use one of them"
        )
    return torch.float8_e4m3fn


def _check_fixed_blocks(fixed: int, needed: int, max_model_len: int) -> None:
    if fixed < needed:
        raise ConfigError(
            "num_gpu_blocks_override",
            fixed,
            f"one sequence of max_model_len ({max_model_len}) needs {needed}; "
            "lower max_model_len or raise num_gpu_blocks_override",
        )


def _torch_runner(
    inputs: RunnerInputs, cache: PagedKVCache, row_kernel: RowKernel | None
) -> TorchModelRunner:
    from hetero_llm.runner.model_runner import TorchModelRunner

    runner = TorchModelRunner(
        inputs.model,
        inputs.model_config,
        cache,
        max_num_seqs=inputs.scheduler.max_num_seqs,
        max_model_len=inputs.scheduler.max_model_len,
        device=inputs.device,
        batch_invariant=inputs.batch_invariant,
        row_kernel=row_kernel,
    )
    runner.typical = inputs.typical
    runner.layer_ready = inputs.layer_ready
    return runner
