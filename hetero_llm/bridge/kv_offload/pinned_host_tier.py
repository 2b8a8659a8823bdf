"""`kv_cache.host_tier.HostTier` over a `HostBlockIndex` and a `Copier`.

A failure here costs a recomputation and nothing else. If copies keep failing the tier switches
itself off: it then finds and stores nothing, while transfers under way still end properly.
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
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.kv_cache.host_tier import EvictionCandidate, HostHit, TierEvents

logger = logging.getLogger(__name__)

_FREE_TOKENS = 133
"""Tokens computed in the time that reading the weights takes: fewer cost no more than one."""
_NAP_S = 0.001
_NO_HIT = HostHit()


@dataclass(frozen=True, slots=True)
class LoadRule:
    """When loading is preferred to computing.

    Attributes:
        block_size: tokens in a block.
        block_bytes: of one block, all layers.
        num_layers: computing all layers but the first hides a load.
        compute: (count, start) -> seconds to compute `count` tokens of a prompt behind `start`
            others; 0.0 if not known yet, then everything is loaded.
        min_tokens: minimum number of tokens to load; None: as many as one pass over the weights
            computes at no extra cost, unless the load is hidden.
        window_bytes: maximum bytes of larger loads that run before a smaller one; None: no limit,
            loads run in the order of their start.
    """

    block_size: int
    block_bytes: int
    num_layers: int
    compute: Callable[[int, int], float]
    min_tokens: int | None = None
    window_bytes: int | None = 32 << 20


@dataclass(slots=True)
class _Load:
    host_blocks: tuple[int, ...]
    lookup_keys: tuple[bytes, ...]
    aborted: bool = False
    landed: bool = False


# large: the whole of `HostTier`, which keeps index, copier and counters alike
class PinnedHostTier:
    """Assigns transfer ids and keeps the index, the copier and the counters consistent. Used by the
    thread of the step loop only; for its methods see `HostTier`.

    Args:
        index: empty; it gets as many host blocks as the copier has.
        copier: copies the blocks.
        rule: when to load.
        free_memory: called once by `shut_down`, after all copies have ended.
        max_failures: consecutive failed copies that switch the tier off.
        patience_s: seconds that `poll` waits for a load that a finished step has read.

    Attributes:
        index: what host memory holds.
        copier: may be wrapped while no copy is under way.
    """

    def __init__(
        self,
        index: HostBlockIndex,
        copier: Copier,
        rule: LoadRule,
        *,
        free_memory: Callable[[], None] = lambda: None,
        max_failures: int = 16,
        patience_s: float = 60.0,
    ) -> None:
        self.index = index
        self.copier = copier
        self._rule = rule
        self._free_memory = free_memory
        self._max_failures = max_failures
        self._patience_s = patience_s
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, list[int]] = {}  # host blocks
        self._ended: list[_Load] = []  # still pinned, not yet known to the index
        self._refused: list[int] = []  # loads that could not start; the next poll reports failure
        self._last_id = 0
        self._last_step = 0
        self._failures = 0  # consecutive ones
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

    def match(self, parent_hash: bytes, contents: Iterable[bytes]) -> HostHit:
        return _NO_HIT if self._off else self.index.match(parent_hash, contents)

    def release(self, hit: HostHit) -> None:
        self.index.unpin(hit.host_blocks)

    def load(
        self, hit: HostHit, blocks: NDArray[np.int64], after_step: int, compute: float | None
    ) -> int:
        assert hit.host_blocks and len(hit.host_blocks) == len(blocks)
        transfer_id = self._new_id()
        if self._off or self._shut or not self.copier.can_load():
            self.release(hit)
            self._refused.append(transfer_id)
            return transfer_id
        self._loads[transfer_id] = _Load(hit.host_blocks, hit.lookup_keys)
        host_blocks, places = np.array(hit.host_blocks, np.int64), np.asarray(blocks, np.int64)
        order = TransferOrder(transfer_id, host_blocks, places, after_step, compute)
        self.copier.load(order)
        return transfer_id

    def abort(self, transfer_id: int) -> None:
        load = self._loads.get(transfer_id)
        if load is not None and not load.aborted and not self._shut:
            load.aborted = True
            self.copier.abort(transfer_id)

    def store(self, candidates: Sequence[EvictionCandidate]) -> tuple[int, int]:
        if self._off or self._shut:
            return 0, 0
        self._unpin_ended()
        reserved = self.index.reserve(candidates)
        self._counts["dropped_stores"] += len(candidates) - reserved.taken
        if not reserved.host_blocks:
            return reserved.taken, 0
        transfer_id = self._new_id()
        self._stores[transfer_id] = reserved.host_blocks
        host_blocks = np.array(reserved.host_blocks, np.int64)
        blocks = np.array(reserved.device_blocks, np.int64)
        self.copier.store(TransferOrder(transfer_id, host_blocks, blocks, self._last_step))
        return reserved.taken, transfer_id

    def holds(self, lookup_key: bytes) -> bool:
        return not self._off and self.index.holds(lookup_key)

    def wants(self, block_hash: bytes) -> bool:
        return not self._off and self.index.wants(block_hash)

    def add_use_counts(self, uses: Mapping[bytes, int]) -> None:
        self._unpin_ended()
        self.index.add_use_counts(uses)

    def device_evicted(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        self._unpin_ended()
        self.index.device_evicted(entries)

    def take_host_evicted(self) -> list[tuple[bytes, bytes]]:
        return self.index.take_evicted()

    def step_launched(self, number: int) -> None:
        self._last_step = number
        self.copier.step_launched(number)

    def seconds_left(self, transfer_ids: Iterable[int]) -> float:
        open_loads = [each for each in transfer_ids if each in self._loads]
        return self.copier.seconds_left(open_loads) if open_loads else 0.0

    def seconds_ahead(self, transfer_ids: Iterable[int]) -> float:
        open_loads = [each for each in transfer_ids if each in self._loads]
        rate = self.copier.load_rate()
        if not open_loads or rate <= 0.0:
            return 0.0
        own = sum(len(self._loads[each].host_blocks) for each in open_loads)
        left = self.copier.seconds_left(open_loads)
        return max(0.0, left - own * self._rule.block_bytes / rate)

    def worth_loading(self, hit: HostHit, start: int, rest: int) -> int:
        """See `HostTier.worth_loading`. The result is all of a hit or nothing: the more ancestors a
        block has, the longer it takes to compute, but not to load."""
        rule, count = self._rule, len(hit.host_blocks)
        if not count or self._off or self._shut or not self.copier.can_load():
            return 0
        self.index.set_depth(hit.host_blocks, start // rule.block_size)
        tokens = count * rule.block_size
        if rule.min_tokens is not None and tokens < rule.min_tokens:
            return 0
        rate = self.copier.load_rate()
        if rate <= 0.0:  # nothing measured yet
            return count
        load = count * rule.block_bytes / rate + self._seconds_ahead(count, rate)
        rest_s = rule.compute(rest, start + tokens) if rest else 0.0
        hidden = load <= rest_s * (rule.num_layers - 1) / rule.num_layers
        if rule.min_tokens is None and not hidden and tokens < _FREE_TOKENS - rest:
            return 0
        whole = rule.compute(tokens + rest, start)
        return count if hidden or whole <= 0.0 or load < whole - rest_s else 0

    def poll(self, finished: Iterable[int] = ()) -> TierEvents:
        """See `HostTier.poll`.

        Raises:
            EngineDeadError: a load of `finished` did not end within `patience_s`: the device is
                stuck.
        """
        events = TierEvents()
        if self._refused:
            events.failed.extend(self._refused)
            self._counts["failed_loads"] += len(self._refused)
            self._refused.clear()
        self._grow()
        self._collect(events)
        waiting = [each for each in finished if each in self._loads]
        deadline = time.monotonic() + self._patience_s if waiting else 0.0
        while waiting:
            self.copier.wait(_NAP_S)
            self._collect(events)
            waiting = [each for each in waiting if each in self._loads]
            if waiting and time.monotonic() > deadline:
                raise EngineDeadError(
                    f"loads {waiting} of prefix KV did not end within {self._patience_s:.0f} s"
                )
        return events

    def wait(self, seconds: float) -> None:
        if not self._refused:
            self.copier.wait(seconds)

    def clear(self) -> None:
        self._unpin_ended()
        self.index.clear()

    def metrics(self) -> dict[str, float]:
        """Counters since start. `loads` and `stores` count transfers, `dropped_stores` blocks for
        which there was no room, once for each attempt."""
        rule, counts = self._rule, self._counts
        values: dict[str, float] = {
            "kv_offload_bytes_h2d": counts["loaded_blocks"] * rule.block_bytes,
            "kv_offload_bytes_d2h": counts["stored_blocks"] * rule.block_bytes,
            **self.copier.metrics(),
        }
        own = {
            **counts,
            "load_seconds_total": self._load_seconds,
            "open_loads": len(self._loads),
            "open_stores": len(self._stores),
            "host_slots": self.index.num_blocks,
            "host_slots_used": self.index.num_used,
            "host_evictions": self.index.evictions,
            "broken": max(float(self._off), values.get("kv_offload_broken", 0.0)),
        }
        values |= {f"kv_offload_{name}": value for name, value in own.items()}
        return {name: float(value) for name, value in values.items()}

    def shut_down(self) -> None:
        if not self._shut:
            self._shut = True
            self.copier.close()
            self._free_memory()

    def check_integrity(self) -> None:
        """Asserts that pins and states of host blocks match the loads and stores under way; further
        pins may belong to hits not yet loaded or released. Slow."""
        self._unpin_ended()
        self.index.check_integrity()
        self.index.check_busy(
            [block for load in self._loads.values() for block in load.host_blocks],
            [block for blocks in self._stores.values() for block in blocks],
        )

    def _unpin_ended(self) -> None:
        for load in self._ended:
            if load.landed:
                self.index.mark_on_device(load.lookup_keys)
            self.index.unpin(load.host_blocks)
        self._ended.clear()

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _grow(self) -> None:
        more = self.copier.num_host_blocks - self.index.num_blocks
        if more > 0:
            self.index.add_blocks(more)

    def _seconds_ahead(self, count: int, rate: float) -> float:
        """Seconds of the copies that would run before a new load of `count` blocks: all loads that
        are not larger, and a window of larger ones."""
        if not self._loads:
            return 0.0
        window = self._rule.window_bytes
        if window is None:
            return self.copier.seconds_left(list(self._loads))
        first = [each for each, load in self._loads.items() if len(load.host_blocks) <= count]
        seconds = self.copier.seconds_left(first) if first else 0.0
        return seconds + (window / rate if len(first) < len(self._loads) else 0.0)

    def _collect(self, events: TierEvents) -> None:
        if not self._loads and not self._stores:
            return
        for done in self.copier.poll():
            if done.transfer_id in self._loads:
                self._end_load(done, events)
            else:
                self._end_store(done, events)

    def _end_load(self, done: Done, events: TierEvents) -> None:
        load = self._loads.pop(done.transfer_id)
        self._ended.append(load)  # unpinned later: waiting sequences go first
        if done.ok:
            events.loaded.append(done.transfer_id)
            self._counts["loads"] += 1
            self._counts["loaded_blocks"] += len(load.host_blocks)
            self._load_seconds += done.seconds
            self._failures = 0
            load.landed = not load.aborted  # else the device has evicted it
            return
        events.failed.append(done.transfer_id)
        if load.aborted:
            self._counts["aborted_loads"] += 1
        else:
            self._counts["failed_loads"] += 1
            self._note_failure()

    def _end_store(self, done: Done, events: TierEvents) -> None:
        host_blocks = self._stores.pop(done.transfer_id)
        self.index.stored(host_blocks, done.ok)
        events.stored.append(done.transfer_id)
        if done.ok:
            self._counts["stores"] += 1
            self._counts["stored_blocks"] += len(host_blocks)
            self._failures = 0
        else:
            self._counts["failed_stores"] += 1
            self._note_failure()

    def _note_failure(self) -> None:
        """Switches the tier off after a lasting driver error or many consecutive failures."""
        self._failures += 1
        broken = self.copier.metrics().get("kv_offload_broken", 0.0) > 0.0
        if not self._off and (broken or self._failures >= self._max_failures):
            self._off = True
            self.index.clear()  # and the device drops its descendants
            why = "the driver reports a lasting error" if broken else "copy after copy fails"
            logger.error("prefix KV in host memory is switched off: %s", why)
