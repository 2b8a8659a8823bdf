"""Builds an engine from its configuration.

Only this file and its builders (`build_model`, `build_runner`, `build_adapters`, `build_experts`,
`build_host_tier`, `build_drafter`, `build_device_draft`, `build_draft_worker`, `build_pooling`,
`build_ranks`) and `rank_process` join the engine with devices.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.config.engine_config import EngineConfig, LoraConfig, SchedulerConfig
from hetero_llm.config.pooling_config import PoolingConfig
from hetero_llm.config.prompt_adapter_config import PromptAdapterConfig
from hetero_llm.core.drafter import CostAware
from hetero_llm.core.errors import ConfigError, ContextTooLongError, ModelLoadError
from hetero_llm.core.step_times import StepTimes
from hetero_llm.distributed.rank_share import never
from hetero_llm.engine.builders.build_device_draft import DeviceDraft, count_blocks, draft_limits
from hetero_llm.engine.builders.build_draft_worker import (
    StartingDraftWorker,
    background_drafter_of,
    check_draft_length,
    find_draft_model,
    own_load_format,
    prepare_draft_model,
)
from hetero_llm.engine.builders.build_drafter import make_drafter
from hetero_llm.engine.builders.build_experts import (
    choose_experts,
    open_experts,
    open_memory_near,
    own_cores,
)
from hetero_llm.engine.builders.build_host_tier import (
    HostPlatform,
    HostTierMemory,
    host_platform,
    offload_limits,
    open_host_memory,
    step_times,
)
from hetero_llm.engine.builders.build_model import (
    backend_name,
    find_served_model,
    load_weights,
    native_backend,
)
from hetero_llm.engine.builders.build_pooling import BuiltPooling, build_pooling
from hetero_llm.engine.builders.build_ranks import (
    EngineRanks,
    check_parallel,
    check_sequence_ranks,
    for_ranks,
    join_ranks,
    start_ranks,
)
from hetero_llm.engine.builders.build_runner import (
    BuiltRunner,
    RunnerInputs,
    build_runner,
    cache_shape,
    check_context,
    runs_on_torch,
)
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.default_sampling import default_sampling
from hetero_llm.engine.inputs.images import ImageInputs, open_images
from hetero_llm.engine.inputs.input_processor import InputProcessor
from hetero_llm.engine.inputs.prompt_adapters import open_prompt_adapters
from hetero_llm.engine.kv_events import KvEventPublisher, open_kv_events
from hetero_llm.engine.output_processor import OutputProcessor
from hetero_llm.engine.resolve import (
    limit_steps,
    model_folder,
    open_tokenizer,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
)
from hetero_llm.engine.speculation_log import make_log
from hetero_llm.engine.text.stop_strings import holds_stop
from hetero_llm.engine.text.tokenizer import Tokenizer, open_grammars
from hetero_llm.expert_offload.step_costs import with_host_experts
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.block_transfers import BlockTransfers
from hetero_llm.kv_cache.hit_log import HitCounter, HitLog
from hetero_llm.kv_cache.prefix_cache import PrefixCache
from hetero_llm.models.collectives import Rank
from hetero_llm.models.sharding import check_ranks, sharded_config
from hetero_llm.pooling.pooling_model import read_pooling_model
from hetero_llm.scheduler.adapter_slots import AdapterSlots
from hetero_llm.scheduler.forced_token_pace import PaceByShare, PaceByTimes
from hetero_llm.scheduler.grammar_drafts import GrammarDrafts
from hetero_llm.scheduler.kv_loads import KVLoadQueue
from hetero_llm.scheduler.scheduler import Scheduler
from hetero_llm.structured_output.compiler import GrammarCompiler
from hetero_llm.structured_output.draft_matcher import DraftMatcher
from hetero_llm.utils import compile_progress, triton_cache

if TYPE_CHECKING:
    import torch

    from hetero_llm.config.draft_model_config import DraftModelConfig
    from hetero_llm.core.drafter import Drafter
    from hetero_llm.gpu.hybrid_experts import HybridExperts
    from hetero_llm.kv_cache.host_tier import HostTier
    from hetero_llm.lora.store import AdapterStore
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.spec_decode.lookahead.store import Store

logger = logging.getLogger(__name__)

_MOST_FORCED_STEP = 128
"""Most tokens of a step on a GPU that verifies forced tokens, where nothing else is drafted: a few
graphs serve these steps, and larger batches gain little."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what its callers need to know about it.

    Attributes:
        num_blocks: number of KV blocks on the device.
        backend: what runs the model: "cuda", or on a CPU "native" (our executor), "torch" or
            "ipex".
        store: the lookahead cache's; None without one.
        offload, default_sampling: see `EngineInfo`.
        images: see `InputProcessor`.
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
    images: ImageInputs | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int = 0

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of engine and lookahead cache, by name."""
        return self.engine.metrics() | ({} if self.store is None else self.store.metrics())


def build(
    config: EngineConfig, *, show_progress: bool = True, serving: bool = False
) -> BuiltEngine | BuiltPooling:
    """Builds the engine that the model needs: `build_engine`, or `build_pooling` for one that
    returns vectors.

    Raises:
        ConfigError, ModelLoadError: see there.
    """
    device = resolve_device(config.load.device)
    model = read_pooling_model(model_folder(config.load, weights=False), config)
    if model is None:
        if replace(config.pooling, runner="", convert="") != PoolingConfig():
            logger.warning("pooler_config has no effect on a model that generates text")
        return build_engine(config, show_progress=show_progress, serving=serving)
    _check_no_adapters(config)
    if config.parallel.num_ranks > 1:
        raise ConfigError(*config.parallel.asked_by, "a model that pools runs on one device")
    if config.kv_events is not None:
        reason = "a model that pools has no prefix cache, so it has no events"
        raise ConfigError("kv_events_config", {"enable_kv_cache_events": True}, reason)
    free_unreachable(device.type)
    folder = model_folder(config.load)
    return build_pooling(config, folder, model, show_progress=show_progress)


def build_engine(
    config: EngineConfig,
    *,
    show_progress: bool = True,
    drafter: Drafter | None = None,
    serving: bool = False,
    platform: HostPlatform | None = None,
) -> BuiltEngine:
    """Loads model and tokenizer, sizes the KV cache and builds the engine.

    Args:
        drafter: proposes draft trees; None: the configured one.
        serving: users watch the tokens stream, so steps are shorter unless
            `max_num_batched_tokens` is configured.
        platform: access to the device for the host tier; None: through the device's driver.

    Raises:
        ConfigError: this model or machine cannot serve with these arguments.
        ModelLoadError: the model folder is missing, damaged or not supported.
    """
    while True:
        try:
            return _build_engine(config, show_progress, drafter, serving=serving, platform=platform)
        except ContextTooLongError as error:
            fits = error.fits
            if not config.fit_max_model_len or fits < 1:
                raise
        # Outside of the handler: the error holds what has been loaded.
        logger.warning(
            "max_model_len=auto: the context is %d tokens, which the KV cache holds", fits
        )
        config = replace(config, max_model_len=fits)


def _build_engine(
    config: EngineConfig,
    show_progress: bool,
    drafter: Drafter | None,
    *,
    serving: bool,
    platform: HostPlatform | None,
) -> BuiltEngine:
    """Builds the engine with the context of `config`; see `build_engine`."""
    import torch

    load = config.load
    device = resolve_device(load.device)
    check_parallel(config, device)
    _check_adapters(config, device)
    free_unreachable(device.type)
    if device.type == "cuda":
        triton_cache.prepare()
    _check_offload(config, device)
    folder, model_config = find_served_model(config, device)
    parallel = config.parallel
    check_ranks(model_config, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    check_sequence_ranks(model_config, parallel)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    check_draft_length(config.speculation, max_model_len)
    model_config = dataclasses.replace(model_config, max_model_len=max_model_len)
    dtype_name = resolve_dtype(load.dtype, model_config.torch_dtype, device)
    steps = limit_steps(config, max_model_len, device.type, serving=serving)
    tokenizer = open_tokenizer(config, folder)
    images = open_images(folder, model_config, config.max_images, config.media_domains)
    sampling = {} if serving else default_sampling(config.generation, folder)
    dtype: torch.dtype = getattr(torch, dtype_name)
    largest = Rank(0, parallel.tensor_parallel_size, 0, parallel.pipeline_parallel_size)
    part = sharded_config(model_config, largest)
    check_context(config, steps, part, dtype, device)
    if device.type == "cuda":
        from hetero_llm.gpu.fill_step import compile_in_thread

        compile_in_thread()
    draft_model = None
    if drafter is None:
        config, draft_model = prepare_draft_model(
            config, model_config, tokenizer,
            target_on_cpu=device.type == "cpu", max_model_len=max_model_len,
        )  # fmt: skip
    config = for_ranks(config, device)
    inputs = _EngineInputs(
        folder, model_config, max_model_len, tokenizer, dtype, device, steps, show_progress,
        platform or host_platform(config, device), images,
        open_grammars(tokenizer, model_config.vocab_size, model_config.eos_token_ids),
        open_kv_events(
            config.kv_events, replica=config.replica, block_size=config.cache.block_size
        ),
    )  # fmt: skip
    if serving and inputs.grammars is not None:
        inputs.grammars.warm_up_beside()  # while the weights load
    try:
        built = _with_ranks(config, inputs, drafter, draft_model)
        return dataclasses.replace(built, default_sampling=sampling)
    except BaseException:
        inputs.events.close()
        if draft_model is not None:
            draft_model.worker.close()
        raise
    finally:
        compile_progress.finish()


@dataclass(frozen=True, slots=True)
class _EngineInputs:
    """Model and machine as resolved before any weight is loaded."""

    folder: Path
    model_config: ModelConfig
    max_model_len: int
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    scheduler: SchedulerConfig
    show_progress: bool
    platform: HostPlatform | None
    images: ImageInputs | None
    grammars: GrammarCompiler | None
    events: KvEventPublisher


def _with_ranks(
    config: EngineConfig,
    inputs: _EngineInputs,
    drafter: Drafter | None,
    draft_model: StartingDraftWorker | None,
) -> BuiltEngine:
    """Starts the other ranks, if there are to be any, and builds the engine with them."""
    processes = start_ranks(config, inputs.device)
    try:
        ranks = join_ranks(
            processes,
            config,
            folder=inputs.folder,
            scheduler=inputs.scheduler,
            dtype=inputs.dtype,
            device=inputs.device,
            row_bytes=inputs.model_config.hidden_size * inputs.dtype.itemsize,
            most_drafted_tokens=_most_drafted_tokens(config, inputs, drafter),
        )
        return _join(config, inputs, drafter, draft_model, ranks)
    except ContextTooLongError:  # of all ranks: they have agreed on the number of blocks
        processes.shut_down()
        raise
    except BaseException as error:
        found = processes.why(error)
        processes.shut_down()
        if found is not error:
            raise found from error
        raise


# large: each part of an engine is named once.
def _join(
    config: EngineConfig,
    inputs: _EngineInputs,
    drafter: Drafter | None,
    draft_model: StartingDraftWorker | None,
    ranks: EngineRanks,
) -> BuiltEngine:
    """Loads the weights, builds all parts and joins them."""
    model_config, tokenizer = inputs.model_config, inputs.tokenizer
    device, dtype, max_model_len = inputs.device, inputs.dtype, inputs.max_model_len
    dtype_name = str(dtype).removeprefix("torch.")
    native = native_backend(config, model_config, dtype, device)
    backend = backend_name(config, device, native=native is not None)
    rank = ranks.share.collectives.rank
    chosen = choose_experts(
        *(config, inputs.folder, model_config, inputs.scheduler),
        dtype=dtype,
        device=device,
        share=ranks.share,
    )
    opened = None if chosen is None else open_memory_near(chosen, rank, dtype=dtype, device=device)
    model, served = load_weights(
        config,
        inputs.folder,
        model_config,
        dtype=dtype,
        device=device,
        show_progress=inputs.show_progress,
        backend=backend,
        share=ranks.share,
        expert_memory=None if opened is None else opened.memory,
    )
    ranks.wait_loaded()
    adapters = None if served is None else served.store
    num_parameters = model.parameters_per_token()  # before an executor takes the weights over
    experts = None
    if chosen is not None and opened is not None:
        experts = open_experts(
            *(chosen, config, model, inputs.scheduler),
            opened=opened,
            dtype=dtype,
            device=device,
            share=ranks.share,
        )
        ranks.share_experts(experts)  # before the profile run, which may promote some
    device_draft = None if drafter is not None else _load_device_draft(config, inputs, backend)
    own_config = sharded_config(model_config, rank)
    shape = cache_shape(config, own_config, dtype, device)
    events = inputs.events
    host = open_host_memory(
        config.offload, inputs.platform, shape, inputs.scheduler,
        events=events.log, own=ranks.host_share(own_config.num_layers, model_config.num_layers),
    )  # fmt: skip
    built = build_runner(
        RunnerInputs(
            *(config, inputs.scheduler, model, own_config, dtype, device),
            most_drafted_tokens=_most_drafted_tokens(config, inputs, drafter),
            native=native,
            layer_ready=None if host is None else host.layer_ready,
            adapters=served,
            share=ranks.share,
            experts=experts,
        )
    )
    runner, num_blocks, store = built.runner, built.cache.num_blocks, None
    if device_draft is not None:
        drafter = device_draft.drafter()
    elif drafter is None:
        proposer = None if draft_model is None else draft_model.proposer()
        drafter, store = make_drafter(
            config.speculation, model_config, max_model_len, tokenizer, proposer
        )
    _set_step_times(drafter, runner, experts, launches_ahead=device.type != "cpu")
    if experts is not None:
        own_cores(experts, config, rank)
    times = step_times(model_config, num_parameters)
    tier = None if host is None else host.join(built.cache, times)
    offload = None if tier is None or host is None else host
    if inputs.grammars is not None:
        runner.set_open_matcher(inputs.grammars.open)
    on_torch = device.type == "cpu" or runs_on_torch(config, model_config)
    scheduler, hits = _scheduler(config, inputs, built, drafter, (tier, offload, times), adapters)
    ranks.share_adapters(adapters)
    engine = Engine(
        InputProcessor(
            tokenizer,
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            eos_ids=model_config.eos_token_ids,
            max_logprobs=config.max_logprobs,
            seed=config.seed,
            images=inputs.images,
            grammars=inputs.grammars,
            constraints=config.constraints,
            prompt_adapters=open_prompt_adapters(config, model_config),
            takes_processors=config.parallel.num_ranks == 1,
        ),
        scheduler,
        ranks.parallel(
            runner,
            adapters,
            defers=on_torch and tier is None,
            timed_out=never if host is None else host.gave_up,
        ),
        OutputProcessor(tokenizer, scheduler.stop_sequence),
        asynchronous=config.parallel.pipeline_parallel_size > 1 or not on_torch,
        speculation_log=make_log(config.speculation),
        background_drafter=background_drafter_of(drafter, config.speculation),
        grammars=inputs.grammars,
        hit_log=HitLog(hits) if offload is not None and offload.config.hit_count else None,
        adapters=adapters,
        ranks=ranks.processes,
        kv_events=events,
    )
    if not config.disable_log_stats:
        sizes = max_model_len, num_blocks, config.cache.block_size
        message = "%s on %s in %s: context %d, %d KV blocks of %d tokens"
        logger.info(message, config.load.model, device, dtype_name, *sizes)
    return BuiltEngine(
        engine, tokenizer, max_model_len, num_blocks, str(device), dtype_name, backend, store,
        "" if offload is None else offload.words(), inputs.images,
        vocab_size=model_config.vocab_size,
    )  # fmt: skip


def _scheduler(
    config: EngineConfig,
    inputs: _EngineInputs,
    built: BuiltRunner,
    drafter: Drafter | None,
    memory: tuple[HostTier | None, HostTierMemory | None, StepTimes],
    adapters: AdapterStore | None,
) -> tuple[Scheduler, HitCounter]:
    """Builds the scheduler and its block manager. Returns the scheduler and the block manager's hit
    counter.

    Args:
        memory: the host tier and its memory, None without one, and the step-time predictor.
        adapters: the host memory of adapters; None: none are served.
    """
    tier, host, times = memory
    shape, tokenizer = built.cache.shape, inputs.tokenizer
    caching = config.cache.enable_prefix_caching
    prefix_cache = PrefixCache(inputs.events.log) if caching else None
    transfers = None
    if tier is not None and host is not None and prefix_cache is not None:
        limits = offload_limits(host.config, inputs.scheduler)
        transfers = BlockTransfers(tier, prefix_cache, limits, built.cache.num_blocks)
    blocks = BlockManager(built.cache.num_blocks, shape.block_size, prefix_cache, transfers)
    chunked = inputs.scheduler.enable_chunked_prefill
    scheduler = Scheduler(
        inputs.scheduler,
        blocks,
        None if tokenizer is None else partial(holds_stop, tokenizer),
        drafter=drafter,
        adapters=None if adapters is None else AdapterSlots(config.lora.max_loras, adapters),
        grammar_drafts=_grammar_drafts(config, inputs, drafter),
        loads=None
        if transfers is None
        else KVLoadQueue(blocks, transfers, shape.num_layers, times, chunked=chunked),
    )
    return scheduler, blocks.hits


def _most_drafted_tokens(
    config: EngineConfig, inputs: _EngineInputs, drafter: Drafter | None
) -> int:
    """Most tokens of a step with draft trees, which the runner prepares for; 0: there are none."""
    largest = inputs.scheduler.max_num_batched_tokens
    if drafter is not None or config.speculation is not None:
        return largest
    if inputs.device.type == "cpu" or inputs.grammars is None:
        return 0
    parallel = config.parallel
    alone = parallel.pipeline_parallel_size == 1 and parallel.sequence_parallel_size == 1
    captured = alone and not runs_on_torch(config, inputs.model_config)
    return min(_MOST_FORCED_STEP, largest) if captured else 0


def _grammar_drafts(
    config: EngineConfig, inputs: _EngineInputs, drafter: Drafter | None
) -> GrammarDrafts | None:
    """What drafts forced tokens; None where nothing does."""
    most_tokens = _most_drafted_tokens(config, inputs, drafter)
    if inputs.device.type == "cpu" and config.parallel.pipeline_parallel_size == 1:
        most_tokens = inputs.scheduler.max_num_batched_tokens
    if inputs.grammars is None or most_tokens == 0:
        return None
    waits_anyway = inputs.device.type == "cpu" or drafter is not None
    pace = PaceByShare() if waits_anyway else PaceByTimes()
    opened = partial(inputs.grammars.open_as, DraftMatcher)
    return GrammarDrafts(opened, pace, most_tokens=most_tokens)


def _load_device_draft(
    config: EngineConfig, inputs: _EngineInputs, backend: str
) -> DeviceDraft | None:
    """Loads the draft model that runs on the target's device, with its KV cache; None without
    one."""
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
    """Builds the draft model as the target is built, with three differences: no native executor, no
    weights in host memory, and a KV cache that leaves room for the target's."""
    load_format = own_load_format(config.load.load_format)
    folder, model_config = find_draft_model(
        wanted, inputs.model_config, inputs.tokenizer,
        load_format=load_format, allow_pickle=config.load.allow_pickle_weights,
    )  # fmt: skip
    limits = draft_limits(wanted, model_config, inputs.scheduler)
    model_config = dataclasses.replace(model_config, max_model_len=limits.max_model_len)
    own = dataclasses.replace(
        config,
        load=dataclasses.replace(config.load, cpu_offload_gb=0.0, load_format=load_format),
        cache=dataclasses.replace(config.cache, scales_path=None),  # of the target
        speculation=None,
        offload=None,
        lora=LoraConfig(),
        prompt_adapters=PromptAdapterConfig(),  # the draft model sees tokens only
    )
    dtype, device = inputs.dtype, inputs.device
    if backend == "native":
        logger.warning("the draft model runs on torch; cpu_draft_worker=True is faster on a CPU")
        backend = "torch"
    try:
        model, _ = load_weights(
            own, folder, model_config,
            dtype=dtype, device=device, show_progress=inputs.show_progress, backend=backend,
        )  # fmt: skip
        shapes = (
            cache_shape(config, of, dtype, device) for of in (model_config, inputs.model_config)
        )
        room = _room_for_caches(config, device)
        blocks = count_blocks(config, wanted.model, limits, room, *shapes)
        cache = dataclasses.replace(own.cache, num_blocks=blocks, conservative=False)
        own = dataclasses.replace(own, cache=cache)
        runner = build_runner(RunnerInputs(own, limits, model, model_config, dtype, device)).runner
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
    """Bytes for the KV caches of both models, once all weights are loaded."""
    share = config.cache.memory_utilization
    if device.type == "cuda":
        from hetero_llm.gpu.memory import memory_left

        return memory_left(share)
    from hetero_llm.utils.topology import usable_memory_bytes

    return int(usable_memory_bytes() * share)


