"""Drafts of the draft model's worker, as one of the sources of a `HybridDrafter`.

What the engine knows of the worker is a mirror of its trees (mirror.py). A proposal takes in what
has come, walks the new tokens down the mirror and returns what stands below, mostly without any
waiting: the worker has drafted for this outcome while it was verified. For a text that left its
tree the worker needs some steps; whether it pays to wait for them is worked out at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetero_llm.bridge.ipc.messages import (
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
)
from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.request import Sequence
from hetero_llm.spec_decode.array_table import (
    ArrayTable,
    BoolVector,
    Int32Matrix,
    Int32Vector,
    Int64Vector,
    reader_of,
)
from hetero_llm.spec_decode.draft_model.node_buckets import (
    NUM_BUCKETS,
    NUM_RANKS,
    PRIOR_TRIALS,
    Record,
)
from hetero_llm.spec_decode.draft_model.tree_replica import (
    Mirror,
    MirrorArrays,
    ask_all,
    commit_all,
    propose_all,
)
from hetero_llm.spec_decode.draft_model.worker_client import DraftWorker
from hetero_llm.spec_decode.proposals import Proposals, rows_of

_CLOSED, _REFUSED = -1, -2  # instead of a generation
_LONGEST_WAIT = 2e-3  # seconds, unless the user says otherwise
_FIRST_LEVEL = 5e-4  # seconds in which the worker finds a tree's next level, before it is known
_WEIGHT = 0.1  # of a new observation in moving averages
_FIRST_CHOICES = np.r_[:NUM_BUCKETS, NUM_RANKS * NUM_BUCKETS : (NUM_RANKS + 1) * NUM_BUCKETS]
"""Kinds of the likeliest candidates, without and with noise."""
_PATIENCE = 3  # waits in vain after which nobody waits until the worker is heard of
_MOST_TELLINGS = 8  # of a text to a worker that loses parts of it
_LEAST_TOLD = np.float32(0.02)  # chance of a node that the worker is told of
_EXTENDED = 4  # leaves of a draft that the worker's next step goes on from, about
_FIRST_SIZE = 16


class _Buffers(NamedTuple):
    """What compiled functions write.

    Attributes:
        told: [4, S] int32: slots, generations, lengths so far and new tokens of texts that the
            worker knows. fresh: [N] int32, these tokens.
        asked: [3, S] int32: slots (-1: not drafted for), most nodes, most tokens of a path.
        caught_up: [S] bool, see `Mirror.caught_up`.
    """

    told: Int32Matrix
    fresh: Int32Vector
    asked: Int32Matrix
    caught_up: BoolVector


class _Arrays:
    """What compiled functions find by name."""

    mirror: MirrorArrays
    lengths: Int64Vector
    generations: Int64Vector
    drafts: Proposals
    buffers: _Buffers


_read = reader_of(_Arrays)


class DraftModelProposer:
    """One thread at a time. Rows of live sequences are the worker's slots.

    Args:
        worker: which is up.
        slots: of the worker; sequences in higher rows are not drafted for.
        vocab_size: of the target and the draft model.
        clock: seconds since some moment.

    Attributes:
        drafts: of the last proposal, its first rows. Replaced by a larger one by `propose`.
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
        self._tellings = np.zeros(slots, np.int64)  # of whole texts to this worker
        self._sequences: dict[int, Sequence] = {}
        self._to_open: list[int] = []  # slots that the worker has to be told anew
        self._was_up = True
        self._level = _FIRST_LEVEL
        self._vain = 0
        self._bound = ArrayTable(_Arrays)
        self._bound.put("mirror", self._mirror.arrays)
        self._bound.put("lengths", self._lengths)
        self._bound.put("generations", self._generations)
        self._make_room(_FIRST_SIZE, _FIRST_SIZE)
        self._counts = dict.fromkeys(("hits", "misses", "waits", "timeouts", "rejected"), 0)
        self._waited = 0.0
        self._yield = 1.0  # tokens of a sequence in a step, lately
        Mirror.compile()
        nothing = np.zeros(0, np.int64)
        _go_on(self._bound.table, nothing, nothing, nothing)
        self._ask(nothing, np.zeros(0, np.int32))
        grafts = _pack_grafts(self.drafts, np.zeros(_FIRST_SIZE, np.int32))
        assert not len(grafts[1])
        _weigh(self._bound.table, 0, self.drafts.path_probs, self.drafts.counts)

    def _make_room(self, rows: int, tokens: int) -> None:
        """For so many texts, and new tokens of them."""
        self._buffers = _Buffers(
            told=np.empty((4, rows), np.int32),
            fresh=np.empty(tokens, np.int32),
            asked=np.empty((3, rows), np.int32),
            caught_up=np.empty(rows, np.bool_),
        )
        self._bound.put("buffers", self._buffers)
        self.drafts = Proposals.empty(rows)
        self._bound.put("drafts", self.drafts)

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
        fresh, sizes = np.asarray(fresh, np.int64), np.asarray(sizes, np.int64)
        held, room = len(self._buffers.caught_up), len(self._buffers.fresh)
        if len(rows) > held or len(fresh) > room:
            self._make_room(max(held, 2 * len(rows)), max(room, 2 * len(fresh)))
        count, size, num_new = _go_on(self._bound.table, rows, sizes, fresh)
        assert count >= 0, "the mirror has the lengths of all texts"
        if num_new:
            ends = np.cumsum(sizes)
            for index, row in enumerate(rows.tolist()):
                if row < self._slots and self._lengths[row] == 0:
                    text = fresh[ends[index] - sizes[index] : ends[index]].astype(np.int32)
                    self._open(row, sequences[index], text)
        if count:
            self._yield += _WEIGHT * (size / count - self._yield)
            slots, generations, bases, counts = self._buffers.told[:, :count]
            stamps = Stamps(slots, generations, bases)
            put_commits(self._worker.outbox, stamps, counts, self._buffers.fresh[:size])
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

    def run_deferred(self) -> None:
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
        self._lengths[row], self._tellings[row] = len(text), 0
        self._sequences[row] = sequence
        if self._worker.is_up and self._was_up:
            self._tell(row, sequence, text)

    def _tell(self, row: int, sequence: Sequence, text: NDArray[np.int32]) -> None:
        if len(text) >= self._longest:
            self._generations[row] = _REFUSED
            return
        generation = self._worker.next_generation()
        self._generations[row] = generation
        self._tellings[row] += 1
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
        """The worker is gone, with all that it knew and refused."""
        for row in self._sequences:
            self._mirror.close(row)
        self._generations[:] = _CLOSED
        self._tellings[:] = 0

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
        asked, misses = self._ask(rows, most)
        if misses and self._take_in():
            asked, misses = self._ask(rows, most)
        self._counts["misses"] += misses
        self._counts["hits"] += asked - misses
        if self._config.overlap != "enumerate" and self._worker.is_up and self._vain < _PATIENCE:
            self._wait(rows, most, seconds, found)
        return self.drafts.some(slice(count))

    def _ask(self, rows: NDArray[np.int64], most: NDArray[np.int32]) -> tuple[int, int]:
        """Drafts out of the mirror, as it is now. Returns how many texts are drafted for, and how
        many of these the worker has drafted nothing for yet."""
        if len(rows) > len(self._buffers.caught_up):
            self._make_room(2 * len(rows), len(self._buffers.fresh))
        counts: tuple[int, int] = _ask(
            self._bound.table, rows, most, self._config.num_tokens, self._longest
        )
        return counts

    def add_external_nodes(
        self, rows: NDArray[np.int64], found: Proposals, kept: NDArray[np.int32]
    ) -> None:
        """Tells the worker of nodes that are verified and not its own, while the device works: what
        may follow them is worth drafting, too.

        Args:
            rows: [S] of the last proposal. found: its drafts. kept: [S] first nodes of each that
                are verified.
        """
        used = rows < self._slots
        is_open = used & (self._generations[np.where(used, rows, 0)] >= 0)
        counts, nodes = _pack_grafts(found, np.where(is_open, kept, 0).astype(np.int32))
        some = counts > 0
        if not some.any():
            return
        slots = rows[some]
        stamps = Stamps(slots, self._generations[slots], self._lengths[slots])
        put_grafts(self._worker.outbox, stamps, counts[some], nodes.reshape(-1).view(GRAFTED))

    def _wait(
        self,
        rows: NDArray[np.int64],
        most: NDArray[np.int32],
        seconds: float,
        found: Proposals,
    ) -> None:
        """Waits for further levels as long as what they are worth beats the time they take."""
        limit = self._config.timeout
        if limit is None:
            limit = min(2 * max(self._level, _FIRST_LEVEL) * self._config.num_tokens, _LONGEST_WAIT)
        begin = now = self._clock()
        while True:
            gain = _weigh(self._bound.table, len(rows), found.path_probs, found.counts)
            # Tokens a second, with one more level and without.
            if gain * (seconds + now - begin) <= len(rows) * self._yield * self._level:
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
            self._ask(rows, most)
        self._waited += now - begin

    def _take_in(self, timeout_us: int = 0) -> bool:
        """Takes in what the worker has told; whether there was anything."""
        records = self._worker.poll(timeout_us)
        if records is None:
            return False
        self._vain = 0
        for kind, run in records.runs():
            if kind == Kind.NODES:
                if not self._mirror.add(run):
                    self._counts["rejected"] += len(run)
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
            again = lost and self._tellings[row] < _MOST_TELLINGS
            self._generations[row] = _CLOSED if again else _REFUSED
            if again:
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
            "draft_first_accepted": _first_rate(self._record.table),
            "draft_rejected_messages": self._counts["rejected"]
            + counters.corrupt
            + dropped["malformed"],
        }

    def shut_down(self) -> None:
        """Ends the worker."""
        self._worker.close()


