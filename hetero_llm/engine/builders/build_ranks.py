"""Starts the rank processes of an engine, and gives each rank its part in the exchanges.

Ranks that share layers (tensor parallel) are neighbours. The engine's own process, rank 0, has a
part of the last stage (pipeline parallel), so it samples; those of the first stage have the highest
numbers. What a rank process runs is in `rank_process.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.bridge.kv_offload.transfer_reports import board_bytes
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.config.parallel_config import ParallelConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.promotion import promotions_to_rows
from hetero_llm.distributed.agreement import GroupAgreement
from hetero_llm.distributed.deferred_runner import DeferredRunner
from hetero_llm.distributed.parallel_runner import ParallelRunner
from hetero_llm.distributed.process_group import (
    abort_group,
    check_no_group,
    close_group,
    group_within,
    open_group,
)
from hetero_llm.distributed.rank_processes import NoRanks, RankProcesses, RankProgram
from hetero_llm.distributed.rank_share import ALONE_SHARE, RankShare, never
from hetero_llm.distributed.value_codec import ValueCodec, types_within
from hetero_llm.engine.builders.build_host_tier import HostShare
from hetero_llm.engine.builders.rank_faults import fault_bytes
from hetero_llm.models.collectives import (
    NO_LINK,
    ONE_RANK,
    Collectives,
    OneRank,
    Rank,
    StageLink,
)
from hetero_llm.models.configs.transformers_vision import ImageModelConfig
from hetero_llm.utils import topology
from hetero_llm.utils.env import child_environment, group_environment
from hetero_llm.utils.log_sink import kind_of_root

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from hetero_llm.gpu.collectives import PeerCollectives
    from hetero_llm.gpu.hybrid_experts import HybridExperts
    from hetero_llm.lora.store import AdapterStore
    from hetero_llm.models.config import ModelConfig

logger = logging.getLogger(__name__)

MODULE = "hetero_llm.engine.processes.rank_process"

IMPORTED, LOADED = "imported", "loaded"
"""Points of a rank's start, which the engine waits for: the rank is about to join the group; it has
its weights."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank process builds; resolved by the engine, so that all ranks build alike.

    Attributes:
        config: its model is a folder of this machine.
        scheduler: limits of steps.
        dtype: name of the model's type.
        device: "cpu" or "cuda"; rank r uses the GPU of index r.
        row_bytes: of a row of hidden states in the model's type.
        most_drafted_tokens: most tokens of a step with draft trees; 0: there are no such steps.
        threads: of torch, on the CPU.
        log_level, log_format: of the engine's log.
        board: see `build_host_tier.HostShare`.
        faults: see `RankShare`.
    """

    config: EngineConfig
    scheduler: SchedulerConfig
    dtype: str
    device: str
    row_bytes: int
    most_drafted_tokens: int
    threads: int
    log_level: int
    log_format: str
    board: int = -1
    faults: int = -1


_FORM = ValueCodec(*types_within(RankSettings))


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The other ranks of an engine, and its own share.

    Attributes:
        processes: a null object where there are none.
        share: of rank 0.
    """

    processes: RankProcesses | NoRanks
    share: RankShare

    def host_share(self, own_layers: int, all_layers: int) -> HostShare:
        """Rank 0's share of what all ranks keep in host memory.

        Args:
            own_layers, all_layers: of rank 0, and of all stages.
        """
        if isinstance(self.processes, NoRanks):
            return HostShare()
        of_stage = self.processes.size // self.share.collectives.rank.stages
        return HostShare(
            self.share,
            others=self.processes,
            board=self.processes.shared,
            bytes_of_all=of_stage * all_layers / own_layers,
        )

    def parallel(
        self,
        runner: ModelRunner[Any],
        store: AdapterStore | None = None,
        *,
        defers: bool = False,
        timed_out: Callable[[], bool] = never,
    ) -> ModelRunner[Any]:
        """The runner that the engine calls: that of rank 0, or one that announces steps, too.

        Args:
            store: of the adapters that steps load.
            defers: where there are stages, `runner` launches a step when that is finished. For
                runners that compute in `launch`.
            timed_out: see `ParallelRunner`.
        """
        if isinstance(self.processes, NoRanks):
            return runner
        if defers and self.share.collectives.rank.stages > 1:
            from hetero_llm.lora.rank_adapters import NoRankAdapters, RankAdapters

            resources = NoRankAdapters() if store is None else RankAdapters(store)
            runner = DeferredRunner(runner, resources)
        self.processes.begin_serving()
        self.share.serves()
        return ParallelRunner(runner, self.processes, self.share.gave_up, timed_out)

    def share_adapters(self, store: AdapterStore | None) -> None:
        """Lets the other ranks open and forget adapters as the store of rank 0 does."""
        if store is not None and not isinstance(self.processes, NoRanks):
            store.ranks = self.processes

    def share_experts(self, experts: HybridExperts) -> None:
        """Lets the other ranks promote what the bank of rank 0 promotes, from its first step on;
        they read it when they begin to serve."""
        if not isinstance(self.processes, NoRanks):
            promote = self.processes.promote
            experts.moves.announce = lambda chosen: promote(promotions_to_rows(chosen))

    def wait_loaded(self) -> None:
        """Waits until the other ranks have their weights.

        Raises:
            HeteroLLMError: a rank has failed.
        """
        if isinstance(self.processes, RankProcesses):
            self.processes.wait_for(LOADED)


