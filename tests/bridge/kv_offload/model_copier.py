"""`copier_protocol.Copier` in plain Python over numpy memory: its streams stand still until a test
moves them.

Memory is [rows, layers, bytes of a layer] uint8 on both sides. The two streams are queues of
operations, taken one at a time by `advance`: wait for a step, copy one layer of some blocks, write
a flag, end. Steps are on the device from `step_launched` until the test calls `finish_step`; what
they write there is the test's business. Readers of KV that is being loaded ask `landed`, which
looks at nothing but the flags.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hetero_llm.bridge.kv_offload.copier_protocol import Done, LayerReadyFlag
from hetero_llm.core.transfer_order import TransferOrder

NUM_FLAGS = 64
RATE = 1e9
"""Bytes a second that it pretends to copy."""


@dataclass(slots=True)
class _Transfer:
    order: TransferOrder
    is_load: bool
    ready: LayerReadyFlag | None = None
    layer: int = 0  # loads: the next one
    at: int = 0  # the next pair of it, or of the store
    fails_at: int = -1  # copies until one fails
    aborted: bool = False
    ok: bool = True

    def pair(self) -> tuple[int, int]:
        """Host block and block to copy next."""
        return int(self.order.host_blocks[self.at]), int(self.order.blocks[self.at])


# large: the whole of `Copier`, its streams, and what tests set
@dataclass(slots=True)
class ModelCopier:
    """See the module's text.

    Attributes:
        device, host: memory.
        num_host_blocks: rows of `host` that are usable by now; a test may raise it.
        drop_waits: negative control: copies do not wait for steps.
        broken: every copy fails from now on.
        still: `wait` does not move streams either.
        places: layer-ready flags at a time.
        rng: the order in which the streams move in `wait`, and how much lands at a time.
        on_copy: called with (is_load, host block, block, layer) at each copy, before it happens.
    """

    device: np.ndarray
    host: np.ndarray
    num_host_blocks: int
    rng: random.Random
    drop_waits: bool = False
    broken: bool = False
    still: bool = False
    places: int = NUM_FLAGS
    on_copy: Callable[[bool, int, int, int], None] = lambda *_: None
    flags: np.ndarray = field(default_factory=lambda: np.zeros(NUM_FLAGS, np.int32))
    last_launched: int = 0
    last_finished: int = 0
    copied: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    closed: bool = False
    _transfers: dict[int, _Transfer] = field(default_factory=dict)
    _queues: dict[bool, deque[_Transfer]] = field(
        default_factory=lambda: {True: deque(), False: deque()}
    )
    _over: list[Done] = field(default_factory=list)
    _bases: list[int] = field(default_factory=lambda: [1] * NUM_FLAGS)

    @property
    def num_layers(self) -> int:
        return int(self.device.shape[1])

    @property
    def block_bytes(self) -> int:
        return int(self.device[0].nbytes)

    # -- Copier -------------------------------------------------------------------------------

    def can_load(self) -> bool:
        return len(self._used_places()) < self.places

    def load(self, order: TransferOrder) -> None:
        self._check(order)
        used = self._used_places()
        place = next(place for place in range(self.places) if place not in used)
        ready = LayerReadyFlag(place, self._bases[place])
        self.flags[place] = ready.base
        self._bases[place] += self.num_layers + 1
        self._add(_Transfer(order, True, ready))

    def store(self, order: TransferOrder) -> None:
        self._check(order)
        self._add(_Transfer(order, False))

    def _check(self, order: TransferOrder) -> None:
        host_blocks, blocks = order.host_blocks, order.blocks
        assert host_blocks.dtype == blocks.dtype == np.int64 and len(host_blocks) == len(blocks) > 0
        assert host_blocks.max() < self.num_host_blocks
        assert order.after_step <= self.last_launched

    def abort(self, transfer_id: int) -> None:
        if transfer_id in self._transfers:
            self._transfers[transfer_id].aborted = True

    def layer_ready_flag(self, transfer_id: int) -> LayerReadyFlag | None:
        entry = self._transfers.get(transfer_id)
        return entry.ready if entry is not None else None

    def step_launched(self, number: int) -> None:
        assert number == self.last_launched + 1
        self.last_launched = number

    def seconds_left(self, transfer_ids: Iterable[int]) -> float:
        wanted = set(transfer_ids)
        total = most = 0
        for entry in self._queues[True]:
            total += len(entry.order.host_blocks) * self.block_bytes
            if entry.order.transfer_id in wanted:
                most = total
        return most / RATE

    def load_rate(self) -> float:
        return RATE

    def poll(self) -> list[Done]:
        over, self._over = self._over, []
        for done in over:
            del self._transfers[done.transfer_id]
        return over

    def wait(self, seconds: float) -> None:
        """Moves streams until something is over, or nothing can move."""
        while not self.still and not self._over and (self._queues[True] or self._queues[False]):
            if not self.advance(self.rng.random() < 0.5) and not (
                self.advance(True) or self.advance(False)
            ):
                return

    def metrics(self) -> dict[str, float]:
        return {"kv_offload_broken": float(self.broken), "kv_offload_model": 1.0}

    def close(self) -> None:
        self.last_finished = self.last_launched
        for is_load in (True, False):
            while self._queues[is_load]:
                self.advance(is_load)
        self.closed = True

    # -- for tests ---------------------------------------------------------------------------

    def finish_step(self) -> None:
        """The oldest step on the device is over."""
        assert self.last_finished < self.last_launched
        self.last_finished += 1

    def fail(self, transfer_id: int, after_copies: int) -> None:
        """So many more copies of single blocks succeed, the next one fails."""
        self._transfers[transfer_id].fails_at = after_copies

    def is_sound(self, transfer_id: int) -> bool:
        """Whether nothing has failed so far."""
        entry = self._transfers[transfer_id]
        return entry.ok and not entry.aborted

    def landed(self, transfer_id: int, layer: int) -> bool:
        """Whether a layer-ready flag lets the readers of a layer through."""
        ready = self.layer_ready_flag(transfer_id)
        return ready is None or int(self.flags[ready.place]) - (ready.base + layer + 1) >= 0

    def open_transfers(self, is_load: bool) -> list[int]:
        """Those with something left to do, in the order of their turn."""
        return [entry.order.transfer_id for entry in self._queues[is_load]]

    @property
    def idle(self) -> bool:
        return not self._transfers and not self._over

    def advance(self, is_load: bool) -> bool:
        """One operation of the stream of loads or of stores; False if it can do none now."""
        queue = self._queues[is_load]
        if not queue:
            return False
        entry = queue[0]
        waits = entry.order.after_step > self.last_finished and not self.drop_waits
        if waits and not entry.aborted:
            return False
        if entry.aborted or not entry.ok:
            entry.ok = False
            self._end(entry)
        elif is_load:
            self._load_some(entry)
        else:
            self._store_some(entry)
        return True

    # -- streams -----------------------------------------------------------------------------

    def _used_places(self) -> set[int]:
        return {entry.ready.place for entry in self._transfers.values() if entry.ready is not None}

    def _add(self, entry: _Transfer) -> None:
        assert entry.order.transfer_id not in self._transfers and not self.closed
        self._transfers[entry.order.transfer_id] = entry
        self._queues[entry.is_load].append(entry)

    def _load_some(self, entry: _Transfer) -> None:
        """A few blocks of a layer; behind the last one the flag is written."""
        assert entry.ready is not None
        for _ in range(self.rng.randint(1, 3)):
            host_block, block = entry.pair()
            if not self._copy(entry, host_block, block, entry.layer):
                return
            self.device[block, entry.layer] = self.host[host_block, entry.layer]
            entry.at += 1
            if entry.at == len(entry.order.host_blocks):
                entry.at = 0
                entry.layer += 1
                self.flags[entry.ready.place] = entry.ready.base + entry.layer
                break
        if entry.layer == self.num_layers:
            self._end(entry)

    def _store_some(self, entry: _Transfer) -> None:
        host_block, block = entry.pair()
        if self._copy(entry, host_block, block, 0):
            self.host[host_block] = self.device[block]
            entry.at += 1
            if entry.at == len(entry.order.host_blocks):
                self._end(entry)

    def _copy(self, entry: _Transfer, host_block: int, block: int, layer: int) -> bool:
        if self.broken or entry.fails_at == 0:
            entry.ok = False
            return False
        entry.fails_at -= 1
        self.on_copy(entry.is_load, host_block, block, layer)
        self.copied[entry.is_load] += 1
        return True

    def _end(self, entry: _Transfer) -> None:
        """Gates of what failed let everybody through."""
        if entry.ready is not None:
            self.flags[entry.ready.place] = entry.ready.base + self.num_layers
        assert self._queues[entry.is_load].popleft() is entry
        self._over.append(Done(entry.order.transfer_id, entry.ok, 0.001))
