"""Builds an engine from its configuration: the only place that joins engine and devices."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.core.config import CacheConfig, EngineConfig, SchedulerConfig
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.engine.block_manager import BlockManager
from hetero_llm.engine.device_draft import DeviceDraft, count_blocks, draft_limits
from hetero_llm.engine.draft_model import (
    DraftModel,
    attended_by,
    find_draft_model,
    prepare_draft_model,
)
from hetero_llm.engine.drafters import make_drafter
from hetero_llm.engine.drafting import Priced
from hetero_llm.engine.engine import Engine, ModelRunner
from hetero_llm.engine.input_processor import InputProcessor
from hetero_llm.engine.output_processor import OutputProcessor, holds_stop
from hetero_llm.engine.prefix_cache import PrefixCache
from hetero_llm.engine.resolve import (
    find_model,
    limit_steps,
    open_tokenizer,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
)
from hetero_llm.engine.resolve import open_model as open_model  # for whoever needs no engine
from hetero_llm.engine.scheduler import Scheduler
from hetero_llm.engine.speculation_log import make_log
from hetero_llm.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from hetero_llm.core.acceptance import TypicalAcceptance
    from hetero_llm.core.draft_model_config import DraftModelConfig
    from hetero_llm.cpu.backend import NativeBackend
    from hetero_llm.cpu.lookahead.store import Store
    from hetero_llm.cpu.model_runner import NativeModelRunner
    from hetero_llm.engine.drafting import Drafter
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.layers import CausalLM
    from hetero_llm.runner.attention import RowKernel
    from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache
    from hetero_llm.runner.model_runner import TorchModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what its callers need to know about it.

    `backend` is what runs the model: "cuda", or on a CPU "native" (our executor), "torch" or
    "ipex". `store` is there with the lookahead cache only. `offload`: see `EngineInfo`.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    max_model_len: int
    num_blocks: int
    device: str
    dtype: str
    backend: str
    store: Store | None
    offload: str = ""


def build_engine(
    config: EngineConfig,
    *,
    show_progress: bool = True,
    drafter: Drafter | None = None,
    serving: bool = False,
) -> BuiltEngine:
    """Loads model and tokenizer and sizes the KV cache.

    `drafter` proposes draft trees; None: what the configuration asks for. `serving`: somebody
    watches the tokens come, so steps are shorter unless the configuration says how long.

    Raises:
        ConfigError: arguments that this model or machine cannot serve.
        ModelLoadError: the model folder is missing, damaged or not supported.
    """
    import torch

    load = config.load
    device = resolve_device(load.device)
    free_unreachable(device.type)
    _check_offload(config, device)
    folder, model_config = find_model(load)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    model_config = dataclasses.replace(model_config, max_model_len=max_model_len)
    dtype_name = resolve_dtype(load.dtype, model_config.torch_dtype, device)
    steps = limit_steps(config, max_model_len, device.type, serving=serving)
    tokenizer = open_tokenizer(config, folder)
    dtype: torch.dtype = getattr(torch, dtype_name)
    draft_model = None
    if drafter is None:
        config, draft_model = prepare_draft_model(
            config, model_config, tokenizer,
            target_on_cpu=device.type == "cpu", max_model_len=max_model_len,
        )  # fmt: skip
    inputs = _EngineInputs(
        folder, model_config, max_model_len, tokenizer, dtype, device, steps, show_progress
    )  # fmt: skip
    try:
        return _join(config, inputs, drafter, draft_model)
    except BaseException:
        if draft_model is not None:
            draft_model.worker.close()
        raise


@dataclass(frozen=True, slots=True)
class _EngineInputs:
    """What was found out about model and machine before any weight is loaded."""

    folder: Path
    model_config: ModelConfig
    max_model_len: int
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    scheduler: SchedulerConfig
    show_progress: bool


def _join(
    config: EngineConfig,
    inputs: _EngineInputs,
    drafter: Drafter | None,
    draft_model: DraftModel | None,
) -> BuiltEngine:
    """Loads the weights and joins all parts."""
    load, model_config, tokenizer = config.load, inputs.model_config, inputs.tokenizer
    device, dtype, max_model_len = inputs.device, inputs.dtype, inputs.max_model_len
    dtype_name = str(dtype).removeprefix("torch.")
    native = _native_backend(config, model_config, dtype, device)
    backend = _backend_name(config, device, native=native is not None)
    model = _load_weights(
        config,
        inputs.folder,
        model_config,
        dtype=dtype,
        device=device,
        show_progress=inputs.show_progress,
        backend=backend,
    )
    device_draft = None if drafter is not None else _load_device_draft(config, inputs, backend)
    runner, num_blocks = _build_runner(
        config,
        inputs.scheduler,
        model,
        model_config=model_config,
        dtype=dtype,
        device=device,
        drafts=drafter is not None or config.speculation is not None,
        native=native,
    )
    store = None
    if device_draft is not None:
        drafter = device_draft.drafter()
    elif drafter is None:
        source = None if draft_model is None else draft_model.source()
        drafter, store = make_drafter(
            config.speculation, model_config, max_model_len, tokenizer, source
        )
    _tell_costs(drafter, runner)
    prefix_cache = PrefixCache() if config.cache.enable_prefix_caching else None
    blocks = BlockManager(num_blocks, config.cache.block_size, prefix_cache)
    scheduler = Scheduler(
        inputs.scheduler,
        blocks,
        None if tokenizer is None else partial(holds_stop, tokenizer),
        drafter=drafter,
    )
    engine = Engine(
        InputProcessor(
            tokenizer,
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_ids=model_config.eos_token_ids,
            max_logprobs=config.max_logprobs,
            seed=config.seed,
        ),
        scheduler,
        runner,
        OutputProcessor(tokenizer, scheduler.stop_sequence),
        asynchronous=device.type == "cuda" and not config.batch_invariant,
        speculation_log=make_log(config.speculation),
        attended=attended_by(drafter, config.speculation),
    )
    if not config.disable_log_stats:
        sizes = max_model_len, num_blocks, config.cache.block_size
        message = "%s on %s in %s: context %d, %d KV blocks of %d tokens"
        logger.info(message, load.model, device, dtype_name, *sizes)
    return BuiltEngine(
        engine, tokenizer, max_model_len, num_blocks, str(device), dtype_name, backend, store
    )


def _load_device_draft(
    config: EngineConfig, inputs: _EngineInputs, backend: str
) -> DeviceDraft | None:
    """The draft model that is to run beside the target, with its KV cache; None without one."""
    wanted = None if config.speculation is None else config.speculation.draft
    if wanted is None or wanted.on_cpu:
        return None
    try:
        return _device_draft(config, wanted, inputs, backend)
    except (ConfigError, ModelLoadError) as error:
        if not wanted.optional:
            raise
        logger.warning("serving without the draft model: %s", error)
        return None


def _device_draft(
    config: EngineConfig, wanted: DraftModelConfig, inputs: _EngineInputs, backend: str
) -> DeviceDraft:
    """As the target is built, but for what is the target's alone: the native executor, weights in
    host memory, a KV cache out of all memory there is."""
    folder, model_config = find_draft_model(wanted, inputs.model_config, inputs.tokenizer)
    limits = draft_limits(wanted, model_config, inputs.scheduler)
    model_config = dataclasses.replace(model_config, max_model_len=limits.max_model_len)
    own = dataclasses.replace(
        config, load=dataclasses.replace(config.load, cpu_offload_gb=0.0), speculation=None
    )
    dtype, device = inputs.dtype, inputs.device
    if backend == "native":
        logger.warning("the draft model runs on torch; cpu_draft_worker=True is faster on a CPU")
        backend = "torch"
    try:
        model = _load_weights(
            own, folder, model_config,
            dtype=dtype, device=device, show_progress=inputs.show_progress, backend=backend,
        )  # fmt: skip
        shapes = (
            _cache_shape(config, of, dtype, device) for of in (model_config, inputs.model_config)
        )
        room = _room_for_caches(config, device)
        blocks = count_blocks(config, wanted.model, limits, room, *shapes)
        cache = dataclasses.replace(own.cache, num_blocks=blocks, conservative=False)
        own = dataclasses.replace(own, cache=cache)
        runner, _ = _build_runner(
            own, limits, model,
            model_config=model_config, dtype=dtype, device=device, drafts=False, native=None,
        )  # fmt: skip
    except ConfigError as error:
        if error.field not in ("cpu_offload_gb", "num_gpu_blocks_override"):
            raise
        reason = (
            "it does not fit into the GPU beside the target; take a smaller one, keep weights of "
            "the target on the host (cpu_offload_gb), or set cpu_draft_worker=True"
        )
        raise ConfigError("speculative_model", wanted.model, reason) from error
    speculation = config.speculation
    assert speculation is not None
    return DeviceDraft(runner, limits, blocks, wanted.num_tokens, speculation.most_sequences)


def _room_for_caches(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the KV caches may take, with all weights loaded."""
    share = config.cache.memory_utilization
    if device.type == "cuda":
        from hetero_llm.gpu.memory import memory_left

        return memory_left(share)
    from hetero_llm.cpu.topology import usable_memory_bytes

    return int(usable_memory_bytes() * share)


