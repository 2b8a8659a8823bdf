"""Joins the experts of a mixture: host memory, the GPU's bank, CPU threads, and the layers.

`choose_experts` decides before the weights are loaded whether some stay on the host;
`ExpertMemory` then gives page-locked memory to all of them, and `open_experts` builds the rest.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hetero_llm.bridge.expert_mailbox import open_mailbox
from hetero_llm.bridge.host_experts import HostExperts, HostKind, HostLayer, HostMatrices
from hetero_llm.bridge.kv_offload.pinned_pool import PinnedPool, PoolError
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.config.expert_config import ExpertConfig, worker_beside_experts
from hetero_llm.core.errors import ConfigError
from hetero_llm.engine.builders.build_runner import cache_shape, runs_on_torch
from hetero_llm.engine.core_plan import plan_cores
from hetero_llm.expert_offload.placement import ExpertPlacement, PromotionBudget
from hetero_llm.expert_offload.plan import (
    ExpertPlan,
    ExpertShape,
    GpuMemory,
    HostMemory,
    plan_experts,
    why_not_exclusive,
)
from hetero_llm.expert_offload.profile import (
    ProfileError,
    load_or_none,
    model_fingerprint,
    save_profile,
)
from hetero_llm.models.config import ClampedSwish
from hetero_llm.models.config_reader import read_json
from hetero_llm.utils import topology

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetero_llm.bridge.expert_mailbox import ExpertMailbox
    from hetero_llm.cpu.expert_team import ExpertTeam
    from hetero_llm.gpu.expert_bank import ExpertBank
    from hetero_llm.gpu.expert_moves import Placement
    from hetero_llm.gpu.hybrid_experts import HybridExperts
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.experts import Experts
    from hetero_llm.models.layers import CausalLM
    from hetero_llm.quantization.matrix import QuantizedStack

logger = logging.getLogger(__name__)

FIELD = "moe_cpu_experts"
_PINNING_THREADS = 8
_PROMOTED_BYTES = 2e9  # a second: 4% of a link of 50 GB/s
_GRAPHS_BYTES = 2 << 30  # of the GPU, for graphs and what libraries take
_KV_SEQUENCES = 4  # of `max_model_len`, at most: room that the bank leaves to the KV cache
_KV_SHARE = 0.25  # of the GPU, of which such sequences have at most so much
_HOST_SHARE = 0.95  # of free host memory
_PAGE = 4096
_CANDIDATES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Some experts of the model stay on the host.

    Attributes:
        plan: with `mode` "inclusive".
        budget_bytes: of the bank, its staging slots left out.
        profile: see `ExpertConfig`.
        model: its fingerprint.
    """

    plan: ExpertPlan
    budget_bytes: int
    profile: str | None
    model: str


