"""The native copier over the fake driver: bytes, order, limits, waits. Invariants 3, 4, 10 and 13
of the design: copies after the last reader or writer, flags behind bytes, identical bytes, the
window."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload.copier import NUM_FLAGS
from hetero_llm.bridge.kv_offload.copier_library import Method
from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from tests.bridge.kv_offload.conftest import Rig, until

MakeRig = Callable[..., Rig]

ASCENDING = np.arange(9)
SCATTERED = np.array([7, 2, 11, 0, 20, 5, 13, 9, 16])
MIXED = np.array([3, 4, 5, 9, 1, 2, 20, 21, 8])


SIZES = [(method, size) for method in Method for size in (48, 1024, 7)]
SIZES.remove((Method.KERNEL, 7))  # it moves 16 bytes at a time


@pytest.mark.parametrize(("method", "layer_bytes"), SIZES)
def test_bytes_come_back(make_rig: MakeRig, method: Method, layer_bytes: int) -> None:
    for seed, group in enumerate((1, 3, 8)):
        rig = make_rig(layer_bytes=layer_bytes, force=(method, group), seed=seed, chunk_rows=4)
        transfer_id = 0
        for host_blocks in (ASCENDING, SCATTERED, MIXED):
            for blocks in (ASCENDING + 3, SCATTERED[::-1].copy()):
                device, host = rig.device.copy(), rig.host.copy()
                rig.store(transfer_id := transfer_id + 1, blocks, host_blocks)
                assert rig.drain(transfer_id)[transfer_id].ok
                host[host_blocks] = device[blocks]
                np.testing.assert_array_equal(rig.host, host)
                others = np.setdiff1d(np.arange(24), blocks)[:9]
                rig.load(transfer_id := transfer_id + 1, host_blocks, others)
                assert rig.drain(transfer_id)[transfer_id].ok
                device[others] = host[host_blocks]
                np.testing.assert_array_equal(rig.device, device)
        rig.end()


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_the_flag_follows_the_layers(make_rig: MakeRig, method: Method, group: int) -> None:
    """Every write to a flag is checked against the bytes, in `Rig.check_write`."""
    rig = make_rig(force=(method, group), num_layers=5, delay_us=200)
    rig.load(1, MIXED, SCATTERED)
    ready = rig.copier.layer_ready_flag(1)
    assert rig.drain(1)[1].ok
    assert rig.values(ready) == [*range(group, 5, group), 5]
    assert rig.copier.layer_ready_flag(1) is None
    assert rig.flags[ready.place] == ready.base + 5


def test_a_flag_ahead_of_its_bytes_would_be_noticed(make_rig: MakeRig) -> None:
    """Negative control of the check above."""
    rig = make_rig()
    rig.expected[3] = (1, ASCENDING, ASCENDING)
    rig.check_write(rig.flags.ctypes.data + 12, 2)
    assert rig.problems == ["3: 1 layers are not there"]
    rig.problems.clear()


def test_runs_are_merged_within_chunks(make_rig: MakeRig) -> None:
    """Slots 0 to 7 in chunks of 3 are three runs; single blocks are plain copies."""
    rig = make_rig(force=(Method.RUNS, 2), chunk_rows=3)
    rig.load(1, np.arange(8), np.arange(8) + 2)
    assert rig.drain(1)[1].ok
    assert rig.fake.calls(b"cuMemcpy2DAsync") == 2 * 3
    rig.load(2, [1, 5, 9], [3, 2, 1])
    assert rig.drain(2)[2].ok
    assert rig.fake.calls(b"cuMemcpy2DAsync") == 2 * 3
    assert rig.fake.calls(b"cuMemcpyHtoDAsync") == 2 * 3
    rig.store(3, np.arange(8), np.arange(8) + 12)
    assert rig.drain(3)[3].ok
    assert rig.fake.calls(b"cuMemcpyDtoHAsync") == 3


def test_large_groups_go_in_parts(make_rig: MakeRig) -> None:
    rig = make_rig(options={"max_inflight": 48 * 4}, num_layers=2)
    rig.load(1, np.arange(10), np.arange(10))
    assert rig.drain(1)[1].ok
    assert rig.fake.calls(b"cuMemcpyBatchAsync") == 2 * 3


@pytest.mark.parametrize("method", Method)
def test_no_more_than_the_window_is_under_way(make_rig: MakeRig, method: Method) -> None:
    window = 48 * 12
    rig = make_rig(
        num_blocks=60, num_host_blocks=60, options={"max_inflight": window}, force=(method, 2)
    )
    rig.hold(rig.lane_in)
    rig.hold(rig.lane_out)
    for transfer_id in range(4):
        rig.load(1 + transfer_id, 11 * transfer_id + MIXED[:-3], 9 * transfer_id + ASCENDING[:-3])
        rig.store(
            11 + transfer_id,
            [40 + 2 * transfer_id, 41 + 2 * transfer_id],
            [59 - transfer_id, 50 - transfer_id],
        )
    until(lambda: min(rig.fake.peak(rig.lane_in), rig.fake.peak(rig.lane_out)) > 0)
    rig.release(rig.lane_in)
    rig.release(rig.lane_out)
    rig.drain(*range(1, 5), *range(11, 15))
    assert 48 * 6 < rig.fake.peak(rig.lane_in) <= window
    assert 0 < rig.fake.peak(rig.lane_out) <= window


def test_lookahead(make_rig: MakeRig) -> None:
    rig = make_rig(num_layers=8, options={"lookahead": 3})
    rig.hold(rig.lane_in)
    rig.load(1, [1, 2], [3, 4])
    rig.settle()
    assert rig.fake.calls(b"cuStreamWriteValue32") == 3
    rig.hold(rig.lane_in, allowed=3)  # copy, flag, event
    until(lambda: rig.fake.calls(b"cuStreamWriteValue32") == 4)
    rig.settle()
    assert rig.fake.calls(b"cuStreamWriteValue32") == 4
    rig.release(rig.lane_in)
    assert rig.drain(1)[1].ok


@pytest.mark.parametrize("lazy", [True, False])
def test_a_small_load_overtakes(make_rig: MakeRig, lazy: bool) -> None:
    """Not if everything is submitted at once. It is small enough to be submitted whole."""
    options = {"lazy": lazy, "max_inflight": 48 * 40, "ahead_bytes": 48 * 8}
    rig = make_rig(num_layers=8, options=options)
    rig.hold(rig.lane_in)
    rig.load(1, np.arange(16), np.arange(16))
    rig.settle()
    assert rig.fake.calls(b"cuStreamWriteValue32") == (2 if lazy else 8)
    rig.load(2, [20], [20])
    until(lambda: rig.fake.calls(b"cuStreamWriteValue32") == (10 if lazy else 16))
    large, small = rig.copier.layer_ready_flag(1), rig.copier.layer_ready_flag(2)
    rig.release(rig.lane_in)
    assert all(rig.drain(1, 2)[transfer_id].ok for transfer_id in (1, 2))
    first = rig.writes.index((small.place, small.base + 8))
    before = [place for place, _ in rig.writes[:first]]
    assert before.count(large.place) == (2 if lazy else 8)


def test_a_smaller_load_has_the_link(make_rig: MakeRig) -> None:
    """What it leaves free of the window is not filled up by a larger one, unless the link would
    idle."""
    rig = make_rig(num_blocks=40, num_host_blocks=40, options={"max_inflight": 48 * 48})
    rig.hold(rig.lane_in)
    rig.load(1, np.arange(12), np.arange(12))
    rig.settle()
    rig.load(2, np.arange(16) + 12, np.arange(16) + 12)
    rig.settle()
    assert rig.fake.calls(b"cuStreamWriteValue32") == 2
    rig.load(3, [30], [30])
    rig.settle()
    assert rig.fake.calls(b"cuStreamWriteValue32") == 4
    large = rig.copier.layer_ready_flag(2)
    rig.release(rig.lane_in)
    rig.drain(1, 2, 3)
    assert rig.writes[-1] == (large.place, large.base + 4)


def test_a_large_load_is_not_overtaken_for_ever(make_rig: MakeRig) -> None:
    """There are always smaller ones: each of its parts goes after eight times its bytes of theirs.
    Of two large ones the first has all these turns, so that they do not add up."""
    large, small, others = 12, 8, 60
    rig = make_rig(options={"max_inflight": large * 48})
    rig.hold(rig.lane_in)
    rig.load(1, np.arange(large), np.arange(large))
    rig.settle()  # its first part is under way
    rig.load(2, np.arange(large), np.arange(large))
    for transfer_id in range(3, 3 + others):
        rig.load(transfer_id, np.arange(small) + large, np.arange(small) + large)
    flags_of = {
        rig.copier.layer_ready_flag(transfer_id).place: transfer_id
        for transfer_id in range(1, 3 + others)
    }
    rig.settle()
    rig.release(rig.lane_in)
    assert all(done.ok for done in rig.drain(*range(1, 3 + others)).values())
    order = [min(flags_of[place], 3) for place, _ in rig.writes]
    between = [3] * (8 * large // small)
    first = [1, *between] * 4
    second = [2, *between] * 4
    assert order == [*first, *second, *[3] * (4 * others - 8 * len(between))]


def test_who_cannot_go_is_not_overtaken(make_rig: MakeRig) -> None:
    """A load that waited for a step has no claim afterwards: it is overtaken like a new one."""
    rig = make_rig(options={"max_inflight": 12 * 48})
    rig.hold(rig.compute)
    rig.hold(rig.lane_in, allowed=3 * 40)  # a copy, a flag, an event
    rig.copier.step_launched(1)
    rig.load(1, np.arange(12), np.arange(12), after_step=1)
    for transfer_id in range(2, 32):
        rig.load(transfer_id, np.arange(8) + 12, np.arange(8) + 12)
    until(lambda: len(rig.writes) == 40)
    rig.settle()
    rig.release(rig.compute)
    until(lambda: rig.copier.step_done(1))
    large = rig.copier.layer_ready_flag(1)
    rig.release(rig.lane_in)
    rig.drain(*range(1, 32))
    # Whether one more was submitted before the step ended is the copy thread's timing.
    assert rig.writes.index((large.place, large.base + 1)) in (40 + 12, 40 + 1 + 12)


def test_a_load_waits_for_the_last_reader(make_rig: MakeRig) -> None:
    rig = make_rig()
    before = rig.device[5].copy()
    seen = np.zeros_like(before)
    rig.hold(rig.compute)
    rig.fake.copy(rig.compute, seen.ctypes.data, rig.device[5].ctypes.data, before.nbytes)
    rig.load(1, [3], [5], after_step=1)  # a step that is not even launched
    rig.settle()
    rig.copier.step_launched(1)
    rig.load(2, [4], [6])  # others do not wait with it
    rig.drain(2)
    rig.settle()
    assert not rig.copier.step_done(1) and rig.fake.calls(b"cuMemcpyBatchAsync") == 4
    rig.release(rig.compute)
    assert rig.drain(1)[1].ok and rig.copier.step_done(1)
    np.testing.assert_array_equal(seen, before)
    np.testing.assert_array_equal(rig.device[5], rig.host[3])


def test_without_the_wait_the_reader_is_overtaken(make_rig: MakeRig) -> None:
    """Negative control: events of the steps' stream lie."""
    rig = make_rig()
    before = rig.device[5].copy()
    seen = np.zeros_like(before)
    rig.fake.blind(rig.compute)
    rig.hold(rig.compute)
    rig.fake.copy(rig.compute, seen.ctypes.data, rig.device[5].ctypes.data, before.nbytes)
    rig.copier.step_launched(1)
    rig.load(1, [3], [5], after_step=1)
    assert rig.drain(1)[1].ok
    rig.release(rig.compute)
    until(lambda: rig.fake.run(rig.compute) == rig.fake.added(rig.compute))
    assert not np.array_equal(seen, before)


