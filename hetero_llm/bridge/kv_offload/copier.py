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
from hetero_llm.bridge.kv_offload.copier_protocol import Done, Gate
from hetero_llm.bridge.kv_offload.copy_rates import Calibration, Choice, assumed

logger = logging.getLogger(__name__)

PLACES = 64
"""Flags on the device, so loads at a time."""
PART_BYTES = 16 << 20
"""Most that is submitted at once: larger groups of layers go in parts."""

_OVER = np.dtype([("ticket", np.int64), ("ok", np.int64), ("seconds", np.float64)])
_POLLED = 256
_LONGEST_WAIT_S = 0.1  # between two looks of Python at its signals
_HALF_WORD = 1 << 31


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """KV on the device, block-first: a block is a row, a layer of it a contiguous piece.

    Attributes:
        address: of block 0.
        flags: address of int32 [PLACES], all zero at the beginning; see `contract.Gate`.
    """

    address: int
    num_blocks: int
    block_bytes: int
    num_layers: int
    flags: int


class HostRows(Protocol):
    """Page-locked rows of `DeviceRows.block_bytes` each, one after the other.

    Attributes:
        address: of row 0.
        ready_rows: the first so many can be used; it only grows.
        chunk_rows: so many were page-locked at a time: no single copy may cross their borders.
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
        lookahead: groups of a load's layers that are submitted ahead of what has landed.
        ahead_bytes: of one load that are in any case, however many groups that is.
        max_inflight: bytes that are, in all loads together; likewise in stores.
        lazy: False: everything at once, without those limits.
        libcuda: the driver's library.
        core: that the copy thread runs on; None: any.
    """

    lookahead: int = 2
    ahead_bytes: int = 1 << 20
    max_inflight: int = 32 << 20
    lazy: bool = True
    libcuda: str = "libcuda.so.1"
    core: int | None = None


