"""How large the pool becomes, and what is said about it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.bridge.kv_offload.sizing import check_utilization, pool_size
from hetero_llm.core.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20


def test_what_was_asked_for_if_it_is_there() -> None:
    size = pool_size(
        0.25,
        total_bytes=400 * GIB,
        available_bytes=390 * GIB,
        headroom_bytes=None,
        row_bytes=2 * MIB,
    )
    assert (size.num_rows, size.num_bytes, size.asked_bytes) == (51200, 100 * GIB, 100 * GIB)
    assert size.sentence == (
        "cpu_prefill_memory_utilization=0.25 of 400.00 GiB is 100.00 GiB: "
        "the pool has 100.00 GiB, 51200 blocks of 2.00 MiB"
    )


def test_clamped_to_what_is_available() -> None:
    size = pool_size(
        0.5,
        total_bytes=400 * GIB,
        available_bytes=100 * GIB,
        headroom_bytes=300 * GIB,
        row_bytes=2 * MIB,
    )
    assert size.num_bytes <= 100 * GIB - 10 * 10**9 < size.num_bytes + 2 * MIB
    assert "; available are 100.00 GiB, of which 9.31 GiB stay free: the pool has" in size.sentence


def test_clamped_to_the_control_group() -> None:
    size = pool_size(
        1.0,
        total_bytes=64 * GIB,
        available_bytes=60 * GIB,
        headroom_bytes=8 * GIB,
        row_bytes=MIB,
    )
    assert size.num_rows == (8 * GIB - 64 * GIB // 10) // MIB
    assert "its control group leaves 8.00 GiB, of which 6.40 GiB stay free" in size.sentence


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.5, math.nan, math.inf, -math.inf])
def test_no_share(utilization: float) -> None:
    with pytest.raises(ConfigError, match="more than 0 and at most 1") as caught:
        check_utilization(utilization)
    assert caught.value.field == "cpu_prefill_memory_utilization"
    with pytest.raises(ConfigError):
        pool_size(
            utilization,
            total_bytes=GIB,
            available_bytes=GIB,
            headroom_bytes=None,
            row_bytes=MIB,
        )


@pytest.mark.parametrize("headroom", [None, 4 * GIB])
def test_too_little_for_one_sequence(headroom: int | None) -> None:
    available = 4 * GIB if headroom is None else 40 * GIB
    with pytest.raises(ConfigError, match="room for 0 blocks .* and 100 are needed for one seq"):
        pool_size(
            0.5,
            total_bytes=64 * GIB,
            available_bytes=available,
            headroom_bytes=headroom,
            row_bytes=MIB,
            min_rows=100,
        )


@given(
    utilization=st.floats(0.001, 1.0),
    total=st.integers(1 << 20, 1 << 40),
    available=st.floats(0.0, 1.0),
    headroom=st.none() | st.floats(0.0, 1.0),
    row=st.integers(1, 1 << 16),
)
def test_never_more_than_there_is(
    utilization: float, total: int, available: float, headroom: float | None, row: int
) -> None:
    there = int(available * total)
    limit = None if headroom is None else int(headroom * total)
    try:
        size = pool_size(
            utilization,
            total_bytes=total,
            available_bytes=there,
            headroom_bytes=limit,
            row_bytes=row,
        )
    except ConfigError:
        reserve = min(10**10, total // 10)
        free = min(there, there if limit is None else limit) - reserve
        assert min(free, utilization * total) < row
        return
    assert size.num_bytes == size.num_rows * row > 0
    assert size.num_bytes <= size.asked_bytes <= utilization * total
    assert size.num_bytes <= there and (limit is None or size.num_bytes <= limit)