@pytest.mark.parametrize("blind", [False, True])
def test_a_store_waits_for_the_last_writer(make_rig: MakeRig, blind: bool) -> None:
    """`blind`: negative control."""
    rig = make_rig()
    written = np.random.default_rng(1).integers(0, 256, rig.device[5].shape, np.uint8)
    if blind:
        rig.fake.blind(rig.compute)
    rig.hold(rig.compute)
    rig.fake.copy(rig.compute, rig.device[5].ctypes.data, written.ctypes.data, written.nbytes)
    rig.copier.step_launched(7)
    rig.store(1, [5], [9], after_step=7)
    if blind:
        rig.drain(1)
    else:
        rig.settle()
        assert 1 not in rig.done
    rig.release(rig.compute)
    assert rig.drain(1)[1].ok
    assert np.array_equal(rig.host[9], written) != blind


def test_a_step_at_a_gate_is_not_waited_for_by_its_own_load(make_rig: MakeRig) -> None:
    """Step 1 waits for load 1; load 2, which goes first, waits for step 1."""
    rig = make_rig(num_layers=8)
    rig.hold(rig.lane_in)
    rig.load(1, np.arange(8), np.arange(8))
    ready = rig.copier.layer_ready_flag(1)
    flag = rig.flags.ctypes.data + 4 * ready.place
    rig.fake.gate(rig.compute, flag, ready.base + 8)
    rig.copier.step_launched(1)
    rig.load(2, [20], [20], after_step=1)
    rig.store(3, [21], [21], after_step=1)
    rig.settle()
    rig.release(rig.lane_in)
    assert all(done.ok for done in rig.drain(1, 2, 3).values())


