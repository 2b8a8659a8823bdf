"""Which adapters are on the device, and which waiting sequence gets the next slot.

A slot is the place of one adapter on the device. A running sequence refers to the slot of its
adapter; a slot to which none refers is free for another adapter, the least recently used one
first. The runner fills a slot that gets another adapter behind the steps that still use the old
one, and ahead of the first step that uses the new one.

Rule of admission. Waiting sequences are visited in the order of their arrival (a *pass*). One whose
adapter has no slot is passed over, and so are others of that adapter. To keep a few busy adapters
from holding their slots for ever, a sequence that has been passed over by `patience` younger ones
with an adapter gets a slot *reserved*: of those that are in use, the one with the fewest running
sequences. No sequence that is visited later is admitted to a reserved slot, so its running
sequences end, and it becomes free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hetero_llm.core.lora import NO_ADAPTER, AdapterLoad, AdapterMemory, AdapterRef

PATIENCE = 32


class NoAdapterSlots:
    """In the place of `AdapterSlots` where adapters are not served."""

    num_slots = num_loads = 0

    def begin_pass(self) -> None:
        pass

    def end_pass(self, *, complete: bool) -> None:
        pass

    def acquire(self, adapter: AdapterRef | None) -> int | None:
        assert adapter is None, "requests with adapters are refused"
        return NO_ADAPTER

    def share(self, adapter: AdapterRef | None) -> None:
        pass

    def slot_of(self, adapter: AdapterRef | None) -> int:
        return NO_ADAPTER

    def release(self, adapter: AdapterRef | None) -> None:
        pass

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        return ()

    def check_integrity(self, adapters: Iterable[AdapterRef | None]) -> None:
        pass


class AdapterSlots:
    """Owns the slots; the scheduler alone calls it.

    Args:
        num_slots: adapters on the device.
        memory: host memory, from which slots are filled.
        patience: see the rule above.

    Attributes:
        num_slots: see Args.
        num_loads: slots filled since the start.
    """

    def __init__(self, num_slots: int, memory: AdapterMemory, *, patience: int = PATIENCE) -> None:
        self.num_slots = num_slots
        self.num_loads = 0
        self._memory = memory
        self._patience = patience
        self._free = list(range(num_slots - 1, -1, -1))  # slots that were never used
        self._resident: dict[str, tuple[AdapterRef, int]] = {}  # by content, last used last
        self._users: Counter[str] = Counter()  # running sequences of each content
        self._loads: list[AdapterLoad] = []
        self._passed: dict[str, int] = {}  # by content of those without a slot: times passed over
        self._reserved: dict[str, str] = {}  # by content that waits: content whose slot it gets
        self._blocked: dict[str, None] = {}  # of this pass, the oldest first
        self._closed: set[str] = set()  # contents that this pass admits no more
        self._full = False  # no slot can be unused before a sequence gives one back

    def begin_pass(self) -> None:
        """Starts a visit of the waiting sequences, the oldest first."""
        self._blocked.clear()
        self._closed.clear()
        self._full = False  # slots were reserved for sequences of the pass before

    def end_pass(self, *, complete: bool) -> None:
        """Ends the visit. `complete`: all waiting sequences were visited."""
        if complete:
            for key in [key for key in self._passed if key not in self._blocked]:
                self._forget(key)

    def acquire(self, adapter: AdapterRef | None) -> int | None:
        """The slot for a sequence that is visited and about to run; `release` gives it back.

        Returns:
            `NO_ADAPTER` for the base model; None: the sequence is passed over.

        Raises:
            AdapterError: the adapter cannot be loaded any more.
        """
        if adapter is None:
            return NO_ADAPTER
        key = adapter.content_hash
        if key in self._blocked or key in self._closed:
            self._pass_over(key)
            return None
        if key not in self._resident and not self._load(adapter):
            self._pass_over(key)
            return None
        self._forget(key)
        for older in self._blocked:
            self._passed[older] += 1
        self.share(adapter)
        return self.slot_of(adapter)

    def share(self, adapter: AdapterRef | None) -> None:
        """One sequence more runs with an adapter that has a slot; `release` ends that."""
        if adapter is not None:
            key = adapter.content_hash
            self._resident[key] = self._resident.pop(key)
            self._users[key] += 1

    def slot_of(self, adapter: AdapterRef | None) -> int:
        """The slot of an adapter that has one."""
        return NO_ADAPTER if adapter is None else self._resident[adapter.content_hash][1]

    def release(self, adapter: AdapterRef | None) -> None:
        """A sequence has stopped running. The adapter stays in its slot until another needs it."""
        if adapter is None:
            return
        key = adapter.content_hash
        self._users[key] -= 1
        assert self._users[key] >= 0, "a slot was released once too often"
        if not self._users[key]:
            del self._users[key]
            self._full = False

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """The slots that the next step has to fill first, in order."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def check_integrity(self, adapters: Iterable[AdapterRef | None]) -> None:
        """Asserts that the users of slots are the running sequences.

        Args:
            adapters: of every running sequence.
        """
        users = Counter(one.content_hash for one in adapters if one is not None)
        assert users == self._users, (users, self._users)
        assert set(users) <= set(self._resident)
        slots = [slot for _, slot in self._resident.values()]
        assert sorted([*slots, *self._free]) == list(range(self.num_slots))
        assert len(slots) == len(set(slots)), "two adapters have one slot"

    def _load(self, adapter: AdapterRef) -> bool:
        """Gives an adapter a slot, if one is unused that is not reserved for an older sequence."""
        key = adapter.content_hash
        evicted = None
        if not self._free:
            if self._full:
                return False
            taken = self._taken()
            unused = [one for one in self._resident if not self._users[one] and one not in taken]
            if not unused:
                self._full = True
                return False
            own = self._reserved.get(key)
            evicted = own if own in unused else unused[0]
        self._memory.hold(adapter)
        if evicted is None:
            slot = self._free.pop()
        else:
            before, slot = self._resident.pop(evicted)
            self._memory.release(before)
        self._resident[key] = (adapter, slot)
        self._loads.append(AdapterLoad(slot, adapter))
        self.num_loads += 1
        return True

    def _pass_over(self, key: str) -> None:
        """Notes that a sequence was passed over; reserves a slot for its adapter if it is due."""
        passed = self._passed.setdefault(key, 0)
        if key not in self._resident:
            if self._reserved.get(key) not in self._resident:
                self._reserved.pop(key, None)
            if passed >= self._patience and key not in self._reserved:
                taken = self._taken()
                candidates = [one for one in self._resident if one not in taken]
                if candidates:
                    self._reserved[key] = min(candidates, key=lambda one: self._users[one])
            if key in self._reserved:
                self._closed.add(self._reserved[key])
        self._blocked.setdefault(key)

    def _taken(self) -> set[str]:
        """Contents whose slots are reserved for sequences that this pass has visited."""
        return {slot_of for key, slot_of in self._reserved.items() if key in self._blocked}

    def _forget(self, key: str) -> None:
        self._passed.pop(key, None)
        self._reserved.pop(key, None)