# -- compiled -------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _go_on(
    table: np.ndarray, rows: np.ndarray, sizes: np.ndarray, tokens: np.ndarray
) -> tuple[int, int, int]:
    """Adds new tokens to texts and to the mirror, and notes what the worker is to be told.

    Returns:
        texts that it is to be told of, -1 if the mirror knows other ones; their new tokens; texts
        that have just begun, which are left alone.
    """
    lengths, generations = _read(table, "lengths"), _read(table, "generations")
    told, fresh, _, _ = _read(table, "buffers")
    first = count = size = num_new = 0
    for i in range(len(rows)):
        row, new = rows[i], tokens[first : first + sizes[i]]
        first += sizes[i]
        if row >= len(lengths):
            continue
        if lengths[row] == 0:
            num_new += 1
            continue
        if generations[row] >= 0 and len(new) > 0:
            told[0, count], told[1, count] = row, generations[row]
            told[2, count], told[3, count] = lengths[row], len(new)
            fresh[size : size + len(new)] = new
            count += 1
            size += len(new)
        lengths[row] += len(new)
    fine = commit_all(
        _read(table, "mirror"), told[0, :count], told[2, :count], fresh[:size], told[3, :count]
    )
    return count if fine else -1, size, num_new


@njit(cache=True, nogil=True)
def _ask(
    table: np.ndarray, rows: np.ndarray, most: np.ndarray, depth: int, longest: int
) -> tuple[int, int]:
    """See `DraftModelProposer._ask`.

    Args:
        depth: most tokens of a path. longest: positions of the draft model.
    """
    count = len(rows)
    lengths, generations = _read(table, "lengths"), _read(table, "generations")
    _, _, asked, caught_up = _read(table, "buffers")
    num_asked = 0
    for i in range(count):
        row = rows[i]
        asked[0, i], asked[1, i], asked[2, i] = -1, most[i], 0
        if row < len(lengths) and generations[row] >= 0 and lengths[row] < longest:
            asked[0, i], asked[2, i] = row, min(longest - lengths[row], depth)
            num_asked += 1
    mirror, own = _read(table, "mirror"), rows_of(_read(table, "drafts"), 0, count)
    ask_all(mirror.state, asked[0, :count], caught_up)
    propose_all(mirror, asked[0, :count], asked[1, :count], asked[2, :count], own)
    num_missing = count
    for i in range(count):
        num_missing -= caught_up[i]
        for node in range(own.counts[i]):
            own.buckets[i, node] = -1  # the mirror keeps the record of these
    return num_asked, num_missing


