"""Where host memory holds experts, if it has no room for those that the GPU's bank holds.

Host memory is a row of places of one size. The GPU and the CPU exchange experts: one that leaves
the bank is copied to a free place, and one that has entered it frees its own. A place goes round:

    free -> written   `begin`: a copy from the bank writes it; no address leads there
         -> held      `publish`: the copy has ended; CPU threads and streams read it
         -> left      `leave`: steps launched from now on find the expert in the bank; older ones
                      may still read it here
         -> free      `release`: all of those have finished

So each expert is whole on one side at every moment, and on both while it changes sides. The thread
that launches steps calls all methods. Other threads read `table` and the addresses, but only of
experts to which a launched step leads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NOT_HELD = -1
"""In the table of places: the expert is in the bank alone."""

FREE, WRITTEN, HELD, LEFT = range(4)
"""States of a place."""


class HostPlaces:
    """See the module.

    Args:
        num_layers, num_experts: of the layers that have experts.
        num_places: experts that host memory has room for.

    Attributes:
        table: [num_layers, num_experts] int32 place of each expert, or `NOT_HELD`; changed in place
            by `fill`, `publish` and `release`.
    """

    def __init__(self, num_layers: int, num_experts: int, num_places: int) -> None:
        self.table = np.full((num_layers, num_experts), NOT_HELD, np.int32)
        self._states = np.full(num_places, FREE, np.int8)
        self._owners: list[tuple[int, int] | None] = [None] * num_places
        self._free = list(range(num_places))[::-1]
        # Addresses to keep up to date, with the firsts and strides of their matrices.
        self._led: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    @property
    def num_places(self) -> int:
        """Of all states."""
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Copies from the bank that may begin now."""
        return len(self._free)

    def fill(self, bank: np.ndarray) -> None:
        """The first content, before any step: all experts that the bank does not hold, in order.

        Args:
            bank: [num_layers, num_experts] int32, negative where the bank has no slot.
        """
        outside = np.argwhere(bank < 0)
        assert len(self._free) == self.num_places >= len(outside)
        for layer, expert in outside.tolist():
            place = self._free.pop()
            self._states[place] = HELD
            self._owners[place] = (layer, expert)
            self.table[layer, expert] = place

    def lead(self, addresses: np.ndarray, firsts: Sequence[int], strides: Sequence[int]) -> None:
        """Keeps addresses up to date: those of experts that are not held are 0.

        Args:
            addresses: [num_layers, num_experts, M] int64 view, of M matrices of each expert;
                written here and whenever places change.
            firsts, strides: [M] bytes: where place 0 is, and from one place to the next.
        """
        assert addresses.dtype == np.int64 and addresses.shape[:2] == self.table.shape
        self._led.append((addresses, np.array(firsts, np.int64), np.array(strides, np.int64)))
        for layer, expert in np.ndindex(*self.table.shape):
            self._lead(layer, expert)

    def begin(self, layer: int, expert: int) -> int:
        """A free place, to which an expert of the bank is going to be copied."""
        assert self.table[layer, expert] == NOT_HELD and self._free
        place = self._free.pop()
        assert self._states[place] == FREE
        self._states[place] = WRITTEN
        self._owners[place] = (layer, expert)
        return place

    def publish(self, place: int) -> None:
        """The copy to a place has ended: from now on its expert is on the host, too."""
        self._turn(place, WRITTEN, HELD)
        owner = self._owners[place]
        assert owner is not None
        self.table[owner] = place
        self._lead(*owner)

    def leave(self, layer: int, expert: int) -> int:
        """Steps launched from now on find an expert in the bank. Returns its place, to be given to
        `release` when those launched before have finished."""
        place = int(self.table[layer, expert])
        assert place != NOT_HELD
        self._turn(place, HELD, LEFT)
        return place

    def release(self, place: int) -> None:
        """No step under way reads a place that was left."""
        self._turn(place, LEFT, FREE)
        owner = self._owners[place]
        assert owner is not None and self.table[owner] == place
        self.table[owner] = NOT_HELD
        self._owners[place] = None
        self._lead(*owner)
        self._free.append(place)

    def check_integrity(self) -> None:
        """Asserts that places, owners and table agree, and that no place is used twice."""
        held = np.argwhere(self.table != NOT_HELD).tolist()
        used = np.flatnonzero(np.isin(self._states, (HELD, LEFT))).tolist()
        assert sorted(int(self.table[tuple(at)]) for at in held) == used
        for at in held:
            assert self._owners[int(self.table[tuple(at)])] == tuple(at)
        assert sorted(self._free) == np.flatnonzero(self._states == FREE).tolist()
        assert all(self._owners[place] is None for place in self._free)
        for addresses, _, _ in self._led:
            assert ((addresses != 0).all(axis=2) == (self.table != NOT_HELD)).all()

    def _turn(self, place: int, old: int, new: int) -> None:
        assert self._states[place] == old, (place, int(self._states[place]), old)
        self._states[place] = new

    def _lead(self, layer: int, expert: int) -> None:
        place = int(self.table[layer, expert])
        for addresses, firsts, strides in self._led:
            addresses[layer, expert] = 0 if place == NOT_HELD else firsts + place * strides
