"""Builds a model's runner with its KV cache, on any device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hetero_llm.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError, ContextTooLongError
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.distributed.rank_share import ALONE_SHARE, RankShare
from hetero_llm.engine.builders.build_adapters import (
    LoadedAdapters,
    apply_adapters,
    device_adapters,
)
from hetero_llm.models.configs.transformers_vision import ImageModelConfig

if TYPE_CHECKING:
    import torch

    from hetero_llm.core.acceptance import TypicalAcceptance
    from hetero_llm.cpu.backend import NativeBackend
    from hetero_llm.cpu.model_runner import NativeModelRunner
    from hetero_llm.gpu.hybrid_experts import HybridExperts
    from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
    from hetero_llm.gpu.memory import StepRunner
    from hetero_llm.gpu.model_runner import GpuModelRunner
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.layers import CausalLM
    from hetero_llm.runner.attention import RowKernel
    from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
    from hetero_llm.runner.layer_ready import LayerReadyFlags
    from hetero_llm.runner.model_runner import TorchModelRunner

logger = logging.getLogger(__name__)

_LARGE_TABLE = 1 << 30  # bytes
_FP8_GPU = (8, 9)  # the compute capability from which on e4m3 is converted in hardware
_DRY_BLOCKS = 2  # of a KV cache that no step uses
_TRIED_TOKENS = (1, 16)  # sizes of the steps that `_can_be_captured` tries


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner and its KV cache."""

    runner: ModelRunner[Any]
    cache: PagedKVCache


