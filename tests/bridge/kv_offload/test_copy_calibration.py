"""Choosing how to copy: by rates, and the rates by measuring through the copier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload.copier_library import Method
from hetero_llm.bridge.kv_offload.copy_calibration import calibrate, prepare
from hetero_llm.bridge.kv_offload.copy_rates import Calibration, Choice, Rate, assumed
from tests.bridge.kv_offload.conftest import Rig

MakeRig = Callable[..., Rig]

GB = 1e9
LAYER = 64 << 10
MEASURED = Calibration(
    LAYER,
    (
        Rate(Method.BATCH, 1, 40 * GB, 40 * GB),
        Rate(Method.BATCH, 4, 52 * GB, 52 * GB),
        Rate(Method.RUNS, 1, 8 * GB, 55 * GB),
        Rate(Method.RUNS, 4, 30 * GB, 55 * GB),
        Rate(Method.KERNEL, 1, 49 * GB, 49 * GB),
    ),
)


def test_the_method_follows_the_order_of_blocks() -> None:
    assert MEASURED.choose(32, 1024, 0.0, 10.0).method == Method.BATCH
    assert MEASURED.choose(32, 1024, 1.0, 10.0).method == Method.RUNS
    assert MEASURED.rates[3].seconds(1 << 30, 8, 0.5) == pytest.approx(
        (1 << 30) * (1 / 30 + 1 / 55) / 2 / GB
    )


def test_the_group_weighs_rate_against_overlap() -> None:
    """By hand, for 1024 scattered blocks of 2 MiB and a compute of 10 ms: 1 layer at a time takes
    53.69 + 10/32 ms and 0.16 for its calls, 4 take 41.30 + 10/8 + 0.04."""
    assert MEASURED.choose(32, 1024, 0.0, 10e-3) == Choice(Method.BATCH, 4)
    # With 15 ms of load beside 200 ms of compute the first layer is all that shows.
    assert MEASURED.choose(32, 256, 0.0, 200e-3) == Choice(Method.BATCH, 1)
    # If nobody says how much compute there is: 4.8 ms for 32 layers.
    assert MEASURED.choose(32, 1024, 0.0, 0.0) == MEASURED.choose(32, 1024, 0.0, 4.8e-3)


def test_what_groups_cost_besides_counts_for_small_loads() -> None:
    """Groups of a layer cost 40 us each besides, those of 4 nothing. Beside 1.2 ms for 64 MiB that
    is more than what a longer group shows of a short compute; beside 39 ms and 40 it is less."""
    rates = (
        Rate(Method.RUNS, 1, 55 * GB, 55 * GB, 40e-6, 40e-6),
        Rate(Method.RUNS, 4, 55 * GB, 55 * GB),
    )
    calibration = Calibration(LAYER, rates)
    assert calibration.choose(32, 32, 1.0, 1e-3) == Choice(Method.RUNS, 4)
    assert calibration.choose(32, 1024, 1.0, 40e-3) == Choice(Method.RUNS, 1)
    assert rates[0].seconds(55 * 10**9, 32, 0.5) == pytest.approx(1 + 32 * 40e-6)


def test_nothing_waits_for_the_layers_of_a_first_part() -> None:
    """So it goes as fast as it can, in groups as large as are measured."""
    assert MEASURED.choose(32, 128, 0.0, None).group >= 4
    assert MEASURED.choose(32, 128, 1.0, None).method == Method.RUNS


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 32])
def test_groups_fit_the_model(num_layers: int) -> None:
    for blocks in (1, 100, 10_000):
        choice = MEASURED.choose(num_layers, blocks, 0.3, 1e-3)
        assert choice.group <= num_layers and choice.group & (choice.group - 1) == 0


def test_the_kernel_has_to_be_much_faster() -> None:
    rates = (Rate(Method.BATCH, 1, 40 * GB, 40 * GB), Rate(Method.KERNEL, 1, 49 * GB, 49 * GB))
    assert Calibration(LAYER, rates).choose(32, 64, 0.0, 0.0).method == Method.BATCH
    slow = (Rate(Method.BATCH, 1, 30 * GB, 30 * GB), rates[1])
    assert Calibration(LAYER, slow).choose(32, 64, 0.0, 0.0).method == Method.KERNEL


def test_table() -> None:
    assert MEASURED.table().splitlines() == [
        "copies to the device, GB/s, scattered / ascending blocks",
        "piece             64 KiB         256 KiB",
        "batch       40.0 / 40.0     52.0 / 52.0*",
        "runs         8.0 / 55.0     30.0 / 55.0 ",
        "kernel      49.0 / 49.0*               -",
        "* the fastest with scattered blocks",
    ]
    assert MEASURED.best_rate() == 55 * GB
    assert assumed((Method.PLAIN,), LAYER).table() == "copies to the device: not measured"


def test_measuring(make_rig: MakeRig) -> None:
    """Every method at every size; host rows stay as they were, counters begin anew, and loads go as
    chosen."""
    rig = make_rig(force=None)
    host, device = rig.host.copy(), rig.device.copy()
    calibration = calibrate(rig.copier)
    assert rig.copier.calibration is calibration and calibration.measured
    assert set(calibration.methods()) <= set(Method) and len(calibration.methods()) > 0
    assert all(rate.layers in (1, 2, 4) for rate in calibration.rates)
    assert all(rate.scattered > 0 and rate.ascending > 0 for rate in calibration.rates)
    np.testing.assert_array_equal(rig.host, host)
    assert not np.array_equal(rig.device, device)
    reported = rig.copier.metrics()
    assert reported["kv_offload_bytes_h2d"] == reported["kv_offload_loads"] == 0
    assert rig.copier.load_rate() == pytest.approx(calibration.best_rate())
    rig.load(1, [5, 2, 9], [3, 4, 5])
    ready = rig.copier.layer_ready_flag(1)
    assert rig.drain(1)[1].ok
    np.testing.assert_array_equal(rig.device[[3, 4, 5]], rig.host[[5, 2, 9]])
    choice = calibration.choose(4, 3, 0.0, 0.0)
    landed = [*range(choice.group, 4, choice.group), 4]
    assert rig.values(ready)[-len(landed) :] == landed


def test_a_method_that_fails_is_left_out(make_rig: MakeRig) -> None:
    rig = make_rig(force=None)
    rig.fake.fail(b"cuMemcpyBatchAsync", 0, 1000, 1)
    assert Method.BATCH not in calibrate(rig.copier).methods()
    for name in (b"cuMemcpyHtoDAsync", b"cuMemcpy2DAsync", b"cuLaunchKernel"):
        rig.fake.fail(name, 0, 1000, 1)
    before = rig.copier.calibration
    assert calibrate(rig.copier) is before


def test_tiny_pools(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=2, num_host_blocks=3, num_layers=1, force=None)
    assert calibrate(rig.copier).measured
    rig.end()
    rig = make_rig(num_blocks=1, num_host_blocks=3, force=None)
    assert not calibrate(rig.copier).measured


def test_without_the_kernel(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rig = make_rig(kernel=False, force=None)
    calibration = prepare(rig.copier)
    assert Method.KERNEL not in calibration.methods()
    assert "NVRTC" in caplog.text and "the copy engines remain" in caplog.text
    assert calibration.table() in caplog.text
