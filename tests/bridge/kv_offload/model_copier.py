"""`contract.Copier` in plain Python over numpy memory: streams stand still until a test moves them.

Memory is [rows, layers, bytes of a layer] uint8 on both sides. The two streams are queues of
operations, taken one at a time by `advance`: wait for a step, copy one layer of some blocks, write
a flag, end. Steps are on the device from `step_launched` until the test calls `finish_step`; what
they write there is the test's business. Whoever reads KV behind a gate asks `landed`, which looks
at nothing but the flags.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hetero_llm.bridge.kv_offload.copier_protocol import Done, Gate

PLACES = 64
RATE = 1e9
"""Bytes a second that it pretends to copy."""


@dataclass(slots=True)
class _Ticket:
    ticket: int
    is_load: bool
    slots: np.ndarray
    blocks: np.ndarray
    after_step: int
    gate: Gate | None = None
    layer: int = 0  # loads: the next one
    at: int = 0  # the next block of it, or of the store
    fails_at: int = -1  # copies until one fails
    aborted: bool = False
    ok: bool = True


@dataclass(slots=True)
class ModelCopier:
    """See the module's text.

    Attributes:
        device, host: memory.
        num_slots: rows of `host` that are usable by now; a test may raise it.
        drop_waits: negative control: copies do not wait for steps.
        broken: every copy fails from now on.
        still: `wait` does not move streams either.
        places: gates at a time.
        rng: the order in which the streams move in `wait`, and how much lands at a time.
        on_copy: called with (is_load, slot, block, layer) at each copy, before it happens.
    """

    device: np.ndarray
    host: np.ndarray
    num_slots: int
    rng: random.Random
    drop_waits: bool = False
    broken: bool = False
    still: bool = False
    places: int = PLACES
    on_copy: Callable[[bool, int, int, int], None] = lambda *_: None
    flags: np.ndarray = field(default_factory=lambda: np.zeros(PLACES, np.int32))
    last_launched: int = 0
    last_finished: int = 0
    copied: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    closed: bool = False
    _tickets: dict[int, _Ticket] = field(default_factory=dict)
    _queues: dict[bool, deque[_Ticket]] = field(
        default_factory=lambda: {True: deque(), False: deque()}
    )
    _over: list[Done] = field(default_factory=list)
    _bases: list[int] = field(default_factory=lambda: [1] * PLACES)

    @property
    def num_layers(self) -> int:
        return int(self.device.shape[1])

    @property
    def block_bytes(self) -> int:
        return int(self.device[0].nbytes)

    # -- contract.Copier ---------------------------------------------------------------------

    def can_load(self) -> bool:
        return len(self._used_places()) < self.places

    def load(
        self,
        ticket: int,
        slots: np.ndarray,
        blocks: np.ndarray,
        after_step: int,
        compute: float | None,
    ) -> None:
        assert slots.dtype == blocks.dtype == np.int64 and len(slots) == len(blocks) > 0
        assert slots.max() < self.num_slots and after_step <= self.last_launched
        used = self._used_places()
        place = next(place for place in range(self.places) if place not in used)
        gate = Gate(place, self._bases[place])
        self.flags[place] = gate.base
        self._bases[place] += self.num_layers + 1
        self._add(_Ticket(ticket, True, slots, blocks, after_step, gate))

    def store(self, ticket: int, blocks: np.ndarray, slots: np.ndarray, after_step: int) -> None:
        assert slots.dtype == blocks.dtype == np.int64 and len(slots) == len(blocks) > 0
        assert slots.max() < self.num_slots and after_step <= self.last_launched
        self._add(_Ticket(ticket, False, slots, blocks, after_step))

    def abort(self, ticket: int) -> None:
        if ticket in self._tickets:
            self._tickets[ticket].aborted = True

    def gate(self, ticket: int) -> Gate | None:
        entry = self._tickets.get(ticket)
        return entry.gate if entry is not None else None

    def step_launched(self, number: int) -> None:
        assert number == self.last_launched + 1
        self.last_launched = number

    def step_done(self, number: int) -> bool:
        return number <= self.last_finished

    def seconds_left(self, tickets: Iterable[int]) -> float:
        wanted = set(tickets)
        total = most = 0
        for entry in self._queues[True]:
            total += len(entry.slots) * self.block_bytes
            if entry.ticket in wanted:
                most = total
        return most / RATE

    def load_rate(self) -> float:
        return RATE

    def poll(self) -> list[Done]:
        over, self._over = self._over, []
        for done in over:
            del self._tickets[done.ticket]
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

    def fail(self, ticket: int, after_copies: int) -> None:
        """So many more copies of single blocks succeed, the next one fails."""
        self._tickets[ticket].fails_at = after_copies

    def is_sound(self, ticket: int) -> bool:
        """Whether nothing has failed so far."""
        entry = self._tickets[ticket]
        return entry.ok and not entry.aborted

    def landed(self, ticket: int, layer: int) -> bool:
        """Whether a gate lets the readers of a layer through."""
        gate = self.gate(ticket)
        return gate is None or int(self.flags[gate.place]) - (gate.base + layer + 1) >= 0

    def open_tickets(self, is_load: bool) -> list[int]:
        """Those with something left to do, in the order of their turn."""
        return [entry.ticket for entry in self._queues[is_load]]

    @property
    def idle(self) -> bool:
        return not self._tickets and not self._over

    def advance(self, is_load: bool) -> bool:
        """One operation of the stream of loads or of stores; False if it can do none now."""
        queue = self._queues[is_load]
        if not queue:
            return False
        entry = queue[0]
        waits = entry.after_step > self.last_finished and not self.drop_waits
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
        return {entry.gate.place for entry in self._tickets.values() if entry.gate is not None}

    def _add(self, entry: _Ticket) -> None:
        assert entry.ticket not in self._tickets and not self.closed
        self._tickets[entry.ticket] = entry
        self._queues[entry.is_load].append(entry)

    def _load_some(self, entry: _Ticket) -> None:
        """A few blocks of a layer; behind the last one the flag is written."""
        assert entry.gate is not None
        for _ in range(self.rng.randint(1, 3)):
            slot, block = int(entry.slots[entry.at]), int(entry.blocks[entry.at])
            if not self._copy(entry, slot, block, entry.layer):
                return
            self.device[block, entry.layer] = self.host[slot, entry.layer]
            entry.at += 1
            if entry.at == len(entry.slots):
                entry.at = 0
                entry.layer += 1
                self.flags[entry.gate.place] = entry.gate.base + entry.layer
                break
        if entry.layer == self.num_layers:
            self._end(entry)

    def _store_some(self, entry: _Ticket) -> None:
        slot, block = int(entry.slots[entry.at]), int(entry.blocks[entry.at])
        if self._copy(entry, slot, block, 0):
            self.host[slot] = self.device[block]
            entry.at += 1
            if entry.at == len(entry.slots):
                self._end(entry)

    def _copy(self, entry: _Ticket, slot: int, block: int, layer: int) -> bool:
        if self.broken or entry.fails_at == 0:
            entry.ok = False
            return False
        entry.fails_at -= 1
        self.on_copy(entry.is_load, slot, block, layer)
        self.copied[entry.is_load] += 1
        return True

    def _end(self, entry: _Ticket) -> None:
        """Gates of what failed let everybody through."""
        if entry.gate is not None:
            self.flags[entry.gate.place] = entry.gate.base + self.num_layers
        assert self._queues[entry.is_load].popleft() is entry
        self._over.append(Done(entry.ticket, entry.ok, 0.001))