def test_places_and_bases(make_rig: MakeRig) -> None:
    """64 loads at a time; the bases of a place go on past the end of an int32."""
    rig = make_rig(num_blocks=NUM_FLAGS + 1, num_host_blocks=NUM_FLAGS + 1, first_base=2**31 - 2)
    rig.hold(rig.lane_in)
    for transfer_id in range(1, NUM_FLAGS + 1):
        assert rig.copier.can_load()
        rig.load(transfer_id, [transfer_id - 1], [transfer_id - 1])
    assert not rig.copier.can_load()
    flags_of = {
        transfer_id: rig.copier.layer_ready_flag(transfer_id)
        for transfer_id in range(1, NUM_FLAGS + 1)
    }
    assert sorted(ready.place for ready in flags_of.values()) == list(range(NUM_FLAGS))
    rig.release(rig.lane_in)
    rig.drain(*range(1, NUM_FLAGS + 1))
    assert rig.copier.can_load() and rig.copier.layer_ready_flag(1) is None
    for ready in flags_of.values():
        assert rig.flags[ready.place] == ready.base + 4 - 2**32
    rig.load(100, [0], [0])
    again = rig.copier.layer_ready_flag(100)
    assert again.base == -(2**31) + 3 and rig.drain(100)[100].ok


def test_no_base_is_zero(make_rig: MakeRig) -> None:
    """A step that waits at base 0 waits for no load."""
    rig = make_rig(first_base=-5)
    place = rig.copier.next_flag.place
    rig.load(1, [0], [0])
    assert rig.drain(1)[1].ok and rig.copier.next_flag == LayerReadyFlag(place, 1)