def choose_experts(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertChoice | None:
    """Which experts stay on the host; None: none, the model is loaded as all others.

    Raises:
        ConfigError: the experts do not fit, or other arguments need all weights on the GPU.
        ModelLoadError: see `load_model`.
    """
    wanted = config.experts
    asked = wanted != ExpertConfig()
    if device.type == "cpu":
        _warn_if(asked, "all experts are computed by the CPU")
        return None
    if config.parallel.num_ranks > 1:
        if asked and wanted.cpu_experts != "off":
            reason = "experts on the CPU cannot be combined with it yet: use one of them"
            raise ConfigError(*config.parallel.field, reason)
        return None
    import torch

    from hetero_llm.models.loader import expert_sizes

    sizes = expert_sizes(
        folder, model_config, dtype=dtype, load_format=config.load.load_format,
        allow_pickle=config.load.allow_pickle_weights,
    )  # fmt: skip
    if not sizes.num_layers:
        _warn_if(asked, "the model has no experts that this engine computes")
        return None
    shape = ExpertShape(sizes.num_layers, sizes.num_experts, sizes.expert_bytes)
    free, total = torch.cuda.mem_get_info()
    usable = int(total * config.cache.memory_utilization)
    taken = total - free
    kv = cache_shape(config, model_config, dtype, device)
    staging = 2 * shape.num_experts * shape.expert_bytes
    step = _step_bytes(model_config, scheduler, dtype)
    least = _least_kv(config, scheduler, kv.block_bytes, usable)
    host = HostMemory(int(_HOST_SHARE * topology.usable_memory_bytes()), _pool_bytes(config))
    without = GpuMemory(usable, sizes.other_bytes + taken, step, least)
    decides = wanted.cpu_experts == "auto" and wanted.bank_bytes is None
    if decides and (shape.total_bytes <= without.room or config.load.cpu_offload_gb):
        return None  # loading says what does not fit, if anything
    gpu = GpuMemory(usable, sizes.other_bytes + taken, step + staging, least)
    plan = plan_experts(shape, wanted, without if wanted.cpu_experts == "off" else gpu, host)
    if plan.mode == "resident":
        return None
    _check_alone(config, model_config)
    if plan.mode == "exclusive":
        raise ConfigError(FIELD, wanted.cpu_experts, why_not_exclusive(plan, shape, host))
    logger.info("%s", plan)
    draft = None if config.speculation is None else config.speculation.draft
    if draft is not None and draft.on_cpu:
        logger.warning("%s", worker_beside_experts())
    profile = wanted.profile
    model = model_fingerprint(read_json(folder / "config.json"))
    return ExpertChoice(plan, plan.resident_bytes, profile, model)


def _warn_if(asked: bool, reason: str) -> None:
    if asked:
        logger.warning(
            "moe_expert_memory, moe_cpu_experts and moe_expert_profile have no effect: %s", reason
        )


def _check_alone(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ConfigError: with other arguments, all experts have to be on the GPU."""
    reason = "experts on the CPU cannot be combined with it: use one of them"
    for name, value, given in (
        ("batch_invariant", True, config.batch_invariant),
        ("cpu_offload_gb", config.load.cpu_offload_gb, bool(config.load.cpu_offload_gb)),
        ("enable_prompt_adapter", True, config.prompt_adapters.enabled),
        ("data_parallel_size", config.num_replicas, config.num_replicas > 1),
        (FIELD, config.experts.cpu_experts, runs_on_torch(config, model_config)),
    ):
        if given:
            raise ConfigError(name, value, reason)


def _step_bytes(model_config: ModelConfig, scheduler: SchedulerConfig, dtype: torch.dtype) -> int:
    """By estimate: rows of the largest step as some layer has them, logits and sampling, graphs."""
    tokens, hidden = scheduler.max_num_batched_tokens, model_config.hidden_size
    k = getattr(model_config, "experts_per_token", 1)
    inner = getattr(model_config, "expert_size", hidden)
    rows = tokens * (16 * hidden + k * (2 * hidden + inner)) * dtype.itemsize
    logits = min(scheduler.max_num_seqs, tokens) * model_config.vocab_size * 12
    return rows + logits + _GRAPHS_BYTES


def _least_kv(
    config: EngineConfig, scheduler: SchedulerConfig, block_bytes: int, usable: int
) -> int:
    """What the bank leaves to the KV cache."""
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks * block_bytes
    one = -(-scheduler.max_model_len // config.cache.block_size) * block_bytes
    count = min(_KV_SEQUENCES, scheduler.max_num_seqs)
    return max(one, min(count * one, int(_KV_SHARE * usable)))


def _pool_bytes(config: EngineConfig) -> int:
    """Host memory that the pool of offloaded KV is going to take."""
    if config.offload is None:
        return 0
    return int(config.offload.memory_utilization * topology.read_topology().total_memory)


class ExpertMemory:
    """Page-locked memory for tensors of experts, each of its own pool; `models.experts.HostMemory`.

    Args:
        node: preferred NUMA node; None: any.
        libcuda: see `PinnedPool`.

    Attributes:
        num_bytes: given so far.
    """

    def __init__(self, *, node: int | None = None, libcuda: str | None = "libcuda.so.1") -> None:
        self.num_bytes = 0
        self._node = node
        self._libcuda = libcuda

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An empty tensor, whose memory lives as long as any view of it.

        Raises:
            ConfigError: the host has no memory for it, or does not lock it.
        """
        import torch

        size = math.prod(shape) * dtype.itemsize
        rows = -(-size // _PAGE)
        try:
            pool = PinnedPool(
                _PAGE, rows, chunk_bytes=rows * _PAGE, node=self._node, threads=_PINNING_THREADS,
                libcuda=self._libcuda,
            )  # fmt: skip
        except PoolError as error:
            raise self._refused(size, str(error)) from error
        if pool.failure:
            pool.close()
            raise self._refused(size, pool.failure)
        self.num_bytes += size
        memory = (ctypes.c_char * max(size, 1)).from_address(pool.address)
        weakref.finalize(memory, pool.close)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size)
        return flat.view(dtype).view(shape)

    def _refused(self, size: int, why: str) -> ConfigError:
        held, more = _gib(self.num_bytes), _gib(size)
        reason = f"no host memory for experts: {held} are locked, and {more} more are not: {why}"
        return ConfigError(FIELD, "auto", reason)


def open_experts(
    choice: ExpertChoice,
    config: EngineConfig,
    model: CausalLM,
    scheduler: SchedulerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> HybridExperts:
    """Fills the bank, starts the threads, and lets the model's layers compute with both.

    Raises:
        ConfigError: no kernel serves the experts, on the GPU or on the CPU.
    """
    from hetero_llm.gpu.expert_bank import ExpertBank, slot_bytes, why_not
    from hetero_llm.gpu.graph_set import token_buckets

    modules = expert_modules(model)
    host = host_experts(modules)
    reason = why_not(host, dtype, modules[0].activation.name)
    if reason is not None:
        raise ConfigError(FIELD, config.experts.cpu_experts, reason)
    each = slot_bytes(host, device)  # kernels may have them in more bytes than a checkpoint
    slots = min(choice.plan.slots, choice.budget_bytes // each)
    placement = ExpertPlacement(
        host.num_layers, host.num_experts, slots,
        budget=PromotionBudget(bytes_per_s=_PROMOTED_BYTES, expert_bytes=host.expert_bytes),
    )  # fmt: skip
    shape = (host.num_layers, host.num_experts)
    if choice.profile is not None:
        scores = load_or_none(choice.profile, model=choice.model, shape=shape)
        if scores is not None:
            placement.scores.start_from(scores.reshape(-1))
    placement.fill()
    bank = ExpertBank(host, slots, staging=host.num_experts, device=device)
    bank.place(placement.table)
    rows = token_buckets(min(_CANDIDATES[-1], scheduler.max_num_batched_tokens))
    k = cast(int, model.config.experts_per_token)  # type: ignore[attr-defined]
    mailbox = open_mailbox(rows[-1], host.hidden, k, dtype, pin=device.type == "cuda")
    team = _open_team(config, host, mailbox)
    experts = join_experts(
        bank, placement, mailbox, modules, wake=team.wake, on_stream=device.type == "cuda"
    )
    if device.type == "cuda":
        candidates = [count for count in _CANDIDATES if count in rows] or [rows[0]]
        link, threads = experts.measure_most_rows(candidates)
        times = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in threads.items())
        logger.info(
            "experts: %d of %d on the GPU, %d threads for the others; steps of up to %d tokens ask "
            "them (ms a layer by tokens: %s), longer ones stream (%.2f ms a layer)",
            *(slots, shape[0] * shape[1], team.threads, experts.most_rows, times, 1e3 * link),
        )  # fmt: skip
    if choice.profile is not None:
        weakref.finalize(experts, _save, choice.profile, placement, choice.model)
    return experts


def join_experts(
    bank: ExpertBank,
    placement: Placement,
    mailbox: ExpertMailbox,
    modules: Sequence[Experts],
    *,
    wake: Callable[[], None],
    on_stream: bool,
) -> HybridExperts:
    """Joins a bank that was filled as `placement` says, a mailbox that is answered, and layers.

    Args:
        wake: see `HybridExperts`.
        on_stream: copies run on CUDA streams; else at once.
    """
    import torch

    from hetero_llm.gpu.expert_moves import CopiesAtOnce, ExpertMoves, StreamCopies
    from hetero_llm.gpu.expert_streams import DirectLane, ExpertStreams, StreamLane
    from hetero_llm.gpu.hybrid_experts import HybridExperts
    from hetero_llm.gpu.kernels.expert_requests import STATE_WORDS, Exchange

    device = bank.device
    exchange = Exchange(
        mailbox,
        torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=on_stream),
    )
    moves = ExpertMoves(bank, placement, StreamCopies(device) if on_stream else CopiesAtOnce())
    streams = ExpertStreams(
        bank, placement.table, StreamLane(device) if on_stream else DirectLane()
    )
    experts = HybridExperts(
        bank, exchange, moves, streams,
        activation=modules[0].activation.name, most_rows=len(mailbox.ids), wake=wake,
    )  # fmt: skip
    experts.join(modules)
    return experts


def _open_team(config: EngineConfig, host: HostExperts, mailbox: ExpertMailbox) -> ExpertTeam:
    """Threads on all cores but the first, on which the engine's loop is likely to run, and those of
    a draft worker and of the KV copy thread."""
    from hetero_llm.cpu import native
    from hetero_llm.cpu.expert_team import ExpertTeam

    library = native.load()
    if library is None:
        reason = "the library of CPU kernels is not available: see the log"
        raise ConfigError(FIELD, config.experts.cpu_experts, reason)
    plan = plan_cores(config, target_on_cpu=False)
    free = topology.compute_cpus(reserve=0) if plan is None else plan.engine
    taken = free[:1] if plan is None else (free[0], plan.copy)
    cpus = tuple(cpu for cpu in free if cpu not in taken) or free[:1]
    return ExpertTeam(host, mailbox, library, threads=len(cpus), cpus=cpus)


def _save(path: str, placement: ExpertPlacement, model: str) -> None:
    scores = placement.scores.slowest.reshape(placement.table.shape)
    try:
        save_profile(path, scores, model=model)
    except ProfileError as error:
        logger.warning("scores of experts are not kept: %s", error)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def expert_modules(model: nn.Module) -> list[Experts]:
    """The mixtures of a model in the order of its layers."""
    from hetero_llm.models.experts import Experts

    return [module for module in model.modules() if isinstance(module, Experts)]


def host_experts(modules: Sequence[Experts]) -> HostExperts:
    """The experts of layers whose weights are in host memory; shares the memory.

    Raises:
        ConfigError: layers differ, or a checkpoint's columns are in an order of their own.
    """
    layers = []
    for module in modules:
        first, second = module.biases or (None, None)
        parts = [
            _matrices(getattr(module, name), bias)
            for name, bias in (("gate_up", first), ("down", second))
        ]
        layers.append(HostLayer(*parts))
    for layer in layers[1:]:
        if _form(layer) != _form(layers[0]):
            reason = "experts on the CPU need layers that are quantized alike"
            raise ConfigError(FIELD, "auto", reason)
    gate = modules[0].activation.name
    if isinstance(gate, ClampedSwish):
        return HostExperts(tuple(layers), "clamped", gate.alpha, gate.limit)
    return HostExperts(tuple(layers), gate)


def _matrices(weight: torch.Tensor | QuantizedStack, bias: torch.Tensor | None) -> HostMatrices:
    import torch

    if bias is not None:
        bias = bias.detach().cpu()
    if isinstance(weight, torch.Tensor):
        kind = cast(HostKind, str(weight.dtype).removeprefix("torch."))
        return HostMatrices(kind, weight.detach(), bias=bias)
    matrix, count = weight.matrix, weight.count
    if matrix.order is not None:
        reason = "experts whose columns have an order of their own (desc_act) stay on the GPU"
        raise ConfigError(FIELD, "auto", reason)

    def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.view(count, -1, *tensor.shape[1:])

    data = each(matrix.data)
    assert data is not None
    return HostMatrices(
        matrix.kind,
        data,
        each(matrix.scale),
        matrix.group,
        matrix.rows,
        each(matrix.zero),
        each(matrix.offset),
        None if matrix.row_scale is None else matrix.row_scale.view(count, -1),
        bias,
    )


def _form(layer: HostLayer) -> tuple[object, ...]:
    """What all layers have to have in common."""
    return tuple(
        (part.kind, part.group, part.scale_rows, name, tensor.dtype, tuple(tensor.shape))
        for part in (layer.gate_up, layer.down)
        for name, tensor in part.tensors()
    )
