"""The native copier when copies fail, are stopped or are cut short by the end. Invariants 7, 8 and
12 of the design: others go on, flags are set, nothing is left behind, nothing hangs."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload import copier_library
from hetero_llm.bridge.kv_offload.copier import CopyOptions, DeviceRows, NativeCopier
from hetero_llm.bridge.kv_offload.copier_library import CopierError, Method
from hetero_llm.bridge.kv_offload.copy_calibration import FixedRows
from tests.bridge.kv_offload.conftest import FakeCuda, Rig, until

MakeRig = Callable[..., Rig]

LAYERS = 6
SLOTS, BLOCKS = np.array([3, 4, 5, 9, 1]), np.array([6, 7, 8, 2, 1])


ABORTS = [(group, landed) for group in (1, 2, 4) for landed in range(-(-LAYERS // group) + 1)]


@pytest.mark.parametrize(("group", "landed"), ABORTS)
def test_abort_at_every_group(make_rig: MakeRig, group: int, landed: int) -> None:
    """Another load on other blocks is not touched. What was not submitted is never written."""
    rig = make_rig(num_layers=LAYERS, force=(Method.BATCH, group), options={"lookahead": 1})
    before = rig.device.copy()
    rig.hold(rig.lane_in, allowed=3 * landed)  # a copy, a flag, an event
    rig.load(1, SLOTS, BLOCKS, lenient=True)
    ready = rig.copier.layer_ready_flag(1)
    until(lambda: rig.fake.run(rig.lane_in) >= 3 * landed)
    rig.settle()
    submitted = min(LAYERS, (landed + 1) * group)
    rig.copier.abort(1)
    rig.load(2, SLOTS, BLOCKS + 10)
    rig.release(rig.lane_in)
    rig.drain(1, 2)
    assert rig.done[2].ok and rig.done[1].ok == (submitted == LAYERS)
    assert (ready.place, ready.base + LAYERS) in rig.writes
    np.testing.assert_array_equal(rig.device[BLOCKS, :submitted], rig.host[SLOTS, :submitted])
    np.testing.assert_array_equal(rig.device[BLOCKS, submitted:], before[BLOCKS, submitted:])


def test_abort_before_anything_is_submitted(make_rig: MakeRig) -> None:
    rig = make_rig()
    before = rig.device.copy()
    rig.load(1, [0], [0], after_step=1, lenient=True)  # a step that never comes
    ready = rig.copier.layer_ready_flag(1)
    rig.copier.abort(1)
    assert not rig.drain(1)[1].ok
    assert rig.flags[ready.place] == ready.base + 4
    np.testing.assert_array_equal(rig.device, before)


CALLS = {
    Method.BATCH: b"cuMemcpyBatchAsync",
    Method.RUNS: b"cuMemcpy2DAsync",
    Method.PLAIN: b"cuMemcpyHtoDAsync",
    Method.KERNEL: b"cuLaunchKernel",
}


@pytest.mark.parametrize("method", Method)
def test_a_copy_that_fails(
    make_rig: MakeRig, method: Method, caplog: pytest.LogCaptureFixture
) -> None:
    """At every submission in turn, until a load has no more: the load fails, its flag is set, the
    next one works."""
    for index in range(100):
        rig = make_rig(force=(method, 1))
        rig.fake.fail(CALLS[method], index, 1, 1)
        rig.load(1, SLOTS, BLOCKS, lenient=True)
        ready = rig.copier.layer_ready_flag(1)
        assert rig.drain(1)[1].ok == (rig.fake.calls(CALLS[method]) <= index)
        assert rig.flags[ready.place] == ready.base + 4
        failed = not rig.done[1].ok
        assert rig.copier.metrics()["kv_offload_failed_loads"] == failed
        assert rig.copier.metrics()["kv_offload_broken"] == 0
        rig.fake.fail(CALLS[method], 0, 0, 1)
        rig.load(2, SLOTS, BLOCKS + 10)
        assert rig.drain(2)[2].ok
        rig.end()
        if not failed:
            assert index == rig.fake.calls(CALLS[method]) / 2
            break
    assert "a copy to the device: CUDA_ERROR_INVALID_VALUE" in caplog.text


@pytest.mark.parametrize("name", [b"cuStreamWriteValue32", b"cuEventRecord", b"cuEventQuery"])
def test_other_calls_that_fail(make_rig: MakeRig, name: bytes) -> None:
    """One of them, each in turn: a load and a store end, at most one of them failed, and what says
    that it succeeded has. A flag that could not be written stays behind, never ahead."""
    for index in range(9):
        rig = make_rig(num_layers=2)
        rig.fake.fail(name, index, 1, 1)
        rig.load(1, SLOTS, BLOCKS, lenient=True)
        ready = rig.copier.layer_ready_flag(1)
        rig.store(2, [15, 16], [20, 21])
        rig.drain(1, 2)
        assert rig.done[1].ok or rig.done[2].ok
        if rig.done[1].ok:
            np.testing.assert_array_equal(rig.device[BLOCKS], rig.host[SLOTS])
        if rig.done[2].ok:
            np.testing.assert_array_equal(rig.device[15:17], rig.host[20:22])
        if name != b"cuStreamWriteValue32":
            assert rig.flags[ready.place] == ready.base + 2
        rig.fake.fail(name, 0, 0, 1)
        rig.load(3, SLOTS, BLOCKS + 10)
        assert rig.drain(3)[3].ok and rig.copier.metrics()["kv_offload_broken"] == 0
        rig.end()


@pytest.mark.parametrize("name", [b"cuEventCreate", b"cuEventRecord"])
def test_without_events(make_rig: MakeRig, name: bytes) -> None:
    """The copier asks the streams whether they have drained."""
    rig = make_rig()
    rig.fake.fail(name, 0, 1000, 2)
    rig.hold(rig.lane_in)
    rig.load(1, SLOTS, BLOCKS, lenient=True)
    rig.store(2, [15], [20])
    rig.drain(2)
    assert 1 not in rig.done
    rig.release(rig.lane_in)
    rig.drain(1)
    assert rig.done[1].ok == rig.done[2].ok == (name == b"cuEventCreate")


def test_flags_that_cannot_be_written(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.fake.fail(b"cuStreamWriteValue32", 0, 1000, 1)
    rig.load(1, SLOTS, BLOCKS)
    assert not rig.drain(1)[1].ok and not rig.flags.any()


def test_a_store_that_fails(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.fake.fail(b"cuMemcpyDtoHAsync", 1, 1, 1)
    rig.store(1, [1, 5, 9], [2, 4, 6])
    rig.store(2, [11], [12])
    rig.drain(1, 2)
    assert (rig.done[1].ok, rig.done[2].ok) == (False, True)
    assert rig.copier.metrics()["kv_offload_failed_stores"] == 1


@pytest.mark.parametrize("name", [b"cuMemcpyBatchAsync", b"cuEventQuery", b"cuStreamWriteValue32"])
@pytest.mark.parametrize("index", [0, 3])
def test_a_context_that_is_lost(
    make_rig: MakeRig, name: bytes, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything that is open ends as failed, and so does at once whatever comes later."""
    rig = make_rig(num_blocks=40)
    rig.hold(rig.lane_in)
    for transfer_id in range(1, 4):
        rig.load(transfer_id, SLOTS, BLOCKS + 8 * (transfer_id - 1), lenient=True)
    rig.fake.fail(name, index, 1, 700)
    rig.release(rig.lane_in)
    rig.drain(1, 2, 3)
    assert sum(done.ok for done in rig.done.values()) < 3
    until(lambda: rig.copier.metrics()["kv_offload_broken"] == 1)
    rig.load(4, SLOTS, BLOCKS, after_step=9, lenient=True)
    rig.store(5, BLOCKS, SLOTS, after_step=9)
    rig.drain(4, 5)
    assert not rig.done[4].ok and not rig.done[5].ok
    rig.copier.step_launched(1)
    assert rig.copier.step_done(1) and rig.copier.seconds_left([4]) == 0
    assert "no more copies from here on" in caplog.text


