"""The memory behind the block manager: `kv_cache.host_tier.HostTier` over slots and copies.

Whatever fails here costs a recomputation and nothing else. Copies that keep failing switch the tier
off: it then finds nothing and stores nothing, while what is under way still ends properly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_llm.bridge.kv_offload.copier_protocol import Copier, Done
from hetero_llm.bridge.kv_offload.host_block_index import HostBlockIndex
from hetero_llm.core.errors import EngineDeadError
from hetero_llm.kv_cache.host_tier import EvictionCandidate, HostHit, TierEvents

logger = logging.getLogger(__name__)

_FREE_TOKENS = 133
"""Rows that one pass over the weights takes along for nothing: so many tokens are computed in the
time in which the weights are read."""
_FAILURES_IN_A_ROW = 16
_PATIENCE_S = 60.0
_NAP_S = 0.001
_NO_HIT = HostHit((), (), ())


@dataclass(frozen=True, slots=True)
class LoadRule:
    """When loading beats computing.

    Attributes:
        block_size: tokens in a block.
        block_bytes: of one block, all layers.
        num_layers: a load is hidden by the computation of all layers but the first.
        compute: seconds to compute so many tokens of a prompt, given how many lie before them:
            (start, count) -> seconds; 0.0 if not known yet, then everything is loaded.
        min_tokens: fewer are not loaded; None: what one pass over the weights takes along anyway,
            unless the load is hidden.
        window_bytes: of larger loads that may be ahead of a smaller one in the queue; None: all of
            them, whatever their size.
    """

    block_size: int
    block_bytes: int
    num_layers: int
    compute: Callable[[int, int], float]
    min_tokens: int | None = None
    window_bytes: int | None = 32 << 20


@dataclass(slots=True)
class _Load:
    slots: tuple[int, ...]
    sources: tuple[bytes, ...]
    aborted: bool = False
    landed: bool = False


class PinnedHostTier:
    """Joins bookkeeping and copies. Belongs to the thread of the step loop.

    Args:
        cache: empty; it gets as many slots as the copier has.
        copier: what moves the blocks.
        rule: when to load.
        free_memory: called once by `shut_down`, when no copy is left.
    """

    def __init__(
        self,
        cache: HostBlockIndex,
        copier: Copier,
        rule: LoadRule,
        *,
        free_memory: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache = cache
        self._copier = copier
        self._rule = rule
        self._free_memory = free_memory
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, list[int]] = {}  # slots
        self._over: list[_Load] = []  # still pinned, and the cache does not know
        self._refused: list[int] = []  # loads that could not begin, to be told as failed
        self._tickets = 0
        self._last_step = 0
        self._failures = 0  # in a row
        self._off = False
        self._shut = False
        self._counts = dict.fromkeys(
            (
                "loads",
                "failed_loads",
                "aborted_loads",
                "loaded_blocks",
                "stores",
                "failed_stores",
                "stored_blocks",
                "dropped_stores",
            ),
            0,
        )
        self._load_seconds = 0.0
        self._grow()

    @property
    def is_off(self) -> bool:
        """Whether failures have switched the tier off."""
        return self._off

    def match(self, parent: bytes, contents: Iterable[bytes]) -> HostHit:
        return _NO_HIT if self._off else self._cache.match(parent, contents)

    def release(self, hit: HostHit) -> None:
        self._cache.unpin(hit.slots)

    def load(
        self, hit: HostHit, blocks: NDArray[np.int64], after_step: int, compute: float | None
    ) -> int:
        assert hit.slots and len(hit.slots) == len(blocks)
        ticket = self._new_ticket()
        if self._off or self._shut or not self._copier.can_load():
            self.release(hit)
            self._refused.append(ticket)
            return ticket
        self._loads[ticket] = _Load(hit.slots, hit.sources)
        slots, places = np.array(hit.slots, np.int64), np.asarray(blocks, np.int64)
        self._copier.load(ticket, slots, places, after_step, compute)
        return ticket

    def abort(self, ticket: int) -> None:
        load = self._loads.get(ticket)
        if load is not None and not load.aborted and not self._shut:
            load.aborted = True
            self._copier.abort(ticket)

    def store(self, victims: Sequence[EvictionCandidate]) -> tuple[int, int]:
        if self._off or self._shut:
            return 0, 0
        self._unpin()
        reserved = self._cache.reserve(victims)
        self._counts["dropped_stores"] += len(victims) - reserved.taken
        if not reserved.slots:
            return reserved.taken, 0
        ticket = self._new_ticket()
        self._stores[ticket] = reserved.slots
        self._copier.store(
            ticket,
            np.array(reserved.blocks, np.int64),
            np.array(reserved.slots, np.int64),
            self._last_step,
        )
        return reserved.taken, ticket

    def holds(self, source: bytes) -> bool:
        return not self._off and self._cache.holds(source)

    def wants(self, key: bytes) -> bool:
        return not self._off and self._cache.wants(key)

    def note_use(self, uses: Mapping[bytes, int]) -> None:
        self._unpin()
        self._cache.note_use(uses)

    def left(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        self._unpin()
        self._cache.left(entries)

    def take_lost(self) -> list[tuple[bytes, bytes]]:
        return self._cache.take_lost()

    def step_launched(self, number: int) -> None:
        self._last_step = number
        self._copier.step_launched(number)

    def seconds_left(self, tickets: Iterable[int]) -> float:
        open_loads = [ticket for ticket in tickets if ticket in self._loads]
        return self._copier.seconds_left(open_loads) if open_loads else 0.0

    def seconds_ahead(self, tickets: Iterable[int]) -> float:
        open_loads = [ticket for ticket in tickets if ticket in self._loads]
        rate = self._copier.load_rate()
        if not open_loads or rate <= 0.0:
            return 0.0
        own = sum(len(self._loads[ticket].slots) for ticket in open_loads)
        left = self._copier.seconds_left(open_loads)
        return max(0.0, left - own * self._rule.block_bytes / rate)

    def worth_loading(self, hit: HostHit, start: int, rest: int) -> int:
        """See `HostTier.worth_loading`. All of a hit or nothing of it: computing a block takes the
        longer the deeper it lies, loading it does not."""
        rule, count = self._rule, len(hit.slots)
        if not count or self._off or self._shut or not self._copier.can_load():
            return 0
        self._cache.set_depth(hit.slots, start // rule.block_size)
        tokens = count * rule.block_size
        if rule.min_tokens is not None and tokens < rule.min_tokens:
            return 0
        rate = self._copier.load_rate()
        if rate <= 0.0:  # not known yet either
            return count
        load = count * rule.block_bytes / rate + self._seconds_ahead(count, rate)
        behind = rule.compute(start + tokens, rest) if rest else 0.0
        hidden = load <= behind * (rule.num_layers - 1) / rule.num_layers
        if rule.min_tokens is None and not hidden and tokens < _FREE_TOKENS - rest:
            return 0
        whole = rule.compute(start, tokens + rest)
        return count if hidden or whole <= 0.0 or load < whole - behind else 0

    def poll(self, over: Iterable[int] = ()) -> TierEvents:
        """See `HostTier.poll`.

        Raises:
            EngineDeadError: a load of `over` did not end within a minute: the device is stuck.
        """
        events = TierEvents()
        if self._refused:
            events.failed.extend(self._refused)
            self._counts["failed_loads"] += len(self._refused)
            self._refused.clear()
        self._grow()
        self._collect(events)
        waiting = [ticket for ticket in over if ticket in self._loads]
        deadline = time.monotonic() + _PATIENCE_S if waiting else 0.0
        while waiting:
            self._copier.wait(_NAP_S)
            self._collect(events)
            waiting = [ticket for ticket in waiting if ticket in self._loads]
            if waiting and time.monotonic() > deadline:
                raise EngineDeadError(
                    f"loads {waiting} of prefix KV did not end within {_PATIENCE_S:.0f} s"
                )
        return events

    def wait(self, seconds: float) -> None:
        if not self._refused:
            self._copier.wait(seconds)

    def clear(self) -> None:
        self._unpin()
        self._cache.clear()

    def metrics(self) -> dict[str, float]:
        """Counters since start. Loads and stores count tickets; `dropped_stores` counts blocks for
        which there was no room, each time that they were offered."""
        rule, counts = self._rule, self._counts
        values: dict[str, float] = {
            "bytes_h2d": counts["loaded_blocks"] * rule.block_bytes,
            "bytes_d2h": counts["stored_blocks"] * rule.block_bytes,
        }
        told = self._copier.metrics()
        values |= {name.removeprefix("kv_offload_"): value for name, value in told.items()}
        values |= counts
        values |= {
            "load_seconds_total": self._load_seconds,
            "open_loads": len(self._loads),
            "open_stores": len(self._stores),
            "host_slots": self._cache.num_slots,
            "host_slots_used": self._cache.num_used,
            "host_evictions": self._cache.evictions,
            "broken": max(float(self._off), values.get("broken", 0.0)),
        }
        return {f"kv_offload_{name}": float(value) for name, value in values.items()}

    def shut_down(self) -> None:
        if not self._shut:
            self._shut = True
            self._copier.close()
            self._free_memory()

    def check_integrity(self) -> None:
        """Asserts that pins and states of slots are exactly those of open loads and stores, hits
        that are neither loaded nor released yet aside; slow."""
        self._unpin()
        self._cache.check_integrity()
        self._cache.check_busy(
            [slot for load in self._loads.values() for slot in load.slots],
            [slot for slots in self._stores.values() for slot in slots],
        )

    def _unpin(self) -> None:
        for load in self._over:
            if load.landed:
                self._cache.loaded(load.sources)
            self._cache.unpin(load.slots)
        self._over.clear()

    def _new_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _grow(self) -> None:
        more = self._copier.num_slots - self._cache.num_slots
        if more > 0:
            self._cache.add_slots(more)

    def _seconds_ahead(self, count: int, rate: float) -> float:
        """Of copies that go before a load of so many blocks: those of loads that are not larger,
        and what is already submitted of larger ones."""
        if not self._loads:
            return 0.0
        window = self._rule.window_bytes
        if window is None:
            return self._copier.seconds_left(list(self._loads))
        first = [ticket for ticket, load in self._loads.items() if len(load.slots) <= count]
        seconds = self._copier.seconds_left(first) if first else 0.0
        return seconds + (window / rate if len(first) < len(self._loads) else 0.0)

    def _collect(self, events: TierEvents) -> None:
        if not self._loads and not self._stores:
            return
        for done in self._copier.poll():
            if done.ticket in self._loads:
                self._end_load(done, events)
            else:
                self._end_store(done, events)

    def _end_load(self, done: Done, events: TierEvents) -> None:
        load = self._loads.pop(done.ticket)
        self._over.append(load)  # its readers wait for their tokens, nobody for its slots
        if done.ok:
            events.loaded.append(done.ticket)
            self._counts["loads"] += 1
            self._counts["loaded_blocks"] += len(load.slots)
            self._load_seconds += done.seconds
            self._failures = 0
            load.landed = not load.aborted  # else the device forgets it
            return
        events.failed.append(done.ticket)
        if load.aborted:
            self._counts["aborted_loads"] += 1
        else:
            self._counts["failed_loads"] += 1
            self._note_failure()

    def _end_store(self, done: Done, events: TierEvents) -> None:
        slots = self._stores.pop(done.ticket)
        self._cache.stored(slots, done.ok)
        events.stored.append(done.ticket)
        if done.ok:
            self._counts["stores"] += 1
            self._counts["stored_blocks"] += len(slots)
            self._failures = 0
        else:
            self._counts["failed_stores"] += 1
            self._note_failure()

    def _note_failure(self) -> None:
        """Switches the tier off if the driver is broken for good, or nothing succeeds any more."""
        self._failures += 1
        broken = self._copier.metrics().get("kv_offload_broken", 0.0) > 0.0
        if not self._off and (broken or self._failures >= _FAILURES_IN_A_ROW):
            self._off = True
            self._cache.clear()  # what follows it on the device is of no use either
            why = "the driver reports a lasting error" if broken else "copy after copy fails"
            logger.error("prefix KV in host memory is switched off: %s", why)
