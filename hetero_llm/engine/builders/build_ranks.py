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
from hetero_llm.distributed.agreement import GroupAgreement
from hetero_llm.distributed.deferred_runner import DeferredRunner
from hetero_llm.distributed.parallel_runner import ParallelRunner
from hetero_llm.distributed.plain_form import PlainForm, types_within
from hetero_llm.distributed.process_group import (
    abort_group,
    check_no_group,
    close_group,
    open_group,
    open_stage_group,
)
from hetero_llm.distributed.rank_processes import NoRanks, RankProcesses, RankProgram
from hetero_llm.distributed.rank_share import ALONE_SHARE, RankShare, never
from hetero_llm.engine.builders.build_host_tier import HostShare
from hetero_llm.models.collectives import Collectives, OneRank, Rank
from hetero_llm.utils import topology
from hetero_llm.utils.env import child_environment, group_environment
from hetero_llm.utils.log_sink import kind_of_root

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from hetero_llm.gpu.collectives import PeerCollectives
    from hetero_llm.lora.rank_adapters import ParallelAdapters
    from hetero_llm.lora.store import AdapterStore

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
        drafts: steps may have draft trees.
        threads: of torch, on the CPU.
        log_level, log_format: of the engine's log.
        board: see `build_host_tier.HostShare`.
    """

    config: EngineConfig
    scheduler: SchedulerConfig
    dtype: str
    device: str
    row_bytes: int
    drafts: bool
    threads: int
    log_level: int
    log_format: str
    board: int = -1


_FORM = PlainForm(*types_within(RankSettings))


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The other ranks of an engine, and its own share.

    Attributes:
        processes: a null object where there are none.
        share: of rank 0.
    """

    processes: RankProcesses | NoRanks
    share: RankShare

    def host_share(self) -> HostShare:
        """Rank 0's share of what all ranks keep in host memory."""
        if isinstance(self.processes, NoRanks):
            return HostShare()
        return HostShare(self.share, self.processes, self.processes.shared)

    def parallel(
        self,
        runner: ModelRunner[Any],
        store: AdapterStore | None = None,
        *,
        on_torch: bool = False,
        timed_out: Callable[[], bool] = never,
    ) -> ModelRunner[Any]:
        """The runner that the engine calls: that of rank 0, or one that announces steps, too.

        Args:
            store: of the adapters that steps load.
            on_torch: `runner.launch` computes, rather than let a device compute.
            timed_out: see `ParallelRunner`.
        """
        if isinstance(self.processes, NoRanks):
            return runner
        if on_torch and self.share.collectives.rank.stages > 1:
            from hetero_llm.lora.rank_adapters import NoRankAdapters, RankAdapters

            resources = NoRankAdapters() if store is None else RankAdapters(store)
            runner = DeferredRunner(runner, resources)
        self.processes.begin_serving()
        self.share.serves()
        return ParallelRunner(runner, self.processes, self.share.gave_up, timed_out)

    def adapters(self, store: AdapterStore | None) -> AdapterStore | ParallelAdapters | None:
        """What the engine opens adapters with: the store of rank 0, or all ranks' stores."""
        if store is None or isinstance(self.processes, NoRanks):
            return store
        from hetero_llm.lora.rank_adapters import ParallelAdapters

        return ParallelAdapters(store, self.processes)

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
    ranks = parallel.num_ranks
    if ranks == 1:
        return
    field, size = parallel.field
    check_no_group(size, field)
    if device.type == "cuda":
        import torch

        count = torch.cuda.device_count()
        if count < ranks:
            needed = "as many GPUs" if ranks == size else f"{ranks} GPUs with {_words(parallel)}"
            raise ConfigError(field, size, f"needs {needed}, and this process sees {count}")
    if parallel.pipeline_parallel_size > 1:
        _check_stages(config)
    if config.cpu.backend == "ipex":
        reason = f"cannot be combined with {field} ({size}) yet: leave one of them out"
        raise ConfigError("cpu_backend", config.cpu.backend, reason)
    if device.type == "cpu" and config.cpu.weight_dtype != "auto":
        reason = f"needs the native backend, which does not share layers ({field}={size})"
        raise ConfigError("cpu_weight_dtype", config.cpu.weight_dtype, reason)


def _words(parallel: ParallelConfig) -> str:
    return (
        f"tensor_parallel_size={parallel.tensor_parallel_size} and "
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
    )


def _check_stages(config: EngineConfig) -> None:
    """Raises ConfigError: an argument cannot be combined with stages."""
    stages = config.parallel.pipeline_parallel_size
    field = "pipeline_parallel_size"
    if config.speculation is not None:
        reason = "cannot be combined with drafts yet (use_lookahead, speculative_model, ...)"
        raise ConfigError(field, stages, f"{reason}: leave one of them out")
    reason = f"cannot be combined with {field} ({stages}) yet: leave one of them out"
    refused: tuple[tuple[str, Any, bool], ...] = (
        ("enable_prefix_cache_offload", True, config.offload is not None),
        ("enable_prompt_adapter", True, config.prompt_adapters.enabled),
        ("cpu_offload_gb", config.load.cpu_offload_gb, bool(config.load.cpu_offload_gb)),
        ("quantization_param_path", config.cache.scales_path, config.cache.scales_path is not None),
    )
    for name, value, is_given in refused:
        if is_given:
            raise ConfigError(name, value, reason)


