"""Builds the host tier of the KV cache: page-locked pool, copier, and the index over them.

If anything is missing (memory, compiler, permission to lock pages) the engine logs a warning and
serves without the tier. Of a model with several ranks each has a pool and a copier for its part of
the blocks, as many blocks as the others; what one of them is missing, all do without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hetero_llm.bridge.kv_offload.copier import CopyOptions, DeviceRows, NativeCopier
from hetero_llm.bridge.kv_offload.copier_library import CopierError
from hetero_llm.bridge.kv_offload.copier_protocol import Copier, LayerReadyFlag
from hetero_llm.bridge.kv_offload.copy_calibration import prepare
from hetero_llm.bridge.kv_offload.host_block_index import HostBlockIndex
from hetero_llm.bridge.kv_offload.pinned_host_tier import LoadRule, PinnedHostTier
from hetero_llm.bridge.kv_offload.pinned_pool import PinnedPool, PoolError
from hetero_llm.bridge.kv_offload.rank_copies import OtherRanks, RankCopies, RanksCopier
from hetero_llm.bridge.kv_offload.sizing import pool_size
from hetero_llm.bridge.kv_offload.transfer_reports import ReportBoard
from hetero_llm.config.engine_config import EngineConfig, SchedulerConfig
from hetero_llm.config.offload_config import OffloadConfig, no_effect_on_cpu, pool_words
from hetero_llm.core.kv_events import KvEvents, NoKvEvents
from hetero_llm.core.step_times import StepTimes
from hetero_llm.distributed.rank_share import ALONE_SHARE, RankShare, never
from hetero_llm.engine.core_plan import plan_cores
from hetero_llm.kv_cache.block_transfers import OffloadLimits
from hetero_llm.utils.topology import read_topology

if TYPE_CHECKING:
    import torch

    from hetero_llm.models.config import ModelConfig
    from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache

logger = logging.getLogger(__name__)

_PINNING_THREADS = 16
_CALIBRATED_BLOCKS = 64  # host blocks that the calibration of the copier uses
_NAP_S = 0.05
_RESERVED_STEPS = 8
_ANY_ROWS = 1 << 62
"""Blocks of the pool of a rank that takes as many as rank 0 has."""


class LoadFlags(Protocol):
    """`runner.layer_ready.LayerReadyFlags` over flags on the device.

    Attributes:
        flag_of: transfer id -> flag of a load, None if it has ended; set once there is a copier.
        flags_address: of the flags, int32, initially zero.
    """

    flag_of: Callable[[int], LayerReadyFlag | None]

    @property
    def flags_address(self) -> int: ...

    def arm(self, transfer_ids: Sequence[int]) -> None: ...

    def wait(self, layer: int) -> None: ...


@dataclass(frozen=True, slots=True)
class HostPlatform:
    """What the host tier needs to know of the device.

    Attributes:
        libcuda: the driver's library.
        current_stream: returns the handle of the stream that steps are launched on.
        make_layer_ready: creates the flags at which steps wait for loads.
        node: the device's NUMA node; None: unknown.
        core: CPU core of the copy thread; None: any.
    """

    libcuda: str
    current_stream: Callable[[], int]
    make_layer_ready: Callable[[], LoadFlags]
    node: int | None = None
    core: int | None = None


@dataclass(frozen=True, slots=True)
class HostShare:
    """A rank's share of what all ranks keep in host memory.

    Attributes:
        share: of the rank.
        rank: its number among all ranks, whatever they share.
        others: what rank 0 announces its copies to; None in the other ranks, and where there is
            one rank.
        board: descriptor of the memory of the ranks' `ReportBoard`; -1 with one rank.
        bytes_of_all: bytes of KV on all ranks for each byte on this one; of rank 0.
    """

    share: RankShare = ALONE_SHARE
    rank: int = 0
    others: OtherRanks | None = None
    board: int = -1
    bytes_of_all: float = 1.0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.share.agreement.size


@dataclass(slots=True)
class HostTierMemory:
    """The pool and the layer-ready flags, opened before the KV cache is allocated.

    Attributes:
        gave_up: see `distributed.parallel_runner.ParallelRunner`; set by `join`.
    """

    config: OffloadConfig
    platform: HostPlatform
    pool: PinnedPool
    layer_ready: LoadFlags
    events: KvEvents
    own: HostShare
    board: ReportBoard | None
    method: str = ""
    gave_up: Callable[[], bool] = never

    def join(self, cache: PagedKVCache, times: StepTimes) -> PinnedHostTier | None:
        """Starts the copier and returns the tier; None with a warning if there is no copier. To be
        called before the cache holds anything, by rank 0."""
        copier = self._open_copier(cache)
        if copier is None:
            return None
        self.method = copier.calibration.best()[-1].method.name.lower()
        shape, config = cache.shape, self.config
        rule = LoadRule(
            block_size=shape.block_size,
            block_bytes=shape.block_bytes,
            num_layers=shape.num_layers,
            compute=times.predict,
            min_tokens=config.load_min_tokens,
            window_bytes=config.max_inflight_bytes if config.lazy else None,
        )
        index = HostBlockIndex(
            policy=config.host_policy, min_uses=config.min_uses, events=self.events
        )
        joined: Copier = copier
        if self.board is not None:
            assert self.own.others is not None
            joined = ranks = RanksCopier(
                copier, self.own.others, self.board, bytes_of_all=self.own.bytes_of_all
            )
            self.gave_up = ranks.gave_up
        return PinnedHostTier(index, joined, rule, free_memory=self._free)

    def join_rank(self, cache: PagedKVCache) -> RankCopies | None:
        """Starts the copier of another rank than 0; None as in `join`, in all ranks alike."""
        copier = self._open_copier(cache)
        if copier is None:
            return None
        assert self.board is not None
        return RankCopies(copier, partial(self.board.set_ready_rows, self.own.rank))

    def words(self) -> str:
        """Text for the start-up table."""
        size = self.own.size
        how = f"copied by {self.method}" + (f", divided between {size} ranks" if size > 1 else "")
        own_bytes = self.pool.num_rows * self.pool.row_bytes
        return pool_words(int(own_bytes * self.own.bytes_of_all), how)

    def _open_copier(self, cache: PagedKVCache) -> NativeCopier | None:
        """Opens and calibrates the copier. Without one, here or in another rank: None with a
        warning, and the pool is closed."""
        copier = _open_copier(self, cache)
        if not self.own.share.agreement.least(int(copier is not None)):
            if copier is not None:
                logger.warning("serving without prefix cache offload: another rank cannot copy")
                copier.close()
            self._free()
            return None
        assert copier is not None
        self.layer_ready.flag_of = copier.layer_ready_flag
        return copier

    def _free(self) -> None:
        self.pool.close()
        if self.board is not None:
            self.board.close()


def host_platform(config: EngineConfig, device: torch.device, rank: int = 0) -> HostPlatform | None:
    """Access to the device for the host tier; None without offload, and on a CPU."""
    if config.offload is None:
        return None
    if device.type == "cpu":
        if rank == 0:
            logger.warning("%s", no_effect_on_cpu())
        return None
    import torch

    from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
    from hetero_llm.utils.numa import numa_node

    # Cores are divided for the engine's process; copy threads of other ranks run where they can.
    plan = plan_cores(config, target_on_cpu=False) if rank == 0 else None
    return HostPlatform(
        libcuda="libcuda.so.1",
        current_stream=lambda: torch.cuda.current_stream(device).cuda_stream,
        make_layer_ready=lambda: DeviceLayerReadyFlags(device, lambda transfer_id: None),
        node=numa_node(rank or device.index or 0),
        core=None if plan is None else plan.copy,
    )


def open_host_memory(
    config: OffloadConfig | None,
    platform: HostPlatform | None,
    shape: KVCacheShape,
    scheduler: SchedulerConfig,
    *,
    events: KvEvents | None = None,
    own: HostShare | None = None,
) -> HostTierMemory | None:
    """Opens page-locked memory for offloaded blocks. None without a configuration or a platform,
    and with a warning if the memory cannot be locked. To be called before the KV cache is sized:
    page tables of a large pool take memory on the device, too. All ranks call it together, and get
    pools of as many blocks.

    Args:
        shape: of the rank's part of the KV cache.
        own: share of this rank; None: there is one.

    Raises:
        ConfigError: the requested share of memory is too small for a pool.
    """
    if config is None or platform is None:
        return None
    own = own or HostShare()
    agreement, board, num_rows = own.share.agreement, None, _ANY_ROWS
    try:
        if own.rank == 0:
            row_bytes = int(shape.block_bytes * own.bytes_of_all)
            num_rows = _num_rows(config, row_bytes, scheduler)
            if own.size > 1:  # before another rank knows the number of rows
                board = ReportBoard(own.board, own.size)
        num_rows = agreement.least(num_rows)
    except CopierError as error:
        logger.warning("serving without prefix cache offload: %s", error)
        agreement.least(0)
        return None
    if not num_rows:
        return None
    pool = _open_pool(config, platform, shape.block_bytes, num_rows)
    if own.rank > 0:
        board = ReportBoard(own.board)
    if not agreement.least(int(pool is not None)):
        if pool is not None:
            logger.warning("serving without prefix cache offload: another rank has no memory")
            pool.close()
        if board is not None:
            board.close()
        return None
    assert pool is not None
    return HostTierMemory(
        config, platform, pool, platform.make_layer_ready(), events or NoKvEvents(), own, board
    )


def _num_rows(config: OffloadConfig, row_bytes: int, scheduler: SchedulerConfig) -> int:
    """Blocks for the configured share of the machine's memory.

    Args:
        row_bytes: of a block on all ranks.
    """
    host = read_topology()
    limit = host.memory_limit
    size = pool_size(
        config.memory_utilization,
        total_bytes=host.total_memory,
        available_bytes=host.available_memory,
        headroom_bytes=None if limit is None else limit.headroom_bytes,
        row_bytes=row_bytes,
        min_rows=-(-scheduler.max_model_len // scheduler.block_size),
    )
    logger.info("%s", size.sentence)
    return size.num_rows


def _open_pool(
    config: OffloadConfig, platform: HostPlatform, row_bytes: int, num_rows: int
) -> PinnedPool | None:
    """The pool of this rank; None with a warning if there is no memory."""
    try:
        pool = PinnedPool(
            row_bytes, num_rows, node=platform.node, threads=_PINNING_THREADS,
            background=config.background_pin, libcuda=platform.libcuda,
        )  # fmt: skip
    except PoolError as error:
        logger.warning("serving without prefix cache offload: %s", error)
        return None
    if pool.failure and not pool.ready_rows:
        logger.warning("serving without prefix cache offload: %s", pool.failure)
        pool.close()
        return None
    return pool


def _open_copier(host: HostTierMemory, cache: PagedKVCache) -> NativeCopier | None:
    """Opens and calibrates the copier; None with a warning if that cannot be done."""
    config, pool, platform, shape = host.config, host.pool, host.platform, cache.shape
    while pool.ready_rows < min(_CALIBRATED_BLOCKS, pool.num_rows) and not pool.wait(_NAP_S):
        pass  # usually ready by now: loading the weights takes longer
    rows = DeviceRows(
        cache.data.data_ptr(), cache.num_blocks, shape.block_bytes, shape.num_layers,
        host.layer_ready.flags_address,
    )  # fmt: skip
    options = CopyOptions(
        lookahead=config.lookahead, max_inflight=config.max_inflight_bytes, lazy=config.lazy,
        libcuda=platform.libcuda, core=platform.core,
        board=0 if host.board is None else host.board.address, rank=host.own.rank,
    )  # fmt: skip
    try:
        copier = NativeCopier(rows, pool, options, current_stream=platform.current_stream)
    except CopierError as error:
        logger.warning("serving without prefix cache offload: %s", error)
        return None
    prepare(copier)
    return copier


def offload_limits(config: OffloadConfig, scheduler: SchedulerConfig) -> OffloadLimits:
    """Limits that decide when blocks are stored in host memory. The device blocks of several of the
    largest steps are kept stored ahead of their eviction, since prompts are computed faster than
    blocks can be stored."""
    reserve = _RESERVED_STEPS * -(-scheduler.max_num_batched_tokens // scheduler.block_size)
    return OffloadLimits(
        reserve, config.gpu_evictor_limit, write_through=config.write_policy == "write_through"
    )


def step_times(config: ModelConfig, num_parameters: int) -> StepTimes:
    """The predictor of step durations. A token costs 4 operations per head dimension for each token
    of its context (2 products, each a multiplication and an addition), and 2 per parameter."""
    per_context = 4 * config.num_layers * config.num_heads * config.head_dim
    return StepTimes(per_context=per_context / (2 * max(num_parameters, 1)))