def test_an_event_that_never_tells(make_rig: MakeRig) -> None:
    """Errors that do not say that the context is lost, but without end."""
    rig = make_rig()
    rig.fake.fail(b"cuEventQuery", 0, 1000, 1)
    rig.load(1, SLOTS, BLOCKS, lenient=True)
    assert not rig.drain(1)[1].ok
    assert rig.copier.metrics()["kv_offload_broken"] == 1


@pytest.mark.parametrize("lazy", [True, False])
def test_close_with_work_under_way(make_rig: MakeRig, lazy: bool) -> None:
    rig = make_rig(num_layers=8, num_blocks=40, options={"lazy": lazy}, delay_us=300)
    for transfer_id in range(1, 4):
        rig.load(transfer_id, SLOTS, BLOCKS + 8 * (transfer_id - 1), lenient=True)
    rig.load(4, [20], [20], after_step=1, lenient=True)  # a step that never comes
    rig.store(5, [21], [21], after_step=1)
    flags_of = [rig.copier.layer_ready_flag(transfer_id) for transfer_id in range(1, 5)]
    rig.end()
    after = rig.device.copy()
    rig.take()
    assert set(rig.done) == {1, 2, 3, 4, 5}
    assert not rig.done[4].ok and not rig.done[5].ok
    for transfer_id in (1, 2, 3):
        if rig.done[transfer_id].ok:
            blocks = BLOCKS + 8 * (transfer_id - 1)
            np.testing.assert_array_equal(rig.device[blocks], rig.host[SLOTS])
    for ready in flags_of:
        assert rig.flags[ready.place] == ready.base + 8
    np.testing.assert_array_equal(rig.device, after)
    rig.copier.wait(0.0)
    assert rig.copier.poll() == [] and not rig.copier.can_load()
    assert rig.copier.metrics()["kv_offload_copy_thread_cpu_seconds_total"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_anything_at_any_time(make_rig: MakeRig, seed: int) -> None:
    """Loads, stores, steps, aborts and faults at random. What succeeded is there, byte for byte;
    unused blocks and host blocks stay as they were; all transfers end."""
    rng = random.Random(seed)
    methods = list(Method)
    rig = make_rig(
        num_blocks=64,
        num_host_blocks=64,
        seed=seed,
        options={"max_inflight": 48 * rng.choice([8, 40])},
    )
    device, host = rig.device.copy(), rig.host.copy()
    open_loads: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    open_stores: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    free_blocks, free_slots = set(range(62)), set(range(62))
    step = 0

    def settle_accounts() -> None:
        rig.take()
        for transfer_id in [t for t in (*open_loads, *open_stores) if t in rig.done]:
            loads = transfer_id in open_loads
            host_blocks, blocks = (open_loads if loads else open_stores).pop(transfer_id)
            target, source = (rig.device[blocks], rig.host[host_blocks])[:: 1 if loads else -1]
            if rig.done[transfer_id].ok:
                np.testing.assert_array_equal(target, source)
            device[blocks], host[host_blocks] = rig.device[blocks], rig.host[host_blocks]
            free_blocks.update(blocks.tolist())
            free_slots.update(host_blocks.tolist())

    for transfer_id in range(1, 120):
        count = rng.randrange(1, 9)
        if rng.random() < 0.3:
            step += 1
            rig.copier.step_launched(step)
        if rng.random() < 0.05:
            rig.fake.fail(rng.choice([*CALLS.values(), b"cuMemcpyDtoHAsync"]), 1, 1, 1)
        if rng.random() < 0.15 and open_loads:
            rig.copier.abort(rng.choice(list(open_loads)))
        if min(len(free_blocks), len(free_slots)) >= count:
            blocks = np.array(rng.sample(sorted(free_blocks), count))
            host_blocks = np.array(rng.sample(sorted(free_slots), count))
            free_blocks -= set(blocks.tolist())
            free_slots -= set(host_blocks.tolist())
            rig.copier.force = (rng.choice(methods), rng.choice([1, 2, 4]))
            if rng.random() < 0.5:
                open_loads[transfer_id] = host_blocks, blocks
                rig.load(
                    transfer_id, host_blocks, blocks, after_step=rng.randint(0, step), lenient=True
                )
            else:
                open_stores[transfer_id] = host_blocks, blocks
                rig.store(transfer_id, blocks, host_blocks, after_step=rng.randint(0, step))
        else:
            rig.copier.wait(1.0)
        settle_accounts()
    rig.drain(*open_loads, *open_stores)
    settle_accounts()
    np.testing.assert_array_equal(rig.device, device)
    np.testing.assert_array_equal(rig.host, host)
    assert sorted(free_blocks) == list(range(62)) and rig.copier.num_free_flags == 64


def _open(fake_path: str, row_bytes: int = 64, offset: int = 0) -> NativeCopier:
    memory = np.zeros(1 << 12, np.uint8)
    device = DeviceRows(memory.ctypes.data + offset, 4, row_bytes, 4, memory.ctypes.data + 2048)
    host = FixedRows(memory.ctypes.data + 1024, row_bytes, 4)
    copier = NativeCopier(
        device, host, CopyOptions(libcuda=fake_path), current_stream=lambda: memory.size
    )
    return copier


def test_no_driver(tmp_path: Path, fake: FakeCuda) -> None:
    with pytest.raises(CopierError, match="no copies with /no/libcuda.so: /no/libcuda.so"):
        _open("/no/libcuda.so")
    with pytest.raises(CopierError, match="libc.so.6 has no cuCtxGetCurrent"):
        _open("libc.so.6")
    fake.set_context(0)
    with pytest.raises(CopierError, match="no device's context is current in this thread"):
        _open(fake.path)


def test_no_streams(fake: FakeCuda) -> None:
    for index in range(2):
        fake.fail(b"cuStreamCreateWithPriority", index, 1, 2)
        with pytest.raises(CopierError, match="no stream can be made: CUDA_ERROR_OTHER"):
            _open(fake.path)
        fake.reset(0, 0)


def test_no_library(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    copier_library.load.cache_clear()
    monkeypatch.setenv("HETERO_LLM_NATIVE", "0")
    with pytest.raises(CopierError, match="HETERO_LLM_NATIVE=0 leaves the compiled copier out"):
        _open(fake.path)
    monkeypatch.undo()


def test_a_core_that_is_not_there(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    memory = np.zeros(1 << 12, np.uint8)
    address = memory.ctypes.data
    options = CopyOptions(libcuda=fake.path, core=100_000)
    copier = NativeCopier(
        DeviceRows(address, 4, 64, 4, address + 2048), FixedRows(address + 1024, 64, 4), options,
        current_stream=lambda: 0,
    )  # fmt: skip
    copier.close()
    assert "core 100000 cannot be had for the copy thread" in caplog.text


def test_no_kernel(fake: FakeCuda) -> None:
    """The other methods remain."""
    copier = _open(fake.path)
    with pytest.raises(CopierError, match="there is no NVRTC library|NVRTC error"):
        copier.add_kernel()
    fake.fail(b"cuModuleLoadData", 0, 1, 200)
    with pytest.raises(CopierError, match="the copy kernel cannot be used: CUDA_ERROR_OTHER"):
        copier.add_kernel(b"image")
    assert copier.methods() == (Method.BATCH, Method.RUNS, Method.PLAIN)
    copier.add_kernel(b"image")
    assert Method.KERNEL in copier.methods()
    copier.close()
    crooked = _open(fake.path, offset=8)
    with pytest.raises(CopierError, match="CUDA_ERROR_INVALID_VALUE"):
        crooked.add_kernel(b"image")
    crooked.close()


def test_an_older_driver(fake: FakeCuda) -> None:
    """It has no copies in batches."""
    fake.fail(b"cuGetProcAddress", 0, 1, 500)
    copier = _open(fake.path)
    assert copier.methods() == (Method.RUNS, Method.PLAIN)
    assert copier.calibration.choose(4, 1, 0.0, 0.0).method == Method.RUNS
    copier.close()


def test_waiting_ends(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.copier.wait(0.15)  # longer than one look at signals
    rig.store(1, [1], [1])
    until(lambda: bool(rig.fake.calls(b"cuMemcpyDtoHAsync")))
    rig.copier.wait(60)
    assert [done.transfer_id for done in rig.copier.poll()] == [1]


def test_errors_are_said_once(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rig = make_rig()
    for transfer_id in (1, 2):
        rig.fake.fail(b"cuMemcpyBatchAsync", 0, 1, 1)
        rig.load(transfer_id, SLOTS, BLOCKS, lenient=True)
        assert not rig.drain(transfer_id)[transfer_id].ok
    assert len(caplog.records) == 1
