"""Copies of KV blocks between page-locked host memory and the device, by a native thread."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hetero_llm.bridge.kv_offload import copier_library
from hetero_llm.bridge.kv_offload.copier_library import CopierError, Method
from hetero_llm.bridge.kv_offload.copier_protocol import Done, LayerReadyFlag
from hetero_llm.bridge.kv_offload.copy_rates import Calibration, Choice, assumed
from hetero_llm.core.transfer_order import TransferOrder

logger = logging.getLogger(__name__)

NUM_FLAGS = 64
"""Layer-ready flags on the device: maximum number of loads under way."""
PART_BYTES = 16 << 20
"""Maximum size of one submission: larger groups of layers are submitted in parts."""

DONE = np.dtype([("transfer_id", np.int64), ("ok", np.int64), ("seconds", np.float64)])
"""`Done` of the library."""
_POLLED = 256
_LONGEST_WAIT_S = 0.1  # Python handles signals in between
_HALF_WORD = 1 << 31


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """KV on the device, block-first: a block is a row of one contiguous piece for each layer.

    Attributes:
        address: of block 0.
        flags: address of int32 [NUM_FLAGS], initially zero; see `LayerReadyFlag`.
    """

    address: int
    num_blocks: int
    block_bytes: int
    num_layers: int
    flags: int


class HostRows(Protocol):
    """Contiguous page-locked rows of `DeviceRows.block_bytes` each.

    Attributes:
        address: of row 0.
        ready_rows: number of leading rows that can be used; it only grows.
        chunk_rows: rows page-locked together; no single copy may span two such chunks.
    """

    @property
    def address(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def ready_rows(self) -> int: ...
    @property
    def chunk_rows(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How copies are submitted.

    Attributes:
        lookahead: groups of a load's layers that may be submitted and not yet landed.
        ahead_bytes: bytes of a load that may be in any case, even if these are more groups.
        max_inflight: maximum bytes of all loads submitted and not yet landed; likewise of stores.
        lazy: False: submit everything at once, without these limits.
        libcuda: the driver's library.
        core: CPU core of the copy thread; None: any.
        board, rank: address of the memory of a `transfer_reports.ReportBoard` where ends are
            reported, too, and as whose; 0: nowhere.
    """

    lookahead: int = 2
    ahead_bytes: int = 1 << 20
    max_inflight: int = 32 << 20
    lazy: bool = True
    libcuda: str = "libcuda.so.1"
    core: int | None = None
    board: int = 0
    rank: int = 0