def _tell_costs(drafter: Drafter | None, runner: Any) -> None:
    """Step times of runners that have measured them, to whoever weighs them."""
    profile = getattr(runner, "profile", None)
    if profile and isinstance(drafter, Priced):
        drafter.price(profile)


def free_unreachable(device: str) -> None:
    """Gives a GPU the memory of closed engines; nothing to do on a CPU."""
    if device.startswith("cuda"):
        from hetero_llm.gpu.memory import free_unreachable as free

        free()


def _check_offload(config: EngineConfig, device: torch.device) -> None:
    wanted = config.load.cpu_offload_gb
    if not wanted:
        return
    if device.type == "cpu":
        raise ConfigError(
            "cpu_offload_gb", wanted, "needs a GPU; on a CPU all weights are in host memory"
        )
    if config.batch_invariant:
        raise ConfigError(
            "cpu_offload_gb", wanted, "cannot be combined with batch_invariant: use one of them"
        )


def _native_backend(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> NativeBackend | None:
    """The native executor's settings, where it is to run the model."""
    cpu = config.cpu
    if device.type == "cpu":
        from hetero_llm.cpu.backend import choose_backend

        return choose_backend(cpu, model_config, dtype, batch_invariant=config.batch_invariant)
    given = {
        "cpu_backend": cpu.backend != "native",
        "cpu_weight_dtype": cpu.weight_dtype != "auto",
        "cpu_threads": cpu.threads is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        logger.warning("%s has no effect on a GPU", name)
    return None


def _backend_name(config: EngineConfig, device: torch.device, *, native: bool) -> str:
    """See `BuiltEngine`; without the native executor torch serves, or IPEX if it was asked for."""
    if native:
        return "native"
    if device.type == "cuda":
        return "cuda"
    return "ipex" if config.cpu.backend == "ipex" else "torch"


@dataclass(frozen=True, slots=True)
class _RunnerInputs:
    """What a runner is built from, on any device."""

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

    @property
    def blocks_per_sequence(self) -> int:
        """Of one sequence of max_model_len."""
        return -(-self.scheduler.max_model_len // self.cache.block_size)


def _load_weights(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool,
    backend: str,
) -> CausalLM:
    """The model with the products that the device and the configuration ask for.

    Args:
        backend: see `BuiltEngine`; the native executor takes the weights as they are.
    """
    from hetero_llm.models.loader import load_model

    load = partial(
        load_model,
        folder,
        model_config,
        dtype=dtype,
        device=device,
        show_progress=show_progress,
        load_format=config.load.load_format,
        seed=config.load.seed,
    )
    if device.type == "cuda":
        from hetero_llm.gpu.memory import load_weights
        from hetero_llm.gpu.weight_offload import plan_offload

        plan = plan_offload(model_config, dtype, config.load.cpu_offload_gb)
        model = load_weights(load, device, plan)
    else:
        model = load()
    if config.batch_invariant:
        from hetero_llm.models.invariant import make_batch_invariant

        make_batch_invariant(model)
    elif backend == "cuda":
        from hetero_llm.gpu.fused import speed_up

        speed_up(model)
    elif backend == "ipex":
        from hetero_llm.cpu.ipex import speed_up

        speed_up(model)
    elif backend == "torch":
        from hetero_llm.cpu.fused import speed_up

        speed_up(model)
    return model


def _build_runner(
    config: EngineConfig,
    scheduler_config: SchedulerConfig,
    model: CausalLM,
    *,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    drafts: bool,
    native: NativeBackend | None,
) -> tuple[ModelRunner[Any], int]:
    """The runner with its KV cache, and the number of blocks."""
    inputs = _RunnerInputs(
        model,
        model_config,
        _cache_shape(config, model_config, dtype, device),
        device,
        scheduler_config,
        config.cache,
        config.batch_invariant,
        config.enforce_eager,
        drafts,
        native,
        None if config.speculation is None else config.speculation.typical,
    )
    _check_fixed_blocks(inputs)
    return _cuda_runner(inputs) if device.type == "cuda" else _cpu_runner(inputs)


def _cpu_runner(inputs: _RunnerInputs) -> tuple[ModelRunner[Any], int]:
    from hetero_llm.cpu.topology import usable_memory_bytes
    from hetero_llm.runner.kv_cache import PagedKVCache

    if inputs.cache.conservative:
        logger.warning("conservative_dry_run has no effect on a CPU: there is no profile run")
    needed, num_blocks = inputs.blocks_per_sequence, inputs.cache.num_blocks
    if num_blocks is None:
        share = inputs.cache.memory_utilization
        num_blocks = int(usable_memory_bytes() * share) // inputs.shape.block_bytes
        # host memory beyond what sequences can fill is left alone
        num_blocks = min(num_blocks, needed * inputs.scheduler.max_num_seqs)
        if num_blocks < needed:
            raise ConfigError(
                "gpu_memory_utilization",
                share,
                f"gives {num_blocks} KV blocks of the free host memory, one sequence of "
                f"max_model_len ({inputs.scheduler.max_model_len}) needs {needed}; lower "
                f"max_model_len or raise gpu_memory_utilization",
            )
    cache = PagedKVCache(inputs.shape, num_blocks, inputs.device)
    if inputs.native is not None:
        return _native_runner(inputs, inputs.native, cache), num_blocks
    row_kernel = None
    if not inputs.batch_invariant:
        from hetero_llm.cpu.paged_attention import native_row_kernel

        config = inputs.model_config
        row_kernel = native_row_kernel(cache, config.num_heads, config.attn_scale)
    return _torch_runner(inputs, cache, row_kernel), num_blocks


def _native_runner(
    inputs: _RunnerInputs, native: NativeBackend, cache: PagedKVCache
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


def _cuda_runner(inputs: _RunnerInputs) -> tuple[ModelRunner[Any], int]:
    from hetero_llm.gpu.memory import build_runner, measure_room, too_small_error
    from hetero_llm.gpu.model_runner import GpuModelRunner
    from hetero_llm.runner.kv_cache import PagedKVCache

    def runner_with(num_blocks: int, graphs: bool) -> ModelRunner[Any]:
        cache = PagedKVCache(inputs.shape, num_blocks, inputs.device)
        if inputs.batch_invariant:
            return _torch_runner(inputs, cache, None)
        runner = GpuModelRunner(
            inputs.model,
            inputs.model_config,
            cache,
            max_num_seqs=inputs.scheduler.max_num_seqs,
            max_model_len=inputs.scheduler.max_model_len,
            max_num_batched_tokens=inputs.scheduler.max_num_batched_tokens,
            graphs=graphs,
            drafts=inputs.drafts,
        )
        runner.typical = inputs.typical
        return runner

    room, num_blocks = None, inputs.cache.num_blocks
    if num_blocks is None:
        room = measure_room(
            partial(runner_with, graphs=False),
            inputs.scheduler,
            inputs.shape,
            utilization=inputs.cache.memory_utilization,
            conservative=inputs.cache.conservative,
        )
        num_blocks = room.pool_bytes // inputs.shape.block_bytes
        if num_blocks < inputs.blocks_per_sequence:
            raise too_small_error(num_blocks, inputs.scheduler, inputs.shape, room)
    final = partial(runner_with, graphs=not inputs.enforce_eager)
    return build_runner(final, num_blocks, inputs.shape, room), num_blocks


def _cache_shape(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> KVCacheShape:
    from hetero_llm.runner.kv_cache import KVCacheShape

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


def _check_fixed_blocks(inputs: _RunnerInputs) -> None:
    fixed, needed = inputs.cache.num_blocks, inputs.blocks_per_sequence
    if fixed is not None and fixed < needed:
        raise ConfigError(
            "num_gpu_blocks_override",
            fixed,
            f"one sequence of max_model_len ({inputs.scheduler.max_model_len}) needs {needed}; "
            "lower max_model_len or raise num_gpu_blocks_override",
        )


def _torch_runner(
    inputs: _RunnerInputs, cache: PagedKVCache, row_kernel: RowKernel | None
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
    return runner
