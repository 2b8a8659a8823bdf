"""Drafts of the draft model's worker, as one of the sources of a `LookaheadDrafter`.

What the engine knows of the worker is a mirror of its trees (mirror.py). A proposal takes in what
has come, walks the new tokens down the mirror and returns what stands below, mostly without any
waiting: the worker has drafted for this outcome while it was verified. For a text that left its
tree the worker needs some steps; whether it pays to wait for them is worked out at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetero_llm.bridge.records import (
    GRAFTED,
    Kind,
    OpenRequest,
    Records,
    Refusal,
    Stamps,
    put_close,
    put_commits,
    put_grafts,
    put_open,
    read_nodes,
)
from hetero_llm.core.draft_model_config import DraftModelConfig
from hetero_llm.core.request import Sequence
from hetero_llm.cpu.draft.client import DraftWorker
from hetero_llm.cpu.draft.kinds import NUM_BUCKETS, NUM_RANKS, Record
from hetero_llm.cpu.draft.mirror import Mirror
from hetero_llm.cpu.lookahead.sources import Proposals

_CLOSED, _REFUSED = -1, -2  # instead of a generation
_LONGEST_WAIT = 2e-3  # seconds, unless the user says otherwise
_FIRST_LEVEL = 5e-4  # seconds in which the worker finds a tree's next level, before it is known
_WEIGHT = 0.1  # of a new observation in moving averages
_FIRST_CHOICES = np.r_[:NUM_BUCKETS, NUM_RANKS * NUM_BUCKETS : (NUM_RANKS + 1) * NUM_BUCKETS]
"""Kinds of the likeliest candidates, without and with noise."""
_LEAST_TOLD = np.float32(0.02)  # chance of a node that the worker is told of
_PATIENCE = 3  # waits in vain after which nobody waits until the worker is heard of


class DraftSource:
    """One thread at a time. Rows of live sequences are the worker's slots.

    Args:
        worker: which is up.
        slots: of the worker; sequences in higher rows are not drafted for.
        vocab_size: of the target and the draft model.
        clock: seconds since some moment.
    """

    def __init__(
        self,
        worker: DraftWorker,
        config: DraftModelConfig,
        *,
        slots: int,
        vocab_size: int,
        max_positions: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._worker, self._config, self._clock = worker, config, clock
        self._record = Record()
        self._mirror = Mirror(slots, vocab_size=vocab_size, record=self._record)
        self._slots, self._longest = slots, max_positions
        self._generations = np.full(slots, _CLOSED, np.int64)
        self._lengths = np.zeros(slots, np.int64)
        self._sequences: dict[int, Sequence] = {}
        self._to_open: list[int] = []  # slots that the worker has to be told anew
        self._was_up = True
        self._level = _FIRST_LEVEL
        self._vain = 0
        self._own = Proposals.empty(1)
        self._counts = dict.fromkeys(("hits", "misses", "waits", "timeouts", "rejected"), 0)
        self._waited = 0.0
        self._yield = 1.0  # tokens of a sequence in a step, lately
        Mirror.compile()
        grafts = _pack_grafts(*self._own.rows(1).arrays, np.zeros(1, np.int32))
        assert not len(grafts[1])
        _potentials(*self._own.rows(1).arrays[:3], self._own.counts[:1], np.zeros(1, np.float32))

    # -- texts ------------------------------------------------------------------------------

    def commit(
        self,
        rows: NDArray[np.int64],
        fresh: NDArray[np.int64],
        sizes: NDArray[np.int64],
        sequences: list[Sequence],
    ) -> None:
        """Tells the worker new tokens, and whole texts of new rows.

        Args:
            rows: [S]. fresh: new tokens, one sequence after the other. sizes: [S] of each.
        """
        self._take_in()
        count = np.array(sizes, np.int64)
        tokens = np.array(fresh, np.int32)
        used = rows < self._slots
        known = np.where(used, rows, 0)
        is_new = used & (self._lengths[known] == 0)
        if is_new.any():
            ends = np.cumsum(count)
            for index in np.flatnonzero(is_new).tolist():
                text = tokens[ends[index] - count[index] : ends[index]]
                self._open(int(rows[index]), sequences[index], text)
        goes_on = used & ~is_new & (count > 0)
        if not goes_on.all():
            tokens = tokens[np.repeat(goes_on, count)]
            rows, count = rows[goes_on], count[goes_on]
        if len(rows):
            self._yield += _WEIGHT * (len(tokens) / len(rows) - self._yield)
            bases = self._lengths[rows]
            self._lengths[rows] = bases + count
            is_open = self._generations[rows] >= 0
            if not is_open.all():
                tokens = tokens[np.repeat(is_open, count)]
                rows, count, bases = rows[is_open], count[is_open], bases[is_open]
        if len(rows):
            self._mirror.commit(rows, bases, tokens, count)
            stamps = Stamps(rows, self._generations[rows], bases)
            put_commits(self._worker.outbox, stamps, count, tokens)
        self._worker.push()

    def close(self, rows: list[int]) -> None:
        """These sequences have ended."""
        for row in rows:
            if row >= self._slots:
                continue
            if self._generations[row] >= 0:
                put_close(self._worker.outbox, row, int(self._generations[row]))
                self._mirror.close(row)
            self._generations[row], self._lengths[row] = _CLOSED, 0
            self._sequences.pop(row, None)

    def settle(self) -> None:
        """While the device works: looks after the worker, and tells it what it does not know."""
        worker = self._worker
        self._take_in()
        worker.look_after()
        if not worker.is_up:
            if self._was_up:
                self._forget_all()
            self._was_up = False
            return
        if not self._was_up:
            self._was_up = True
            self._to_open = list(self._sequences)
        for row in self._to_open:
            sequence = self._sequences.get(row)
            if sequence is not None and self._generations[row] == _CLOSED:
                text = np.array(sequence.token_ids[: int(self._lengths[row])], np.int32)
                self._tell(row, sequence, text)
        self._to_open.clear()
        worker.push()

    def _open(self, row: int, sequence: Sequence, text: NDArray[np.int32]) -> None:
        self._lengths[row] = len(text)
        self._sequences[row] = sequence
        if self._worker.is_up and self._was_up:
            self._tell(row, sequence, text)

    def _tell(self, row: int, sequence: Sequence, text: NDArray[np.int32]) -> None:
        if len(text) >= self._longest:
            self._generations[row] = _REFUSED
            return
        generation = self._worker.next_generation()
        self._generations[row] = generation
        self._mirror.open(row, generation, len(text))
        request = sequence.request
        put_open(
            self._worker.outbox,
            OpenRequest(
                row, generation, text, seed=request.seed, sample_index=sequence.index,
                temperature=request.params.temperature,
            ),
        )  # fmt: skip

    def _forget_all(self) -> None:
        """The worker is gone, with all that it knew."""
        for row in np.flatnonzero(self._generations >= 0).tolist():
            self._mirror.close(row)
            self._generations[row] = _CLOSED

    # -- drafts -----------------------------------------------------------------------------

    def propose(
        self,
        rows: NDArray[np.int64],
        most: NDArray[np.int32],
        seconds: float,
        found: Proposals,
    ) -> Proposals:
        """The likeliest nodes below each text: [S] rows that the next call overwrites.

        Args:
            rows: [S]. most: [S] nodes.
            seconds: that the step takes without drafts.
            found: what others propose: there it pays less to wait.
        """
        count = len(rows)
        if len(self._own.counts) < count:
            self._own = Proposals.empty(2 * count)
        own = self._own.rows(count)
        used = rows < self._slots
        slots = np.where(used & (self._generations[np.where(used, rows, 0)] >= 0), rows, -1)
        longest = self._longest - self._lengths[np.where(used, rows, 0)]
        depths = np.minimum(longest, self._config.num_tokens).astype(np.int32)
        slots[depths < 1] = -1
        self._take_in()
        caught_up = self._mirror.caught_up(slots)
        misses = count - int(caught_up.sum())
        self._counts["misses"] += misses
        self._counts["hits"] += int((slots >= 0).sum()) - misses
        self._mirror.proposals(slots, most, own, depths)
        if self._config.overlap != "enumerate" and self._worker.is_up and self._vain < _PATIENCE:
            self._wait(slots, most, depths, own, seconds, found)
        own.kind[:] = -1  # the mirror keeps the record of these
        return own

    def graft(self, rows: NDArray[np.int64], found: Proposals, kept: NDArray[np.int32]) -> None:
        """Tells the worker of nodes that are verified and not its own, while the device works: what
        may follow them is worth drafting, too.

        Args:
            rows: [S] of the last proposal. found: its drafts. kept: [S] first nodes of each that
                are verified.
        """
        used = rows < self._slots
        is_open = used & (self._generations[np.where(used, rows, 0)] >= 0)
        counts, nodes = _pack_grafts(*found.arrays, np.where(is_open, kept, 0).astype(np.int32))
        some = counts > 0
        if not some.any():
            return
        slots = rows[some]
        stamps = Stamps(slots, self._generations[slots], self._lengths[slots])
        put_grafts(self._worker.outbox, stamps, counts[some], nodes.reshape(-1).view(GRAFTED))

    def _wait(
        self,
        slots: NDArray[np.int64],
        most: NDArray[np.int32],
        depths: NDArray[np.int32],
        own: Proposals,
        seconds: float,
        found: Proposals,
    ) -> None:
        """Waits for further levels as long as what they are worth beats the time they take."""
        limit = self._config.timeout
        if limit is None:
            limit = min(2 * max(self._level, _FIRST_LEVEL) * self._config.num_tokens, _LONGEST_WAIT)
        begin = now = self._clock()
        others = np.where(found.counts[: len(slots)] > 0, found.survival[: len(slots), 0], 0.0)
        while True:
            potentials = np.where(self._mirror.caught_up(slots), 0.0, 1.0).astype(np.float32)
            _potentials(own.tokens, own.parents, own.survival, own.counts, potentials)
            gain = float(((1.0 - others) * potentials).sum()) * self._first_rate()
            # Tokens a second, with one more level and without.
            if gain * (seconds + now - begin) <= len(slots) * self._yield * self._level:
                break
            left = limit - (now - begin)
            if left <= 0:
                break
            before, self._counts["waits"] = now, self._counts["waits"] + 1
            came = self._take_in(int(left * 1e6) + 1)
            now = self._clock()
            if not came:
                self._vain += 1
                self._counts["timeouts"] += 1
                break
            self._level += _WEIGHT * (now - before - self._level)
            self._mirror.proposals(slots, most, own, depths)
        self._waited += now - begin

    def _first_rate(self) -> float:
        """How often the worker's first choice is accepted, lately."""
        accepted, tried = self._record.table[_FIRST_CHOICES].sum(axis=0)
        return float((accepted + 1.0) / (tried + 2.0))

    def _take_in(self, timeout_us: int = 0) -> bool:
        """Takes in what the worker has told; whether there was anything."""
        records = self._worker.poll(timeout_us)
        if records is None:
            return False
        self._vain = 0
        for kind, run in records.runs():
            if kind == Kind.NODES:
                told = read_nodes(run)
                if told is None:
                    self._counts["rejected"] += len(run)
                    continue
                self._mirror.add(*told)
            elif kind == Kind.REFUSED:
                self._refused(run)
            else:
                self._counts["rejected"] += len(run)
        return True

    def _refused(self, records: Records) -> None:
        for header in records.headers:
            row = int(header["slot"])
            if row >= self._slots or self._generations[row] != header["generation"]:
                continue
            self._mirror.close(row)
            lost = header["value"] == Refusal.LOST_RECORD
            self._generations[row] = _CLOSED if lost else _REFUSED
            if lost:
                self._to_open.append(row)

    def metrics(self) -> dict[str, float]:
        """Counters since start and the present state, flat."""
        counters, dropped = self._worker.counters, self._mirror.dropped
        return {
            "draft_worker_up": float(self._worker.is_up),
            "draft_restarts": counters.starts - 1,
            "draft_hits": self._counts["hits"],
            "draft_misses": self._counts["misses"],
            "draft_timeouts": self._counts["timeouts"],
            "draft_wait_seconds": self._waited,
            "draft_first_accepted": self._first_rate(),
            "draft_rejected_messages": self._counts["rejected"]
            + counters.corrupt
            + dropped["malformed"],
        }

    def shut_down(self) -> None:
        """Ends the worker."""
        self._worker.close()