class NativeCopier:
    """`contract.Copier`. For one thread, in which the device's context is current.

    The host memory is the pool's: it must stay until `close` has returned.
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
        """Opens the driver and starts the thread. Copies as fast as they can be only after
        `calibration.calibrate`.

        Args:
            current_stream: the handle of the stream that steps are launched on.
            first_base: of the gates, for tests of what happens beyond 2**32.

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
        )
        handle, warning = copier_library.open_copier(self._library, options.libcuda, setup)
        if warning:
            logger.warning("KV copies: %s", warning)
        self._handle: int | None = handle
        self._free_places = list(range(PLACES - 1, -1, -1))
        self._bases = [first_base] * PLACES
        self._gates: dict[int, Gate] = {}
        self._last_step = 0
        self._told = False
        self._over = np.zeros(_POLLED, _OVER)
        self._after_close: list[Done] = []
        self._totals = copier_library.Totals()
        self.calibration = assumed(self.methods(), self.layer_bytes)
        self.force: tuple[Method, int] | None = None
        """How all loads go, (method, layers of a group), in tests and measurements."""

    @property
    def layer_bytes(self) -> int:
        return self.device.block_bytes // self.device.num_layers

    @property
    def num_slots(self) -> int:
        return self.host.ready_rows

    def methods(self) -> tuple[Method, ...]:
        """Those that can be used."""
        found = self._quick.hetero_copier_methods(self._open())
        return tuple(method for method in Method if found >> method & 1)

    def add_kernel(self, image: bytes | None = None) -> None:
        """Makes `Method.KERNEL` available, with an image of `native.compile_kernel`.

        Raises:
            CopierError: it cannot be; the other methods remain.
        """
        if self.host.ready_rows == 0:
            raise CopierError("the copy kernel cannot be used: no host memory is ready yet")
        if image is None:
            image = copier_library.compile_kernel(self.options.libcuda)
        copier_library.add_kernel(self._library, self._open(), image)

    def use(self, calibration: Calibration) -> None:
        """Chooses by these rates from now on."""
        self.calibration = calibration
        self._quick.hetero_copier_set_rate(self._open(), calibration.best_rate())

    def can_load(self) -> bool:
        return bool(self._free_places) and self._handle is not None

    def load(
        self,
        ticket: int,
        slots: np.ndarray,
        blocks: np.ndarray,
        after_step: int,
        compute: float | None,
    ) -> None:
        self._begin_load(ticket, slots, blocks, after_step, self._choose(slots, blocks, compute))

    def time_load(
        self, slots: np.ndarray, blocks: np.ndarray, method: Method, group: int, layers: int
    ) -> float | None:
        """Loads the first `layers` layers and waits for it: seconds, None if it failed. Only while
        nothing else is under way."""
        assert not self._gates, "loads are under way"
        self._begin_load(-1, slots, blocks, 0, Choice(method, group), layers)
        while True:
            self.wait(1.0)
            for done in self.poll():
                assert done.ticket == -1, done
                return done.seconds if done.ok else None

    def store(self, ticket: int, blocks: np.ndarray, slots: np.ndarray, after_step: int) -> None:
        slots, blocks = self._checked(slots, blocks)
        self._quick.hetero_copier_store(
            self._open(), ticket, blocks.ctypes.data, slots.ctypes.data, len(slots), after_step
        )

    def abort(self, ticket: int) -> None:
        self._quick.hetero_copier_abort(self._open(), ticket)

    def gate(self, ticket: int) -> Gate | None:
        return self._gates.get(ticket)

    def step_launched(self, number: int) -> None:
        assert number > self._last_step, (number, self._last_step)
        self._last_step = number
        self._quick.hetero_copier_step_launched(self._open(), number, self._current_stream())

    def step_done(self, number: int) -> bool:
        return bool(self._quick.hetero_copier_step_done(self._open(), number))

    def seconds_left(self, tickets: Iterable[int]) -> float:
        ahead = [self._quick.hetero_copier_ahead(self._open(), ticket) for ticket in tickets]
        most = max(ahead, default=0)
        return most / self.load_rate() if most else 0.0

    def load_rate(self) -> float:
        return self._read_totals().rate or self.calibration.best_rate()

    def poll(self) -> list[Done]:
        if self._handle is None:
            found, self._after_close = self._after_close, []
            return found
        found = []
        room = count = len(self._over)
        while count == room:
            count = self._quick.hetero_copier_poll(self._handle, self._over.ctypes.data, room)
            for ticket, ok, seconds in self._over[:count].tolist():
                found.append(Done(ticket, bool(ok), seconds))
                self._free(ticket)
        if not self._told and any(not done.ok for done in found):
            self._tell()
        return found

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._handle is not None:
            left = min(deadline - time.monotonic(), _LONGEST_WAIT_S)
            if left <= 0 or self._library.waiting.hetero_copier_wait(self._handle, int(left * 1e9)):
                return

    def metrics(self) -> dict[str, float]:
        """Counters since start. Of loads that are over, each is counted in one of kv_offload_loads,
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
        """Waits for copies that are submitted; what is not submitted fails. May be called again,
        as may `poll`, `wait`, `metrics` and `can_load`; nothing else."""
        if self._handle is None:
            return
        handle = self._handle
        self._library.waiting.hetero_copier_close(handle)
        self._after_close = self.poll()
        self._read_totals()
        self._handle = None
        self._quick.hetero_copier_free(handle)

    def _choose(self, slots: np.ndarray, blocks: np.ndarray, compute: float | None) -> Choice:
        if self.force is not None:
            return Choice(*self.force)
        follows = (np.diff(slots) == 1) & (np.diff(blocks) == 1)
        ascending = np.count_nonzero(follows) / max(1, len(follows))
        return self.calibration.choose(self.device.num_layers, len(slots), ascending, compute)

    def _begin_load(
        self,
        ticket: int,
        slots: np.ndarray,
        blocks: np.ndarray,
        after_step: int,
        choice: Choice,
        layers: int | None = None,
    ) -> None:
        slots, blocks = self._checked(slots, blocks)
        assert ticket not in self._gates, ticket
        place = self._free_places.pop()
        gate = Gate(place, self._bases[place])
        self._gates[ticket] = gate
        load = copier_library.Load(
            ticket=ticket,
            place=place,
            base=gate.base,
            method=choice.method,
            group=choice.group,
            layers=self.device.num_layers if layers is None else layers,
            after_step=after_step,
        )
        self._quick.hetero_copier_load(
            self._open(),
            ctypes.addressof(load),
            slots.ctypes.data,
            blocks.ctypes.data,
            len(slots),
        )

    def _checked(self, slots: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both as the library takes them. A wrong number would be a write to foreign memory."""
        assert len(slots) == len(blocks) > 0, (len(slots), len(blocks))
        assert slots.min() >= 0 and slots.max() < self.num_slots, (slots, self.num_slots)
        assert blocks.min() >= 0 and blocks.max() < self.device.num_blocks, blocks
        return np.ascontiguousarray(slots, np.int64), np.ascontiguousarray(blocks, np.int64)

    def _free(self, ticket: int) -> None:
        gate = self._gates.pop(ticket, None)
        if gate is None:
            return  # a store
        self._free_places.append(gate.place)
        base = gate.base + self.device.num_layers + 1
        base = (base + _HALF_WORD) % (2 * _HALF_WORD) - _HALF_WORD  # int32, as the flag
        self._bases[gate.place] = base or 1  # to who waits at gates, 0 means none

    def _tell(self) -> None:
        text = copier_library.trouble(self._library, self._open())
        if text:
            self._told = True
            broken = "; no more copies from here on" if self._read_totals().broken else ""
            logger.error("a copy of KV failed: %s%s", text, broken)

    def _read_totals(self) -> copier_library.Totals:
        if self._handle is not None:
            self._quick.hetero_copier_totals(self._handle, ctypes.addressof(self._totals))
        return self._totals

    def _open(self) -> int:
        assert self._handle is not None, "closed"
        return self._handle
