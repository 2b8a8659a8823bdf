"""Copiers of several ranks report to one board."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hetero_llm.bridge.ipc.shared_memory import allocate_shared
from hetero_llm.bridge.kv_offload.copier_library import CopierError
from hetero_llm.bridge.kv_offload.copier_protocol import Done
from hetero_llm.bridge.kv_offload.transfer_reports import STEP, ReportBoard, board_bytes
from tests.bridge.kv_offload.conftest import Rig, until

MakeRig = Callable[..., Rig]
RING = 4096  # reports of one rank


@pytest.fixture
def memory() -> Iterator[int]:
    fd = allocate_shared(board_bytes(3))
    yield fd
    os.close(fd)


@pytest.fixture
def board(memory: int) -> Iterator[ReportBoard]:
    made = ReportBoard(memory, 3)
    yield made
    made.close()
    made.close()


def reporting(make_rig: MakeRig, board: ReportBoard, rank: int) -> Rig:
    return make_rig(options={"board": board.address, "rank": rank}, delay_us=0)


def test_memory_that_is_no_board(memory: int) -> None:
    with pytest.raises(CopierError, match="holds no board"):
        ReportBoard(memory)
    ReportBoard(memory, 3).close()
    again = ReportBoard(memory)
    assert again.ranks == 3
    again.close()


def test_each_rank_reports_its_ends(make_rig: MakeRig, board: ReportBoard, memory: int) -> None:
    theirs = ReportBoard(memory)  # as in another process
    rig = reporting(make_rig, theirs, 2)
    rig.store(1, [0, 1], [4, 5])
    rig.drain(1)
    rig.load(2, [4, 5], [7, 8])
    rig.drain(2)
    rig.copier.abort(2)  # it has ended
    found = board.take(2)
    assert [(done.transfer_id, done.ok) for done in found] == [(1, True), (2, True)]
    assert all(done.seconds >= 0 for done in found)
    assert board.take(2) == board.take(0) == board.take(1) == []
    rig.copier.report_step(False)
    rig.copier.report_step(True)
    assert board.take(2) == [Done(STEP, False, 0.0), Done(STEP, True, 0.0)]
    rig.end()
    rig.copier.report_step(True)  # too late
    assert board.take(2) == []
    theirs.close()


def test_a_failed_load_is_reported_when_nothing_of_it_is_written_any_more(
    make_rig: MakeRig, board: ReportBoard
) -> None:
    rig = reporting(make_rig, board, 1)
    rig.hold(rig.lane_in)
    rig.load(1, [0, 1], [2, 3], lenient=True)
    rig.settle()
    rig.copier.abort(1)
    rig.settle()
    assert {done.transfer_id for done in board.take(1)}.isdisjoint({1})
    rig.release(rig.lane_in)
    rig.drain(1)
    assert [(done.transfer_id, done.ok) for done in board.take(1)] == [(1, False)]
    assert not board.is_broken()


def test_measurements_are_not_reported(make_rig: MakeRig, board: ReportBoard) -> None:
    rig = reporting(make_rig, board, 1)
    assert rig.copier.time_load(np.array([0]), np.array([1]), rig.copier.methods()[0], 1, 1)
    assert board.take(1) == []


def test_nothing_is_lost_where_nobody_reads(make_rig: MakeRig, board: ReportBoard) -> None:
    """The copy thread keeps what the board has no room for, and others are reported meanwhile."""
    rig = reporting(make_rig, board, 1)
    for number in range(RING + 100):
        rig.copier.report_step(number % 3 == 0)
    rig.store(1, [0], [0])
    rig.drain(1)
    other = reporting(make_rig, board, 2)
    other.copier.report_step(True)
    assert board.take(2) == [Done(STEP, True, 0.0)]
    found: list[Done] = []

    def take() -> bool:
        found.extend(board.take(1))
        return len(found) == RING + 101

    until(take)
    assert [done.ok for done in found[:-1]] == [n % 3 == 0 for n in range(RING + 100)]
    assert found[-1].transfer_id == 1


def test_a_driver_that_is_broken_in_one_rank(make_rig: MakeRig, board: ReportBoard) -> None:
    rig = reporting(make_rig, board, 1)
    rig.fake.fail(b"cuMemcpyBatchAsync", 0, 1, 700)
    rig.load(1, [0], [0], lenient=True)
    assert not rig.drain(1)[1].ok
    assert board.is_broken() and not board.take(1)[0].ok


def test_host_blocks_that_all_other_ranks_have(board: ReportBoard) -> None:
    assert board.ready_rows() == 0
    board.set_ready_rows(1, 20)
    assert board.ready_rows() == 0
    board.set_ready_rows(2, 12)
    assert board.ready_rows() == 12


def test_a_report_wakes_rank_0(make_rig: MakeRig, board: ReportBoard) -> None:
    rig = reporting(make_rig, board, 2)
    board.wait(0.0)
    board.wait(1e-4)
    woken = threading.Event()

    def sleep() -> None:
        board.wait(3600.0)
        woken.set()

    threading.Thread(target=sleep, daemon=True).start()
    rig.copier.report_step(True)
    assert woken.wait(60)
    board.wait(3600.0)  # there is still something to take
    assert len(board.take(2)) == 1