@njit(cache=True, nogil=True)
def _pack_grafts(
    tokens: np.ndarray,
    parents: np.ndarray,
    survival: np.ndarray,
    kind: np.ndarray,
    counts: np.ndarray,
    kept: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """[S] nodes of each draft to be told, and those as rows of int32 words, see `GRAFTED`. A draft
    whose kept nodes all came from the worker is left out."""
    told = np.zeros(len(counts), np.int32)
    total = 0
    for row in range(len(counts)):
        worth = 0
        while worth < min(kept[row], counts[row]) and survival[row, worth] >= _LEAST_TOLD:
            worth += 1
        for node in range(worth):
            if kind[row, node] >= 0:
                told[row] = worth
        total += told[row]
    words = np.empty((total, 3), np.int32)
    chances = words.view(np.float32)
    at = 0
    for row in range(len(counts)):
        for node in range(told[row]):
            words[at, 0], words[at, 1] = tokens[row, node], parents[row, node]
            chances[at, 2] = survival[row, node]
            at += 1
    return told, words


@njit(cache=True, nogil=True)
def _potentials(
    tokens: np.ndarray,
    parents: np.ndarray,
    survival: np.ndarray,
    counts: np.ndarray,
    potentials: np.ndarray,
) -> None:
    """Writes the survival of each draft's likeliest leaf, where it has one: what a further level
    starts from."""
    for row in range(len(counts)):
        best = np.float32(0.0)
        for node in range(counts[row]):
            is_leaf = True
            for other in range(node + 1, counts[row]):
                if parents[row, other] == node:
                    is_leaf = False
                    break
            if is_leaf:
                best = max(best, survival[row, node])
        if counts[row] > 0:
            potentials[row] = best
