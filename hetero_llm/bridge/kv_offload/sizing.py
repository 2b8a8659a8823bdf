"""Size of the host memory pool for offloaded blocks. Plain arithmetic: the caller reads the
machine's memory (`utils.topology`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_llm.core.errors import ConfigError

FIELD = "cpu_prefill_memory_utilization"

_RESERVE_BYTES = 10 * 10**9
_SMALL_RESERVE = 0.1
"""Share of the machine's memory, if less than `_RESERVE_BYTES`."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of the pool.

    Attributes:
        num_rows: blocks.
        num_bytes: of all blocks.
        asked_bytes: requested by the utilization.
        sentence: requested and granted size with the reason, for the log.
    """

    num_rows: int
    num_bytes: int
    asked_bytes: int
    sentence: str


def check_utilization(utilization: float) -> None:
    """Raises ConfigError unless 0 < utilization <= 1."""
    if not 0.0 < utilization <= 1.0:  # false for NaN too
        raise ConfigError(FIELD, utilization, "must be more than 0 and at most 1")


def pool_size(
    utilization: float,
    *,
    total_bytes: int,
    available_bytes: int,
    headroom_bytes: int | None,
    row_bytes: int,
    min_rows: int = 1,
) -> PoolSize:
    """Grants the requested share of the machine's memory, as far as it is available, within the
    control groups too, less a reserve for other processes.

    Args:
        utilization: share of `total_bytes`.
        total_bytes: memory of the machine.
        available_bytes: can be allocated now without swapping.
        headroom_bytes: left by the control groups' limits; None: no limit.
        row_bytes: of one block.
        min_rows: minimum number of blocks: those of one sequence.

    Raises:
        ConfigError: the utilization is not in (0, 1], or the pool would have fewer than `min_rows`.
    """
    check_utilization(utilization)
    assert total_bytes > 0 and row_bytes > 0 and min_rows >= 1
    asked = math.floor(utilization * total_bytes)
    reserve = min(_RESERVE_BYTES, math.floor(_SMALL_RESERVE * total_bytes))
    limited = headroom_bytes is not None and headroom_bytes < available_bytes
    there = headroom_bytes if limited and headroom_bytes is not None else available_bytes
    granted = min(asked, max(0, there - reserve))
    rows = granted // row_bytes
    whose = "its control group leaves" if limited else "available are"
    cause = f"{whose} {gib(there)}, of which {gib(reserve)} stay free"
    sentence = f"{FIELD}={utilization:g} of {gib(total_bytes)} is {gib(asked)}"
    if granted < asked:
        sentence += f"; {cause}"
    if rows < min_rows:
        raise ConfigError(
            FIELD,
            utilization,
            f"{sentence}: room for {rows} blocks of {row_bytes / 2**20:.2f} MiB, "
            f"and {min_rows} are needed for one sequence",
        )
    num_bytes = rows * row_bytes
    sentence += f": the pool has {gib(num_bytes)}, {rows} blocks of {row_bytes / 2**20:.2f} MiB"
    return PoolSize(rows, num_bytes, asked, sentence)


def gib(num_bytes: int) -> str:
    """A size as text, in GiB."""
    return f"{num_bytes / _GIB:.2f} GiB"