def check_parallel(config: EngineConfig, device: torch.device) -> None:
    """Checks that the engine can have its ranks, before anything is started.

    Raises:
        ConfigError: there are fewer GPUs, or another argument cannot be combined with ranks.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1:
        return
    field, size = parallel.asked_by
    check_no_group(size, field)
    if device.type == "cuda":
        import torch

        count = torch.cuda.device_count()
        if count < parallel.num_ranks:
            needed = "as many" if size == parallel.num_ranks else _product(parallel)
            reason = f"needs {needed} GPUs, and this process sees {count}"
            raise ConfigError(field, size, reason)
    if parallel.pipeline_parallel_size > 1:
        _check_stages(config)
    if config.cpu.backend == "ipex":
        reason = f"cannot be combined with {field} ({size}) yet: leave one of them out"
        raise ConfigError("cpu_backend", config.cpu.backend, reason)
    if parallel.sequence_parallel_size > 1:
        _check_sequence_parallel(config, device)
    if device.type == "cpu" and config.cpu.weight_dtype != "auto":
        reason = f"needs the native backend, which does not share layers ({field}={size})"
        raise ConfigError("cpu_weight_dtype", config.cpu.weight_dtype, reason)


def _product(parallel: ParallelConfig) -> str:
    tensor = f"tensor_parallel_size={parallel.tensor_parallel_size}"
    name = "sequence_parallel_size"
    if parallel.pipeline_parallel_size > 1:
        name = "pipeline_parallel_size"
    return f"{parallel.num_ranks} ({tensor} times {name}={getattr(parallel, name)})"


def _check_stages(config: EngineConfig) -> None:
    """Raises ConfigError: an argument cannot be combined with stages."""
    stages = config.parallel.pipeline_parallel_size
    field = "pipeline_parallel_size"
    _refuse_host_weights(config, field)
    path = config.cache.scales_path
    if path is not None:
        reason = f"cannot be combined with {field} ({stages}) yet: leave one of them out"
        raise ConfigError("quantization_param_path", path, reason)


def _refuse_host_weights(config: EngineConfig, field: str) -> None:
    """Raises ConfigError: something comes from host memory that `field` does not go with."""
    size = getattr(config.parallel, field)
    reason = f"cannot be combined with {field} ({size}) yet: leave one of them out"
    refused: tuple[tuple[str, Any, bool], ...] = (
        ("enable_prompt_adapter", True, config.prompt_adapters.enabled),
        ("cpu_offload_gb", config.load.cpu_offload_gb, bool(config.load.cpu_offload_gb)),
    )
    for name, value, is_given in refused:
        if is_given:
            raise ConfigError(name, value, reason)


def _check_sequence_parallel(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError: ranks that share tokens do not do so with another argument."""
    size, tokens = config.parallel.sequence_parallel_size, config.max_num_batched_tokens
    _refuse_host_weights(config, "sequence_parallel_size")
    from hetero_llm.runner.sequence_parallel import LEAST_TOKENS

    least = LEAST_TOKENS[device.type]
    if tokens is not None and tokens < least:
        reason = f"ranks do not share steps of fewer than {least} tokens: raise it, or leave out "
        reason += f"sequence_parallel_size ({size})"
        raise ConfigError("max_num_batched_tokens", tokens, reason)


