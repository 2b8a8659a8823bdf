"""Sequences whose prefix is on its way from host memory, and when they may run.

Late join: a step with a loading sequence takes at least as long as what is left of its load, for
every other sequence of the step too. So it joins only once the rest of the load hides under the
computation of all layers but the first: its own first token comes no later for that, and nobody
else waits (the idea of balancing loads against computation is Strata's, arXiv 2508.18572). What
goes before a load on the link hides under nothing: layers come one load after the other.

Part of the scheduler, which alone calls it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetero_llm.core.request import Sequence
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.kv_cache.block_manager import BlockManager

_SOON = 1e-3
"""Seconds to wait for others on the link: to be launched takes a step as long."""
_ALONE, _LAUNCH = 1.5, 2e-3
"""With nobody else to wait for it a sequence joins a little earlier: the prediction may be low, and
beside a busy thread a launch takes so many seconds."""
_NEWEST = 0.25
"""Weight of the newest step in the mean of those with about as many rows."""
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3


class StepTimes:
    """Predicts how long steps take from those seen, by their rows (powers of two). A row's time
    grows with the tokens before it by a known share.

    Args:
        per_context: relative cost of one token of context, from the model's sizes: attention's
            share of the arithmetic.
    """

    def __init__(self, per_context: float) -> None:
        self._per_context = per_context
        self._seen: dict[int, tuple[float, float]] = {}  # bucket: mean rows, mean seconds

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        rows = int(step.num_scheduled_tokens.sum())
        context = float((step.num_computed_tokens * step.num_scheduled_tokens).sum()) / rows
        self._note(rows, seconds / (1.0 + self._per_context * context))

    def _note(self, rows: int, seconds: float) -> None:
        bucket = rows.bit_length()
        old = self._seen.get(bucket)
        if old is not None:
            rows_mean = old[0] + _NEWEST * (rows - old[0])
            self._seen[bucket] = rows_mean, old[1] + _NEWEST * (seconds - old[1])
        else:
            self._seen[bucket] = float(rows), seconds

    def predict(self, context: int, rows: int) -> float:
        """Seconds of a step with `rows` rows behind `context` tokens; 0.0 if nothing is known."""
        if not self._seen or rows <= 0:
            return 0.0
        known = sorted(self._seen.values())
        below = [pair for pair in known if pair[0] <= rows]
        above = [pair for pair in known if pair[0] > rows]
        if not below:
            base = above[0][1] * rows / above[0][0]  # at least that
        elif not above:
            base = below[-1][1] * max(1.0, rows / below[-1][0])
        else:
            (low, first), (high, last) = below[-1], above[0]
            base = first + (last - first) * (rows - low) / (high - low)
        return base * (1.0 + self._per_context * context)


@dataclass(slots=True)
class Loading:
    """A sequence with a slot and a table, but not running: `cached` tokens of it are there or
    loading. `under_way`: some are loading, or will be (`deferred`); `in_part`: the beginning of a
    long prefix is, and the rest is put off."""

    sequence: Sequence
    cached: int
    under_way: bool
    deferred: bool = False
    in_part: bool = False


class KVLoadQueue:
    """Who is loading, in the order of admission, and what the next step waits for.

    Args:
        blocks: the KV pool, with host memory behind it.
        num_layers: of the model: all but one hide a load.
        times: of steps.
        chunked: a prompt may be computed in pieces.

    Attributes:
        wait_whole: join only when everything has landed; for benches.
        exposed_seconds: how much longer steps took for prefixes that came from host memory, and how
            long nothing could run for them.
    """

    def __init__(
        self, blocks: BlockManager, num_layers: int, times: StepTimes, *, chunked: bool = True
    ) -> None:
        self.wait_whole = False
        self.exposed_seconds = self._hidden_seconds = 0.0
        self._queried = self._hit = 0  # tokens
        self._blocks = blocks
        self._times = times
        self._chunked = chunked
        self._hidden_share = (num_layers - 1) / num_layers
        self._loading: dict[Sequence, Loading] = {}
        self._joined: set[int] = set()
        self._last_rows = self._flying = 0  # of the step made last; steps that are not over
        self._no_room = False  # for the rows of one whose prefix has come
        # Whether it is time, by tickets, rows, context and `alone`: the same for all of a burst.
        self._judged: dict[tuple[frozenset[int], int, int, bool], bool] = {}

    def __len__(self) -> int:
        return len(self._loading)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loading

    def all(self) -> list[Loading]:
        return list(self._loading.values())

    # -- beginning --------------------------------------------------------------------------

    def begin(self, sequence: Sequence, slot: int, cached: int, *, alone: bool) -> Loading | None:
        """Starts to load what host memory has of a sequence whose table was opened, or puts it off
        for the sake of others, whose step must not wait until a long prefix is looked up.

        Args:
            cached: tokens that the device has, or is getting for somebody else.
            alone: nobody runs who may make room, or has a step to be launched.

        Returns:
            None if there is no room now for what would be loaded: to be tried again later. What it
            returns is kept here only if something is under way.
        """
        loading = Loading(sequence, cached, under_way=True)
        if not alone and not sequence.skips_host:
            loading.deferred = self._blocks.may_load(slot, sequence.token_ids)
        if not loading.deferred:
            has_room = sequence.skips_host or self._load(loading, slot)
            if not has_room and (self._loading or not alone):
                return None  # else nobody will make room: it has to be computed
            loading.under_way = bool(self._blocks.pending(slot))
        if loading.under_way:
            sequence.request_slot = slot
            self._loading[sequence] = loading
        return loading

    def begin_deferred(self, give_up: Callable[[Sequence], None]) -> int:
        """Starts the loads that `begin` has put off: to be called while the device works. Returns
        how many there were. Of long prefixes the rest is looked up at the next call, while the
        beginning is copied: beside a short step there is no time for all.

        Args:
            give_up: lets a sequence wait again, for which there is no room now.
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
        """Whether there is room for what would be loaded; then it is being loaded."""
        token_ids = loading.sequence.token_ids
        reached = self._blocks.load(slot, token_ids, self._times.predict, whole=whole)
        if reached is None:
            return False
        if not loading.in_part:
            self._queried += len(token_ids) - loading.cached
        self._hit += reached - loading.cached
        loading.cached = reached
        return True

    # -- joining ----------------------------------------------------------------------------

    def candidates(self) -> list[tuple[Loading, int]]:
        """Who may join the next step, and how many rows it would have for them and for all who
        wait for nothing more than they do: those with one prefix join together."""
        self._judged.clear()
        ready = [loading for loading in self._loading.values() if not loading.deferred]
        waiting = [frozenset(self._blocks.pending(each.sequence.request_slot)) for each in ready]
        rows: Counter[frozenset[int]] = Counter()
        for loading, tickets in zip(ready, waiting, strict=True):
            rows[tickets] += len(loading.sequence.token_ids) - loading.cached
        together = {
            tickets: sum(count for other, count in rows.items() if other <= tickets)
            for tickets in rows
        }
        return [
            (loading, together[tickets]) for loading, tickets in zip(ready, waiting, strict=True)
        ]

    def join(self, loading: Loading, rows: int, budget: int, *, alone: bool) -> int:
        """Rows that a sequence has in the step that is being made, if its time has come: then it
        is loading no more, and has blocks for them; 0 if not.

        Args:
            rows: of the step, should it join with those who can. budget: most rows for this one.
            alone: nobody else runs.
        """
        sequence, cached = loading.sequence, loading.cached
        missing = len(sequence.token_ids) - cached
        count = min(missing, budget)
        tickets = frozenset(self._blocks.pending(sequence.request_slot))
        case = tickets, rows, cached, alone
        if case not in self._judged:
            self._judged[case] = self._is_time(sequence.request_slot, rows, cached, alone=alone)
        if not self._judged[case]:
            return 0
        if count < missing and not self._chunked:
            return 0
        if not self._blocks.allocate(sequence.request_slot, cached, cached + count):
            self._no_room = True
            return 0
        self._joined |= tickets
        self.end(sequence)
        return count

    def _is_time(self, slot: int, rows: int, context: int, *, alone: bool) -> bool:
        left = self._blocks.seconds_left(slot)
        if left <= 0.0 or self.wait_whole:
            return left <= 0.0
        lead = self._times.predict(0, self._last_rows) if self._flying else 0.0
        ahead = self._blocks.seconds_ahead(slot)
        hidden = self._hidden(rows, context)
        if alone:
            hidden = hidden * _ALONE + _LAUNCH
        return ahead <= lead + _SOON and left <= lead + hidden

    def _hidden(self, rows: int, context: int) -> float:
        return self._times.predict(context, rows) * self._hidden_share

    def take_starved(self) -> Sequence | None:
        """Who is to give its blocks up, where all of them belong to loading sequences and one
        that is ready cannot get those it needs."""
        no_room, self._no_room = self._no_room, False
        if not no_room or len(self._loading) < 2:
            return None
        return next(reversed(self._loading))

    @property
    def any_joined(self) -> bool:
        """Whether the step being made has to wait for loads."""
        return bool(self._joined)

    def take_joined(self, rows: int) -> tuple[int, ...]:
        """Those loads; forgotten here afterwards. The step has so many rows and is made now."""
        self._last_rows = rows
        self._flying += 1
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
        """A sequence runs, waits again or is over."""
        del self._loading[sequence]

    def collect(
        self, running: Iterable[Sequence], finished: tuple[int, ...], *, timed_out: bool
    ) -> list[Sequence]:
        """Takes note of copies that ended.

        Args:
            finished: loads that a finished step waited for; `timed_out`: it went on without them.

        Returns:
            Sequences, running or loading, whose blocks were not filled. Their next prefix is not
            loaded from host memory: once is enough.
        """
        lost = set(self._blocks.poll(() if timed_out else finished))
        if timed_out:
            lost |= self._blocks.readers(finished)
        if not lost:
            return []
        found = [s for s in (*running, *self._loading) if s.request_slot in lost]
        for sequence in found:
            sequence.skips_host = True
        return found

    def metrics(self) -> dict[str, float]:
        """Counters of host memory since start, flat. Of the time in which any load was under way,
        what is not exposed was hidden: loads at the same time count once."""
        counters = self._blocks.tier_metrics()
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
        """Ends all copies. Nothing is to be scheduled afterwards."""
        self._blocks.shut_down()

    # -- times ------------------------------------------------------------------------------

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        """Learns from a step that is over; of one with loads, how much longer than expected it
        took."""
        self._flying -= 1
        if not step.kv_loads:
            self._times.observe(step, seconds)
            return
        rows = int(step.num_scheduled_tokens.sum())
        context = int((step.num_computed_tokens * step.num_scheduled_tokens).sum() // rows)
        expected = self._times.predict(context, rows)
        if expected:
            self.exposed_seconds += max(0.0, seconds - expected)

    def nap(self) -> None:
        """Sleeps until the first of the loading sequences may join, at most a millisecond."""
        begun = time.monotonic()
        spare = min(self._spare(loading) for loading in self._loading.values())
        self._blocks.wait(min(max(spare, _SHORTEST_NAP), _LONGEST_NAP))
        self.exposed_seconds += time.monotonic() - begun

    def _spare(self, loading: Loading) -> float:
        """Seconds until a sequence may join with nobody else beside it."""
        sequence, cached = loading.sequence, loading.cached
        left = self._blocks.seconds_left(sequence.request_slot)
        if self.wait_whole:
            return left
        hidden = self._hidden(len(sequence.token_ids) - cached, cached) * _ALONE + _LAUNCH
        return max(left - hidden, self._blocks.seconds_ahead(sequence.request_slot) - _SOON)


class NoKVLoads:
    """Stands in for `KVLoadQueue` where there is no host memory: always empty, loads nothing."""

    any_joined = False

    def __len__(self) -> int:
        return 0

    def __contains__(self, sequence: Sequence) -> bool:
        return False

    def all(self) -> list[Loading]:
        return []

    def begin(self, sequence: Sequence, slot: int, cached: int, *, alone: bool) -> Loading:
        return Loading(sequence, cached, under_way=False)

    def begin_deferred(self, give_up: Callable[[Sequence], None]) -> int:
        return 0

    def candidates(self) -> list[tuple[Loading, int]]:
        return []

    def join(self, loading: Loading, rows: int, budget: int, *, alone: bool) -> int:
        return 0

    def take_starved(self) -> Sequence | None:
        return None

    def take_joined(self, rows: int) -> tuple[int, ...]:
        return ()

    def admit(self, sequence: Sequence, slot: int) -> None:
        pass

    def keep_counts(self, sequence: Sequence) -> None:
        pass

    def end(self, sequence: Sequence) -> None:
        pass

    def collect(
        self, running: Iterable[Sequence], finished: tuple[int, ...], *, timed_out: bool
    ) -> list[Sequence]:
        return []

    def observe(self, step: SchedulerOutput, seconds: float) -> None:
        pass

    def nap(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def shut_down(self) -> None:
        pass