@dataclass(frozen=True, slots=True)
class RunnerInputs:
    """Everything a runner and its KV cache are built from.

    Attributes:
        scheduler: limits of steps.
        model_config: of the model, or of this rank's part of it (`models.sharding`).
        dtype: of the model.
        most_drafted_tokens: of a step with draft trees; 0: there are no such steps.
        native: settings of the native executor; None: it does not run the model.
        layer_ready: flags at which steps wait for KV loads from host memory; None: there are none.
        adapters: of the model; None: requests have none.
        share: of this rank. All ranks get as many blocks as the one with the least memory has.
        experts: of its mixtures on a GPU, some of them on the host; None: there are no such.
    """

    config: EngineConfig
    scheduler: SchedulerConfig
    model: CausalLM
    model_config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    most_drafted_tokens: int = 0
    native: NativeBackend | None = None
    layer_ready: LayerReadyFlags | None = None
    adapters: LoadedAdapters | None = None
    share: RankShare = ALONE_SHARE
    experts: HybridExperts | None = None

    @property
    def shape(self) -> KVCacheShape:
        return cache_shape(self.config, self.model_config, self.dtype, self.device)

    @property
    def typical(self) -> TypicalAcceptance | None:
        speculation = self.config.speculation
        return None if speculation is None else speculation.typical

    @property
    def blocks_per_sequence(self) -> int:
        """KV blocks of one sequence of `max_model_len` tokens."""
        return -(-self.scheduler.max_model_len // self.config.cache.block_size)


def build_runner(inputs: RunnerInputs) -> BuiltRunner:
    """Builds the runner and its KV cache.

    Raises:
        ConfigError: there is not enough memory.
    """
    config, device, fixed = inputs.config, inputs.device, inputs.config.cache.num_blocks
    scales = _kv_scales(config, inputs.model, inputs.model_config, inputs.shape.dtype)
    if fixed is not None:
        _check_fixed_blocks(fixed, inputs.scheduler)
    if device.type == "cuda":
        return _cuda_runner(inputs, scales)
    built = _cpu_runner(inputs)
    if inputs.adapters is not None:
        apply_adapters(built.runner, inputs.adapters.store, config, device)
    return built


def _cpu_runner(inputs: RunnerInputs) -> BuiltRunner:
    from hetero_llm.runner.kv_cache import PagedKVCache

    if inputs.config.cache.conservative:
        logger.warning("conservative_dry_run has no effect on a CPU: there is no profile run")
    shape, num_blocks = inputs.shape, inputs.config.cache.num_blocks
    if num_blocks is None:
        processes = inputs.share.agreement.size
        num_blocks = _blocks_in_host_memory(inputs.config.cache, inputs.scheduler, shape, processes)
    num_blocks = inputs.share.agreement.least(num_blocks)
    cache = PagedKVCache(shape, num_blocks, inputs.device)
    if inputs.native is not None:
        assert inputs.layer_ready is None, "the native executor has its KV in host memory"
        return BuiltRunner(_native_runner(inputs, inputs.native, cache), cache)
    row_kernel = None
    if not inputs.config.batch_invariant:
        from hetero_llm.cpu.paged_attention import native_row_kernel
        from hetero_llm.runner.scored_attention import Scoring

        config = inputs.model_config
        row_kernel = native_row_kernel(cache, config.num_heads, Scoring.of(config))
    return BuiltRunner(_torch_runner(inputs, cache, row_kernel), cache)


def _blocks_in_host_memory(
    cache: CacheConfig, scheduler: SchedulerConfig, shape: KVCacheShape, processes: int
) -> int:
    """KV blocks for the configured share of the free host memory, no more than `max_num_seqs`
    sequences can fill.

    Args:
        processes: ranks that divide this memory between them.

    Raises:
        ContextTooLongError: they do not hold one sequence of `max_model_len`.
    """
    from hetero_llm.utils.topology import usable_memory_bytes

    share = cache.memory_utilization
    needed = -(-scheduler.max_model_len // cache.block_size)
    num_blocks = int(usable_memory_bytes() * share / processes) // shape.block_bytes
    num_blocks = min(num_blocks, needed * scheduler.max_num_seqs)
    if num_blocks < needed:
        raise ContextTooLongError(
            "gpu_memory_utilization",
            share,
            f"gives {num_blocks} KV blocks of the free host memory, one sequence of "
            f"max_model_len ({scheduler.max_model_len}) needs {needed}; lower "
            f"max_model_len or raise gpu_memory_utilization",
            fits=num_blocks * cache.block_size,
        )
    return num_blocks


def check_context(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks that attention serves the model with its KV cache, and that a sequence of
    `max_model_len` tokens fits, before anything is loaded or allocated: the length may come from an
    unchecked config.json. A rotary table of more than 1 GiB is logged.

    Raises:
        ConfigError: one of them does not hold.
    """
    shape, cache = cache_shape(config, model_config, dtype, device), config.cache
    read_kv_scales(config, model_config, shape.dtype)
    if device.type == "cuda" and not runs_on_torch(config, model_config):
        from hetero_llm.gpu.attention_context import check_supported

        check_supported(model_config)
    if device.type == "cuda" and not config.batch_invariant:
        _check_fp8_weights(model_config, device)
    length = scheduler.max_model_len
    if cache.num_blocks is not None:
        _check_fixed_blocks(cache.num_blocks, scheduler)
    elif device.type == "cpu":
        _blocks_in_host_memory(cache, scheduler, shape, config.parallel.num_ranks)
    else:
        _check_device_memory(cache, shape, length, device)
    table = 0 if model_config.rope is None else 4 * length * model_config.rope.rotary_dim
    if table > _LARGE_TABLE:
        logger.warning(
            "a context of %d tokens has a rotary table of %.1f GiB; max_model_len lowers it",
            *(length, table / 2**30),
        )


def _check_fp8_weights(model_config: ModelConfig, device: torch.device) -> None:
    """Raises ConfigError if the GPU has no conversion from e4m3."""
    import torch

    from hetero_llm.models.quantization_config import has_fp8_weights

    if not has_fp8_weights(model_config) or torch.cuda.get_device_capability(device) >= _FP8_GPU:
        return
    online, stored = model_config.online_quantization, model_config.quantization or {}
    reason = "weights or scales in e4m3 need a GPU of compute capability 8.9 or later; "
    reason += "use ifq or int4" if online else "batch_invariant=True serves them, slowly"
    raise ConfigError("quantization", online or stored.get("quant_method"), reason)


def _check_device_memory(
    cache: CacheConfig, shape: KVCacheShape, length: int, device: torch.device
) -> None:
    """Compares one sequence with all of the GPU's memory; `measure_room` does so with what is left
    after loading."""
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    needed = -(-length // cache.block_size) * shape.block_bytes
    if needed > total:
        raise ContextTooLongError(
            "max_model_len",
            length,
            f"the KV cache of one such sequence takes {needed / 2**30:.1f} GiB, the GPU has "
            f"{total / 2**30:.1f} GiB; lower max_model_len",
            fits=total // shape.block_bytes * cache.block_size,
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
        drafts=inputs.most_drafted_tokens > 0,
    )
    runner.typical = inputs.typical
    return runner


def _cuda_runner(inputs: RunnerInputs, kv_scales: torch.Tensor | None) -> BuiltRunner:
    from hetero_llm.gpu.memory import build_runner as build_within
    from hetero_llm.gpu.memory import kernels_ahead, measure_room, too_small_error
    from hetero_llm.gpu.model_runner import GpuModelRunner
    from hetero_llm.runner.kv_cache import PagedKVCache
    from hetero_llm.runner.sequence_parallel import sequence_parallel

    config, shape = inputs.config, inputs.shape
    takes_images = isinstance(inputs.model_config, ImageModelConfig)
    if takes_images or config.prompt_adapters.enabled:
        what = "a model with images" if takes_images else "enable_prompt_adapter: the model"
        logger.info("%s runs without CUDA graphs", what)
    on_torch = runs_on_torch(config, inputs.model_config)
    graphs = not on_torch and not config.enforce_eager and _can_be_captured(inputs.model)
    if graphs and not inputs.share.in_graphs:
        logger.info("the ranks exchange through NCCL: steps run without CUDA graphs")
        graphs = False
    adapters = device_adapters(inputs.adapters, inputs.model, config, inputs.device)

    def runner_with(num_blocks: int, graphs: bool, *, dry: bool = False) -> BuiltRunner:
        cache = PagedKVCache(shape, num_blocks, inputs.device, kv_scales)
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
            capture_prompts=inputs.share.agreement.size > 1,
            most_drafted_tokens=inputs.most_drafted_tokens,
            layer_ready=cast("DeviceLayerReadyFlags | None", inputs.layer_ready),
            adapters=adapters,
            experts=inputs.experts,
            sequence=sequence_parallel(inputs.share.sequence, inputs.device),
            link=inputs.share.link,
            dry=dry,
        )
        runner.typical = inputs.typical
        return BuiltRunner(runner, cache)

    def bodies() -> list[Callable[[], None]]:
        return cast("GpuModelRunner", runner_with(_DRY_BLOCKS, graphs, dry=True).runner).bodies

    room, num_blocks = None, config.cache.num_blocks
    if num_blocks is None:
        with kernels_ahead(bodies) if graphs else nullcontext():
            room = measure_room(
                lambda blocks: _measured(runner_with(blocks, graphs=False).runner, inputs),
                inputs.scheduler,
                shape,
                utilization=config.cache.memory_utilization,
                conservative=config.cache.conservative,
            )
        num_blocks = inputs.share.agreement.least(room.pool_bytes // shape.block_bytes)
        if num_blocks < inputs.blocks_per_sequence:
            raise too_small_error(num_blocks, inputs.scheduler, shape, room)
    final = partial(runner_with, graphs=graphs)
    return build_within(final, num_blocks, shape, room)


def _measured(runner: ModelRunner[Any], inputs: RunnerInputs) -> StepRunner[Any]:
    """The runner as `measure_room` runs it: where ranks share the largest step, the largest one
    that they do not share may take more memory, so that is run as well."""
    if inputs.share.sequence.rank.size == 1:
        return runner
    from hetero_llm.gpu.memory import AlsoRuns, largest_step
    from hetero_llm.runner.sequence_parallel import LEAST_TOKENS

    scheduler = inputs.scheduler
    tokens = min(scheduler.max_num_batched_tokens, LEAST_TOKENS[inputs.device.type] - 1)
    tokens = max(tokens, scheduler.max_num_seqs)
    return AlsoRuns(runner, largest_step(replace(scheduler, max_num_batched_tokens=tokens)))


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


def runs_on_torch(config: EngineConfig, model_config: ModelConfig) -> bool:
    """Whether plain torch computes the attention on a GPU."""
    wanted = config.batch_invariant or config.prompt_adapters.enabled
    return wanted or isinstance(model_config, ImageModelConfig)


def cache_shape(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> KVCacheShape:
    """The shape of the model's KV cache.

    Raises:
        ConfigError: the configured dtype does not fit the model, the device or another argument.
        ModelLoadError: the checkpoint's KV cache is quantized in a way that is not served.
    """
    from hetero_llm.runner.kv_cache import KVCacheShape

    return KVCacheShape(
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        config.cache.block_size,
        _cache_dtype(config, model_config, dtype, device),
    )


def _cache_dtype(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    import torch

    from hetero_llm.models.quantization_config import kv_cache_of

    wanted = config.cache.dtype
    if wanted in ("float16", "bfloat16"):
        if dtype != getattr(torch, wanted):
            name = str(dtype).removeprefix("torch.")
            raise ConfigError("kv_cache_dtype", wanted, f"the model runs in {name}; use auto")
        return dtype
    stored = kv_cache_of(model_config)
    if wanted == "auto":
        serves = _why_no_fp8(config, model_config, "fp8", device) is None
        return torch.float8_e4m3fn if stored == "default" and serves else dtype
    reason = _why_no_fp8(config, model_config, wanted, device)
    if reason is None and wanted == "fp8_e5m2" and stored is not None:
        reason = "the checkpoint has scales of an e4m3 cache; use fp8"
    if reason is not None:
        raise ConfigError("kv_cache_dtype", wanted, reason)
    return torch.float8_e5m2 if wanted == "fp8_e5m2" else torch.float8_e4m3fn


def _why_no_fp8(
    config: EngineConfig, model_config: ModelConfig, wanted: str, device: torch.device
) -> str | None:
    """Why a KV cache of 8-bit floats cannot be served here; None if it can."""
    import torch

    if device.type == "cpu":
        return "needs a GPU; use auto on a CPU"
    if config.batch_invariant:
        return "cannot be combined with batch_invariant: use one of them"
    if config.prompt_adapters.enabled:
        return "cannot be combined with enable_prompt_adapter: use one of them"
    if runs_on_torch(config, model_config):
        return "a model with images needs auto"
    if wanted != "fp8_e5m2" and torch.cuda.get_device_capability(device) < _FP8_GPU:
        return "needs a GPU of compute capability 8.9 or later; use auto or fp8_e5m2"
    return None


def read_kv_scales(
    config: EngineConfig, model_config: ModelConfig, cache_dtype: torch.dtype
) -> torch.Tensor | None:
    """The scales of `quantization_param_path`; None without it.

    Raises:
        ConfigError: they do not fit the model or the cache.
    """
    import torch

    from hetero_llm.models.kv_scales import read_scales_file

    path = config.cache.scales_path
    if path is None:
        return None
    if cache_dtype != torch.float8_e4m3fn:
        reason = "has the scales of an e4m3 KV cache; set kv_cache_dtype=fp8, or leave it out"
        raise ConfigError("quantization_param_path", path, reason)
    return read_scales_file(path, model_config)


def _kv_scales(
    config: EngineConfig, model: CausalLM, model_config: ModelConfig, cache_dtype: torch.dtype
) -> torch.Tensor | None:
    """The scales of a runner's KV cache; None: all are 1. Says in the log what the user may not
    expect of the cache."""
    import torch

    from hetero_llm.models.quantization_config import kv_cache_of

    is_default = config.cache.dtype == "auto" and kv_cache_of(model_config) == "default"
    if cache_dtype != torch.float8_e4m3fn:
        if is_default:
            name = str(cache_dtype).removeprefix("torch.")
            logger.info("the KV cache stays %s: that of the checkpoint, fp8, cannot serve", name)
        return None
    if is_default:
        logger.info("the KV cache is fp8, as the checkpoint says; kv_cache_dtype changes it")
    scales = read_kv_scales(config, model_config, cache_dtype)
    if scales is None:
        scales = model.kv_scales
    if scales is None:
        logger.warning(
            "the fp8 KV cache has no scales, neither of the checkpoint nor of "
            "quantization_param_path: 1 is used, which may cost accuracy"
        )
    return scales if scales is None or (scales != 1).any() else None


def _check_fixed_blocks(fixed: int, scheduler: SchedulerConfig) -> None:
    """Raises ContextTooLongError: the configured blocks do not hold one sequence."""
    needed = -(-scheduler.max_model_len // scheduler.block_size)
    if fixed < needed:
        raise ContextTooLongError(
            "num_gpu_blocks_override",
            fixed,
            f"one sequence of max_model_len ({scheduler.max_model_len}) needs {needed}; "
            "lower max_model_len or raise num_gpu_blocks_override",
            fits=fixed * scheduler.block_size,
        )


def _torch_runner(
    inputs: RunnerInputs, cache: PagedKVCache, row_kernel: RowKernel | None
) -> TorchModelRunner:
    from hetero_llm.runner.model_runner import TorchModelRunner
    from hetero_llm.runner.sequence_parallel import sequence_parallel

    runner = TorchModelRunner(
        inputs.model,
        inputs.model_config,
        cache,
        max_num_seqs=inputs.scheduler.max_num_seqs,
        max_model_len=inputs.scheduler.max_model_len,
        device=inputs.device,
        batch_invariant=inputs.config.batch_invariant,
        row_kernel=row_kernel,
        prompt_adapters=inputs.config.prompt_adapters.enabled,
    )
    runner.typical = inputs.typical
    runner.layer_ready = inputs.layer_ready
    runner.sequence = sequence_parallel(inputs.share.sequence, inputs.device)
    runner.link = inputs.share.link
    return runner
