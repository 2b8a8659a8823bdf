"""The time after which a refused client should try again."""

from __future__ import annotations

import pytest

from hetero_llm.engine.finish_rate import FinishRate


def test_the_recent_rate_says_how_long_more_requests_take() -> None:
    now = [100.0]
    rate = FinishRate(lambda: now[0])
    assert rate.seconds_for(50) == 1.0  # not known yet
    for _ in range(40):  # one every 2 seconds
        rate.note()
        now[0] += 2.0
    assert rate.seconds_for(5) == pytest.approx(10.0)
    assert (rate.seconds_for(0), rate.seconds_for(1000)) == (1.0, 60.0)
    rate.clear()
    assert rate.seconds_for(1000) == 1.0
