"""Joins the experts of a mixture: host memory, the GPU's bank, CPU threads, and the layers.

`choose_experts` decides before the weights are loaded whether some stay on the host; `open_memory`
then gives memory to them (`expert_store`), and `open_experts` builds the rest. Of several ranks
each does so with its slices of all experts; all call the same functions at the same time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from hetero_llm.bridge.expert_mailbox import (
    LINKED_UNIT,
    NO_PART,
    WHOLES,
    LinkPart,
    open_mailbox,
    order_for,
)
from hetero_llm.bridge.host_experts import HostExperts
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.config.expert_config import ExpertConfig, worker_beside_experts
from hetero_llm.config.parallel_config import ParallelConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.distributed.agreement import Agreement
from hetero_llm.distributed.rank_share import ALONE_SHARE, RankShare
from hetero_llm.engine.builders.build_runner import cache_shape, runs_on_torch
from hetero_llm.engine.builders.expert_store import (
    FIELD,
    ExpertMemory,
    ExpertStore,
    host_experts,
)
from hetero_llm.engine.builders.rank_faults import open_faults
from hetero_llm.engine.core_plan import deal_to_ranks, plan_cores
from hetero_llm.expert_offload.placement import ExpertPlacement, PromotionBudget
from hetero_llm.expert_offload.plan import (
    ExpertPlan,
    ExpertShape,
    GpuMemory,
    HostMemory,
    plan_experts,
)
from hetero_llm.expert_offload.profile import (
    ProfileError,
    load_or_none,
    model_fingerprint,
    save_profile,
)
from hetero_llm.expert_offload.step_costs import (
    LEAST_ON_HOST,
    LINKED_SIZES,
    choose_linked,
    fit_lane_costs,
    linked_rows,
    linked_wholes,
    paying_parts,
)
from hetero_llm.models.collectives import Rank
from hetero_llm.models.config_reader import read_config
from hetero_llm.models.rank_config import sharded_config
from hetero_llm.utils import topology
from hetero_llm.utils.affinity import ThreadsElsewhere
from hetero_llm.utils.numa import numa_node

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetero_llm.bridge.expert_mailbox import ExpertMailbox
    from hetero_llm.cpu.expert_team import ExpertTeam
    from hetero_llm.gpu.expert_bank import ExpertBank
    from hetero_llm.gpu.expert_moves import Placement
    from hetero_llm.gpu.hybrid_experts import HybridExperts, LinkedTimes
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.models.experts import Experts
    from hetero_llm.models.layers import CausalLM

logger = logging.getLogger(__name__)

_PROMOTED_BYTES = 2e9  # a second: 4% of a link of 50 GB/s
_GRAPHS_BYTES = 2 << 30  # of the GPU, for graphs and what libraries take
_KV_SEQUENCES = 4  # of `max_model_len`, at most: room that the bank leaves to the KV cache
_KV_SHARE = 0.25  # of the GPU's memory: maximum for several such sequences
_HOST_SHARE = 0.95  # of free host memory
_CANDIDATES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Some experts of the model stay on the host.

    Attributes:
        plan: with `mode` "inclusive" or "exclusive".
        shape: of the rank's part of the model.
        budget_bytes: of the bank, its staging slots left out.
        profile: see `ExpertConfig`.
        model: its fingerprint.
    """

    plan: ExpertPlan
    shape: ExpertShape
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
    share: RankShare = ALONE_SHARE,
) -> ExpertChoice | None:
    """Which experts stay on the host; None: none, the model is loaded as all others.

    Args:
        model_config: of the whole model.
        share: of this rank. All ranks choose alike, by the least memory that one of them finds.

    Raises:
        ConfigError: the experts do not fit, or other arguments need all weights on the GPU.
        ModelLoadError: see `load_model`.
    """
    wanted = config.experts
    asked = wanted != ExpertConfig()
    if device.type == "cpu":
        _warn_if(asked, "all experts are computed by the CPU")
        return None
    other = _other_ranks(config.parallel)
    if other is not None:
        if asked and wanted.cpu_experts != "off":
            reason = "experts on the CPU cannot be combined with it yet: use one of them"
            raise ConfigError(*other, reason)
        return None
    import torch

    from hetero_llm.models.loader import expert_sizes

    rank, least_of = share.collectives.rank, share.agreement.least
    sizes = expert_sizes(
        folder, model_config, dtype=dtype, load_format=config.load.load_format,
        allow_pickle=config.load.allow_pickle_weights, rank=rank,
    )  # fmt: skip
    if not sizes.num_layers:
        _warn_if(asked, "the model has no experts that this engine computes")
        return None
    shape = ExpertShape(sizes.num_layers, sizes.num_experts, sizes.expert_bytes, sizes.kept_bytes)
    free, total = torch.cuda.mem_get_info()
    usable = least_of(int(total * config.cache.memory_utilization))
    taken = -least_of(free - total)
    # Each rank reads it before any rank page-locks memory: `least_of` waits for all of them.
    on_host = least_of(int(_HOST_SHARE * topology.usable_memory_bytes()))
    own_config = sharded_config(model_config, rank)
    kv = cache_shape(config, own_config, dtype, device)
    staging = 2 * shape.num_experts * shape.expert_bytes
    step = _step_bytes(own_config, scheduler, dtype)
    least = _least_kv(config, scheduler, kv.block_bytes, usable)
    host = HostMemory(on_host // rank.size, _pool_bytes(config) // rank.size)
    without = GpuMemory(usable, sizes.other_bytes + taken, step, least)
    decides = wanted.cpu_experts == "auto" and wanted.bank_bytes is None
    if decides and (shape.total_bytes <= without.room or config.load.cpu_offload_gb):
        return None  # loading says what does not fit, if anything
    gpu = GpuMemory(usable, sizes.other_bytes + taken, step + staging, least)
    gpu = without if wanted.cpu_experts == "off" else gpu
    plan = plan_experts(shape, wanted, gpu, host, ranks=rank.size)
    if plan.mode == "resident":
        return None
    _check_alone(config, model_config)
    logger.info("%s; %s; %s", plan, gpu, host)
    draft = None if config.speculation is None else config.speculation.draft
    if draft is not None and draft.on_cpu:
        logger.warning("%s", worker_beside_experts())
    profile = wanted.profile
    model = model_fingerprint(read_config(folder).raw)
    return ExpertChoice(plan, shape, plan.resident_bytes, profile, model)


def _other_ranks(parallel: ParallelConfig) -> tuple[str, int] | None:
    """The argument that asks for ranks which do not share layers; None: there are none."""
    for name in ("pipeline_parallel_size", "sequence_parallel_size"):
        if getattr(parallel, name) > 1:
            return name, getattr(parallel, name)
    return None


def _warn_if(asked: bool, reason: str) -> None:
    if asked:
        logger.warning("arguments that begin with moe_ have no effect: %s", reason)


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


@dataclass(frozen=True, slots=True)
class OpenMemory:
    """Where the experts are read to.

    Attributes:
        memory: for `load_model`.
        placement: their places in the bank, filled; None: it is made when all have been read.
    """

    memory: ExpertMemory | ExpertStore
    placement: ExpertPlacement | None


def open_memory_near(
    choice: ExpertChoice, rank: Rank, *, dtype: torch.dtype, device: torch.device
) -> OpenMemory:
    """`open_memory` at the NUMA node of a rank's GPU."""
    memory = ExpertMemory(node=numa_node(rank.index or device.index or 0))
    return open_memory(choice, memory, dtype=dtype, device=device)


def open_memory(
    choice: ExpertChoice, memory: ExpertMemory, *, dtype: torch.dtype, device: torch.device
) -> OpenMemory:
    """Memory for the experts of a model that is going to be loaded.

    Args:
        memory: page-locked.
        dtype: of the model.
        device: of the bank.
    """
    plan, shape = choice.plan, choice.shape
    if plan.mode == "inclusive":
        return OpenMemory(memory, None)
    placement = _placement(choice, plan.slots, shape.expert_bytes, owners_stay=True)
    store = ExpertStore(
        placement.table, num_places=plan.places, num_slots=plan.slots + 2 * shape.num_experts,
        memory=memory, dtype=dtype, device=device,
    )  # fmt: skip
    return OpenMemory(store, placement)


def _placement(
    choice: ExpertChoice, slots: int, expert_bytes: int, *, owners_stay: bool
) -> ExpertPlacement:
    """With the bank's first content: by the scores of an earlier run, if there are any."""
    shape = (choice.shape.num_layers, choice.shape.num_experts)
    budget = PromotionBudget(bytes_per_s=_PROMOTED_BYTES, expert_bytes=expert_bytes)
    placement = ExpertPlacement(*shape, slots, budget=budget, owners_stay=owners_stay)
    if choice.profile is not None:
        scores = load_or_none(choice.profile, model=choice.model, shape=shape)
        if scores is not None:
            placement.scores.start_from(scores.reshape(-1))
    placement.fill()
    return placement


def open_experts(
    choice: ExpertChoice,
    config: EngineConfig,
    model: CausalLM,
    scheduler: SchedulerConfig,
    *,
    opened: OpenMemory,
    dtype: torch.dtype,
    device: torch.device,
    share: RankShare = ALONE_SHARE,
) -> HybridExperts:
    """Fills the bank, starts the threads, and lets the model's layers compute with both.

    Args:
        opened: that of the model's weights.
        share: of this rank. All have the same experts in their banks at first; where there are
            several, rank 0 chooses what is promoted.

    Raises:
        ConfigError: no kernel serves the experts, on the GPU or on the CPU.
    """
    from hetero_llm.gpu.expert_bank import ExpertBank, slot_bytes, why_not
    from hetero_llm.gpu.graph_set import token_buckets

    modules = expert_modules(model)
    store = opened.memory if isinstance(opened.memory, ExpertStore) else None
    host = host_experts(modules) if store is None else store.host_experts(modules)
    reason = why_not(host, dtype, modules[0].activation.name)
    if reason is not None:
        raise ConfigError(FIELD, config.experts.cpu_experts, reason)
    staging = host.num_experts
    if store is None or opened.placement is None:
        each = slot_bytes(host, device)  # kernels may have them in more bytes than a checkpoint
        slots = min(choice.plan.slots, choice.budget_bytes // each)
        slots = share.agreement.least(slots)
        chooses = _placement(choice, slots, host.expert_bytes, owners_stay=False)
        placement = _placement_of_rank(chooses, share)
        bank = ExpertBank(host, slots, staging=staging, device=device)
        bank.place(placement.table)
    else:
        placement = chooses = opened.placement
        bank = store.open_bank(host, choice.plan.slots, staging=staging)
    rows = token_buckets(min(_CANDIDATES[-1], scheduler.max_num_batched_tokens))
    k = cast(int, model.config.experts_per_token)  # type: ignore[attr-defined]
    mailbox = open_mailbox(
        *(rows[-1], host.hidden, k, dtype),
        pin=device.type == "cuda",
        order=order_for(host.layers[0].gate_up.kind, dtype),
    )
    rank, errors = share.collectives.rank, None
    team = _open_team(config, host, mailbox, rank)
    if share.faults >= 0:
        errors = open_faults(share.faults, rank.size, pin=device.type == "cuda")
    experts = join_experts(
        *(bank, placement, mailbox, modules), wake=team.wake, on_stream=device.type == "cuda",
        errors=errors, rank=rank.index,
    )  # fmt: skip
    if rank.size > 1:
        experts.agree = partial(_slowest, share.agreement)
    if device.type == "cuda":
        candidates = [count for count in _CANDIDATES if count in rows] or [rows[0]]
        _measure(experts, candidates, k, threads=team.threads)
        if config.experts.link_lane and (placement.table < 0).mean() >= LEAST_ON_HOST:
            share_link(experts, k)
    if choice.profile is not None and rank.index == 0:
        weakref.finalize(experts, _save, choice.profile, chooses, choice.model)
    return experts


def _measure(experts: HybridExperts, candidates: Sequence[int], k: int, *, threads: int) -> None:
    """Finds out which steps ask the threads, and how long ones are shared; on a CUDA device.

    Args:
        candidates: see `HybridExperts.measure_most_rows`.
        k: experts of a token.
        threads: of the team.
    """
    found = experts.measure_most_rows(candidates)
    bank, table = experts.bank, experts.moves.placement.table
    on_host = int((table < 0).sum(1).max())
    if on_host:
        costs = fit_lane_costs(
            found.threads, on_host=on_host, num_experts=bank.host.num_experts,
            experts_per_token=k, link_seconds=found.link, slowdown=found.slowdown,
        )  # fmt: skip
        experts.share_long_steps(costs)
    times = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in found.threads.items())
    logger.info(
        "experts: %d of %d on the GPU, %d threads for the others; steps of up to %d tokens ask "
        "them (ms a layer by tokens: %s), longer ones stream (%.2f ms a layer; beside it the "
        "threads need %.2f times as long)",
        *(bank.num_slots, table.size, threads, experts.most_rows, times),
        *(1e3 * found.link, found.slowdown),
    )  # fmt: skip


def _placement_of_rank(placement: ExpertPlacement, share: RankShare) -> Placement:
    """That of rank 0 chooses, and those of the others begin with its table: scores on disk may
    change between two readings."""
    if share.collectives.rank.size == 1:
        return placement
    from hetero_llm.gpu.expert_moves import OrderedPlacement

    table = np.array(share.agreement.of_first(placement.table.flatten().tolist()), np.int32)
    if share.collectives.rank.index == 0:
        return placement
    return OrderedPlacement(table.reshape(placement.table.shape))


def _slowest(agreement: Agreement, seconds: float) -> float:
    """The longest time of all ranks, to a nanosecond: each layer ends with the last of them."""
    return -agreement.least(-round(seconds * 1e9)) / 1e9


def share_link(experts: HybridExperts, k: int) -> None:
    """Lets the GPU compute a part of the experts that small steps miss, where that is faster.

    Args:
        experts: on a CUDA device, before steps are captured.
        k: experts of a token.
    """
    from hetero_llm.gpu.kernels.linked_experts import why_not_linked

    host = experts.bank.host
    reason = why_not_linked(host.layers[0], k, experts.activation)
    if reason is None and not host.is_page_locked():
        reason = "their memory is not page-locked"
    if reason is not None:
        logger.info("experts: the link is no lane of small steps: %s", reason)
        return
    sizes = [size for size in LINKED_SIZES if size <= experts.most_rows]
    found = experts.measure_linked(sizes, link_parts(host.inner), paying_parts)
    chosen = {
        size: choose_linked(times.random, times.one_miss, NO_PART) for size, times in found.items()
    }
    experts.use_link(chosen)
    logger.info(
        "experts: what the GPU reads over the link of those on the host, while the threads compute "
        "the others, and ms a layer over those without, by tokens: %s",
        "; ".join(
            f"{size}: {_describe(chosen[size], host.inner)}, {_describe_times(times, chosen[size])}"
            for size, times in found.items()
        ),
    )


def _describe_times(times: LinkedTimes, part: LinkPart) -> str:
    kinds = (("random experts", times.random), ("one miss a token", times.one_miss))
    return ", ".join(
        f"{1e3 * seconds[part]:.3f} over {1e3 * seconds[NO_PART]:.3f} ({name})"
        for name, seconds in kinds
        if seconds
    )


def link_parts(inner: int) -> tuple[LinkPart, ...]:
    """The parts timed at start for experts of `inner` inner rows; `NO_PART` is the first."""
    rows = (LinkPart(rows=count) for count in linked_rows(inner, LINKED_UNIT))
    wholes = (LinkPart(whole=share) for share in linked_wholes(WHOLES))
    return (NO_PART, *rows, *wholes)


def _describe(part: LinkPart, inner: int) -> str:
    if part.rows:
        return f"{part.rows} of {inner} inner rows"
    return f"{part.whole / WHOLES:.2f} of the experts" if part.whole else "nothing"


def join_experts(
    bank: ExpertBank,
    placement: Placement,
    mailbox: ExpertMailbox,
    modules: Sequence[Experts],
    *,
    wake: Callable[[], None],
    on_stream: bool,
    errors: torch.Tensor | None = None,
    rank: int = 0,
) -> HybridExperts:
    """Joins a bank that was filled as `placement` says, a mailbox that is answered, and layers.

    Args:
        wake: see `HybridExperts`.
        on_stream: copies run on CUDA streams; else at once.
        errors: [ranks] int32 words of all ranks (`rank_faults`); None: there is one rank.
        rank: whose word is this one's.
    """
    import torch

    from hetero_llm.gpu.expert_moves import CopiesAtOnce, ExpertMoves, StreamCopies
    from hetero_llm.gpu.expert_streams import DirectLane, ExpertStreams, StreamLane
    from hetero_llm.gpu.hybrid_experts import HybridExperts
    from hetero_llm.gpu.kernels.expert_requests import STATE_WORDS, Exchange

    device = bank.device
    if errors is None:
        errors = torch.zeros(1, dtype=torch.int32, pin_memory=on_stream)
    exchange = Exchange(
        mailbox,
        torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
        errors[rank : rank + 1],
    )
    moves = ExpertMoves(bank, placement, StreamCopies(device) if on_stream else CopiesAtOnce())
    streams = ExpertStreams(
        bank,
        placement.table,
        StreamLane(device) if on_stream else DirectLane(),
        most_rows=len(mailbox.ids),
    )
    experts = HybridExperts(
        bank, exchange, moves, streams,
        activation=modules[0].activation.name, most_rows=len(mailbox.ids), wake=wake,
    )  # fmt: skip
    experts.errors = errors.numpy()
    experts.join(modules)
    return experts


def _open_team(
    config: EngineConfig, host: HostExperts, mailbox: ExpertMailbox, rank: Rank
) -> ExpertTeam:
    from hetero_llm.cpu import native
    from hetero_llm.cpu.expert_team import ExpertTeam

    library = native.load()
    if library is None:
        reason = "the library of CPU kernels is not available: see the log"
        raise ConfigError(FIELD, config.experts.cpu_experts, reason)
    cpus = _team_cpus(config, rank.size)[rank.index]
    return ExpertTeam(host, mailbox, library, threads=len(cpus), cpus=cpus)


def _team_cpus(config: EngineConfig, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Of the threads of each rank: all cores but the first, which the engine's loop has, and those
    of a draft worker and of the KV copy thread. Several ranks get as many each, less one for the
    loop of each, near their GPUs."""
    plan = plan_cores(config, target_on_cpu=False)
    free = topology.compute_cpus(reserve=0) if plan is None else plan.engine
    copy = None if plan is None else plan.copy
    if ranks == 1:
        return (tuple(cpu for cpu in free if cpu not in (free[0], copy)) or free[:1],)
    free = tuple(cpu for cpu in free if cpu != copy) or free
    node_of = {cpu: node.index for node in topology.read_numa_nodes() for cpu in node.cpus}
    dealt = deal_to_ranks(free, [numa_node(rank) for rank in range(ranks)], node_of)
    return tuple(cpus[1:] or cpus for cpus in dealt)


def own_cores(experts: HybridExperts, config: EngineConfig, rank: Rank) -> None:
    """Lets all other threads of the process leave the cores of the experts' threads, for as long as
    `experts` lives: Python's and CUDA's would wake up where a team spins, this rank's or another's.
    Called when the engine is built; what compiles kernels before may use all cores."""
    teams = _team_cpus(config, rank.size)
    cpus = tuple({cpu for team in teams for cpu in team})
    if len(cpus) < sum(map(len, teams)):
        logger.warning(
            "the %d ranks of tensor_parallel_size have %d cores for experts and share them: steps "
            "with experts on the CPU are slow", rank.size, len(cpus),
        )  # fmt: skip
    elsewhere = ThreadsElsewhere(cpus)
    weakref.finalize(experts, elsewhere.restore)
    logger.info("experts: CPUs %s are the threads' own", ", ".join(map(str, sorted(cpus))))


def _save(path: str, placement: ExpertPlacement, model: str) -> None:
    scores = placement.scores.slowest.reshape(placement.table.shape)
    try:
        save_profile(path, scores, model=model)
    except ProfileError as error:
        logger.warning("scores of experts are not kept: %s", error)


def expert_modules(model: nn.Module) -> list[Experts]:
    """The mixtures of a model in the order of its layers."""
    from hetero_llm.models.experts import Experts

    return [module for module in model.modules() if isinstance(module, Experts)]
