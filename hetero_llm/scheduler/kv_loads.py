"""Sequences whose prefix is being loaded from host memory, and when they may run.

Late join: a step with a loading sequence takes at least as long as what is left of its load, for
all other sequences of the step, too. So a sequence joins a step only once the rest of its load is
hidden by the computation of all layers but the first: that does not delay its own first token, and
no other sequence waits (the idea of balancing loads against computation is Strata's, arXiv
2508.18572). Time spent behind other loads is not hidden: loads run one at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetero_llm.core.null_objects import do_nothing, no_items
from hetero_llm.core.request import Sequence
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.core.step_times import StepTimes
from hetero_llm.kv_cache.block_manager import BlockManager
from hetero_llm.kv_cache.block_transfers import BlockTransfers

_MAX_AHEAD = 1e-3
"""Seconds of other loads that a joining sequence may wait behind: as long as a launch takes."""
_ALONE, _LAUNCH = 1.5, 2e-3
"""With no other sequence running, one joins a little earlier: the step may take `_ALONE` times as
long as predicted, and a launch beside a busy thread takes `_LAUNCH` seconds."""
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3


@dataclass(slots=True)
class Loading:
    """A sequence with a request slot and a block table that does not run yet.

    Attributes:
        cached: its first tokens whose KV is on the device or being loaded.
        under_way: some of them are being loaded, or will be (`deferred`).
        deferred: a load is still to be started.
        in_part: the beginning of a long prefix is being loaded, and the rest is deferred.
        pending: the loads it waited for when `candidates` was called.
    """

    sequence: Sequence
    cached: int
    under_way: bool
    deferred: bool = False
    in_part: bool = False
    pending: frozenset[int] = frozenset()


# large: the life of a load from its start to the counters, one method each
class KVLoadQueue:
    """The loading sequences in the order of admission, and the loads that the next step waits for.

    Args:
        blocks: the KV pool.
        transfers: between the pool and host memory.
        num_layers: of the model: all but one hide a load.
        times: predicts step durations; `observe` feeds it.
        chunked: a prompt may be computed in pieces.

    Attributes:
        wait_whole: sequences join only when their load has ended; for benches.
        exposed_seconds: by how much loads prolonged steps, and how long nothing could run because
            of them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfers: BlockTransfers,
        num_layers: int,
        times: StepTimes,
        *,
        chunked: bool = True,
    ) -> None:
        self.wait_whole = False
        self.exposed_seconds = self._hidden_seconds = 0.0
        self._queried = self._hit = 0  # tokens
        self._blocks = blocks
        self._transfers = transfers
        self._tier = transfers.tier
        self._times = times
        self._chunked = chunked
        self._hidden_share = (num_layers - 1) / num_layers
        self._loading: dict[Sequence, Loading] = {}
        self._joined: set[int] = set()  # loads that the step being made waits for
        self._last_tokens = self._in_flight = 0  # size of the last step made; unfinished steps
        self._no_room = False  # a sequence was ready to join, but there were no blocks for it
        # Results of `_is_time` by loads, tokens, context and `alone`: equal for all of a burst.
        self._judged: dict[tuple[frozenset[int], int, int, bool], bool] = {}

    def __len__(self) -> int:
        return len(self._loading)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loading

    def all(self) -> list[Loading]:
        return list(self._loading.values())

    # -- starting loads ---------------------------------------------------------------------

    def begin(self, sequence: Sequence, slot: int, cached: int, *, alone: bool) -> Loading | None:
        """Starts to load what host memory holds of a sequence whose table was just started, or
        defers that, so that running sequences' step need not wait for the look-up.

        Args:
            slot: request slot, which names the table.
            cached: leading tokens that are on the device, or being loaded for another sequence.
            alone: no sequence runs.

        Returns:
            The sequence's entry, kept in the queue if `under_way`; None if the blocks to load to
            are not free now: to be tried again later.
        """
        loading = Loading(sequence, cached, under_way=True)
        if not alone and not sequence.skips_host:
            loading.deferred = self._blocks.may_load(slot, sequence.token_ids)
        if not loading.deferred:
            has_room = sequence.skips_host or self._load(loading, slot)
            if not has_room and (self._loading or not alone):
                return None  # else no sequence will make room: the prefix has to be computed
            loading.under_way = bool(self._transfers.pending(slot))
        if loading.under_way:
            sequence.request_slot = slot
            self._loading[sequence] = loading
        return loading

    def begin_deferred(self, give_up: Callable[[Sequence], None]) -> int:
        """Starts the loads that `begin` deferred and returns their number. Called while the device
        works. Of a long prefix only the beginning is looked up now and the rest at the next call,
        while the beginning is copied: beside a short step there is no time for all of it.

        Args:
            give_up: called with a sequence for which there is no room now, to let it wait again.
        """
        deferred = [loading for loading in self._loading.values() if loading.deferred]
        for loading in deferred:
            sequence = loading.sequence
            whole, loading.deferred = loading.in_part, False
            if not self._load(loading, sequence.request_slot, whole=whole):
                give_up(sequence)
            elif not whole and self._blocks.may_load(sequence.request_slot, sequence.token_ids):
                loading.deferred = loading.in_part = True
        return len(deferred)

    def _load(self, loading: Loading, slot: int, *, whole: bool = True) -> bool:
        """Starts a load if there is room for it; whether there is."""
        token_ids = loading.sequence.token_ids
        reached = self._blocks.load(slot, token_ids, self._times.predict, whole=whole)
        if reached is None:
            return False
        if not loading.in_part:
            self._queried += len(token_ids) - loading.cached
        self._hit += reached - loading.cached
        loading.cached = reached
        return True

    # -- joining a step ---------------------------------------------------------------------

    def candidates(self) -> list[tuple[Loading, int]]:
        """Sequences that may join the next step, each with the number of tokens to compute for it
        and for all others that wait for no other loads: sequences with one prefix join together."""
        self._judged.clear()
        ready = [loading for loading in self._loading.values() if not loading.deferred]
        num_tokens: Counter[frozenset[int]] = Counter()
        for loading in ready:
            loading.pending = frozenset(self._transfers.pending(loading.sequence.request_slot))
            num_tokens[loading.pending] += len(loading.sequence.token_ids) - loading.cached
        together = {
            pending: sum(count for other, count in num_tokens.items() if other <= pending)
            for pending in num_tokens
        }
        return [(loading, together[loading.pending]) for loading in ready]

    def join(self, loading: Loading, num_tokens: int, budget: int, *, alone: bool) -> int:
        """Lets one of `candidates` join the step being made, if it is time: it leaves the queue,
        with blocks for its tokens of the step.

        Args:
            num_tokens: size of the step if the sequence and those like it join.
            budget: maximum number of tokens for this sequence.
            alone: no other sequence runs.

        Returns:
            Number of tokens to compute for the sequence; 0 if it does not join.
        """
        sequence, cached = loading.sequence, loading.cached
        missing = len(sequence.token_ids) - cached
        count = min(missing, budget)
        case = loading.pending, num_tokens, cached, alone
        if case not in self._judged:
            self._judged[case] = self._is_time(*case)
        if not self._judged[case]:
            return 0
        if count < missing and not self._chunked:
            return 0
        if not self._blocks.allocate(sequence.request_slot, cached, cached + count):
            self._no_room = True
            return 0
        self._joined |= loading.pending
        self.end(sequence)
        return count

    def _is_time(self, pending: frozenset[int], num_tokens: int, context: int, alone: bool) -> bool:
        left = self._tier.seconds_left(pending) if pending else 0.0
        if left <= 0.0 or self.wait_whole:
            return left <= 0.0
        until_start = self._times.predict(self._last_tokens) if self._in_flight else 0.0
        ahead = self._tier.seconds_ahead(pending)
        hidden = self._hidden(num_tokens, context)
        if alone:
            hidden = hidden * _ALONE + _LAUNCH
        return ahead <= until_start + _MAX_AHEAD and left <= until_start + hidden

    def _hidden(self, num_tokens: int, context: int) -> float:
        """Seconds of a load that a step hides."""
        return self._times.predict(num_tokens, context) * self._hidden_share

    def take_starved(self) -> Sequence | None:
        """The newest loading sequence, to give its blocks up, if a ready one could not get blocks
        since the previous call and all blocks belong to loading sequences."""
        no_room, self._no_room = self._no_room, False
        if not no_room or len(self._loading) < 2:
            return None
        return next(reversed(self._loading))

    @property
    def any_joined(self) -> bool:
        """Whether the step being made has to wait for loads."""
        return bool(self._joined)

    def take_joined(self, counts: Iterable[int]) -> tuple[int, ...]:
        """Returns and clears the transfer ids that the step being made waits for.

        Args:
            counts: number of tokens of each sequence in that step.
        """
        self._last_tokens = sum(counts)
        self._in_flight += 1
        joined = tuple(sorted(self._joined))
        self._joined.clear()
        return joined

    # -- ending -----------------------------------------------------------------------------

    def admit(self, sequence: Sequence, slot: int) -> None:
        """Called when a sequence begins to run, whether or not anything was loaded for it."""
        self._blocks.admit(slot, sequence.kv_counted)
        sequence.skips_host = False

    def keep_counts(self, sequence: Sequence) -> None:
        """Called before a sequence loses its block table: its blocks count as hits or misses once,
        however often it is preempted."""
        sequence.kv_counted = self._blocks.counted(sequence.request_slot)

    def end(self, sequence: Sequence) -> None:
        """Removes a sequence that runs, waits again or has ended."""
        del self._loading[sequence]

    def collect(
        self, running: Iterable[Sequence], finished: tuple[int, ...], *, timed_out: bool
    ) -> list[Sequence]:
        """Collects ended transfers and gives their blocks back.

        Args:
            finished: loads that a finished step waited for.
            timed_out: the step gave up waiting for one of them.

        Returns:
            Sequences, running or loading, with blocks that were not filled. Their prefix is not
            loaded a second time.
        """
        transfers = self._transfers.poll(() if timed_out else finished)
        self._blocks.take_back(transfers.blocks)
        failed = transfers.failed
        if timed_out:
            failed |= self._transfers.tables_of(finished)
        if not failed:
            return []
        found = [s for s in (*running, *self._loading) if s.request_slot in failed]
        for sequence in found:
            sequence.skips_host = True
        return found

    def metrics(self) -> dict[str, float]:
        """Counters of host memory since start, by name. The time in which any load was under way
        is either exposed or hidden; simultaneous loads count once."""
        counters = self._tier.metrics()
        seconds = counters.pop("kv_offload_loading_seconds_total", 0.0)
        hidden = self._hidden_seconds = max(self._hidden_seconds, seconds - self.exposed_seconds)
        hits = self._blocks.hits
        return {
            **counters,
            "kv_offload_exposed_seconds_total": self.exposed_seconds,
            "kv_offload_hidden_seconds_total": hidden,
            "external_prefix_cache_queries": self._queried,
            "external_prefix_cache_hits": self._hit,
            "prefix_blocks_total": hits.total,
            "prefix_blocks_gpu": hits.gpu,
            "prefix_blocks_cpu": hits.cpu,
        }

    def shut_down(self) -> None:
        """Ends all copies. Nothing may be scheduled afterwards."""
        self._tier.shut_down()

    # -- times ------------------------------------------------------------------------------

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        """Notes the duration of a finished step; of one that waited for loads, by how much it
        exceeded the prediction."""
        self._in_flight -= 1
        counts = step.num_scheduled_tokens
        num_tokens = int(counts.sum())
        context = float((step.num_computed_tokens * counts).sum()) / num_tokens
        if not step.kv_loads:
            self._times.observe(num_tokens, seconds, context)
            return
        expected = self._times.predict(num_tokens, context)
        if expected:
            self.exposed_seconds += max(0.0, seconds - expected)

    def nap(self) -> None:
        """Sleeps until the first loading sequence may join a step, for at most a millisecond."""
        begun = time.monotonic()
        spare = min(self._spare(loading) for loading in self._loading.values())
        self._tier.wait(min(max(spare, _SHORTEST_NAP), _LONGEST_NAP))
        self.exposed_seconds += time.monotonic() - begun

    def _spare(self, loading: Loading) -> float:
        """Seconds until a sequence may join with no other one running."""
        sequence, cached = loading.sequence, loading.cached
        pending = self._transfers.pending(sequence.request_slot)
        if not pending:
            return 0.0
        left = self._tier.seconds_left(pending)
        if self.wait_whole:
            return left
        hidden = self._hidden(len(sequence.token_ids) - cached, cached) * _ALONE + _LAUNCH
        return max(left - hidden, self._tier.seconds_ahead(pending) - _MAX_AHEAD)


class NoKVLoads:
    """Stands in for `KVLoadQueue` where there is no host memory: always empty, loads nothing."""

    any_joined = False
    all = candidates = staticmethod(no_items)
    take_starved = admit = keep_counts = end = observe = nap = shut_down = staticmethod(do_nothing)

    def __len__(self) -> int:
        return 0

    def __contains__(self, sequence: Sequence) -> bool:
        return False

    def begin(self, sequence: Sequence, slot: int, cached: int, *, alone: bool) -> Loading:
        return Loading(sequence, cached, under_way=False)

    def begin_deferred(self, give_up: Callable[[Sequence], None]) -> int:
        return 0

    def join(self, loading: Loading, num_tokens: int, budget: int, *, alone: bool) -> int:
        return 0

    def take_joined(self, counts: Iterable[int]) -> tuple[int, ...]:
        return ()

    def collect(
        self, running: Iterable[Sequence], finished: tuple[int, ...], *, timed_out: bool
    ) -> list[Sequence]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}
