"""The manual's hit line: its text, and when it is written."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.kv_cache.hit_log import HitCounter, HitLog, hit_line

GOLDEN = "[HIT CNT] total: 132, gpu: 0 (0.00%) cpu: 10 (7.58%) not hit: 122 (92.42%)"
COUNTS = st.integers(0, 10**12)


def counted(gpu: int, cpu: int, missed: int) -> HitCounter:
    hits = HitCounter()
    hits.add(gpu, cpu, missed)
    return hits


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def _shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hetero_llm.kv_cache.hit_log")


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (
            (21944, 66166, 89690),
            "[HIT CNT] total: 177800, gpu: 21944 (12.34%) cpu: 66166 (37.21%) "
            "not hit: 89690 (50.44%)",
        ),
        ((0, 10, 122), GOLDEN),
        ((3, 0, 0), "[HIT CNT] total: 3, gpu: 3 (100.00%) cpu: 0 (0.00%) not hit: 0 (0.00%)"),
        ((0, 0, 0), "[HIT CNT] total: 0, gpu: 0 (0.00%) cpu: 0 (0.00%) not hit: 0 (0.00%)"),
    ],
)
def test_the_manuals_lines(counts: tuple[int, int, int], line: str) -> None:
    assert hit_line(counted(*counts)) == line


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS)))
def test_everything_is_counted_once(added: list[tuple[int, int, int]]) -> None:
    hits = HitCounter()
    for one in added:
        hits.add(*one)
    assert (hits.gpu, hits.cpu, hits.missed) == tuple(
        sum(one[place] for one in added) for place in range(3)
    )
    assert hits.total == sum(map(sum, added))


def test_one_line_for_each_hundred(caplog: pytest.LogCaptureFixture) -> None:
    """Twelve prompts of eleven blocks: one line at 110, and the last one."""
    hits = HitCounter()
    log = HitLog(hits)
    for number in range(12):
        hits.add(*((0, 10, 1) if number == 11 else (0, 0, 11)))
        log.note()
        log.note()
        assert len(caplog.records) == (number >= 9)
    log.close()
    assert lines(caplog)[0].startswith("[HIT CNT] total: 110,") and lines(caplog)[1] == GOLDEN


def test_many_hundreds_at_once_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    hits = counted(0, 0, 99)
    log = HitLog(hits)
    log.note()
    assert not caplog.records
    totals = []
    for more in (1, 950, 49, 1, 98, 1):
        hits.add(more, 0, 0)
        log.note()
        totals.append(len(caplog.records))
    # 100 and 1050 print, 1099 does not; 1100 does, 1198 does not, 1199 does not.
    assert totals == [1, 2, 2, 3, 3, 3]
    hits.add(0, 0, 1)
    log.note()
    assert len(caplog.records) == 4 and "total: 1200," in lines(caplog)[-1]


@given(st.lists(st.integers(0, 350), max_size=30))
def test_lines_are_as_many_as_steps_that_passed_a_hundred(steps: list[int]) -> None:
    hits, expected, seen = HitCounter(), [], []
    log = HitLog(hits)
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(HitLog.__module__)
    logger.addHandler(handler)
    for blocks in steps:
        before = hits.total
        hits.add(0, 0, blocks)
        log.note()
        if hits.total // 100 > before // 100:
            expected.append(hit_line(hits))
    logger.removeHandler(handler)
    assert seen == expected


def test_the_last_line_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    log = HitLog(HitCounter())
    log.close()
    log.close()
    assert lines(caplog) == [hit_line(HitCounter())]