def check_sequence_ranks(model_config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError: the tokens of a prompt of this model cannot be shared by ranks."""
    size = parallel.sequence_parallel_size
    if size > 1 and isinstance(model_config, ImageModelConfig):
        reason = f"{model_config.class_name} takes images, which are not sent to other ranks"
        raise ConfigError("sequence_parallel_size", size, reason)


def for_ranks(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The configuration of each rank's part: on a CPU torch runs it, with a share of the cores."""
    ranks = config.parallel.num_ranks
    if ranks == 1 or device.type != "cpu":
        return config
    if config.cpu.backend == "native":
        message = "%s=%d: torch serves, the native executor does not share layers"
        logger.info(message, *config.parallel.asked_by)
    threads = config.cpu.threads or len(topology.compute_cpus(reserve=0))
    return replace(
        config, cpu=replace(config.cpu, backend="torch", threads=max(1, threads // ranks))
    )


def start_ranks(config: EngineConfig, device: torch.device) -> RankProcesses | NoRanks:
    """Starts the processes, which begin to import what they need.

    Args:
        device: of the model.

    Raises:
        ConfigError: they cannot be started.
    """
    size = config.parallel.num_ranks
    if size == 1:
        return NoRanks()
    # -P: a module of the working folder must not shadow one of Python's own. Threads that spin
    # would take the cores of other ranks.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | child_environment()
    shared = 0 if config.offload is None else board_bytes(size)
    command = (sys.executable, "-P", "-m", MODULE)
    faults = fault_bytes(size) if device.type == "cuda" else 0
    program = RankProgram(command, environment, shared, config.parallel.asked_by, faults)
    abort = abort_group if device.type == "cuda" else _nothing_to_abort
    processes = RankProcesses(size, program, abort)
    pids = [os.getpid(), *processes.pids]
    words = ", ".join(f"{rank} is process {pid}" for rank, pid in enumerate(pids))
    parallel = config.parallel
    kind = parallel.asked_by[0].partition("_")[0]
    groups = max(parallel.sequence_parallel_size, parallel.pipeline_parallel_size)
    if parallel.tensor_parallel_size > 1 and groups > 1:
        what = "stages of" if parallel.pipeline_parallel_size > 1 else "times"
        kind = f"{groups} {what} {parallel.tensor_parallel_size} tensor"
    logger.info("%s parallel on %d ranks: %s", kind, size, words)
    return processes


def join_ranks(
    processes: RankProcesses | NoRanks,
    config: EngineConfig,
    *,
    folder: Path,
    scheduler: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
    row_bytes: int,
    most_drafted_tokens: int,
) -> EngineRanks:
    """Gives the processes their settings and joins their group, as rank 0.

    Args:
        config: result of `for_ranks`.
        folder: of the model.
        row_bytes, most_drafted_tokens: see `RankSettings`.

    Raises:
        HeteroLLMError: a rank has failed.
    """
    import torch

    if isinstance(processes, NoRanks):
        return EngineRanks(processes, ALONE_SHARE)
    settings = RankSettings(
        config=_on_this_machine(config, folder),
        scheduler=scheduler,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        row_bytes=row_bytes,
        most_drafted_tokens=most_drafted_tokens,
        threads=config.cpu.threads or 1,
        log_level=logging.getLogger("hetero_llm").getEffectiveLevel(),
        log_format=kind_of_root(),
        board=processes.shared,
        faults=processes.faults,
    )
    try:
        processes.send_settings(_FORM.write(settings))
    except TypeError as error:
        reason = f"an argument cannot be sent to other processes: {error}"
        raise ConfigError(*config.parallel.asked_by, reason) from error
    processes.wait_for(IMPORTED)
    if device.type == "cuda":  # of this thread
        torch.cuda.set_device(0)
    share = processes.run_watched(
        partial(
            join_group,
            Rank(0, processes.size),
            processes.store,
            device,
            row_bytes=row_bytes,
            parallel=config.parallel,
        )
    )
    processes.joined(share.leave, share.abort)
    return EngineRanks(processes, replace(share, faults=processes.faults))


def part_of(rank: Rank, parallel: ParallelConfig) -> Rank:
    """What a rank has of the model.

    Args:
        rank: its number among all ranks.
    """
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage = stages - 1 - rank.index // size if stages > 1 else 0
    return Rank(rank.index % size, size, stage, stages)


def join_group(
    rank: Rank, store: int, device: torch.device, *, row_bytes: int, parallel: ParallelConfig
) -> RankShare:
    """Joins the group of all ranks, and those within it.

    Ranks that share layers are neighbours: of T tensor-parallel ranks, rank r has part r % T of
    each layer. Ranks r, r + T, r + 2 T ... have the same part and share the tokens of long prompts,
    or are stages, which hand over hidden states through NCCL or gloo. On GPUs that reach each
    other's memory, other collectives go through it; else through NCCL.

    Args:
        rank: among all ranks.
        store: see `open_group`.
        device: of this rank; a GPU becomes the current one.
        row_bytes: see `RankSettings`.

    Raises:
        ConfigError: see `open_group`.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(rank.index)
        device = torch.device("cuda", rank.index)
    world = open_group(rank, store, device)
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    every = range(rank.size)
    part = part_of(rank, parallel)
    shared = _Opened(OneRank(part) if stages > 1 and size == 1 else ONE_RANK)
    sequence = _Opened(ONE_RANK)
    groups: list[ProcessGroup] = []
    if size > 1:
        layers = [every[first : first + size] for first in every[::size]]
        groups.append(group_within(layers, rank.index))
        shared = _open_collectives(groups[-1], part, device, row_bytes, parallel, rows=False)
    if parallel.sequence_parallel_size > 1:
        tokens = [every[first::size] for first in range(size)]
        groups.append(group_within(tokens, rank.index))
        place = Rank(rank.index // size, parallel.sequence_parallel_size)
        sequence = _open_collectives(groups[-1], place, device, row_bytes, parallel, rows=True)
    agreement, link = GroupAgreement(rank.size), NO_LINK
    if stages > 1:
        of_stage = groups[0] if size > 1 else None
        first = rank.index - part.index
        agreement = GroupAgreement(rank.size, first=first, members=size, group=of_stage)
        link = _meet_neighbours(rank, part, device)
    within = [group for group in groups if group is not world]
    return _share(shared, sequence, agreement, within, device, link)


def _meet_neighbours(rank: Rank, part: Rank, device: torch.device) -> StageLink:
    """The link of a stage to the one before and the next one."""
    from hetero_llm.distributed.stage_link import GroupLink

    link = GroupLink(
        None if part.is_first else rank.index + part.size,
        None if part.is_last else rank.index - part.size,
    )
    link.meet(device)
    return link


@dataclass(frozen=True, slots=True)
class _Opened:
    """Attributes:
    collectives: of one group.
    peers: the same, if they go through the peers' memory.
    """

    collectives: Collectives
    peers: PeerCollectives | None = None


def _open_collectives(
    group: ProcessGroup,
    rank: Rank,
    device: torch.device,
    row_bytes: int,
    parallel: ParallelConfig,
    *,
    rows: bool,
) -> _Opened:
    """`rows`: they gather rows of many tokens, rather than add up those of few."""
    if device.type == "cuda" and parallel.peer_memory:
        peers = _peer_collectives(group, device, row_bytes, gathers_most=rows)
        if peers is not None:
            peers.rank = rank
            return _Opened(peers, peers)
    from hetero_llm.distributed.group_collectives import GroupCollectives

    return _Opened(GroupCollectives(rank, group))


def _share(
    shared: _Opened,
    sequence: _Opened,
    agreement: GroupAgreement,
    groups: list[ProcessGroup],
    device: torch.device,
    link: StageLink,
) -> RankShare:
    """The share of a rank, from the collectives that share layers and those that share tokens."""
    peers = [one.peers for one in (shared, sequence) if one.peers is not None]
    on_gpu = device.type == "cuda"

    def serves() -> None:
        if not peers:
            return
        from hetero_llm.gpu.collectives import SERVING_SECONDS

        for one in peers:
            one.set_patience(SERVING_SECONDS)

    def abort() -> None:
        for one in peers:
            one.abort()
        if on_gpu:  # gloo's end when the connection to a dead rank does
            abort_group(groups)

    def leave() -> None:
        for one in peers:
            one.close()
        close_group()

    return RankShare(
        shared.collectives,
        agreement,
        in_graphs=shared.peers is not None or shared.collectives.rank.size == 1,
        serves=serves,
        gave_up=lambda: any(one.gave_up for one in peers),
        abort=abort,
        leave=leave,
        sequence=sequence.collectives,
        link=link,
    )


def _peer_collectives(
    group: ProcessGroup, device: torch.device, row_bytes: int, *, gathers_most: bool
) -> PeerCollectives | None:
    """Collectives through memory that the GPUs of all ranks map; None if they cannot, alike on all
    ranks of the group."""
    from hetero_llm.gpu.collectives import (
        GATHERED_BYTES,
        GATHERED_BYTES_OF_ROWS,
        open_peer_collectives,
    )
    from hetero_llm.gpu.peer_memory import GroupExchange, PeersUnreachable

    gathered = GATHERED_BYTES_OF_ROWS if gathers_most else GATHERED_BYTES
    try:
        with group_environment():
            return open_peer_collectives(
                row_bytes, device, GroupExchange(group), gathered_bytes=gathered
            )
    except PeersUnreachable as error:
        logger.warning("%s; NCCL serves", error)
        return None


def _nothing_to_abort() -> None:
    """Gloo's collectives end when the connection to a dead rank does."""


def read_settings(data: bytes) -> RankSettings:
    """The settings that `join_ranks` has sent."""
    settings: RankSettings = _FORM.read(data)
    return settings


def _on_this_machine(config: EngineConfig, folder: Path) -> EngineConfig:
    """The configuration with the model's folder in place of its name, and without what rank 0 alone
    does: it has compared the model's manifest, and has the drafts."""
    load = config.load
    same = load.tokenizer == load.model and load.tokenizer_revision == load.revision
    return replace(
        config,
        load=replace(
            load,
            model=str(folder),
            revision=None,
            tokenizer=str(folder) if same else load.tokenizer,
            tokenizer_revision=None if same else load.tokenizer_revision,
            model_sha256=None,
        ),
    )