def _set_step_times(
    drafter: Drafter | None, runner: Any, experts: HybridExperts | None, *, launches_ahead: bool
) -> None:
    """Gives the step times that the runner has measured, if any, to a drafter that uses them.

    Args:
        experts: those that replays of padding have not asked for; None: there are none.
        launches_ahead: see `CostAware.set_step_times`.
    """
    profile = getattr(runner, "profile", None)
    if profile and experts is not None and experts.measured is not None:
        found = experts.measured
        profile = with_host_experts(
            profile,
            found.threads,
            num_layers=experts.bank.host.num_layers,
            streamed_seconds=found.link,
        )
    if profile and isinstance(drafter, CostAware):
        drafter.set_step_times(profile, launches_ahead)


def free_unreachable(device: str) -> None:
    """Frees GPU memory of closed engines; does nothing on a CPU."""
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


def _check_no_adapters(config: EngineConfig) -> None:
    """Raises ConfigError: adapters are wanted of a model that pools."""
    reason = "a model that pools takes no adapters yet"
    if config.lora.enabled:
        raise ConfigError("enable_lora", True, reason)
    if config.prompt_adapters.enabled:
        raise ConfigError("enable_prompt_adapter", True, reason)
    if config.lora.merge is not None:
        raise ConfigError("lora_merge", config.lora.merge, reason)


def _check_adapters(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError: adapters cannot be served like this; before any weight is read."""
    lora = config.lora
    if lora.enabled and device.type != "cpu":
        reason = "cannot be combined with {} on a GPU yet; use lora_merge for one adapter"
        for name, given in (
            ("batch_invariant", config.batch_invariant),
            ("cpu_offload_gb", config.load.cpu_offload_gb),
            ("enable_prompt_adapter", config.prompt_adapters.enabled),
        ):
            if given:
                raise ConfigError("enable_lora", True, reason.format(name))
    if lora.merge is not None and config.load.cpu_offload_gb:
        reason = "cannot be combined with cpu_offload_gb: use one of them"
        raise ConfigError("lora_merge", lora.merge, reason)