@njit(cache=True, nogil=True)
def _weigh(table: np.ndarray, count: int, survival: np.ndarray, counts: np.ndarray) -> float:
    """Tokens that a further level of all drafts adds to a step.

    Args:
        count: S. survival, counts: [S] what others propose: there it pays less to wait.
    """
    own, (_, _, asked, caught_up) = _read(table, "drafts"), _read(table, "buffers")
    deepest = asked[2]
    gain = 0.0
    for i in range(count):
        start = 0.0 if caught_up[i] else 1.0
        if own.counts[i] > 0:
            start = _open_leaves(own.parents[i], own.path_probs[i], own.counts[i], deepest[i])
        other = float(survival[i, 0]) if counts[i] > 0 else 0.0
        gain += (1.0 - other) * start
    return gain * _first_rate(_read(table, "mirror").table)


@njit(cache=True, nogil=True)
def _open_leaves(parents: np.ndarray, survival: np.ndarray, count: int, deepest: int) -> float:
    """What a further level starts from: the survival of the first `_EXTENDED` leaves, which are the
    likeliest. A leaf as deep as a draft may be is none: nothing below it would be proposed."""
    depths = np.empty(MAX_NODES, np.int32)
    is_leaf = np.ones(MAX_NODES, np.bool_)
    for node in range(count):
        parent = parents[node]
        depths[node] = 1
        if parent >= 0:
            depths[node] = depths[parent] + 1
            is_leaf[parent] = False
    total, left = 0.0, _EXTENDED
    for node in range(count):
        if left > 0 and is_leaf[node] and depths[node] < deepest:
            total += survival[node]
            left -= 1
    return total


@njit(cache=True, nogil=True)
def _first_rate(record: np.ndarray) -> float:
    """How often the worker's first choice is accepted, lately."""
    accepted, tried = 1.0, 2.0
    for kind in _FIRST_CHOICES:
        if record[kind, 1] > PRIOR_TRIALS:  # what is expected of the others is no experience
            accepted += record[kind, 0]
            tried += record[kind, 1]
    return accepted / tried


@njit(cache=True, nogil=True)
def _pack_grafts(found: Proposals, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S] nodes of each draft to be told, and those as rows of int32 words, see `GRAFTED`. A draft
    whose kept nodes all came from the worker is left out."""
    tokens, parents, survival, kind, counts = found
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
