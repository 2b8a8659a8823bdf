"""Copies of KV that all ranks of a model make alike: each rank has its part of every block.

Rank 0 decides. Its `RanksCopier` sends each load, store and abort to the other ranks, in the order
of their steps, and begins its own part; `RankCopies` begins that of another rank. Block numbers are
the same everywhere, on the device and in host memory. A transfer has ended when all ranks have
reported so, and has failed if it has failed on one of them: what is behind a block number is then
whole on all ranks, or not used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from hetero_llm.bridge.kv_offload.copier import NUM_FLAGS, NativeCopier
from hetero_llm.bridge.kv_offload.copier_protocol import Copier, Done, LayerReadyFlag
from hetero_llm.bridge.kv_offload.transfer_reports import STEP, ReportBoard
from hetero_llm.core.errors import EngineDeadError
from hetero_llm.core.null_objects import do_nothing
from hetero_llm.core.transfer_order import TransferOrder

_NAP_S = 0.001
_KEPT_STEPS = 16  # older ones have ended


class OtherRanks(Protocol):
    """The other ranks, each of which begins its part of every transfer of rank 0. Every method
    raises HeteroLLMError if one of them has failed."""

    def load_blocks(self, order: TransferOrder) -> None: ...

    def store_blocks(self, order: TransferOrder) -> None: ...

    def abort_load(self, transfer_id: int) -> None: ...

    def check(self) -> None: ...


@dataclass(slots=True)
class _Open:
    """A transfer under way.

    Attributes:
        missing: ranks that have not reported its end.
        ok: no rank has reported a failure.
        seconds: of the slowest rank so far.
    """

    missing: int
    is_load: bool
    ok: bool = True
    seconds: float = 0.0


class RanksCopier:
    """`Copier` of all ranks, in rank 0. Rates and times left are those of rank 0.

    Args:
        own: of rank 0; reports to the board like the others.
        ranks: the others.
        reports: of all ranks.
        most_loads: layer-ready flags of each rank.
        patience_s: seconds that `gave_up` waits for the other ranks.
        bytes_of_all: bytes of KV on all ranks for each byte on rank 0, whose layers or heads may be
            others, and more.
    """

    def __init__(
        self,
        own: Copier,
        ranks: OtherRanks,
        reports: ReportBoard,
        *,
        most_loads: int = NUM_FLAGS,
        patience_s: float = 60.0,
        bytes_of_all: float,
    ) -> None:
        self._bytes_of_all = bytes_of_all
        self.own = own
        self._ranks = ranks
        self._reports = reports
        self._most_loads = most_loads
        self._patience_s = patience_s
        self._open: dict[int, _Open] = {}
        self._num_loads = 0
        self._ended: list[Done] = []
        self._steps: list[list[bool]] = [[] for _ in range(reports.ranks)]
        self._closed = False

    @property
    def num_host_blocks(self) -> int:
        if self._closed:
            return 0
        return min(self.own.num_host_blocks, self._reports.ready_rows())

    def can_load(self) -> bool:
        # A rank frees the flag of a load with its report, at the latest when the next load comes.
        return self._num_loads < self._most_loads and self.own.can_load()

    def load(self, order: TransferOrder) -> None:
        self._open[order.transfer_id] = _Open(self._reports.ranks, is_load=True)
        self._num_loads += 1
        self._ranks.load_blocks(order)
        self.own.load(order)

    def store(self, order: TransferOrder) -> None:
        self._open[order.transfer_id] = _Open(self._reports.ranks, is_load=False)
        self._ranks.store_blocks(order)
        self.own.store(order)

    def abort(self, transfer_id: int) -> None:
        self._ranks.abort_load(transfer_id)
        self.own.abort(transfer_id)

    def layer_ready_flag(self, transfer_id: int) -> LayerReadyFlag | None:
        """That of rank 0; each rank waits for its own."""
        return self.own.layer_ready_flag(transfer_id)

    def step_launched(self, number: int) -> None:
        self.own.step_launched(number)

    def seconds_left(self, transfer_ids: Iterable[int]) -> float:
        return self.own.seconds_left(transfer_ids)

    def load_rate(self) -> float:
        return self.own.load_rate()

    def poll(self) -> list[Done]:
        """See `Copier.poll`.

        Raises:
            HeteroLLMError: another rank has failed.
        """
        if not self._closed:
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, seconds: float) -> None:
        """See `Copier.wait`.

        Raises:
            HeteroLLMError: another rank has failed.
        """
        if not self._closed:
            self._ranks.check()
            self._reports.wait(seconds)

    def gave_up(self) -> bool:
        """Waits until every rank has finished the oldest step with loads for which this was not
        called. Whether one of them has given a load up: what the step computed is void.

        Raises:
            HeteroLLMError: another rank has failed, or does not answer.
        """
        deadline = time.monotonic() + self._patience_s
        self._collect()
        while not all(self._steps[1:]):
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"a rank did not finish a step within {self._patience_s:.0f} s of rank 0"
                )
            self.wait(_NAP_S)
            self._collect()
        return not all([steps.pop(0) for steps in self._steps[1:]])

    def metrics(self) -> dict[str, float]:
        """See `Copier.metrics`. Bytes are those of all ranks; times and rates those of rank 0."""
        values = self.own.metrics()
        for name in ("kv_offload_bytes_h2d", "kv_offload_bytes_d2h"):
            if name in values:
                values[name] *= self._bytes_of_all
        if not self._closed and self._reports.is_broken():
            values["kv_offload_broken"] = 1.0
        return values

    def close(self) -> None:
        """See `Copier.close`; the other ranks close theirs when the engine ends."""
        if self._closed:
            return
        self.own.close()
        self._collect()
        self._closed = True
        self._ended += [Done(transfer_id, False, 0.0) for transfer_id in self._open]
        self._open.clear()

    def _collect(self) -> None:
        for rank in range(self._reports.ranks):
            for done in self._reports.take(rank):
                if done.transfer_id == STEP:
                    self._steps[rank].append(done.ok)
                else:
                    self._note(done)
        self.own.poll()  # frees the flags of loads that have ended here

    def _note(self, done: Done) -> None:
        transfer = self._open[done.transfer_id]
        transfer.missing -= 1
        transfer.ok &= done.ok
        transfer.seconds = max(transfer.seconds, done.seconds)
        if not transfer.missing:
            del self._open[done.transfer_id]
            self._num_loads -= transfer.is_load
            self._ended.append(Done(done.transfer_id, transfer.ok, transfer.seconds))


class RankCopies:
    """Another rank's part of each transfer. Called in the order in which rank 0 makes the calls.

    Args:
        copier: of this rank.
        grow: called with the number of host blocks that can be used, whenever it has changed.
    """

    def __init__(self, copier: NativeCopier, grow: Callable[[int], None]) -> None:
        self._copier = copier
        self._grow = grow
        self._num_rows = -1
        self._last_step = 0
        # The copier counts moves of KV as steps, too.
        self._last_event = self._last_moves = 0
        self._events: deque[int] = deque([0], _KEPT_STEPS)  # of the last steps
        self.observe()

    def load(self, order: TransferOrder) -> None:
        """Begins this rank's part of a load."""
        self._copier.load(self._prepared(order))

    def store(self, order: TransferOrder) -> None:
        """Begins this rank's part of a store."""
        self._copier.store(self._prepared(order))

    def _prepared(self, order: TransferOrder) -> TransferOrder:
        """The order as the copier counts: it begins behind all moves before it, too."""
        assert order.after_step <= self._last_step + 1, "the ranks count steps differently"
        self._copier.poll()  # frees the flags of loads that have ended
        ago = self._last_step - order.after_step
        event = self._last_event + 1 if ago < 0 else self._events[max(-1 - ago, -len(self._events))]
        return replace(order, after_step=max(event, self._last_moves))

    def abort(self, transfer_id: int) -> None:
        """See `Copier.abort`; the load may have ended here."""
        self._copier.abort(transfer_id)

    def step_launched(self) -> None:
        """All device work of one more step is on the current stream."""
        self._last_step += 1
        self._last_event += 1
        self._events.append(self._last_event)
        self._copier.step_launched(self._last_event)

    def kv_moved(self) -> None:
        """Moves of KV are on the current stream; transfers ordered later begin behind them."""
        self._last_event += 1
        self._last_moves = self._last_event
        self._copier.step_launched(self._last_event)

    def step_finished(self, *, timed_out: bool) -> None:
        """Called after a step that waited for loads; `timed_out`: it has given one up."""
        self._copier.report_step(not timed_out)

    def observe(self) -> None:
        """Called again and again: sees how far host memory is page-locked."""
        rows = self._copier.num_host_blocks
        if rows != self._num_rows:
            self._num_rows = rows
            self._grow(rows)

    def close(self) -> None:
        """Ends all copies."""
        self._copier.close()


def _refuse(*_: object) -> None:
    raise AssertionError("nothing is offloaded")


class NoRankCopies:
    """In the place of `RankCopies` where nothing is offloaded."""

    step_launched = kv_moved = observe = close = staticmethod(do_nothing)
    load = store = abort = staticmethod(_refuse)

    def step_finished(self, *, timed_out: bool) -> None:
        _refuse()