def test_what_is_left(make_rig: MakeRig) -> None:
    rig = make_rig(num_layers=4, options={"lookahead": 1})
    rate = rig.copier.load_rate()
    rig.hold(rig.lane_in)
    rig.load(1, np.arange(8), np.arange(8))
    rig.settle()
    assert rig.copier.seconds_left([1]) == pytest.approx(8 * 4 * 48 / rate)
    rig.load(2, [20], [20])
    # The small one goes first, behind the layer that is under way.
    assert rig.copier.seconds_left([2]) == pytest.approx((4 + 8) * 48 / rate)
    assert rig.copier.seconds_left([1, 2]) == pytest.approx((8 * 4 + 4) * 48 / rate)
    rig.release(rig.lane_in)
    rig.drain(1, 2)
    assert rig.copier.seconds_left([1, 2]) == 0.0 == rig.copier.seconds_left([])


def test_the_rate_is_measured(make_rig: MakeRig) -> None:
    rig = make_rig(layer_bytes=1 << 20, num_blocks=4, num_host_blocks=4, delay_us=0)
    before = rig.copier.load_rate()
    rig.load(1, [0, 1], [2, 3])
    seconds = rig.drain(1)[1].seconds
    rate = rig.copier.load_rate()
    assert rate != before and rate >= 0.9 * (8 << 20) / seconds  # later parts count a little more
    reported = rig.copier.metrics()
    assert 0 < reported["kv_offload_h2d_busy_seconds_total"] <= seconds
    assert reported["kv_offload_copy_thread_cpu_seconds_total"] > 0