def for_ranks(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The configuration of each rank's part: on a CPU torch runs it, with a share of the cores."""
    ranks = config.parallel.num_ranks
    if ranks == 1 or device.type != "cpu":
        return config
    if config.cpu.backend == "native":
        field, size = config.parallel.field
        logger.info("%s=%d: torch serves, the native executor does not share layers", field, size)
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
    program = RankProgram(command, environment, shared, config.parallel.field[0])
    abort = abort_group if device.type == "cuda" else _nothing_to_abort
    processes = RankProcesses(size, program, abort)
    pids = [os.getpid(), *processes.pids]
    words = ", ".join(f"{rank} is process {pid}" for rank, pid in enumerate(pids))
    kind = "tensor parallel"
    if config.parallel.pipeline_parallel_size > 1:
        of_stage = config.parallel.tensor_parallel_size
        kind = "pipeline parallel" if of_stage == 1 else f"stages of {of_stage} ranks each,"
    logger.info("%s on %d ranks: %s", kind, size, words)
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
    drafts: bool,
) -> EngineRanks:
    """Gives the processes their settings and joins their group, as rank 0.

    Args:
        config: result of `for_ranks`.
        folder: of the model.
        row_bytes: see `RankSettings`.

    Raises:
        HeteroLLMError: a rank has failed.
    """
    if isinstance(processes, NoRanks):
        return EngineRanks(processes, ALONE_SHARE)
    settings = RankSettings(
        config=_on_this_machine(config, folder),
        scheduler=scheduler,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        row_bytes=row_bytes,
        drafts=drafts,
        threads=config.cpu.threads or 1,
        log_level=logging.getLogger("hetero_llm").getEffectiveLevel(),
        log_format=kind_of_root(),
        board=processes.shared,
    )
    try:
        processes.send_settings(_FORM.write(settings))
    except TypeError as error:
        reason = f"an argument cannot be sent to other processes: {error}"
        raise ConfigError(*config.parallel.field, reason) from error
    processes.wait_for(IMPORTED)
    share = join_group(
        Rank(0, processes.size), processes.store, device,
        row_bytes=row_bytes, parallel=config.parallel,
    )  # fmt: skip
    processes.joined(share.leave, share.abort)
    return EngineRanks(processes, share)


def part_of(rank: Rank, parallel: ParallelConfig) -> Rank:
    """What a rank has of the model.

    Args:
        rank: its number among all ranks.
    """
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return Rank(rank.index % size, size, stages - 1 - rank.index // size, stages)


def join_group(
    rank: Rank, store: int, device: torch.device, *, row_bytes: int, parallel: ParallelConfig
) -> RankShare:
    """Joins the group of all ranks.

    On GPUs that reach each other's memory, collectives go through it; else through NCCL. Stages
    hand over hidden states through NCCL.

    Args:
        rank: among all ranks.
        store: see `open_group`.
        device: of this rank; a GPU becomes the current one.
        row_bytes: see `RankSettings`.

    Raises:
        ConfigError: see `open_group`.
    """
    import torch

    from hetero_llm.distributed.stage_link import GroupLink

    if device.type == "cuda":
        torch.cuda.set_device(rank.index)
        device = torch.device("cuda", rank.index)
    group = open_group(rank, store, device)
    part = part_of(rank, parallel)
    of_stage = open_stage_group(rank, part.size)
    first = rank.index - part.index
    agreement = GroupAgreement(rank.size, first=first, members=part.size, group=of_stage)
    link = GroupLink(
        None if part.is_first else rank.index + part.size,
        None if part.is_last else rank.index - part.size,
    )
    link.meet(device)
    further = () if of_stage is None else (of_stage,)
    abort = partial(abort_group, *further) if device.type == "cuda" else _nothing_to_abort
    peers = None
    if device.type == "cuda" and parallel.peer_memory and part.size > 1:
        peers = _peer_collectives(of_stage or group, device, row_bytes)
    if peers is None:
        collectives, in_graphs = _group_collectives(part, of_stage)
        return RankShare(
            collectives, agreement, in_graphs=in_graphs, abort=abort, leave=close_group, link=link
        )
    from hetero_llm.gpu.collectives import SERVING_SECONDS

    peers.rank = part

    def abort_all() -> None:
        peers.abort()
        abort()

    def leave() -> None:
        peers.close()
        close_group()

    return RankShare(
        peers,
        agreement,
        in_graphs=peers.in_graphs,
        serves=partial(peers.set_patience, SERVING_SECONDS),
        gave_up=lambda: peers.gave_up,
        abort=abort_all,
        leave=leave,
        link=link,
    )


def _group_collectives(part: Rank, group: ProcessGroup | None) -> tuple[Collectives, bool]:
    """Those of the ranks that share layers, and whether CUDA graphs may hold them.

    Args:
        group: of these ranks; None: the default group, unless this rank is the only one.
    """
    from hetero_llm.distributed.group_collectives import GroupCollectives

    if part.size == 1:
        return OneRank(part), True
    collectives = GroupCollectives(part, group)
    return collectives, collectives.in_graphs


def _peer_collectives(
    group: ProcessGroup, device: torch.device, row_bytes: int
) -> PeerCollectives | None:
    """Collectives through memory that the GPUs of all ranks map; None if they cannot, alike on all
    ranks."""
    from hetero_llm.gpu.collectives import open_peer_collectives
    from hetero_llm.gpu.peer_memory import GroupExchange, PeersUnreachable

    try:
        with group_environment():
            return open_peer_collectives(row_bytes, device, GroupExchange(group))
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
