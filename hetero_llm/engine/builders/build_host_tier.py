"""Builds the host tier of the KV cache: page-locked pool, copier, and the index over them.

If anything is missing (memory, compiler, permission to lock pages) the engine logs a warning and
serves without the tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hetero_llm.bridge.kv_offload.copier import CopyOptions, DeviceRows, NativeCopier
from hetero_llm.bridge.kv_offload.copier_library import CopierError
from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from hetero_llm.bridge.kv_offload.copy_calibration import prepare
from hetero_llm.bridge.kv_offload.host_block_index import HostBlockIndex
from hetero_llm.bridge.kv_offload.pinned_host_tier import LoadRule, PinnedHostTier
from hetero_llm.bridge.kv_offload.pinned_pool import PinnedPool, PoolError
from hetero_llm.bridge.kv_offload.sizing import pool_size
from hetero_llm.config.engine_config import SchedulerConfig
from hetero_llm.config.offload_config import OffloadConfig, pool_words
from hetero_llm.core.kv_events import KvEvents, NoKvEvents
from hetero_llm.core.step_times import StepTimes
from hetero_llm.kv_cache.block_transfers import OffloadLimits
from hetero_llm.utils.topology import read_topology

if TYPE_CHECKING:
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.runner.kv_cache import KVCacheShape, PagedKVCache

logger = logging.getLogger(__name__)

_PINNING_THREADS = 16
_CALIBRATED_BLOCKS = 64  # host blocks that the calibration of the copier uses
_NAP_S = 0.05
_RESERVED_STEPS = 8


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


@dataclass(slots=True)
class HostMemory:
    """The pool and the layer-ready flags, opened before the KV cache is allocated."""

    config: OffloadConfig
    platform: HostPlatform
    pool: PinnedPool
    layer_ready: LoadFlags
    events: KvEvents
    method: str = ""

    def join(self, cache: PagedKVCache, times: StepTimes) -> PinnedHostTier | None:
        """Starts the copier and returns the tier; None with a warning if there is no copier. To be
        called before the cache holds anything."""
        copier = _open_copier(self, cache)
        if copier is None:
            return None
        self.layer_ready.flag_of = copier.layer_ready_flag
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
        return PinnedHostTier(index, copier, rule, free_memory=self.pool.close)

    def words(self) -> str:
        """Text for the start-up table."""
        return pool_words(self.pool.num_rows * self.pool.row_bytes, f"copied by {self.method}")


def open_host_memory(
    config: OffloadConfig | None,
    platform: HostPlatform | None,
    shape: KVCacheShape,
    scheduler: SchedulerConfig,
    *,
    events: KvEvents | None = None,
) -> HostMemory | None:
    """Opens page-locked memory for offloaded blocks. None without a configuration or a platform,
    and with a warning if the memory cannot be locked. To be called before the KV cache is sized:
    page tables of a large pool take memory on the device, too.

    Raises:
        ConfigError: the requested share of memory is too small for a pool.
    """
    if config is None or platform is None:
        return None
    row_bytes = shape.block_bytes
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
    try:
        pool = PinnedPool(
            row_bytes, size.num_rows, node=platform.node, threads=_PINNING_THREADS,
            background=config.background_pin, libcuda=platform.libcuda,
        )  # fmt: skip
    except PoolError as error:
        logger.warning("serving without prefix cache offload: %s", error)
        return None
    if pool.failure and not pool.ready_rows:
        logger.warning("serving without prefix cache offload: %s", pool.failure)
        pool.close()
        return None
    return HostMemory(config, platform, pool, platform.make_layer_ready(), events or NoKvEvents())


def _open_copier(host: HostMemory, cache: PagedKVCache) -> NativeCopier | None:
    """Opens and calibrates the copier. Without one: None with a warning, and the pool is closed."""
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
    )  # fmt: skip
    try:
        copier = NativeCopier(rows, pool, options, current_stream=platform.current_stream)
    except CopierError as error:
        logger.warning("serving without prefix cache offload: %s", error)
        pool.close()
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