def test_counters(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.load(1, [0, 1], [2, 3])
    rig.store(2, [4], [5])
    rig.drain(1, 2)
    rig.hold(rig.lane_in)
    rig.load(3, [0, 1], [2, 3], lenient=True)
    rig.copier.abort(3)
    rig.copier.abort(99)  # over, or never heard of
    rig.release(rig.lane_in)
    assert not rig.drain(3)[3].ok
    reported = rig.copier.metrics()
    assert reported["kv_offload_bytes_d2h"] == 4 * 48
    assert 2 * 4 * 48 <= reported["kv_offload_bytes_h2d"] < 4 * 4 * 48
    counts = [reported[f"kv_offload_{name}"] for name in ("loads", "failed_loads", "aborted_loads")]
    assert counts == [1, 0, 1]
    assert (reported["kv_offload_stores"], reported["kv_offload_failed_stores"]) == (1, 0)
    assert reported["kv_offload_broken"] == reported["kv_offload_driver_errors"] == 0


def test_steps(make_rig: MakeRig) -> None:
    """A step that was not asked about is over when a later one is; events do not pile up."""
    rig = make_rig()
    assert rig.copier.step_done(0) and not rig.copier.step_done(1)
    rig.hold(rig.compute)
    for number in (2, 3):
        rig.copier.step_launched(number)
    assert not rig.copier.step_done(1)
    rig.release(rig.compute)
    until(lambda: rig.copier.step_done(3))
    assert rig.copier.step_done(1) and not rig.copier.step_done(4)
    for number in range(4, 200):
        rig.copier.step_launched(number)
        until(lambda number=number: rig.copier.step_done(number))
    assert rig.fake.num_events() < 6


def test_an_event_that_is_recorded_too_early_would_be_noticed(make_rig: MakeRig) -> None:
    """Negative control of what every test here ends with: copies are said to have landed, so their
    events are used again."""
    rig = make_rig(num_layers=8)
    rig.fake.blind(rig.lane_in)
    rig.hold(rig.lane_in)
    rig.load(1, ASCENDING, ASCENDING)
    assert rig.drain(1)[1].ok and rig.fake.recorded_early() > 0
    rig.release(rig.lane_in)
    until(lambda: rig.fake.run(rig.lane_in) == rig.fake.added(rig.lane_in))


def test_our_own_mistakes(make_rig: MakeRig) -> None:
    rig = make_rig()
    for host_blocks, blocks in (([32], [0]), ([-1], [0]), ([0], [24]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(AssertionError):
            rig.load(1, host_blocks, blocks)
        with pytest.raises(AssertionError):
            rig.store(1, blocks, host_blocks)
    rig.copier.step_launched(3)
    with pytest.raises(AssertionError):
        rig.copier.step_launched(3)