# large: the whole of `Copier`, and what its calibration needs
class NativeCopier:
    """See `copier_protocol.Copier`. Used by one thread, in which the device's context is current.

    The host memory belongs to the pool and must exist until `close` has returned.
    """

    def __init__(
        self,
        device: DeviceRows,
        host: HostRows,
        options: CopyOptions,
        *,
        current_stream: Callable[[], int],
        first_base: int = 1,
    ) -> None:
        """Opens the driver and starts the thread. Copies reach full speed only after
        `copy_calibration.calibrate`.

        Args:
            current_stream: the handle of the stream that steps are launched on.
            first_base: initial `LayerReadyFlag.base`, for tests of its overflow.

        Raises:
            CopierError: there is no compiler, no driver or no context.
        """
        assert host.row_bytes == device.block_bytes, (host.row_bytes, device.block_bytes)
        assert device.block_bytes % device.num_layers == 0 and host.chunk_rows > 0
        assert options.lookahead > 0 and options.max_inflight > 0
        self.device, self.host, self.options = device, host, options
        self._current_stream = current_stream
        self._library = copier_library.load()
        self._quick = self._library.quick
        setup = copier_library.Setup(
            device=device.address,
            host=host.address,
            flags=device.flags,
            block_bytes=device.block_bytes,
            num_layers=device.num_layers,
            chunk_rows=host.chunk_rows,
            lookahead=options.lookahead,
            ahead_bytes=options.ahead_bytes,
            max_inflight=options.max_inflight,
            part_bytes=min(PART_BYTES, options.max_inflight),
            lazy=options.lazy,
            core=-1 if options.core is None else options.core,
            board=options.board,
            rank=options.rank,
        )
        handle, message = copier_library.with_message(
            self._library.waiting.hetero_copier_open,
            options.libcuda.encode(),
            ctypes.addressof(setup),
        )
        if not handle:
            raise CopierError(f"no copies with {options.libcuda}: {message}")
        if message:
            logger.warning("KV copies: %s", message)
        self._handle: int | None = handle
        self._free_flags = list(range(NUM_FLAGS - 1, -1, -1))
        self._bases = [first_base] * NUM_FLAGS
        self._flags: dict[int, LayerReadyFlag] = {}
        self._last_step = 0
        self._reported = False
        self._done = np.zeros(_POLLED, DONE)
        self._after_close: list[Done] = []
        self._totals = copier_library.Totals()
        self.calibration = assumed(self.methods(), self.layer_bytes)
        self.force: tuple[Method, int] | None = None
        """(method, layers of a group) of all loads, for tests; None: by calibration."""

    @property
    def layer_bytes(self) -> int:
        return self.device.block_bytes // self.device.num_layers

    @property
    def num_host_blocks(self) -> int:
        return self.host.ready_rows

    def methods(self) -> tuple[Method, ...]:
        """The methods that can be used."""
        found = self._quick.hetero_copier_methods(self._open())
        return tuple(method for method in Method if found >> method & 1)

    def add_kernel(self, image: bytes | None = None) -> None:
        """Makes `Method.KERNEL` available, with an image of `copier_library.compile_kernel`.

        Raises:
            CopierError: the driver refuses it, or the rows are not aligned to 16 bytes; the other
                methods remain.
        """
        if self.host.ready_rows == 0:
            raise CopierError("the copy kernel cannot be used: no host memory is ready yet")
        if image is None:
            image = copier_library.compile_kernel(self.options.libcuda)
        add_kernel = self._library.waiting.hetero_copier_add_kernel
        error, message = copier_library.with_message(add_kernel, self._open(), image)
        if error:
            raise CopierError(f"the copy kernel cannot be used: {message}")

    def use(self, calibration: Calibration) -> None:
        """Sets the rates by which methods are chosen."""
        self.calibration = calibration
        self._quick.hetero_copier_set_rate(self._open(), calibration.best_rate())

    def can_load(self) -> bool:
        return self.num_free_flags > 0 and self._handle is not None

    @property
    def num_free_flags(self) -> int:
        """Layer-ready flags that no load has."""
        return len(self._free_flags)

    @property
    def next_flag(self) -> LayerReadyFlag:
        """The layer-ready flag that the next load gets; there must be a free one."""
        place = self._free_flags[-1]
        return LayerReadyFlag(place, self._bases[place])

    def load(self, order: TransferOrder) -> None:
        self._begin_load(order, self._choose(order), self.device.num_layers)

    def time_load(
        self, host_blocks: np.ndarray, blocks: np.ndarray, method: Method, group: int, layers: int
    ) -> float | None:
        """Loads the first `layers` layers and returns the seconds that took, None if it failed. No
        other transfer may be under way."""
        assert not self._flags, "loads are under way"
        order = TransferOrder(-1, host_blocks, blocks, 0)
        self._begin_load(order, Choice(method, group), layers)
        while True:
            self.wait(1.0)
            for done in self.poll():
                assert done.transfer_id == -1, done
                return done.seconds if done.ok else None

    def store(self, order: TransferOrder) -> None:
        host_blocks, blocks = self._checked(order)
        self._quick.hetero_copier_store(
            self._open(),
            order.transfer_id,
            blocks.ctypes.data,
            host_blocks.ctypes.data,
            len(host_blocks),
            order.after_step,
        )

    def abort(self, transfer_id: int) -> None:
        self._quick.hetero_copier_abort(self._open(), transfer_id)

    def layer_ready_flag(self, transfer_id: int) -> LayerReadyFlag | None:
        return self._flags.get(transfer_id)

    def step_launched(self, number: int) -> None:
        assert number > self._last_step, (number, self._last_step)
        self._last_step = number
        self._quick.hetero_copier_step_launched(self._open(), number, self._current_stream())

    def step_done(self, number: int) -> bool:
        """Whether the device work of a launched step has ended."""
        return bool(self._quick.hetero_copier_step_done(self._open(), number))

    def seconds_left(self, transfer_ids: Iterable[int]) -> float:
        ahead = [self._quick.hetero_copier_ahead(self._open(), each) for each in transfer_ids]
        most = max(ahead, default=0)
        return most / self.load_rate() if most else 0.0

    def load_rate(self) -> float:
        return self._read_totals().rate or self.calibration.best_rate()

    def poll(self) -> list[Done]:
        if self._handle is None:
            found, self._after_close = self._after_close, []
            return found
        found = []
        room = count = len(self._done)
        while count == room:
            count = self._quick.hetero_copier_poll(self._handle, self._done.ctypes.data, room)
            for transfer_id, ok, seconds in self._done[:count].tolist():
                found.append(Done(transfer_id, bool(ok), seconds))
                self._free(transfer_id)
        if not self._reported and any(not done.ok for done in found):
            self._report()
        return found

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._handle is not None:
            left = min(deadline - time.monotonic(), _LONGEST_WAIT_S)
            if left <= 0 or self._library.waiting.hetero_copier_wait(self._handle, int(left * 1e9)):
                return

    def report_step(self, ok: bool) -> None:
        """Reports to the board that a step has ended that waited for loads; `ok`: it has given up
        none of them."""
        if self._handle is not None:
            self._quick.hetero_copier_report_step(self._handle, int(ok))

    def metrics(self) -> dict[str, float]:
        """Counters since start. Each ended load is counted in one of kv_offload_loads,
        kv_offload_failed_loads and kv_offload_aborted_loads."""
        totals = self._read_totals()
        return {
            "kv_offload_bytes_h2d": totals.bytes_in,
            "kv_offload_bytes_d2h": totals.bytes_out,
            "kv_offload_loads": totals.loads,
            "kv_offload_failed_loads": totals.failed_loads,
            "kv_offload_aborted_loads": totals.aborted_loads,
            "kv_offload_stores": totals.stores,
            "kv_offload_failed_stores": totals.failed_stores,
            "kv_offload_h2d_busy_seconds_total": totals.busy_in_ns * 1e-9,
            "kv_offload_d2h_busy_seconds_total": totals.busy_out_ns * 1e-9,
            "kv_offload_loading_seconds_total": totals.loading_ns * 1e-9,
            "kv_offload_copy_thread_cpu_seconds_total": totals.cpu_ns * 1e-9,
            "kv_offload_h2d_bytes_per_second": totals.rate,
            "kv_offload_driver_errors": totals.errors,
            "kv_offload_broken": totals.broken,
        }

    def close(self) -> None:
        """Waits for submitted copies and fails the rest. Afterwards only `poll`, `wait`, `metrics`,
        `can_load` and `close` may be called."""
        if self._handle is None:
            return
        handle = self._handle
        self._library.waiting.hetero_copier_close(handle)
        self._after_close = self.poll()
        self._read_totals()
        self._handle = None
        self._quick.hetero_copier_free(handle)

    def _choose(self, order: TransferOrder) -> Choice:
        if self.force is not None:
            return Choice(*self.force)
        follows = (np.diff(order.host_blocks) == 1) & (np.diff(order.blocks) == 1)
        share = np.count_nonzero(follows) / max(1, len(follows))
        return self.calibration.choose(
            self.device.num_layers, len(order.blocks), share, order.compute
        )

    def _begin_load(self, order: TransferOrder, choice: Choice, layers: int) -> None:
        host_blocks, blocks = self._checked(order)
        transfer_id = order.transfer_id
        assert transfer_id not in self._flags, transfer_id
        flag = self._flags[transfer_id] = self.next_flag
        self._free_flags.pop()
        load = copier_library.Load(
            transfer_id=transfer_id,
            place=flag.place,
            base=flag.base,
            method=choice.method,
            group=choice.group,
            layers=layers,
            after_step=order.after_step,
        )
        self._quick.hetero_copier_load(
            self._open(),
            ctypes.addressof(load),
            host_blocks.ctypes.data,
            blocks.ctypes.data,
            len(host_blocks),
        )

    def _checked(self, order: TransferOrder) -> tuple[np.ndarray, np.ndarray]:
        """Host blocks and blocks as the library expects them. A wrong number would write to foreign
        memory."""
        host_blocks, blocks = order.host_blocks, order.blocks
        assert len(host_blocks) == len(blocks) > 0, (len(host_blocks), len(blocks))
        assert host_blocks.min() >= 0, host_blocks
        assert host_blocks.max() < self.num_host_blocks, (host_blocks, self.num_host_blocks)
        assert blocks.min() >= 0 and blocks.max() < self.device.num_blocks, blocks
        return np.ascontiguousarray(host_blocks, np.int64), np.ascontiguousarray(blocks, np.int64)

    def _free(self, transfer_id: int) -> None:
        flag = self._flags.pop(transfer_id, None)
        if flag is None:
            return  # a store
        self._free_flags.append(flag.place)
        base = flag.base + self.device.num_layers + 1
        base = (base + _HALF_WORD) % (2 * _HALF_WORD) - _HALF_WORD  # int32, as the flag
        self._bases[flag.place] = base or 1  # waiting kernels take 0 for "no load"

    def _report(self) -> None:
        first_error = self._quick.hetero_copier_first_error
        _, text = copier_library.with_message(first_error, self._open())
        if text:
            self._reported = True
            broken = "; no more copies from here on" if self._read_totals().broken else ""
            logger.error("a copy of KV failed: %s%s", text, broken)

    def _read_totals(self) -> copier_library.Totals:
        if self._handle is not None:
            self._quick.hetero_copier_totals(self._handle, ctypes.addressof(self._totals))
        return self._totals

    def _open(self) -> int:
        assert self._handle is not None, "closed"
        return self._handle
