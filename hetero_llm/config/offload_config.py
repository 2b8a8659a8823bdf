"""Configuration of prefix cache offload, built from the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.config.args_features import OFFLOAD
from hetero_llm.core.errors import ConfigError

_SWITCH = "enable_prefix_cache_offload"
_UTILIZATION = "cpu_prefill_memory_utilization"
_NOT_LAZY = "apc_offload_not_lazy"
_OF_LAZY = ("apc_offload_lookahead", "apc_offload_max_inflight_mb")
_MIB, _GIB = 1 << 20, 1 << 30

_ROWS = {spec.name: spec for spec in OFFLOAD}


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The host tier of the prefix cache, in pinned memory.

    Attributes:
        memory_utilization: requested share of the host's total memory, in (0, 1].
        lazy: submit the layers of a load a few at a time, else all at once. A step waits for each
            layer separately in both cases.
        lookahead: number of layer groups of a load that are submitted ahead; `lazy` only.
        max_inflight_bytes: maximum bytes of all submitted, unfinished loads; `lazy` only.
        min_uses: number of requests that must have used a block before it is stored.
        hit_count: log TACO-LLM's hit line.
        gpu_evictor_limit: maximum unused blocks that keep their content on the device; None: all.
        write_policy: "victim": store blocks shortly before their eviction from the device;
            "write_through": store them as soon as they are full.
        host_policy: eviction policy of host memory: "lru", "slru" or "cost".
        load_min_tokens: compute hits shorter than this instead of loading them; None: decided by
            the time that the load would save.
        background_pin: begin to serve before the whole pool is pinned; it grows meanwhile.
    """

    memory_utilization: float
    lazy: bool
    lookahead: int
    max_inflight_bytes: int
    min_uses: int
    hit_count: bool
    gpu_evictor_limit: int | None
    write_policy: str
    host_policy: str
    load_min_tokens: int | None
    background_pin: bool


def offload_from_args(args: Mapping[str, Any]) -> OffloadConfig | None:
    """The configuration that the arguments give; None without `enable_prefix_cache_offload`.

    Args:
        args: The complete dict of `config.args.resolve_engine_args`.

    Raises:
        ConfigError: there is no prefix cache to offload, or a value has no effect.
    """
    given = {name: args[name] for name in _ROWS}
    changed = {name: value for name, value in given.items() if value != _ROWS[name].default}
    caching = args["enable_prefix_caching"]
    if not given[_SWITCH]:
        for name, value in changed.items():
            raise ConfigError(name, value, f"needs {_SWITCH}=True")
        return None
    if not caching:
        reason = "needs enable_prefix_caching=True: what is offloaded are blocks of that cache"
        raise ConfigError(_SWITCH, True, reason)
    if given[_NOT_LAZY]:
        for name in _OF_LAZY:
            if name in changed:
                reason = f"has no effect with {_NOT_LAZY}=True, which submits everything at once"
                raise ConfigError(name, changed[name], reason)
    limit = given["apc_offload_gpu_evictor_limit"]
    return OffloadConfig(
        memory_utilization=given[_UTILIZATION],
        lazy=not given[_NOT_LAZY],
        lookahead=given["apc_offload_lookahead"],
        max_inflight_bytes=given["apc_offload_max_inflight_mb"] * _MIB,
        min_uses=given["apc_offload_min_access_threshold"],
        hit_count=given["apc_offload_enable_hit_cnt"],
        gpu_evictor_limit=None if limit < 0 else limit,
        write_policy=given["apc_offload_write_policy"],
        host_policy=given["apc_offload_host_policy"],
        load_min_tokens=given["apc_offload_load_min_tokens"],
        background_pin=given["apc_offload_background_pin"],
    )


def no_effect_on_cpu() -> str:
    """Text of the warning if the model runs on a CPU."""
    return (
        f"{_SWITCH} has no effect on a CPU: the prefix cache is in host memory already; raise "
        "gpu_memory_utilization or num_gpu_blocks_override for a larger one"
    )


def pool_words(pool_bytes: int, method: str) -> str:
    """Short description of the host tier, for the start-up table and the log.

    Args:
        pool_bytes: size of the pool, once all of it is pinned.
        method: name of the copy method for large transfers.
    """
    return f"{pool_bytes / _GIB:.1f} GiB of pinned host memory for the prefix cache, {method}"
