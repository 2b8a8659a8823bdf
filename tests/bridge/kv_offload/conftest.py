"""A driver that is played on host memory, and the native copier on top of it."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload.copier import NUM_FLAGS, CopyOptions, DeviceRows, NativeCopier
from hetero_llm.bridge.kv_offload.copier_library import Method
from hetero_llm.bridge.kv_offload.copier_protocol import Done, LayerReadyFlag
from hetero_llm.bridge.kv_offload.copy_calibration import FixedRows
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.utils.native_build import find_compiler

FAKE_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_ON_WRITE = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint32)
_DEADLINE_S = 60


class FakeCuda:
    """The fake driver: `fake.hold(...)` calls its `fake_hold`, and so on."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("reset", None, [ctypes.c_uint, ctypes.c_int]),
            ("fail", None, [ctypes.c_char_p, number, number, ctypes.c_int]),
            ("calls", number, [ctypes.c_char_p]),
            ("set_context", None, [ctypes.c_int]),
            ("on_write", None, [_ON_WRITE]),
            ("num_streams", number, []),
            ("num_events", number, []),
            ("stream", pointer, [number]),
            ("hold", None, [pointer, ctypes.c_int, number]),
            ("blind", None, [pointer]),
            ("recorded_early", number, []),
            ("added", number, [pointer]),
            ("run", number, [pointer]),
            ("peak", number, [pointer]),
            ("next_bytes", number, [pointer]),
            ("gate", ctypes.c_int, [pointer, pointer, ctypes.c_int32]),
            ("copy", ctypes.c_int, [pointer, pointer, pointer, ctypes.c_size_t]),
        ):
            function = getattr(self.library, f"fake_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def new_stream(self) -> int:
        stream = ctypes.c_void_p()
        assert self.library.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        assert self.library.cuStreamDestroy_v2(ctypes.c_void_p(stream)) == 0


def until(condition: Callable[[], bool]) -> None:
    """Waits for the condition without sleeping."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0)


@dataclass
class Rig:
    """A copier over the fake driver.

    Attributes:
        device: [blocks, layers, bytes] uint8; host: [host blocks, layers, bytes] uint8.
        flags: [PLACES] int32.
        lane_in, lane_out: the copier's streams. compute: the steps'.
        writes: (place, value) of all writes to flags, in order.
        problems: what was wrong with them.
        expected: place -> (base, host blocks, blocks) whose bytes must be there before the flag
            says so.
        lenient: places whose flags may be set without.
    """

    copier: NativeCopier
    fake: FakeCuda
    device: np.ndarray
    host: np.ndarray
    flags: np.ndarray
    lane_in: int
    lane_out: int
    compute: int
    writes: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    expected: dict[int, tuple[int, np.ndarray, np.ndarray]] = field(default_factory=dict)
    lenient: set[int] = field(default_factory=set)
    done: dict[int, Done] = field(default_factory=dict)

    def load(
        self,
        transfer_id: int,
        host_blocks: Any,
        blocks: Any,
        *,
        after_step: int = 0,
        lenient: bool = False,
    ) -> None:
        host_blocks, blocks = np.array(host_blocks, np.int64), np.array(blocks, np.int64)
        # Asked before the load, which may write the flag before it returns.
        flag = self.copier.next_flag
        self.expected[flag.place] = (flag.base, host_blocks, blocks)
        (self.lenient.add if lenient else self.lenient.discard)(flag.place)
        self.copier.load(TransferOrder(transfer_id, host_blocks, blocks, after_step, 0.0))
        assert self.copier.layer_ready_flag(transfer_id) == flag

    def store(
        self, transfer_id: int, blocks: Any, host_blocks: Any, *, after_step: int = 0
    ) -> None:
        blocks, host_blocks = np.array(blocks, np.int64), np.array(host_blocks, np.int64)
        self.copier.store(TransferOrder(transfer_id, host_blocks, blocks, after_step))

    def drain(self, *transfer_ids: int) -> dict[int, Done]:
        """Waits until these transfers are over. Returns all transfers that have ended so far."""
        deadline = time.monotonic() + _DEADLINE_S
        while not self.done.keys() >= set(transfer_ids):
            assert time.monotonic() < deadline, "it never ends"
            self.copier.wait(1.0)
            self.take()
        return self.done

    def take(self) -> None:
        for done in self.copier.poll():
            assert done.transfer_id not in self.done and done.seconds >= 0
            self.done[done.transfer_id] = done

    def settle(self) -> None:
        """Until the copy thread has looked at everything several times: it goes round at least
        once for each of these stores."""
        last = len(self.device) - 1
        for number in range(4):
            transfer_id = 1_000_000 + len(self.done) * 10 + number
            self.store(transfer_id, [last], [len(self.host) - 1])
            self.drain(transfer_id)

    def hold(self, stream: int, allowed: int = 0) -> None:
        self.fake.hold(stream, 1, allowed)

    def release(self, stream: int) -> None:
        self.fake.hold(stream, 0, 0)

    def end(self) -> None:
        for stream in (self.compute, self.lane_in, self.lane_out):
            self.release(stream)
        self.copier.close()
        self.copier.close()
        if self.compute:
            self.fake.destroy_stream(self.compute)
            self.compute = 0

    def values(self, ready: LayerReadyFlag) -> list[int]:
        """Number of layers that the flag reports as landed."""
        return [value - ready.base for place, value in self.writes if place == ready.place]

    def check_write(self, target: int, value: int) -> None:
        place = (target - self.flags.ctypes.data) // 4
        value = int(np.array(value, np.uint32).astype(np.int32))
        self.writes.append((place, value))
        if place not in self.expected:
            return
        base, host_blocks, blocks = self.expected[place]
        layers = int(np.int64(value - base).astype(np.int32))
        all_layers = self.device.shape[1]
        if not 0 < layers <= all_layers:
            self.problems.append(f"{place}: {value} is no progress from {base}")
        elif layers == all_layers and place in self.lenient:
            return
        elif not np.array_equal(self.device[blocks, :layers], self.host[host_blocks, :layers]):
            self.problems.append(f"{place}: {layers} layers are not there")


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver, to be given as libcuda; compiled once, however many modules import this."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.getbasetemp() / "libcuda.so"
    if not library.exists():
        flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-pthread"]
        subprocess.run([compiler, *flags, str(FAKE_SOURCE), "-o", str(library)], check=True)
    return library


@pytest.fixture
def fake(fake_cuda_library: Path) -> Iterator[FakeCuda]:
    """Nothing of it may be left behind, and no event may stand for two moments at once."""
    made = FakeCuda(fake_cuda_library)
    made.reset(0, 0)
    yield made
    assert (made.num_streams(), made.num_events(), made.recorded_early()) == (0, 0, 0)
    made.reset(0, 0)


@pytest.fixture
def make_rig(fake: FakeCuda) -> Iterator[Callable[..., Rig]]:
    rigs = []

    def make(
        *,
        num_blocks: int = 24,
        num_host_blocks: int = 32,
        num_layers: int = 4,
        layer_bytes: int = 48,
        chunk_rows: int | None = None,
        options: dict[str, Any] | None = None,
        force: tuple[Method, int] | None = (Method.BATCH, 1),
        kernel: bool = True,
        delay_us: int = 20,
        seed: int = 0,
        first_base: int = 1,
    ) -> Rig:
        fake.reset(seed, delay_us)
        rng = np.random.default_rng(seed)
        device, host = (
            rng.integers(0, 256, (rows, num_layers, layer_bytes), np.uint8)
            for rows in (num_blocks, num_host_blocks)
        )
        flags = np.zeros(NUM_FLAGS, np.int32)
        compute: list[int] = []
        copier = NativeCopier(
            DeviceRows(
                device.ctypes.data, num_blocks, num_layers * layer_bytes, num_layers,
                flags.ctypes.data,
            ),
            _rows(host, chunk_rows),
            CopyOptions(libcuda=fake.path, **({"ahead_bytes": 0} | (options or {}))),
            current_stream=lambda: compute[0],
            first_base=first_base,
        )  # fmt: skip
        lane_in, lane_out = fake.stream(0), fake.stream(1)
        compute.append(fake.new_stream())
        if kernel and layer_bytes % 16 == 0:
            copier.add_kernel(b"image")
        copier.force = force
        rig = Rig(copier, fake, device, host, flags, lane_in, lane_out, compute[0])
        callback = _ON_WRITE(rig.check_write)
        fake.on_write(callback)
        rigs.append((rig, callback))
        return rig

    yield make
    for rig, _ in rigs:
        rig.end()
        assert rig.problems == []


def _rows(host: np.ndarray, chunk_rows: int | None) -> Any:
    num_host_blocks, row_bytes = len(host), host[0].nbytes
    if chunk_rows is None:
        return FixedRows(host.ctypes.data, row_bytes, num_host_blocks)
    return _Chunked(host.ctypes.data, row_bytes, num_host_blocks, chunk_rows)


@dataclass(frozen=True)
class _Chunked:
    address: int
    row_bytes: int
    ready_rows: int
    chunk_rows: int
